"""Corrections of the plan: what `make gpu-report` wrote is what a plan for a GPU is multiplied by."""

from pathlib import Path
from typing import Any

import pytest

from rloo_kit import load_config, plan_vram
from rloo_kit.plan import corrections, planner
from rloo_kit.plan import load as plan_load

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "qwen3_4b_thinking_12gb.yaml"


@pytest.fixture
def corrected(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = {"source": "a GPU", "factors": {"unsloth rollout": 1.1, "unsloth training": 1.5}}
    for module in (corrections, planner):
        monkeypatch.setattr(module, "load_corrections", lambda: found)


def test_measured_peaks_correct_computed_ones(request: pytest.FixtureRequest) -> None:
    """A plan that a GPU has contradicted goes on promising that a run fits; CUDA's context is not torch's to exceed."""
    run = load_config(CONFIG, "rollout.rows=8", "rloo.tokens_per_pass=4608")
    before = plan_vram(run, 12e9 / 2**30)
    request.getfixturevalue("corrected")
    after = plan_vram(run, 12e9 / 2**30)
    assert after.rollout_gib == pytest.approx(0.7 + 1.1 * (before.rollout_gib - 0.7))
    assert after.training_gib == pytest.approx(0.7 + 1.5 * (before.training_gib - 0.7))
    assert sum(part.rollout_gib for part in after.parts) == pytest.approx(after.rollout_gib)
    assert sum(part.training_gib for part in after.parts) == pytest.approx(after.training_gib)
    assert "rollout x 1.10 (a GPU)" in str(after) and "correction" not in str(before)


def test_without_a_gpu_nothing_is_corrected(corrected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU's allocator took says nothing about a laptop's memory."""
    run = load_config(CONFIG.with_name("arithmetic_thinking.yaml"))
    monkeypatch.setattr(plan_load, "is_cpu_torch", lambda: True)
    assert not any(part.name == "correction" for part in plan_vram(run).parts)
