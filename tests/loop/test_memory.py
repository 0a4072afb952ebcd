"""A run's measured peak next to its plan: the printed line and `memory.json`."""

import gc
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rloo_kit import load_config
from rloo_kit.loop.memory_watch import MemoryPeak, MemoryWatch
from rloo_kit.plan import parts
from rloo_kit.plan.parts import rollout_gib
from rloo_kit.plan.planner import read_workload
from rloo_kit.plan.vram_plan import Machine
from rloo_kit.runs.files import write_json
from rloo_kit.system.memory import resident_gib, trim_heap

GIB = 2**30
THINKING = Path(__file__).resolve().parents[2] / "configs" / "qwen3_4b_thinking_12gb.yaml"
GPU = Machine("RTX 3060", 11.2, 0.8, True)


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def run_dir(tmp_path: Path) -> SimpleNamespace:
    return SimpleNamespace(write_json=lambda name, value: write_json(tmp_path / name, value))


def watch_of(machine: Machine, rows: int = 8) -> MemoryWatch:
    load = replace(read_workload(load_config(THINKING), machine), factors=(1.0, 1.0), tokens_per_pass=1)
    return MemoryWatch(load, machine, rows)


def sampled(prompt: int, *completions: int) -> list[dict[str, int]]:
    return [{"prompt_tokens": prompt, "completion_tokens": tokens} for tokens in completions]


def test_the_peak_on_a_gpu_is_compared_at_the_lengths_of_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_dir: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against the plan of full completions every run looks fine; the run that proves the plan wrong has short ones."""
    calls = []
    cuda = SimpleNamespace(
        is_available=lambda: True,
        synchronize=lambda: None,
        reset_peak_memory_stats=lambda: calls.append("reset"),
        max_memory_allocated=lambda: int(6.0 * GIB),
        max_memory_reserved=lambda: int(7.5 * GIB),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    watch = watch_of(GPU)
    watch.start()
    watch(sampled(100, 900, 2000))
    watch(sampled(112, 50))
    watch.report(run_dir)
    seen = replace(watch.load, prompt_tokens=112, completion_tokens=2000)
    computed, planned = rollout_gib(seen, 8), rollout_gib(watch.load, 8)
    found = json.loads((tmp_path / "memory.json").read_text())
    assert calls == ["reset"] and found["measured_gib"] == 6.7 and found["spare_gib"] == 1.5, "with CUDA's context"
    assert found["computed_gib"] == pytest.approx(computed, abs=0.001) and found["row_tokens"] == 2112
    assert found["planned_gib"] == pytest.approx(planned, abs=0.001) and found["part"] == "rollout"
    line = " ".join(capsys.readouterr().out.split())
    assert f"planned {planned:.2f} GiB" in line and "measured peak 6.70 GiB" in line
    assert f"({6.7 / computed:.2f})" in line


def test_a_run_on_the_cpu_is_measured_by_what_it_added(
    tmp_path: Path, run_dir: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """A notebook that holds a dataset of 20 GiB would double every plan of its machine."""
    ballast = torch.ones(2**26)
    watch = watch_of(Machine("the CPU", 16.0, 0.3, False), rows=1)
    watch.start()
    torch.ones(2**27).sum()
    watch(sampled(100, 200))
    watch.report(run_dir)
    found = json.loads((tmp_path / "memory.json").read_text())
    there = parts.context_bytes(watch.load) + parts.body_bytes(watch.load) + parts.table_bytes(watch.load)
    there += parts.FLOAT * parts.trained_weights(watch.load)
    assert found["measured_gib"] == pytest.approx(there / GIB + 0.5, abs=0.1) and ballast is not None
    assert "measured peak" in " ".join(capsys.readouterr().out.split())


def test_training_writes_the_figures_into_its_folder(start, capsys: pytest.CaptureFixture[str]) -> None:
    """A run ends with its measured peak next to the planned one."""
    result = start("rloo.max_steps=1")
    found = json.loads((result.folder / "memory.json").read_text())
    assert found["measured_gib"] > 0 and found["planned_gib"] >= found["computed_gib"] > 0
    assert "measured peak" in " ".join(capsys.readouterr().out.split())


def test_a_peak_is_seen_though_it_is_gone():
    """Memory that is held for a moment is what an out-of-memory error is made of; a look afterwards misses it."""
    gc.collect()
    trim_heap()  # gives back what other tests left
    with MemoryPeak() as peak:
        before = resident_gib()
        torch.ones(2**27).sum()  # half a GiB
    assert peak.gib - before == pytest.approx(0.5, abs=0.1) and resident_gib() - before < 0.1
    with MemoryPeak() as after:
        pass
    assert after.gib < peak.gib - 0.3


def test_a_peak_without_the_kernels_help(monkeypatch):
    """Some containers do not let a process reset its own peak."""

    def refuse(self: Path, *_args: Any, **_named: Any) -> None:
        raise PermissionError(str(self))

    monkeypatch.setattr(Path, "write_text", refuse)
    with MemoryPeak() as peak:
        before = resident_gib()
        held = torch.ones(2**27)
        for _ in range(5):
            held.add_(1)
        del held
    assert peak.gib - before == pytest.approx(0.5, abs=0.1)
