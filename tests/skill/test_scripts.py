"""The scripts of the skill: run as an agent runs them, and for each exit code."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.skill.pages import ROOT

TO_READ = {"minimal_rloo.py"}  # no tool of an agent: contracts/test_minimal_rloo.py
FILES = {path.name for path in (ROOT / "scripts").glob("*.py") if not path.name.startswith("_")}
SCRIPTS = sorted(FILES - TO_READ)
PLAIN_PYTHON = [sys.executable, "-S"]  # without site-packages: the standard library only


def call(script: str, *words: Any, python: list[str] | None = None) -> tuple[int, Any, str]:
    """Exit code, the JSON on stdout (None where there is none), stderr."""
    command = [*(python or [sys.executable]), ROOT / "scripts" / script, *words]
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_the_exit_codes_and_needs_no_package(script: str) -> None:
    """An agent asks for --help first, also where nothing is installed yet; a code that is not listed says nothing."""
    command = [*PLAIN_PYTHON, ROOT / "scripts" / script, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    text = re.sub(r"\s+", " ", done.stdout)
    listed = re.findall(r"(?:Exit codes: |; )(\d) ", text)
    assert listed[:1] == ["0"] and "2" in listed and len(set(listed)) == len(listed), text


# ------------------------------------------------------------------------------------------------ check_setup.py


def test_check_setup_is_content_here() -> None:
    """Run in the repository with its environment it has nothing to say but what to do next."""
    code, found, errors = call("check_setup.py")
    assert code == 0, (found, errors)
    assert found["ok"] and found["skill"] == {"folder": str(ROOT), "missing": []}
    assert found["todo"] == [f"run {found['command']} doctor"] and "error" not in found
    assert found["versions"]["skill"] == found["versions"]["rloo_kit"]


def test_check_setup_tells_a_part_of_the_skill(tmp_path: Path) -> None:
    """Some installers copied SKILL.md alone; what follows then fails one by one."""
    shutil.copy(ROOT / "SKILL.md", tmp_path)
    code, found, _ = call("check_setup.py", "--skill", tmp_path)
    assert code == 3 and "pyproject.toml" in found["skill"]["missing"] and "SKILL.md" not in found["skill"]["missing"]
    assert "npx skills@1.5.18 add ADDRESS -a claude-code -y" in found["error"] and found["error"] == found["todo"][0]


def bare_environment(tmp_path: Path, **programs: str) -> dict[str, str]:
    """An environment whose PATH holds these shell scripts and nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def check_elsewhere(tmp_path: Path, environment: dict[str, str], code: str = "") -> tuple[int, Any]:
    """check_setup.py on a copy of the skill, by a link to this Python that has no rloo-kit next to it; `code` first."""
    skill, python = tmp_path / "skill", tmp_path / "only-python" / "python3"
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())
    skill.mkdir()
    for name in ("SKILL.md", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, skill)
    for name in ("configs", "docs", "notebooks", "references", "rewards", "rloo_kit", "scripts"):
        shutil.copytree(ROOT / name, skill / name, ignore=shutil.ignore_patterns("__pycache__"))
    script = skill / "scripts" / "check_setup.py"
    code = f"import runpy, sys; sys.argv = ['x', '--project', {str(tmp_path)!r}]; {code}"
    command = [python, "-c", f"{code}\nrunpy.run_path({str(script)!r}, run_name='__main__')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=tmp_path)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_check_setup_tells_how_to_install(tmp_path: Path) -> None:
    """Exit code 5 with the command to copy: this Python, the skill's constraints, the skill's folder."""
    code, found = check_elsewhere(tmp_path, bare_environment(tmp_path))
    assert code == 5 and found["command"] is None and found["skill"]["missing"] == []
    said = found["todo"][0]
    assert f"-m venv .venv-rloo && .venv-rloo/bin/python -m pip install -c {tmp_path}/skill/constraints.txt" in said
    assert f"-e '{tmp_path}/skill[notebook]'" in said and "[notebook,gpu]" in said


@pytest.mark.parametrize(
    ("program", "text", "first", "code", "message"),
    [
        # after an update of the skill the old package stays installed, and its commands are other ones
        ("rloo-kit", "echo rloo-kit 0.0.1", "", 6, "the installed rloo-kit is 0.0.1 and this skill is"),
        ("rloo-kit", "exit 127", "", 5, "install rloo-kit"),  # of an environment whose Python is gone
        # `python3` of an older system starts the script, and pip then fails with a page of text
        ("python3", "exit 1", "sys.version_info = (3, 9)", 4, "install Python 3.11 to 3.13"),
    ],
)
def test_check_setup_tells_what_does_not_fit(
    tmp_path: Path, program: str, text: str, first: str, code: int, message: str
) -> None:
    found_code, found = check_elsewhere(tmp_path, bare_environment(tmp_path, **{program: text}), first)
    assert found_code == code and message in found["error"]
    assert (found["command"] or "").endswith("/bin/rloo-kit") == (program == "rloo-kit")
