"""Measured peaks of runs on this machine: how they correct the next plan, and what a damaged file costs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rloo_kit import load_config, plan_vram
from rloo_kit.plan import history
from rloo_kit.plan import load as plan_load
from rloo_kit.plan.history import keep_run, past_runs
from rloo_kit.plan.load import read_load
from rloo_kit.plan.peaks import rollout_gib, training_gib
from rloo_kit.plan.result import Machine
from rloo_kit.system.gpu import Gpu, Gpus

THINKING = Path(__file__).resolve().parents[2] / "configs" / "qwen3_4b_thinking_12gb.yaml"
WORDS = ["model.backend=transformers", "rollout.engine=native", "rollout.rows=6"]
HERE = Machine("RTX 3060", 11.2, 0.8, True)


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A GPU of this machine, and its own file."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("RLOO_KIT_MEMORY", str(tmp_path / "kept" / "memory.json"))
    monkeypatch.setattr(plan_load, "is_cpu_torch", lambda: False)
    gpu = Gpu(0, HERE.name, HERE.total_gib, HERE.total_gib, (8, 6), "1")
    monkeypatch.setattr(plan_load, "find_gpus", lambda: Gpus(gpu, 1, ""))
    history._warn.cache_clear()
    return tmp_path / "kept" / "memory.json"


def keep(ratio: float, share: float = 1.0, spare: float = 0.0, machine: Machine = HERE, *words: str) -> Any:
    """A run that came to `share` of its longest completions, whose peak was `ratio` of what is computed for that."""
    load = replace(read_load(load_config(THINKING, *WORDS, *words), HERE), factors=(1.0, 1.0))
    load = replace(load, completion_tokens=int(share * load.completion_tokens))
    keep_run(machine, load, 6, ratio * max(rollout_gib(load, 6), training_gib(load)), spare)
    return load


def test_a_measured_peak_corrects_the_next_plan() -> None:
    """A run was killed at 11 GiB, and the plan of the next one said 9 again."""
    run = load_config(THINKING, *WORDS)
    before = plan_vram(run)
    keep(1.08)
    after = plan_vram(run)
    assert after.rollout_gib == pytest.approx(1.08 * before.rollout_gib)
    part = next(part for part in after.parts if part.name == "correction")
    assert "rollout x 1.0" in part.detail and "this machine" in part.detail and part.training_gib == 0
    assert not any("not measured" in margin.reason for margin in after.margins)
    assert after.margin_gib < before.margin_gib
    assert sum(part.rollout_gib for part in after.parts) == pytest.approx(after.rollout_gib)


def test_a_plan_that_was_too_high_is_lowered_by_a_full_run_alone() -> None:
    """Completions of a first step are short: a peak at a tenth of the length must not promise rows for the whole."""
    run = load_config(THINKING, *WORDS)
    before = plan_vram(run)
    keep(0.9, share=0.3)
    short = plan_vram(run)
    assert short.rollout_gib == before.rollout_gib and 0 < short.margin_gib < before.margin_gib
    keep(0.9)
    full = plan_vram(run)
    assert full.rollout_gib < before.rollout_gib and full.margin_gib < short.margin_gib


@pytest.mark.parametrize(
    "words",
    [
        ["model.name=Qwen/Qwen3-8B"],
        ["rollout.engine=generate"],
        ["model.load_in_4bit=false", "model.name=Qwen/Qwen3-4B"],
        ["model.gradient_checkpointing=false"],
    ],
)
def test_another_run_is_not_corrected(words: list[str]) -> None:
    """A peak of one engine, precision or model says nothing about another's."""
    before = plan_vram(load_config(THINKING, *WORDS, *words))
    keep(1.3)
    after = plan_vram(load_config(THINKING, *WORDS, *words))
    assert after.peak_gib == before.peak_gib and after.margin_gib == before.margin_gib


def test_another_machine_is_not_corrected() -> None:
    """A plan for another GPU (--gpu-gib), and a home that several machines share."""
    run = load_config(THINKING, *WORDS)
    here, there = plan_vram(run), plan_vram(run, 11.2)
    keep(1.3, machine=replace(HERE, name="RTX 4090", total_gib=24.0))
    assert plan_vram(run).peak_gib == here.peak_gib
    keep(1.3)
    assert plan_vram(run).peak_gib > here.peak_gib and plan_vram(run, 11.2).peak_gib == there.peak_gib


def test_own_measurements_win_over_those_of_the_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A factor of some other GPU on top of this one's own would count the same gap twice."""
    from rloo_kit.plan import corrections

    found = {"source": "an A100", "factors": {"transformers rollout": 1.2, "transformers training": 1.3}}
    monkeypatch.setattr(corrections, "load_corrections", lambda: found)
    keep(1.05)
    detail = next(part for part in plan_vram(load_config(THINKING, *WORDS)).parts if part.name == "correction").detail
    assert "rollout x 1.06 (this machine" in detail, "without the context" and "training x 1.30 (an A100)" in detail


def test_fragments_that_were_seen_are_in_the_margin() -> None:
    """torch held 1.5 GiB more than its tensors: what the reserve of 0.8 does not cover has to be free as well."""
    keep(1.0, 1.0, 1.5)
    (fragments,) = [one for one in plan_vram(load_config(THINKING, *WORDS)).margins if "fragments" in one.reason]
    assert fragments.gib == pytest.approx(0.7)


def test_the_ratio_is_of_todays_arithmetic(file: Path) -> None:
    """A factor that was kept as a number would go on correcting a formula that has been repaired since."""
    load = keep(1.2)
    (entry,) = json.loads(file.read_text())
    assert "ratio" not in entry and entry["load"]["completion_tokens"] == load.completion_tokens
    (run,) = past_runs(HERE, load)
    assert run.part == "rollout" and run.ratio == pytest.approx(1.2)


@pytest.mark.parametrize("damage", ["", "{", "[1, 2]", "null", '{"a": 1}', "[[]]", '[{"load": {"shape": 3}}]'])
def test_a_damaged_file_is_ignored(file: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan, and a run's end, must not fail for a file of the cache that was cut off by a full disk."""
    file.parent.mkdir(parents=True)
    file.write_text(damage)
    run = load_config(THINKING, *WORDS)
    assert plan_vram(run).rows == 6
    captured = capsys.readouterr()
    assert captured.out == "" and ("damaged" in captured.err) == (not damage.startswith("[")), "JSON stays JSON"
    keep(1.1)
    assert len(past_runs(HERE, read_load(run, HERE))) == 1


def test_entries_are_bounded_and_sane(file: Path) -> None:
    """A file that grows with every run of a sweep, and a peak of 40 GiB that another program had."""
    keep(30.0)
    assert not past_runs(HERE, read_load(load_config(THINKING, *WORDS), HERE))
    for _ in range(history.KEPT + 3):
        load = keep(1.1)
    assert len(json.loads(file.read_text())) == history.KEPT == len(past_runs(HERE, load))


def test_a_cache_that_cannot_be_written_costs_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run has ended well; its adapter must not be lost to a read-only home."""
    (tmp_path / "a_file").write_text("")
    monkeypatch.setenv("RLOO_KIT_MEMORY", str(tmp_path / "a_file" / "memory.json"))
    keep(1.0)
    assert "RLOO_KIT_MEMORY" in capsys.readouterr().err
