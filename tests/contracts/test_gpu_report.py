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
FIGURES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "unsloth/knows_the_machine": {"tflops": 395.0, "gb_per_s": 2150.0},
        "unsloth/scores_4bit": {
            "flex, prompt shared": {"mean": 0.004, "max": 0.11, "gradient": 0.021},
            "packed, prompt repeated": {"error": "RuntimeError: no | kernel"},
        },
        "transformers/loads_4bit": {"seconds": 31.0},
    },
    2: {
        "unsloth/decodes": {"rows 8": {"ms_per_step": 30.2, "tokens_per_s": 265}, "rows 128": {"fits": False}},
        "unsloth/trains_4k": {"fast": {"training_s": 4.0, "above_held_gib": 5.0}},
        "unsloth/stock_trains_4k": {"rows": 8, "training_s": 20.0, "above_held_gib": 9.0},
    },
    3: {
        "unsloth/trains_on_8gb": {
            "computed": {"rollout_gib": 5.0, "training_gib": 4.0}, "rollout_gib": 5.402, "training_gib": 3.0,
            "step_s": 512.4, "hours_for_200_steps": 28.5,
        },
        "unsloth/longest_thinking": {"8 GB": {"planned": 6144, "tried": {"6144": True, "7680": False}}},
    },
}  # fmt: skip


@pytest.fixture
def measured(module: Any, tmp_path: Path) -> Path:
    """A folder with the three parts."""
    append = module("on_gpu.checks").append
    folder = tmp_path / "gpu"
    folder.mkdir()
    for number, found in FIGURES.items():
        file = folder / f"part{number}.jsonl"
        append(file, "header", part=number, **HEADER)
        for name, values in found.items():
            append(file, "begin", check=name, budget_s=10)
            append(file, "figure", check=name, values=values)
            bad = any("error" in one for one in values.values() if isinstance(one, dict))
            state, reason = ("failed", "off | single\nsequences") if bad else ("passed", "")
            append(file, "end", check=name, state=state, reason=reason, seconds=7.0)
    with (folder / "part3.jsonl").open("a") as file:
        file.write('{"kind": "figure", "che')  # the machine went away here
    return folder


def test_figures_become_tables(module: Any, measured: Path) -> None:
    """Figures that are copied by hand are the ones that get copied wrong; what failed or fell short is said."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    with_tables, tables = module("reporting").with_tables, module("tables").TABLES
    text = with_tables(page, tables, measured.parent)
    assert "Part 2: NVIDIA Test, 2026-12-01, revision `0123456`; torch 2.11.0, trl 1.15.0." in text
    assert "RuntimeError: no / kernel" in text and "**failed**: off / single" in text
    assert "395 TFLOP/s | **outside** |" in text and "5.00x | reached |" in text and "1.80x | **missed** |" in text
    assert with_tables(page, tables, measured.parent / "nowhere").count("not measured") > text.count("not measured")


def test_measured_peaks_become_corrections_and_headers(module: Any, measured: Path) -> None:
    """The plan that promised 5.0 GiB where 5.4 were taken promises it to the next person, too."""
    report = module("tables")
    parts = report.read_parts(measured)
    assert report.corrections(parts) == {
        "source": "NVIDIA Test, 2026-12-01",
        "factors": {"unsloth rollout": 1.09, "unsloth training": 1.0},
    }
    assert report.corrections({}) == {"source": "", "factors": {}}
    path = ROOT / "configs" / "qwen3_4b_thinking_8gb.yaml"
    run, found = load_config(path), report.claim_of(parts, 8)
    before = report.with_header(path.read_text(encoding="utf-8"), run, 8, None, "")
    after = report.with_header(before, run, 8, found, "NVIDIA Test")
    assert "(computed)." in after and "512 s a step" in after and after.count("# Measured: ") == 1
    assert "5.4 and 3.0 GiB without CUDA's context, on an NVIDIA Test capped to 8 GB" in after
    assert report.with_header(after, run, 8, found, "NVIDIA Test") == after
    assert report.with_header(after, run, 8, None, "") == before
    assert report.claim_of(parts, 12) is None


def test_only_measurements_are_collected(module: Any, measured: Path, tmp_path: Path) -> None:
    """A rehearsal's milliseconds on the CPU in the README would be quoted."""
    report = module("tables")
    target = tmp_path / "target"
    with pytest.raises(SystemExit, match="has no part1.jsonl"):
        report.collect(tmp_path, target)
    text = (measured / "part2.jsonl").read_text(encoding="utf-8")
    (measured / "part2.jsonl").write_text(text.replace('"rehearsed": false', '"rehearsed": true'), encoding="utf-8")
    with pytest.raises(SystemExit, match="part2.jsonl is a rehearsal's"):
        report.collect(measured, target)
    assert set(report.read_parts(measured)) == {1, 3}


def test_a_check_after_an_interrupted_one_corrects_nothing(module: Any, tmp_path: Path) -> None:
    """On the first GPU two configs ran after trainers whose memory had not come back: 0.4 and 1.2 GiB too much."""
    append, report = module("on_gpu.checks").append, module("tables")
    append(tmp_path / "part0.jsonl", "header", part=0, **HEADER)
    peaks = {"computed": {"rollout_gib": 5.0, "training_gib": 4.0}, "rollout_gib": 6.0, "training_gib": 3.0}
    for name, state in (("trains_on_12gb", "passed"), ("grpo_trains_4k", "over budget"), ("trains_on_8gb", "passed")):
        values = peaks if "_on_" in name else {}
        append(tmp_path / "part0.jsonl", "begin", check=f"unsloth/{name}", budget_s=10)
        append(tmp_path / "part0.jsonl", "figure", check=f"unsloth/{name}", values=values)
        append(tmp_path / "part0.jsonl", "end", check=f"unsloth/{name}", state=state, reason="", seconds=7.0)
        peaks = {**peaks, "rollout_gib": 9.0}
    parts = report.read_parts(tmp_path)
    assert list(parts) == [2, 3], "single checks belong to their parts"
    assert report.claim_of(parts, 8)["after"] == "unsloth/grpo_trains_4k" and not report.claim_of(parts, 12)["after"]
    assert report.corrections(parts)["factors"] == {"unsloth rollout": 1.2, "unsloth training": 1.0}
    assert "at most 9.00 / 5.00 = 1.80" in "".join(report.plan_table(parts))
