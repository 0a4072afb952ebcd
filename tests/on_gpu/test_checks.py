"""The checks of `benchmarks/first_hour.py` that assert something, a test each: `make test-gpu`.

One run of that command does them all: correctness (part 1), the claim (part 3), and what of part 0 compares something.
Figures (part 2) are no tests; the code is rehearsed on the CPU by `make test-unsloth` and `make test-slow`.
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

CHECKS = importlib.import_module("on_gpu.listing").list_checks()
MORE = ("leaves_gradients", "gradients_against_float32", "embedded_learns", "trains_on_8gb_fp16", "trains_on_24gb_fp16")
NAMES = [name for name, check in CHECKS.items() if check.part in (1, 3) or check.run.__name__ in MORE]
MINUTES = 45
LEFT_OUT = "Unsloth is left out: "

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
    command = [sys.executable, str(FOLDER / "first_hour.py"), "--out", str(out), "--minutes", str(MINUTES), "--only"]
    subprocess.run([*command, *chosen], check=False)
    files = list(out.glob("part*.jsonl"))
    assert files, "benchmarks/first_hour.py ended before its first line"
    print(f"lines and log: {out}", flush=True)
    return checks.read_part(files[0])


@pytest.mark.parametrize("name", NAMES)
def test_check(name: str, found: Any) -> None:
    """A check that fails fails its test: the report is read by people, this is read by machines."""
    if name not in found.checks:  # it was not begun
        reasons = [note for note in found.notes if note.startswith(LEFT_OUT)] if name.startswith("unsloth/") else []
        if CHECKS[name].stand_in and name.replace("transformers/", "unsloth/") in found.checks:
            reasons.append("Unsloth took its part")
        assert reasons, f"not run: {'; '.join(found.notes)}"
        pytest.skip(reasons[0])
    check = found.checks[name]
    if check.state == "skipped":
        pytest.skip(check.reason)
    assert check.state == "passed", f"{check.state}: {check.reason}; figures: {check.values}"
