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

from tests.skill.pages import ROOT, copy_skill

CHECK_SETUP = ROOT / "scripts" / "check_setup.py"


@pytest.mark.parametrize("script", [CHECK_SETUP, ROOT / "evals" / "run.py"], ids=lambda path: path.name)
def test_help_lists_the_exit_codes_and_needs_no_package(script: Path) -> None:
    """An agent asks for --help first, also where nothing is installed yet; a code that is not listed says nothing."""
    command = [sys.executable, "-S", script, "--help"]  # -S: without site-packages
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    listed = re.findall(r"(?:Exit codes: |; )(\d) ", re.sub(r"\s+", " ", done.stdout))
    assert listed[:1] == ["0"] and "2" in listed and len(set(listed)) == len(listed), done.stdout


def call(*words: Any, **options: Any) -> tuple[int, Any]:
    """Exit code and the JSON on stdout."""
    env = options.pop("env", os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})
    command = [str(word) for word in words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env, **options)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_check_setup_is_content_here() -> None:
    """Run in the repository with its environment it has nothing to say but what to do next."""
    code, found = call(sys.executable, CHECK_SETUP)
    assert code == 0, found
    assert found["ok"] and found["skill"] == {"folder": str(ROOT), "missing": []}
    assert found["todo"] == [f"run {found['command']} doctor"] and "error" not in found
    assert found["versions"]["skill"] == found["versions"]["rloo_kit"]


def test_check_setup_names_what_is_missing(tmp_path: Path) -> None:
    """What follows on a part of the skill fails one by one."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    code, found = call(sys.executable, CHECK_SETUP, "--skill", tmp_path)
    missing = found["skill"]["missing"]
    assert code == 3 and "rloo_kit/__init__.py" in missing and "pyproject.toml" not in missing
    assert f"git clone ADDRESS {tmp_path}" in found["error"] and found["error"] == found["todo"][0]


def check_elsewhere(tmp_path: Path, programs: dict[str, str], first: str = "") -> tuple[int, Any]:
    """check_setup.py in a copy of the skill, without rloo-kit next to it and with these shell scripts as PATH."""
    skill, python, folder = tmp_path / "skill", tmp_path / "only-python" / "python3", tmp_path / "bin"
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())
    copy_skill(skill)
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    script = skill / "scripts" / "check_setup.py"
    code = f"import runpy, sys; sys.argv = ['x', '--project', {str(tmp_path)!r}]; {first}"
    run = f"{code}\nrunpy.run_path({str(script)!r}, run_name='__main__')"
    return call(python, "-c", run, env={"PATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}, cwd=tmp_path)


@pytest.mark.parametrize(
    ("programs", "first", "code", "message"),
    [
        # after an update of the skill the old package stays installed, and its commands are other ones
        ({"rloo-kit": "echo rloo-kit 0.0.1"}, "", 6, "the installed rloo-kit is 0.0.1 and this skill is"),
        ({"rloo-kit": "exit 127"}, "", 5, "install rloo-kit"),  # of an environment whose Python is gone
        # `python3` of an older system starts the script, and pip then fails with a page of text
        ({"python3": "exit 1"}, "sys.version_info = (3, 9)", 4, "install Python 3.11 to 3.13"),
        ({}, "", 5, "install rloo-kit"),
    ],
)
def test_check_setup_says_what_to_do(
    tmp_path: Path, programs: dict[str, str], first: str, code: int, message: str
) -> None:
    """With the command to copy: a Python that fits, the skill's constraints, the skill's folder."""
    found_code, found = check_elsewhere(tmp_path, programs, first)
    assert found_code == code and message in found["error"]
    assert (found["command"] or "").endswith("/bin/rloo-kit") == ("rloo-kit" in programs)
    todo = found["todo"][-1]
    assert f"-m venv .venv-rloo && .venv-rloo/bin/python -m pip install -c {tmp_path}/skill/constraints.txt" in todo
    assert f"-e '{tmp_path}/skill[notebook]'" in todo and "[notebook,gpu]" in todo
