"""The Makefile, read by make itself (`make -n`): what is installed from where, and what it says when it cannot."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What make needs of a fresh clone, without an environment."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-vllm.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    for name in ("with_unsloth", "with_vllm"):
        shutil.copytree(ROOT / "tests" / name, tmp_path / "tests" / name)
    return tmp_path


def run_make(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make with the clone's folder first on PATH. Variables of a make around us (make test) are left out."""
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    env["PATH"] = f"{clone}:{env['PATH']}"
    return subprocess.run(["make", *arguments], cwd=clone, env=env, capture_output=True, text=True, timeout=60)


def installs(clone: Path, *arguments: str) -> list[str]:
    """The pip commands that make would run."""
    done = run_make(clone, "-n", f"PYTHON={sys.executable}", *arguments)
    assert done.returncode == 0, done.stderr
    return [line.strip() for line in done.stdout.splitlines() if "-m pip install" in line]


def script(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_a_gpu_adds_the_gpu_extra_and_torch_index_is_for_torch_only(clone: Path) -> None:
    """torchvision has to come from the index that torch came from, or its operators do not load; an index of torch
    builds does not carry the other packages."""
    script(clone, "nvidia-smi", "echo 'GPU 0: a GPU'")
    torch, kit = installs(clone, "demo", "TORCH_INDEX=file:///builds")
    assert torch.endswith("--index-url file:///builds torch torchvision")
    assert "index-url" not in kit and kit.endswith("-e '.[notebook,gpu]'")
    assert installs(clone, "demo", "NO_GPU=1")[0].endswith("-e '.[notebook]'")


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("old-python", "old-python is Python 3.8.18. Name another: make PYTHON=python3.1"),
        ("", "found none as python3"),
        ("bare-python", "python3-venv"),  # Debian splits venv off, and half an environment stays behind
    ],
)
def test_a_python_that_does_not_do_is_named(clone: Path, python: str, said: str) -> None:
    """Without the check pip reports, in the middle of the installation, that no version of torch matches."""
    script(clone, "old-python", '[ "$1" = -V ] && echo "Python 3.8.18"; [ "$1" = -V ]')
    script(clone, "bare-python", '[ "$1" = -c ] && exit 0; mkdir -p .venv/bin; exit 1')
    done = run_make(clone, "setup", f"PYTHON={python}")
    assert done.returncode != 0 and said in done.stderr
    assert not (clone / ".venv").exists()
