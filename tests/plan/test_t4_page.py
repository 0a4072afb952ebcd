"""The T4 rows of docs/colab.md are what the plan computes."""

from pathlib import Path

import pytest

import rloo_kit as kit
from rloo_kit.plan import planner
from rloo_kit.plan.load import RESERVE_GIB, Machine

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/colab.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip(" `") for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| `qwen3")
]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_the_plan(monkeypatch: pytest.MonkeyPatch, row: list[str]) -> None:
    t4 = Machine("Tesla T4", 14.7, RESERVE_GIB, True, is_here=False)
    monkeypatch.setattr(planner, "find_machine", lambda *_: t4)
    run = kit.load_config(str(ROOT / "configs" / row[0]))
    plan = kit.plan_vram(run)
    assert plan.step is not None and plan.step.gpu == "T4" and plan.fits and run.rloo.num_generations == 8
    found = [str(run.rloo.max_completion_length), str(plan.rows), f"{plan.peak_gib:.2f}", f"{plan.headroom_gib:.2f}"]
    assert [*found, f"{plan.step.seconds / 60:.0f}", f"{plan.step.hours(200):.3g}"] == row[1:]
