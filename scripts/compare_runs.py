#!/usr/bin/env python3
"""Two runs side by side: accuracy after training with the interval of the difference, lengths, time, changed keys.

A and B are folders of runs, outputs/NAME. The difference is B minus A, prompt by prompt where both were measured on the
same prompts. Prints one JSON object on stdout; `better` is a, b, or neither (the interval holds 0).

Exit codes: 0 done;
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from _common import CODES, NOTHING_YET, fail, open_run, read_config, read_evaluations, show


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__ + CODES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, help="folder of the first run")
    parser.add_argument("b", type=Path, help="folder of the second run")
    options = parser.parse_args(arguments)
    runs = {"a": open_run(options.a), "b": open_run(options.b)}
    after = {name: read_evaluations(run).get("after") for name, run in runs.items()}
    for name, found in after.items():
        if found is None:
            fail(
                NOTHING_YET,
                f"{runs[name].folder} has no after.json: the run is not at its end, or run.evaluate is false",
            )
    from rloo_kit.results.evaluation import compare

    difference = compare(after["a"], after["b"])
    show(
        {name: describe(runs[name], after[name]) for name in ("a", "b")}
        | {
            "difference": {"value": difference.difference, "low": difference.low, "high": difference.high},
            "same_prompts": difference.paired,
            "better": find_better(difference),
            "keys_that_differ": find_changes(options.a, options.b),
        }
    )
    return 0


def describe(run_dir: Any, after: Any) -> dict[str, Any]:
    rows = run_dir.read_metrics()
    return {
        "folder": str(run_dir.folder),
        "state": run_dir.status().get("state"),
        "step": run_dir.status().get("step"),
        "accuracy": after.accuracy,
        "low": after.low,
        "high": after.high,
        "greedy": after.greedy_accuracy,
        "closed_share": after.closed_share,
        "mean_thinking_tokens": after.mean_thinking_tokens,
        "training_seconds": rows[-1].get("seconds") if rows else None,
    }


def find_better(difference: Any) -> str | None:
    if difference.low is None:
        return None
    return "b" if difference.low > 0 else "a" if difference.high < 0 else "neither"


def find_changes(a: Path, b: Path) -> dict[str, list[Any]]:
    """Dotted keys of the two resolved configurations with both values, names and places left out."""
    values = [flatten(read_config(folder).model_dump()) for folder in (a, b)]
    keys = sorted(set(values[0]) | set(values[1]))
    found = {key: [one.get(key) for one in values] for key in keys if values[0].get(key) != values[1].get(key)}
    return {key: pair for key, pair in found.items() if key not in ("run.name", "run.output_dir")}


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


if __name__ == "__main__":
    sys.exit(main())
