"""The first hour on a GPU, rehearsed: the calls of `benchmarks/first_hour.py` on the CPU, through both backends."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOME = (
    "unsloth/trains", "unsloth/merges", "transformers/reads_what_was_merged", "unsloth/decodes",
    "unsloth/decodes_natively", "transformers/decodes_natively",
)  # fmt: skip


def rehearse(folder: Path, *chosen: str) -> dict[str, Any]:
    """Run both calls or single checks, with a home and a scratch folder of its own. Returns the checks by name."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("UNSLOTH", "TRITON", "RLOO_KIT"))
    }
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
        environment[name] = str(folder / name.lower())
        Path(environment[name]).mkdir()
    command = [sys.executable, "benchmarks/first_hour.py", "--rehearse", *chosen, "--out", str(folder / "out")]
    command += ["--seconds", "3000"]  # a slow processor is no reason to fail
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    read_part = importlib.import_module("on_gpu.checks").read_part
    parts = [read_part(path) for path in sorted((folder / "out").glob("call*.jsonl"))]
    assert all(part.header["rehearsed"] and part.header["versions"]["torch"] for part in parts)
    return {name: found for part in parts for name, found in part.checks.items()}


@pytest.mark.parametrize("chosen", [SOME, pytest.param((), marks=pytest.mark.long)], ids=["some", "both calls"])
def test_the_first_hour_is_rehearsed(chosen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Code that first runs on a rented GPU spends the lease on typing errors; no figure means nothing was checked."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    found = rehearse(tmp_path, *(("--only", *chosen) if chosen else ()))
    assert found.keys() >= set(chosen or SOME)
    for name, check in found.items():
        assert check.state == "passed" or (check.state == "skipped" and check.reason), f"{name}: {check}"
        assert check.values or check.state == "skipped", name
    for one in importlib.import_module("on_gpu.expected").EXPECTED:
        value: Any = found[one.check].values if one.check in found else {"refused": "it was not chosen"}
        for key in one.keys:
            value = value if "refused" in value else value.get("rows 2" if key.startswith("rows ") else key, value)
        is_known = isinstance(value, float | int) or "refused" in value or found[one.check].state == "skipped"
        assert is_known, f"{one.check}: {one.keys}"
