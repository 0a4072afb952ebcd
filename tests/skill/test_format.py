"""The skill and the plugin as loaders and installers read them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

import rloo_kit
from tests.skill.pages import ROOT

VALIDATOR = Path(sys.executable).parent / "agentskills"


def read_front() -> dict:
    return yaml.safe_load((ROOT / "SKILL.md").read_text(encoding="utf-8").split("---\n", 2)[1])


def list_tracked() -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [name for name in listing.split("\0") if name]


def test_the_validator_takes_it(tmp_path: Path) -> None:
    """A key that the format does not know makes loaders leave the whole skill out."""
    assert VALIDATOR.exists(), "agentskills is missing: make test installs it (skills-ref)"
    (tmp_path / "rloo").mkdir()
    shutil.copy(ROOT / "SKILL.md", tmp_path / "rloo")
    done = subprocess.run([VALIDATOR, "validate", tmp_path / "rloo"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_versions_and_names_are_the_packages() -> None:
    """Only the description is in the context before the skill is loaded; a stale version hides an old install, and
    keeps people on the old skill: `claude plugin update` compares versions only. Without `"skills": ["./"]` a plugin
    looks for a folder skills/, finds none, and loads nothing, without a word."""
    front = read_front()
    assert front["name"] == "rloo" and "Use it when" in front["description"] and "Not for" in front["description"]
    plugin, marketplace = (
        json.loads((ROOT / ".claude-plugin" / f"{name}.json").read_text("utf-8")) for name in ("plugin", "marketplace")
    )
    assert front["metadata"]["version"] == plugin["version"] == rloo_kit.__version__
    (entry,) = marketplace["plugins"]
    assert plugin["name"] == entry["name"] == "rloo" and plugin["skills"] == ["./"]
    assert entry["source"] == "./" and "version" not in entry, "plugin.json holds the version; two of them drift apart"
    for text in (front["description"], plugin["description"], marketplace["description"]):
        assert len(text) <= 1024 and not re.search("[<>]", text)


def test_the_tree_holds_one_skill() -> None:
    """Installers drop files named metadata.json, install a second SKILL.md by itself, and look into skills/ first."""
    names = list_tracked()
    # Some installers keep a link, some copy what is behind it; test_installer.py compares what arrives.
    assert [name for name in names if (ROOT / name).is_symlink()] == ["rloo_kit/rewards"]
    for path in map(Path, names):
        assert path.name != "metadata.json" and path.parts[0] != "skills", path
        assert path.name != "SKILL.md" or len(path.parts) == 1, path
        assert path.parts[0] != "references" or len(path.parts) == 2, path
