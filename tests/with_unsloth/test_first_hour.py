"""The first hour on a GPU, rehearsed: the parts of `benchmarks/first_hour.py` on the CPU, through both backends."""

import importlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIGURES = {  # of each backend, where not one of them stands for both
    1: (
        ("loads_4bit", "seconds"),
        ("scores_4bit", "tokens"),
        ("resumes", "lengths"),
        ("generates", "nats_after_loading"),
    ),
    2: (("decodes", "rows 2", "ms_per_step"), ("trains_4k", "fast", "training_s"), ("stock_trains_4k", "training_s")),
    3: (("trains_on_8gb", "rollout_gib"), ("trains_on_8gb", "training_gib"), ("trains_on_8gb", "step_s")),
}


@pytest.fixture
def read_part(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    return importlib.import_module("on_gpu.checks").read_part


CHAIN = [f"{one}/{name}" for one in ("unsloth", "transformers") for name in
         ("loads_4bit", "scores_4bit", "trains", "resumes", "generates")]  # fmt: skip


def rehearse(folder: Path, *chosen: str) -> None:
    """Run a part or single checks, with a home and a scratch folder of its own."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("UNSLOTH", "TRITON", "RLOO_KIT"))
    }
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
        environment[name] = str(folder / name.lower())
        Path(environment[name]).mkdir()
    command = [sys.executable, "benchmarks/first_hour.py", "--rehearse", *chosen]
    command += ["--out", str(folder / "out"), "--minutes", "20"]  # a slow processor is no reason to fail
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]


@pytest.mark.parametrize(
    ("number", "chosen"),
    [(1, ["--only", *CHAIN]), *(pytest.param(n, ["--part", str(n)], marks=pytest.mark.long) for n in (1, 2, 3))],
    ids=["training", "part 1", "part 2", "part 3"],
)
def test_the_first_hour_is_rehearsed(number: int, chosen: list[str], read_part: Any, tmp_path: Path) -> None:
    """Code that runs for the first time on a rented GPU spends the lease on its typing errors."""
    rehearse(tmp_path, *chosen)
    part = read_part(tmp_path / "out" / f"part{number}.jsonl")
    assert part.header["rehearsed"] and part.header["versions"]["torch"]
    assert all(one.state == "passed" or (one.state == "skipped" and one.reason) for one in part.checks.values())
    for backend in ("unsloth", "transformers"):
        assert any(one.state == "passed" for name, one in part.checks.items() if name.startswith(backend))
        for check, *keys in FIGURES[number]:
            assert part.value(f"{backend}/{check}", *keys) is not None, f"{backend}/{check}: {keys}"
    with tarfile.open(tmp_path / "out" / f"part{number}.tar.gz") as archive:
        assert archive.getnames() == [f"part{number}.jsonl", f"part{number}.log"]
