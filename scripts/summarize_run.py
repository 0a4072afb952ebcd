#!/usr/bin/env python3
"""How a run stands and whether it is healthy: state, accuracy before and after, the metrics judged, what to change.

FOLDER is a run's folder, outputs/NAME, running or ended. Prints one JSON object on stdout: `verdict` is healthy, watch
or alarming, `actions` are the changes in the order of their weight, `health` is what the rules found in the whole run,
the causes in the order of their steps. Rules and limits are those of the run itself and of SKILL.md's table.

Exit codes: 0 healthy, or values to watch; 1 alarming; 6 the run failed, whatever its metrics say;
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from _common import CODES, NOTHING_YET, fail, open_run, read_config, read_evaluations, show

ALARMING, FAILED = 1, 6
SHOWN = ("reward", "completions/mean_length", "thinking/mean_length", "thinking/closed_ratio", "val/ratio")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__ + CODES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a run's folder, outputs/NAME")
    parser.add_argument("--last", type=int, default=10, help="logged steps that are averaged (default 10)")
    options = parser.parse_args(arguments)
    if options.last < 1:
        parser.error(f"--last is {options.last}; it has to be 1 or more")
    run_dir = open_run(options.folder)
    rows, status = run_dir.read_metrics(), run_dir.status()
    failed = status.get("state") == "failed"
    if not rows and not failed:
        fail(
            NOTHING_YET, f"{options.folder} has no metrics yet ({status.get('state')}): ask again after the first step"
        )
    summary = {key: status.get(key) for key in ("state", "step", "max_steps", "updated", "error", "resume")}
    summary = {"folder": str(options.folder)} | {key: value for key, value in summary.items() if value is not None}
    summary["accuracy"] = describe_accuracy(run_dir)
    if rows:
        summary |= judge_rows(rows, read_config(options.folder), status.get("max_steps"), options.last)
    show(summary)
    return FAILED if failed else ALARMING if summary["verdict"] == "alarming" else 0


def judge_rows(rows: list[dict[str, Any]], run: Any, max_steps: int | None, last: int) -> dict[str, Any]:
    """Verdict, actions, what the rules of health found, and each metric judged."""
    from rloo_kit.health.rule import LEVELS, Context
    from rloo_kit.health.watch import HealthWatch, judge

    context = Context.of(run, max_steps)
    watch = HealthWatch(context, rows)
    findings = [vars(one) | {"holds": watch.holds(one)} for one in watch.findings]
    now = [one for one in watch.findings if watch.holds(one)]
    judgements = judge(rows, context.on_policy, last, watch.is_solved())
    levels = ["healthy", *(one.level for one in now), *(one.level for one in judgements)]
    known = {one.rule for one in now} | watch.explained()
    actions = []
    for level in ("alarming", "watch"):
        actions += [str(one) for one in now if one.level == level]
        others = [one for one in judgements if one.level == level and one.rule not in known]
        actions += [f"{one.metric}: {one.action}" for one in others]
    return {
        "verdict": max(levels, key=LEVELS.index),
        "actions": actions,
        "health": findings,
        "metrics": [vars(found) for found in judgements],
        "means": mean_of(rows[-last:]),
        "first": mean_of(rows[:last]),
    }


def mean_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    values = {name: [row[name] for row in rows if row.get(name) is not None] for name in SHOWN}
    return {name: sum(found) / len(found) for name, found in values.items() if found}


def describe_accuracy(run_dir: Any) -> dict[str, Any]:
    """Accuracy with its 95 % interval, before, after and the difference; empty before the first evaluation."""
    from rloo_kit.results.evaluation import compare

    found = read_evaluations(run_dir)
    shown: dict[str, Any] = {
        name: {"accuracy": one.accuracy, "low": one.low, "high": one.high, "greedy": one.greedy_accuracy}
        | {"closed_share": one.closed_share, "truncated_share": one.truncated_share, "prompts": one.num_prompts}
        for name, one in found.items()
    }
    if len(found) == 2:
        difference = compare(found["before"], found["after"])
        shown["difference"] = {"value": difference.difference, "low": difference.low, "high": difference.high}
        shown["difference"]["intervals_apart"] = difference.apart
    return shown


if __name__ == "__main__":
    sys.exit(main())
