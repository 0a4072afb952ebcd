"""The Makefile, read by make itself (`make -n`): what is installed from where, and what it says when it cannot."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What make needs of a fresh clone, without an environment."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "tests" / "with_unsloth", tmp_path / "tests" / "with_unsloth")
    return tmp_path


def run_make(clone: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run make; `path` goes in front of PATH. Variables of a make around us (make test) are left out."""
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    env["PATH"] = f"{path}:{env['PATH']}" if path else env["PATH"]
    return subprocess.run(["make", *arguments], cwd=clone, env=env, capture_output=True, text=True, timeout=60)


def installs(clone: Path, *arguments: str, path: str = "") -> list[str]:
    """The pip commands that make would run."""
    done = run_make(clone, "-n", f"PYTHON={sys.executable}", *arguments, path=path)
    assert done.returncode == 0, done.stderr
    return [line.strip() for line in done.stdout.splitlines() if "-m pip install" in line]


def script(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_help_is_the_default_and_lists_what_there_is(clone: Path) -> None:
    """`make` alone explains; a default that installs would fetch gigabytes for a look."""
    done = run_make(clone)
    assert done.returncode == 0
    for target in ("setup", "demo", "lint", "test", "test-all", "test-unsloth", "test-gpu", "check", "bench"):
        assert re.search(rf"make {target} +\w", done.stdout), target
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize("target", ["demo", "test", "test-unsloth"])
def test_nothing_names_an_index(clone: Path, target: str) -> None:
    """An index on the command line would win over the user's mirror, and nothing else is reachable in some houses."""
    commands = installs(clone, target, "HAS_GPU=")
    assert commands and not any("index-url" in line or "://" in line for line in commands)
    assert all("-c constraints.txt" in line for line in commands)
    assert not any("gpu" in line for line in commands)


def test_torch_index_is_for_torch_only_and_comes_first(clone: Path) -> None:
    """An index of torch builds does not carry the other packages in the locked versions."""
    first, second = installs(clone, "demo", "HAS_GPU=", "TORCH_INDEX=file:///builds")
    assert first.endswith("--index-url file:///builds torch")
    assert "index-url" not in second and second.endswith("-e '.[notebook]'")


def test_a_gpu_adds_the_gpu_extra(clone: Path, tmp_path: Path) -> None:
    """torchvision has to come from the index that torch came from, or its operators do not load."""
    script(tmp_path, "nvidia-smi", "echo 'GPU 0: a GPU'")
    torch, kit = installs(clone, "demo", "TORCH_INDEX=file:///builds", path=str(tmp_path))
    assert torch.endswith("torch torchvision") and kit.endswith("-e '.[notebook,gpu]'")
    assert installs(clone, "test", path=str(tmp_path))[0].endswith("-e '.[dev,math,notebook,gpu]'")
    assert installs(clone, "demo", "NO_GPU=1", path=str(tmp_path))[0].endswith("-e '.[notebook]'")


def test_an_nvidia_smi_without_a_gpu_adds_nothing(clone: Path, tmp_path: Path) -> None:
    """The tool is there and the driver is not: it fails, and says so on standard output."""
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has an NVIDIA driver, which is the other sign of a GPU")
    script(tmp_path, "nvidia-smi", "echo 'NVIDIA-SMI has failed: no driver'; exit 9")
    assert installs(clone, "demo", path=str(tmp_path))[0].endswith("-e '.[notebook]'")


def test_nothing_is_installed_twice(clone: Path) -> None:
    """`make demo` after `make test` has all it needs; a changed lock is installed."""
    (clone / ".venv" / "bin").mkdir(parents=True)
    for name in ("bin/python", ".stamp-run", ".stamp-dev"):
        (clone / ".venv" / name).touch()
    assert installs(clone, "demo", "HAS_GPU=") == [] == installs(clone, "test", "HAS_GPU=")
    old = (clone / "constraints.txt").stat().st_mtime - 1000
    for name in (".stamp-run", ".stamp-dev"):
        os.utime(clone / ".venv" / name, (old, old))
    assert len(installs(clone, "demo", "HAS_GPU=")) == 1


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("old-python", "Python 3.11 or 3.12; old-python is Python 3.8.18"),
        ("", "found none as python3, python3.12"),
    ],
)
def test_an_old_python_is_named(clone: Path, tmp_path: Path, python: str, said: str) -> None:
    """Without the check pip reports, in the middle of the installation, that no version of torch matches."""
    script(tmp_path, "old-python", '[ "$1" = -V ] && echo "Python 3.8.18"; [ "$1" = -V ]')
    done = run_make(clone, "setup", f"PYTHON={python}", path=str(tmp_path))
    assert done.returncode != 0
    assert said in done.stderr and "make PYTHON=" in done.stderr
    assert not (clone / ".venv").exists()


def test_a_python_without_venv_is_explained_and_leaves_nothing(clone: Path, tmp_path: Path) -> None:
    """Debian splits venv off: half an environment stays behind and the next make takes it for a whole one."""
    script(tmp_path, "bare-python", '[ "$1" = -c ] && exit 0; mkdir -p .venv/bin; exit 1')
    done = run_make(clone, "setup", "PYTHON=bare-python", path=str(tmp_path))
    assert done.returncode != 0
    assert "install the venv module" in done.stderr and "python3-venv" in done.stderr
    assert not (clone / ".venv").exists()


def test_ci_runs_targets_that_exist() -> None:
    """A step of .ci/run that make does not know fails the first submission after a rename."""
    steps = re.findall(r"^step ([\w-]+)", (ROOT / ".ci" / "run").read_text(), flags=re.M)
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert steps == ["lint", "test", "test-slow", "test-unsloth"] and set(steps) <= targets
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
