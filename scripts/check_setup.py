#!/usr/bin/env python3
"""Check that the skill's folder is complete and rloo-kit is installed. Needs no package; runs on Python 3.8 or newer.

Prints one JSON object on stdout: ok, todo (what to do, in order), command (the rloo-kit to use), what was found,
and error (the first problem) if there is one.

Exit codes: 0 ready; 2 a wrong option (message on stderr); 3 files of the skill are missing; 4 no supported Python;
5 rloo-kit is not installed; 6 the installed rloo-kit has another version than the skill.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

SKILL = Path(os.path.abspath(__file__)).parents[1]  # the folder as it was called: a link to it stays one
NEEDED = (
    "pyproject.toml",
    "constraints.txt",
    "README.md",
    "LICENSE",
    "configs/arithmetic_thinking.yaml",
    "configs/batch_arithmetic.yaml",
    "docs/README.md",
    "notebooks/arithmetic_thinking.ipynb",
    "references/troubleshooting.md",
    "rewards/__init__.py",
    "rloo_kit/__init__.py",
    "scripts/check_setup.py",
)
OLDEST, TOO_NEW = (3, 11), (3, 14)
PYTHONS = ("python3", "python3.13", "python3.12", "python3.11")
ENVIRONMENTS = (".venv-rloo", ".venv")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skill", type=Path, default=SKILL, help="folder of the skill (default: this script's)")
    parser.add_argument("--project", type=Path, default=Path.cwd(), help="folder whose environments are searched")
    options = parser.parse_args(arguments)
    report, code = check(options.skill.absolute(), options.project.resolve())
    print(json.dumps(report, indent=2))
    return code


def check(skill: Path, project: Path) -> tuple[dict, int]:
    """The report and the exit code: the first problem decides the code, `todo` lists them all."""
    problems = []
    missing = [name for name in NEEDED if not (skill / name).exists()]
    if missing:
        problems.append((3, describe_missing(skill)))
    python, command = find_python(), find_command(skill, project)
    if python is None and command is None:
        problems.append((4, f"install Python 3.11 to 3.13: none was found as {', '.join(PYTHONS)}"))
    wanted, found = read_version(skill), ask_version(command)
    if found is None:
        problems.append((5, f"install rloo-kit: {install_command(skill, python)}"))
    elif wanted is not None and found != wanted:
        message = f"the installed rloo-kit is {found} and this skill is {wanted}: {install_command(skill, python)}"
        problems.append((6, message))
    report = {
        "ok": not problems,
        "todo": [message for _, message in problems] or [f"run {command} doctor"],
        "command": command,
        "versions": {"skill": wanted, "rloo_kit": found},
        "python": python,
        "skill": {"folder": str(skill), "missing": missing},
    }
    if problems:
        report["error"] = problems[0][1]
    return report, problems[0][0] if problems else 0


def describe_missing(skill: Path) -> str:
    return (
        f"only part of the skill is in {skill}: move it away, then `git clone ADDRESS {shlex.quote(str(skill))}"
        "`; ADDRESS is where the skill came from: ask the user for it"
    )


def install_command(skill: Path, python: str | None) -> str:
    words = ["-m", "pip", "install", "-c", str(skill / "constraints.txt"), "pytest", "-e", f"{skill}[notebook]"]
    make = shlex.join([python or "python3.12", "-m", "venv", ".venv-rloo"])
    install = shlex.join([".venv-rloo/bin/python", *words])
    return f"{make} && {install} (with an NVIDIA GPU: [notebook,gpu] at the end)"


def find_python() -> str | None:
    """A supported Python, this one first."""
    if OLDEST <= sys.version_info < TOO_NEW:
        return sys.executable
    code = f"import sys; sys.exit(not {OLDEST!r} <= sys.version_info < {TOO_NEW!r})"
    for name in PYTHONS:
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", code], timeout=30, check=False).returncode == 0:
            return path
    return None


def find_command(skill: Path, project: Path) -> str | None:
    """The rloo-kit next to this Python, in the project's or the skill's environment, or the one on PATH."""
    folders = [Path(sys.executable).parent]
    folders += [base / name / "bin" for base in (project, skill) for name in ENVIRONMENTS]
    for folder in folders:
        if os.access(folder / "rloo-kit", os.X_OK):
            return str(folder / "rloo-kit")
    return shutil.which("rloo-kit")


def ask_version(command: str | None) -> str | None:
    """The version that the command prints, or None if there is no command or it does not run."""
    if command is None:
        return None
    try:
        done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"rloo-kit (\S+)", done.stdout)
    return found.group(1) if found and done.returncode == 0 else None


def read_version(skill: Path) -> str | None:
    """The version in the skill's sources, without importing them; None if they are missing."""
    try:
        text = (skill / "rloo_kit" / "__init__.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r'^__version__ = "([^"]+)"', text, flags=re.M)
    return found.group(1) if found else None


if __name__ == "__main__":
    sys.exit(main())
