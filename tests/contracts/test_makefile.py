"""What the Makefile says of a Python that does not do."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("old-python", "old-python is Python 3.8.18. Name another: make PYTHON=python3.1"),
        ("", "found none as python3"),
        ("bare-python", "python3-venv"),  # Debian splits venv off, and half an environment stays behind
    ],
)
def test_a_python_that_does_not_do_is_named(tmp_path: Path, python: str, said: str) -> None:
    """Without the check pip reports, in the middle of the installation, that no version of torch matches."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-vllm.txt"):
        shutil.copy(ROOT / name, tmp_path)
    scripts = {"old-python": '[ "$1" = -V ] && echo "Python 3.8.18"; [ "$1" = -V ]'}
    scripts["bare-python"] = '[ "$1" = -c ] && exit 0; mkdir -p .venv/bin; exit 1'
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    # Variables of a make around us (make test) are left out.
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    command = ["make", "setup", f"PYTHON={python}"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and said in done.stderr
    assert not (tmp_path / ".venv").exists()
