"""The skill and the plugin as loaders and installers read them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

import rloo_kit
from tests.skill.pages import ROOT, SKILL, read_pages

VALIDATOR = Path(sys.executable).parent / "agentskills"
OWN = {"SKILL.md", "README.md", ".claude-plugin"}
PARTS = {"configs", "docs", "evals", "notebooks", "references", "rewards", "rloo_kit", "scripts"}
LINKS = PARTS | {"LICENSE", "constraints.txt", "constraints-vllm.txt", "pyproject.toml"}


def list_tracked() -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [name for name in listing.split("\0") if name]


def test_the_validator_takes_it() -> None:
    """A key that the format does not know makes loaders leave the whole skill out."""
    assert VALIDATOR.exists(), "agentskills is missing: make test installs it (skills-ref)"
    done = subprocess.run([VALIDATOR, "validate", SKILL], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_versions_and_names_are_the_packages() -> None:
    """Only the description is in the context before the skill is loaded; a stale version hides an old install, and
    keeps people on the old skill: `claude plugin update` compares versions only. Without `"skills": ["./"]` a plugin
    looks for a folder skills/, finds none, and loads nothing, without a word."""
    front = yaml.safe_load((SKILL / "SKILL.md").read_text(encoding="utf-8").split("---\n", 2)[1])
    assert front["name"] == "rloo" and "Use it when" in front["description"] and "Not for" in front["description"]
    plugin = json.loads((SKILL / ".claude-plugin" / "plugin.json").read_text(encoding="utf-8"))
    marketplace = json.loads((ROOT / ".claude-plugin" / "marketplace.json").read_text(encoding="utf-8"))
    assert front["metadata"]["version"] == plugin["version"] == rloo_kit.__version__
    (entry,) = marketplace["plugins"]
    assert plugin["name"] == entry["name"] == "rloo" and plugin["skills"] == ["./"]
    assert entry["source"] == "./skills/rloo"
    assert "version" not in entry, "plugin.json holds the version; two of them drift apart"
    for text in (front["description"], plugin["description"], marketplace["description"]):
        assert len(text) <= 1024 and not re.search("[<>]", text)


def test_the_folder_holds_what_is_needed_and_links_the_rest() -> None:
    """Installers copy what is behind the links of the skill's folder, and nothing else of the repository. A SKILL.md at
    the root would make them take the root; files named metadata.json they drop."""
    names = [name for name in list_tracked() if os.path.lexists(ROOT / name)]
    assert {name.split("/")[2] for name in names if name.startswith("skills/rloo/")} == OWN | LINKS
    assert all((SKILL / name).resolve() == ROOT / name for name in LINKS)
    links = {name for name in names if (ROOT / name).is_symlink()}
    assert links == {f"skills/rloo/{name}" for name in LINKS} | {"rloo_kit/rewards"}
    assert [name for name in names if name.endswith("SKILL.md")] == ["skills/rloo/SKILL.md"]
    assert not [name for name in names if name.endswith("metadata.json") and name.split("/")[0] in PARTS]


def test_what_the_pages_name_is_installed() -> None:
    """SKILL.md and the references lead an agent to a page or a script; in the repository the link works, installed it
    would not."""
    for page, text in read_pages():
        folder = SKILL if page.endswith("SKILL.md") else SKILL / "references"
        for link in re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", text):
            if not re.match(r"[a-z]+:", link):
                found = Path(os.path.normpath(folder / link))  # without following links
                assert found.relative_to(SKILL).parts[0] in LINKS, (page, link)
        for name in re.findall(r"\$RLOO/([\w.-]+)", text):
            assert name in LINKS | OWN, (page, name)
