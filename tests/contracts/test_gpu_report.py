"""`make gpu-report`: what a GPU measured becomes documentation, and nothing else does.

The lines are made up; that real ones have these names is shown by the rehearsal (`with_unsloth/test_first_hour.py`).
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from rloo_kit import load_config

ROOT = Path(__file__).resolve().parents[2]
HEADER = {
    "measured": "2026-12-01", "revision": "0123456789abcdef", "rehearsed": False,
    "machine": {"gpu": "NVIDIA Test"}, "versions": {"torch": "2.11.0", "trl": "1.15.0", "unsloth": None},
}  # fmt: skip
PEAKS = {"computed": {"rollout_gib": 5.0, "training_gib": 4.0}, "rollout_gib": 5.402, "training_gib": 3.0}
TRAINS, CLI = "unsloth/trains_on_8gb", "transformers/runs_the_command_line"
FIGURES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        CLI: {"train": {"verdict": "learnt"}},
        "unsloth/decodes_natively": {
            "rows 8": {"generate": {"ms": 15.0, "tokens_per_s": 533}, "native": {"ms": 6.26, "tokens_per_s": 1278}},
            "rows 32": {"generate": {"fits": False}},
        },
        "unsloth/takes_a_step_of_1k": {"ours, native": {"best_s": 8.0}, "TRL": {"best_s": 20.0}},
    },
    2: {TRAINS: PEAKS | {"step_s": 512.4}, "unsloth/takes_an_evening_s_steps": {"steps": [{"step_time": 61.0}],
                                                                               "peak_gib": 8.0}},
}  # fmt: skip


@pytest.fixture
def write(module: Any, tmp_path: Path) -> Any:
    """`write(number, {check: figures}, over_budget="")`: a call's file; returns the folder of all results."""
    append, folder = module("on_gpu.checks").append, tmp_path / "gpu" / "nvidia-test"
    folder.mkdir(parents=True)

    def part(number: int, found: dict[str, dict[str, Any]], over_budget: str = "") -> Path:
        file = folder / f"call{number}.jsonl"
        append(file, "header", call=number, **HEADER)
        for name, values in found.items():
            append(file, "begin", check=name, budget_s=10)
            append(file, "figure", check=name, values=values)
            state = "over budget" if name == over_budget else "passed"
            append(file, "end", check=name, state=state, reason="", seconds=7.0)
        with file.open("a") as lines:
            lines.write('{"kind": "figure", "che')  # the machine went away here
        return folder.parent

    return part


def test_measurements_become_tables_and_headers(module: Any, write: Any, tmp_path: Path) -> None:
    """Figures copied by hand get copied wrong, and a rehearsal's in the README would be quoted."""
    folder = [write(number, found) for number, found in FIGURES.items()][0]
    report = module("tables")
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    text = module("reporting").with_tables(page, report.TABLES, tmp_path)
    assert "NVIDIA Test, 2026-12-01, revision `0123456`; torch 2.11.0, trl 1.15.0." in text
    found = ("6.3 ms, 1278 tokens/s", "does not fit", "native 8.0 s, TRL 20.0 s (2.50x)", "61 s a step, 8.0 GiB",
             "trains, 5.4 GiB, 512 s a step at most", "1 of 1 checks passed")  # fmt: skip
    assert all(one in text for one in found)
    nowhere = module("reporting").with_tables(page, report.TABLES, tmp_path / "nowhere")
    assert nowhere.count("not measured") > text.count("not measured")

    parts = report.read_gpus(folder)
    path = ROOT / "configs" / "qwen3_4b_thinking_8gb.yaml"
    run, claim = load_config(path), report.claim_of(parts, 8)
    before = report.with_header(path.read_text(encoding="utf-8"), run, 8, None)
    after = report.with_header(before, run, 8, claim)
    assert "(computed)." in after and "512 s a step" in after and after.count("# Measured: ") == 1
    assert "5.4 and 3.0 GiB without CUDA's context, on an NVIDIA Test capped to 8 GB" in after
    assert report.with_header(after, run, 8, claim) == after
    assert report.with_header(after, run, 8, None) == before
    assert report.claim_of(parts, 12) is None

    with pytest.raises(SystemExit, match="has no call1.jsonl"):
        report.collect(tmp_path, tmp_path / "target")
    report.collect(folder / "nvidia-test", tmp_path / "target")
    assert report.read_gpus(tmp_path / "target") == parts
    file = folder / "nvidia-test" / "call2.jsonl"
    file.write_text(file.read_text("utf-8").replace('"rehearsed": false', '"rehearsed": true'), encoding="utf-8")
    with pytest.raises(SystemExit, match="call2.jsonl is a rehearsal's"):
        report.collect(file.parent, tmp_path / "target")
    assert report.claim_of(report.read_gpus(folder), 8) is None


def test_two_gpus_do_not_mix(module: Any, write: Any) -> None:
    """The stored files are an H100's; a second GPU's lie in a folder of its own and get a column."""
    report = module("tables")
    folder = write(1, FIGURES[1])
    for file in report.GPU_RESULTS.glob("part*.jsonl"):
        shutil.copy(file, folder)
    gpus = report.read_gpus(folder)
    assert [report.name_of(gpu) for gpu in gpus] == ["NVIDIA Test", "NVIDIA H100 80GB HBM3"]
    first = report.short_table(gpus)
    assert "NVIDIA Test | NVIDIA H100" in first[0] and "not measured | 4 of 4 checks passed" in first[2]
    assert len(report.decoding_table(gpus)) == 2 + 3


def test_a_check_after_an_interrupted_one_is_named(module: Any, write: Any) -> None:
    """On the first GPU two configs ran after trainers whose memory had not come back: 0.4 and 1.2 GiB too much."""
    report, step = module("tables"), "unsloth/takes_a_step_of_1k"
    found = {"unsloth/trains_on_12gb": PEAKS | {"rollout_gib": 6.0}, step: {}, TRAINS: PEAKS | {"rollout_gib": 9.0}}
    gpus = report.read_gpus(write(0, found, over_budget=step))
    assert report.claim_of(gpus, 8)["after"] == step and not report.claim_of(gpus, 12)["after"]
    assert any("trains, at most 9.0 GiB" in row for row in report.short_table(gpus))


def test_the_plan_computes_what_was_measured(module: Any) -> None:
    """The plan's "lower bound" was above what an H100 took for a token, and a quarter of what it took to train."""
    tables = module("tables")
    found = list(tables.list_speeds(tables.read_gpus(tables.GPU_RESULTS)))
    assert sum(len(measured) for _, measured, _ in found) == 21
    for what, measured, computed in found:
        for real, one in zip(measured, computed, strict=True):
            assert 0.5 <= one / real <= 1.5, f"{what}: {one:.3g} computed, {real:.3g} measured"
