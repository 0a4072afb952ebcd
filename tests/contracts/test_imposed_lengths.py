"""Imposed lengths on the engine that runs under Unsloth: the first GPU stopped here, in every whole step."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rloo_kit.rollout.types import Limits
from tests.rollout.models import PROMPTS, adapted, engine_for

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


def test_the_check_of_padding_keeps_its_own_lengths(make_tiny_model: Any, monkeypatch: pytest.MonkeyPatch):
    """`generate` first continues prompts of its own, padded and alone, which have no imposed length."""
    monkeypatch.setattr(sys, "path", [*sys.path, BENCHMARKS])
    impose_lengths = importlib.import_module("step_sides").impose_lengths
    engine = engine_for(adapted(make_tiny_model()), "generate")
    lengths = [2 + row for row in range(len(PROMPTS))]
    trainer = SimpleNamespace(model=engine._model)
    with impose_lengths(trainer, PROMPTS, lengths, engine.sampling.end_ids[0]):
        rollout = engine.sample(PROMPTS, Limits(20))
    assert [len(ids) for ids in rollout.completion_ids] == lengths
