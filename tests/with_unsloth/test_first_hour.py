"""The first hour on a GPU, rehearsed: all parts of `benchmarks/first_hour.py` on the CPU, through both backends."""

import importlib
import os
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
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


def rehearse(folder: Path, *parts: int) -> None:
    """Run these parts, one after another, with a home and a scratch folder of their own."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("UNSLOTH", "TRITON", "RLOO_KIT"))
    }
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
        environment[name] = str(folder / f"{name.lower()}-{parts[0]}")
        Path(environment[name]).mkdir()
    for part in parts:
        command = [sys.executable, "benchmarks/first_hour.py", "--rehearse", "--part", str(part)]
        command += ["--out", str(folder / "out"), "--minutes", "20"]  # a slow processor is no reason to fail
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]


def test_the_first_hour_is_rehearsed(read_part: Any, tmp_path: Path) -> None:
    """Code that runs for the first time on a rented GPU spends the lease on its typing errors."""
    with ThreadPoolExecutor(2) as pool:  # a rehearsal takes one core
        for done in [pool.submit(rehearse, tmp_path, *parts) for parts in ((1,), (2, 3))]:
            done.result()
    for number, figures in FIGURES.items():
        part = read_part(tmp_path / "out" / f"part{number}.jsonl")
        assert part.header["rehearsed"] and part.header["versions"]["torch"]
        assert all(one.state == "passed" or (one.state == "skipped" and one.reason) for one in part.checks.values())
        for backend in ("unsloth", "transformers"):
            assert any(one.state == "passed" for name, one in part.checks.items() if name.startswith(backend))
            for check, *keys in figures:
                assert part.value(f"{backend}/{check}", *keys) is not None, f"{backend}/{check}: {keys}"
        with tarfile.open(tmp_path / "out" / f"part{number}.tar.gz") as archive:
            assert archive.getnames() == [f"part{number}.jsonl", f"part{number}.log"]
