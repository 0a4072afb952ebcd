"""pip on an installed skill: the folder that the installer made is a package that works, and stays as it is."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import rloo_kit
from tests.skill import installer
from tests.skill.installer import SKILL, Finished, Person, Tree, run


def _make_venv(folder: Path) -> Path:
    """A separate environment that also sees the packages of this one, so that no torch is downloaded."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    here, there = (
        subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True, timeout=60).stdout.strip()
        for python in (sys.executable, folder / "bin" / "python")
    )
    (Path(there) / "packages_of_the_tests.pth").write_text(f"{here}\n", encoding="utf-8")
    return Path(there)


def _check_commands(person: Person, skill: Path) -> None:
    """The commands that a person types first, in the skill's own folder."""
    command = person.project / ".venv-rloo" / "bin" / "rloo-kit"

    def said(*words: str) -> Finished:
        return run([command, *words], skill, person.env | {"PYTHONDONTWRITEBYTECODE": "1"})

    assert said("--version").output.strip() == f"rloo-kit {rloo_kit.__version__}"
    doctor: dict[str, Any] = json.loads(said("doctor", "--json").output)
    assert doctor["exit_code"] == 0, doctor
    config = said("config", "configs/arithmetic_thinking.yaml")
    assert config.exit_code == 0 and yaml.safe_load(config.output)["run"]["name"] == "arithmetic_thinking", str(config)
    check = run([command.parent / "python", skill / "scripts" / "check_setup.py"], person.project, person.env)
    assert check.exit_code == 0 and json.loads(check.output)["command"] == str(command), str(check)


@pytest.mark.slow
@pytest.mark.parametrize("editable", [False, pytest.param(True, marks=pytest.mark.long)], ids=["plain", "editable"])
def test_pip_installs_the_installed_skill(
    editable: bool, make_person: Callable[..., Person], package_index: None, expected: Tree
) -> None:
    """A build that leans on git, or on a file that the installer leaves out, works in the checkout and nowhere else;
    one that leaves a build folder behind makes it part of the skill. The project ignores `.claude/`, as many do: a
    build that asks the project's .gitignore makes an empty package."""
    person = make_person("1.7.4")
    subprocess.run(["git", "init", "-q", person.project], check=True, timeout=60)
    (person.project / ".gitignore").write_text(".claude/\n*.yaml\nrloo_kit/\n", encoding="utf-8")
    person.install("1.7.4")
    skill = person.project / SKILL
    packages = _make_venv(person.project / ".venv-rloo")

    python = person.project / ".venv-rloo" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--ignore-installed"]
    what = ["-c", skill / "constraints.txt", *(["-e"] if editable else []), skill]
    done = run([*pip, *what], person.project, os.environ, timeout_s=180)
    assert done.exit_code == 0, str(done)
    assert not installer.difference(expected, installer.tree(skill)), "the build left something behind"
    if not editable:
        inside = {path: value for path, value in expected.items() if path.startswith("rloo_kit/")}
        built = installer.tree(packages / "rloo_kit")
        built = {f"rloo_kit/{path}": value for path, value in built.items() if not installer.is_left_out(path)}
        assert "rloo_kit/rewards/__init__.py" in inside and not installer.difference(inside, built)
        assert not (packages / "rewards").exists(), "a top-level `rewards` would take the name of the user's own module"
    place = run([python, "-c", "import rloo_kit; print(rloo_kit.__file__)"], person.project, person.env).output
    assert Path(place.strip()).is_relative_to(skill if editable else packages), place

    _check_commands(person, skill)
    left = {path: value for path, value in installer.tree(skill).items() if not installer.is_left_out(path)}
    assert not installer.difference(expected, left), "the commands left something in the skill's folder"
