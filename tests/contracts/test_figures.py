"""The figures in the README are those that were measured, digit for digit."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def demo_rows(result: dict[str, Any]) -> list[str]:
    """The rows of the README's table for benchmarks/results/demo_learning.json."""
    rows = []
    for run in result["runs"]:
        before, after = run["before"], run["after"]
        sampled = [f"{one['accuracy']:.3f} ({one['low']:.3f} to {one['high']:.3f})" for one in (before, after)]
        greedy = [f"{one['greedy_accuracy']:.3f}" for one in (before, after)]
        rows.append(f"| {' | '.join([str(run['seed']), *sampled, *greedy])} |")
    return rows


def test_the_readme_shows_what_the_demo_measured() -> None:
    """A figure that was typed in by hand outlives the code that it was measured with."""
    result = json.loads((ROOT / "benchmarks" / "results" / "demo_learning.json").read_text(encoding="utf-8"))
    missing = [
        row for row in demo_rows(result) if row not in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    ]
    assert not missing, "README.md lacks these rows of benchmarks/results/demo_learning.json:\n" + "\n".join(missing)
    assert [run["seed"] for run in result["runs"]] == [0, 1, 2] and all(run["bar_held"] for run in result["runs"])
    assert all(run[when]["num_prompts"] >= 1000 for run in result["runs"] for when in ("before", "after"))


def batch_rows(result: dict[str, Any]) -> list[str]:
    """The rows of the table in docs/batch.md for benchmarks/results/batch_arithmetic.json."""
    rows = []
    for run in result["runs"]:
        cells = [str(run["parameters.num_generations"]), str(run["parameters.seed"])]
        for when in ("before", "after"):
            value, low, high = (run[f"accuracy{end}_{when}"] for end in ("", "_low", "_high"))
            cells.append(f"{value:.3f} ({low:.3f} to {high:.3f})")
        cells.append(f"{run['greedy_accuracy_before']:.3f} → {run['greedy_accuracy_after']:.3f}")
        cells.append(f"{run['thinking_tokens_before']:.1f} → {run['thinking_tokens_after']:.1f}")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def test_the_page_of_batches_shows_what_the_batch_measured() -> None:
    """The table in the page, and the sentence under it, are those of the file that ships."""
    result = json.loads((ROOT / "benchmarks" / "results" / "batch_arithmetic.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "batch.md").read_text(encoding="utf-8").splitlines()
    assert [row for row in batch_rows(result) if row not in page] == []
    runs = result["runs"]
    assert len(runs) == 6 and all(run["state"] == "done" and run["eval_prompts_after"] == 1000 for run in runs)
    assert max(run["accuracy_low_after"] for run in runs) < min(run["accuracy_high_after"] for run in runs), "overlap"
