"""The checks of `benchmarks/first_hour.py`, a test each: `make test-gpu`.

One run of that command does them all; the code is rehearsed on the CPU by `make test-unsloth`.
"""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(FOLDER))  # last: its rewards.py is not the package

checks = importlib.import_module("on_gpu.checks")

CHECKS = checks.list_checks()
SECONDS = 2700

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="session")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the run of the chosen checks found; skips, with the reason, where there is no GPU."""
    from rloo_kit.system.gpu import find_gpus

    gpus = find_gpus()
    if gpus.gpu is None:
        pytest.skip(f"no CUDA GPU: {gpus.reason}")
    chosen = [item.callspec.params["name"] for item in request.session.items if "found" in item.fixturenames]
    out = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, str(FOLDER / "first_hour.py"), "--out", str(out), "--seconds", str(SECONDS), "--only"]
    subprocess.run([*command, *chosen], check=False)
    part = checks.read_part(out / "call0.jsonl")
    assert part is not None, "benchmarks/first_hour.py ended before its first line"
    print(f"lines and log: {out}", flush=True)
    return part


@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str, found: Any) -> None:
    """A check that fails fails its test: the report is read by people, this is read by machines."""
    assert name in found.checks, f"not run: {'; '.join(found.notes)}"
    check = found.checks[name]
    if check.state == "skipped":
        pytest.skip(check.reason)
    assert check.state == "passed", f"{check.state}: {check.reason}; figures: {check.values}"
