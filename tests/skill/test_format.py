"""The skill's format: what loaders and installers refuse, cut off or execute."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES, MAX_TOKENS = 200, 5000
VALIDATOR = Path(sys.executable).parent / "agentskills"
# Counted high: a usual tokenizer takes most words whole. No tokenizer of a real model is there without a network.
PIECES = re.compile(r"[A-Za-z]{1,5}|\d{1,3}|[^\sA-Za-z\d]")
COMMAND_ON_LOAD = re.compile(r"!`")


def read_skill() -> str:
    return (ROOT / "SKILL.md").read_text(encoding="utf-8")


def split(text: str) -> tuple[dict[str, Any], str]:
    """Front matter and body."""
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def validate(folder: Path) -> subprocess.CompletedProcess[str]:
    assert VALIDATOR.exists(), "agentskills is missing: make test installs it (skills-ref)"
    return subprocess.run([VALIDATOR, "validate", folder], capture_output=True, text=True, timeout=60, check=False)


def find_faults(text: str) -> list[str]:
    """What the validator does not look at and installers or loaders stumble over."""
    front, body = split(text)
    faults = []
    if re.search(r"[<>]", front["description"]):
        faults.append("angle brackets in the description")
    if re.search(r"^\s*[\w-]+:\s*[\[{|>]", text.split("---\n", 2)[1], flags=re.M):
        faults.append("front matter that is not plain block YAML")
    if len(text.splitlines()) >= MAX_LINES:
        faults.append("too many lines")
    if len(PIECES.findall(body)) >= MAX_TOKENS:
        faults.append("too many tokens")
    if COMMAND_ON_LOAD.search(text):
        faults.append("a command that is executed on load")
    return faults


@pytest.fixture
def skill_folder(tmp_path: Path) -> Path:
    """A copy of SKILL.md in a folder of the name that the validator wants."""
    folder = tmp_path / "rloo"
    folder.mkdir()
    shutil.copy(ROOT / "SKILL.md", folder)
    return folder


def test_the_validator_takes_it(skill_folder: Path) -> None:
    """A key that the format does not know makes loaders leave the whole skill out."""
    done = validate(skill_folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_stays_within_the_limits() -> None:
    """What is over the limits is cut off where it hurts, and a command in backticks behind an exclamation mark runs."""
    assert find_faults(read_skill()) == []


def test_no_page_runs_a_command_on_load() -> None:
    """Pages of references/ are read into the same context."""
    for path in sorted((ROOT / "references").glob("*.md")):
        assert not COMMAND_ON_LOAD.search(path.read_text(encoding="utf-8")), path.name


def test_the_front_matter_says_what_and_when_and_which_version() -> None:
    """Only the description is in the context before the skill is loaded; a stale version hides an old install."""
    import rloo_kit

    front, _ = split(read_skill())
    assert front["name"] == "rloo" and "Use it when" in front["description"] and "Not for" in front["description"]
    assert front["metadata"]["version"] == rloo_kit.__version__
    assert set(front) <= {"name", "description", "license", "compatibility", "metadata"}


def list_tracked() -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [name for name in listing.split("\0") if name]


def test_the_tree_holds_one_skill() -> None:
    """Installers drop files named metadata.json, install a second SKILL.md by itself, and look into skills/ first."""
    names = list_tracked()
    # Some installers keep a link, some copy what is behind it; test_installer.py compares what arrives.
    assert [name for name in names if (ROOT / name).is_symlink()] == ["rloo_kit/rewards"]
    for path in map(Path, names):
        assert path.name != "metadata.json" and path.parts[0] != "skills", path
        assert path.name != "SKILL.md" or len(path.parts) == 1, path
        assert path.parts[0] != "references" or len(path.parts) == 2, path
