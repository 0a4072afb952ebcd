"""The skill and the plugin as loaders and installers read them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import yaml

import rloo_kit
from tests.skill.pages import ROOT, list_tracked

VALIDATOR = Path(sys.executable).parent / "agentskills"


def test_the_validator_takes_it(tmp_path: Path) -> None:
    """A key that the format does not know makes loaders leave the whole skill out."""
    assert VALIDATOR.exists(), "agentskills is missing: make test installs it (skills-ref)"
    (tmp_path / "rloo").symlink_to(ROOT)  # it wants the folder to have the skill's name
    done = subprocess.run([VALIDATOR, "validate", tmp_path / "rloo"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_versions_and_names_are_the_packages() -> None:
    """A stale version keeps people on the old skill; without `"skills": ["./"]` a plugin loads nothing."""
    front = yaml.safe_load((ROOT / "SKILL.md").read_text(encoding="utf-8").split("---\n", 2)[1])
    assert front["name"] == "rloo" and "Use it when" in front["description"] and "Not for" in front["description"]
    plugin = json.loads((ROOT / ".claude-plugin" / "plugin.json").read_text(encoding="utf-8"))
    marketplace = json.loads((ROOT / ".claude-plugin" / "marketplace.json").read_text(encoding="utf-8"))
    assert front["metadata"]["version"] == plugin["version"] == rloo_kit.__version__
    (entry,) = marketplace["plugins"]
    assert plugin["name"] == entry["name"] == "rloo" and plugin["skills"] == ["./"]
    assert entry["source"] == "./"
    assert "version" not in entry, "plugin.json holds the version; two of them drift apart"
    for text in (front["description"], plugin["description"], marketplace["description"]):
        assert len(text) <= 1024 and not re.search("[<>]", text)


def test_the_tree_holds_one_skill() -> None:
    """Installers install a second SKILL.md, look into skills/ first, and drop files named metadata.json."""
    names = [Path(name) for name in list_tracked()]
    assert [str(path) for path in names if (ROOT / path).is_symlink()] == ["rloo_kit/rewards"]
    assert [str(path) for path in names if path.name == "SKILL.md"] == ["SKILL.md"]
    assert not [path for path in names if path.name == "metadata.json" or path.parts[0] == "skills"]
