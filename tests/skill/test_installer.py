"""The skill as the real installer leaves it: every tracked file arrives, and pip makes a working package of it.

The only tests of the skill that use a network, and only the npm and pip registries that the machine is configured for;
without them they are skipped with the reason. The repository is served from a bare clone on the disk.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rloo_kit
from tests.skill.pages import copy_skill

pytestmark = pytest.mark.slow
INSTALLER = "skills@1.5.18"  # for Node 18 and newer; docs/agent-skill.md lists the others that were tried
ADDRESS = "https://rloo-kit.example/rloo-kit.git"  # git maps it to the bare clone
Tree = dict[str, tuple[str, bool]]  # path -> (SHA-256, executable)


def run(command: list, cwd: Path, env: dict[str, str] | None = None) -> str:
    """What a command printed; it has to end with exit code 0."""
    words = [str(word) for word in command]
    options = {"capture_output": True, "text": True, "timeout": 240, "stdin": subprocess.DEVNULL}
    done = subprocess.run(words, cwd=cwd, env=env, **options)
    assert done.returncode == 0, f"$ {' '.join(words)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def tree(folder: Path) -> Tree:
    """The files in a folder and behind its links; Python's caches do not count."""
    paths = [Path(here) / name for here, _, names in os.walk(folder, followlinks=True) for name in names]
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), os.access(path, os.X_OK))
        for path in paths
        if "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `work`, the repository as it is now, and `project`, in which the skill was installed from it."""
    if shutil.which("npx") is None:
        pytest.skip("npx is not here")
    folder = tmp_path_factory.mktemp("installer")
    work, home, project = folder / "work", folder / "home", folder / "project"
    copy_skill(work)
    home.mkdir()
    project.mkdir()
    # An agent's own variables, or git's, would send the installer to another folder or repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("CLAUDE", "GIT_", "XDG_"))}
    env |= {"npm_config_userconfig": str(Path.home() / ".npmrc"), "npm_config_cache": str(home / ".npm")}
    env |= {"HOME": str(home), "GIT_CONFIG_GLOBAL": str(home / ".gitconfig"), "DISABLE_TELEMETRY": "1"}
    known = subprocess.run(["npm", "view", INSTALLER, "version"], env=env, capture_output=True, text=True, timeout=60)
    if known.returncode:
        pytest.skip(f"npm's registry has no answer: {known.stderr.strip()[:200]}")
    names = "-c user.name=test -c user.email=test@rloo-kit.example"
    for command in ("init -q -b main", "add -A -f", f"{names} commit -q -m now", "clone -q --bare . ../bare.git"):
        run(["git", *command.split()], work, env)
    shutil.rmtree(work / ".git")
    (home / ".gitconfig").write_text(f'[url "{(folder / "bare.git").as_uri()}"]\n\tinsteadOf = {ADDRESS}\n')
    run(["npx", "--yes", INSTALLER, "add", ADDRESS, "-a", "claude-code", "-y"], project, env)
    return folder


def test_the_installed_tree_is_the_repository(place: Path) -> None:
    """Four versions in a row copied SKILL.md alone, with exit code 0; a kept link leads into a deleted clone."""
    skill = place / "project" / ".claude" / "skills" / "rloo"
    assert tree(skill) == tree(place / "work")
    assert all(path.resolve().is_relative_to(skill.resolve()) for path in skill.rglob("*") if path.is_symlink())


def test_pip_installs_the_installed_skill(place: Path) -> None:
    """A build that leans on git, on a left-out file or on the project's .gitignore works in the checkout alone."""
    project, skill = place / "project", place / "project" / ".claude" / "skills" / "rloo"
    run(["git", "init", "-q", project], place)
    (project / ".gitignore").write_text(".claude/\n*.yaml\nrloo_kit/\n", encoding="utf-8")
    run([sys.executable, "-m", "venv", "--without-pip", project / ".venv"], project)
    python, ask = project / ".venv" / "bin" / "python", "import sysconfig; print(sysconfig.get_path('purelib'))"
    here, packages = (run([one, "-c", ask], project).strip() for one in (sys.executable, python))
    (Path(packages) / "packages_of_the_tests.pth").write_text(f"{here}\n", encoding="utf-8")  # no torch is downloaded

    before = tree(skill)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--ignore-installed"]
    probe = subprocess.run(
        [*pip[:3], "download", "-q", "--no-deps", "-d", place / "probe", "hatchling"], capture_output=True, timeout=120
    )
    if probe.returncode:
        pytest.skip(f"pip's index has no answer: {probe.stderr.decode()[-200:]}")
    run([*pip, "-c", skill / "constraints.txt", skill], project)
    built = {f"rloo_kit/{path}": value for path, value in tree(Path(packages) / "rloo_kit").items()}
    assert built == {path: value for path, value in before.items() if path.startswith("rloo_kit/")}
    assert "rloo_kit/rewards/__init__.py" in built and not (Path(packages) / "rewards").exists()

    env, command = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}, project / ".venv" / "bin" / "rloo-kit"
    assert run([command, "--version"], skill, env).strip() == f"rloo-kit {rloo_kit.__version__}"
    assert "name: arithmetic_thinking" in run([command, "config", "configs/arithmetic_thinking.yaml"], skill, env)
    check = json.loads(run([python, skill / "scripts" / "check_setup.py"], project, env))
    assert check["command"] == str(command)
    assert tree(skill) == before, "the build or a command left something in the skill's folder"
