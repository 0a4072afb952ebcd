"""`make gpu-report`: what a GPU measured becomes documentation, and nothing else does.

The lines are made up; that real ones have these names is shown by the rehearsal (`with_unsloth/test_first_hour.py`).
"""

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
TRAINS = "unsloth/trains_on_8gb"
FIGURES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"transformers/loads_4bit": {"seconds": 31.0}},
    2: {
        "unsloth/decodes": {"rows 8": {"ms_per_step": 30.2, "tokens_per_s": 265}, "rows 128": {"fits": False}},
        "unsloth/trains_4k": {"fast": {"training_s": 4.0}},
        "unsloth/stock_trains_4k": {"rows": 8, "training_s": 20.0},
    },
    3: {TRAINS: PEAKS | {"step_s": 512.4, "hours_for_200_steps": 28.5}},
}  # fmt: skip


@pytest.fixture
def write(module: Any, tmp_path: Path) -> Any:
    """`write(number, {check: figures}, over_budget="")`: a part's file; returns the folder."""
    append, folder = module("on_gpu.checks").append, tmp_path / "gpu"
    folder.mkdir()

    def part(number: int, found: dict[str, dict[str, Any]], over_budget: str = "") -> Path:
        file = folder / f"part{number}.jsonl"
        append(file, "header", part=number, **HEADER)
        for name, values in found.items():
            append(file, "begin", check=name, budget_s=10)
            append(file, "figure", check=name, values=values)
            state = "over budget" if name == over_budget else "passed"
            append(file, "end", check=name, state=state, reason="", seconds=7.0)
        with file.open("a") as lines:
            lines.write('{"kind": "figure", "che')  # the machine went away here
        return folder

    return part


def test_measurements_become_tables_corrections_and_headers(module: Any, write: Any, tmp_path: Path) -> None:
    """Figures that are copied by hand are the ones that get copied wrong. The plan that promised 5.0 GiB where 5.4 were
    taken promises it to the next person, too. A rehearsal's milliseconds on the CPU in the README would be quoted."""
    folder = [write(number, found) for number, found in FIGURES.items()][0]
    report = module("tables")
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    text = module("reporting").with_tables(page, report.TABLES, tmp_path)
    assert "Part 2: NVIDIA Test, 2026-12-01, revision `0123456`; torch 2.11.0, trl 1.15.0." in text
    found = ("5.00x", "30.2 ms, 265 tokens/s", "does not fit", "trains, 5.4 GiB, 512 s a step at most")
    assert all(one in text for one in found)
    nowhere = module("reporting").with_tables(page, report.TABLES, tmp_path / "nowhere")
    assert nowhere.count("not measured") > text.count("not measured")

    parts = report.read_parts(folder)
    factors = {"unsloth rollout": 1.09, "unsloth training": 1.0}
    assert report.corrections(parts) == {"source": "NVIDIA Test, 2026-12-01", "factors": factors}
    assert report.corrections({}) == {"source": "", "factors": {}}
    path = ROOT / "configs" / "qwen3_4b_thinking_8gb.yaml"
    run, claim = load_config(path), report.claim_of(parts, 8)
    before = report.with_header(path.read_text(encoding="utf-8"), run, 8, None, "")
    after = report.with_header(before, run, 8, claim, "NVIDIA Test")
    assert "(computed)." in after and "512 s a step" in after and after.count("# Measured: ") == 1
    assert "5.4 and 3.0 GiB without CUDA's context, on an NVIDIA Test capped to 8 GB" in after
    assert report.with_header(after, run, 8, claim, "NVIDIA Test") == after
    assert report.with_header(after, run, 8, None, "") == before
    assert report.claim_of(parts, 12) is None

    with pytest.raises(SystemExit, match="has no part1.jsonl"):
        report.collect(tmp_path, tmp_path / "target")
    lines = (folder / "part2.jsonl").read_text(encoding="utf-8")
    (folder / "part2.jsonl").write_text(lines.replace('"rehearsed": false', '"rehearsed": true'), encoding="utf-8")
    with pytest.raises(SystemExit, match="part2.jsonl is a rehearsal's"):
        report.collect(folder, tmp_path / "target")
    assert set(report.read_parts(folder)) == {1, 3}


def test_a_check_after_an_interrupted_one_corrects_nothing(module: Any, write: Any) -> None:
    """On the first GPU two configs ran after trainers whose memory had not come back: 0.4 and 1.2 GiB too much."""
    report, grpo = module("tables"), "unsloth/grpo_trains_4k"
    found = {"unsloth/trains_on_12gb": PEAKS | {"rollout_gib": 6.0}, grpo: {}, TRAINS: PEAKS | {"rollout_gib": 9.0}}
    parts = report.read_parts(write(0, found, over_budget=grpo))
    assert list(parts) == [2, 3], "single checks belong to their parts"
    assert report.claim_of(parts, 8)["after"] == grpo and not report.claim_of(parts, 12)["after"]
    assert report.corrections(parts)["factors"] == {"unsloth rollout": 1.2, "unsloth training": 1.0}
    assert "at most 9.00 / 5.00 = 1.80" in "".join(report.plan_table(parts))


def test_the_plan_computes_what_was_measured(module: Any) -> None:
    """The plan's "lower bound" was above what an H100 took for a token, and a quarter of what it took to train."""
    tables = module("tables")
    found = list(tables.list_speeds(tables.read_parts(tables.GPU_RESULTS)))
    assert sum(len(measured) for _, measured, _ in found) == 27
    for what, measured, computed in found:
        for real, one in zip(measured, computed, strict=True):
            assert 0.5 <= one / real <= 1.5, f"{what}: {one:.3g} computed, {real:.3g} measured"
