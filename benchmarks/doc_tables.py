"""The tables of docs/benchmarks.md and the README, made from the files in `benchmarks/results`; the
computed ones of docs/plan.md come from `rloo_kit.plan`.

A page marks a table with two comments that name it. `write_tables` fills it in and a test compares, so that no figure
in a page is typed by hand.
"""

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_report as gpu
import plan_calibration
import relatives_report as relatives
import step_times
from reporting import RESULTS, ROOT, startup_table, step_files_table, step_value, table

PAGES = (
    *(
        ROOT / "docs" / name
        for name in ("benchmarks.md", "compare.md", "data.md", "embedded.md", "export.md", "plan.md", "relatives.md")
    ),
    ROOT / "README.md",
)


def write_tables(pages: tuple[Path, ...] = PAGES, results: Path = RESULTS) -> None:
    """Write the figures of the results files into the pages."""
    for page in pages:
        page.write_text(with_tables(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    print(f"tables: {', '.join(map(str, pages))}", flush=True)


def with_tables(text: str, results: Path = RESULTS) -> str:
    """A page's text with each `<!-- table: NAME -->` .. `<!-- end -->` filled from the results.

    Raises:
        KeyError: no function makes this table.
    """

    def fill(match: "re.Match[str]") -> str:
        name = match.group(1)
        make, file = TABLES[name]
        path = results / file
        if not file:  # computed, from no results
            lines = make(None)
        elif path.suffix != ".json":  # the parts of the first hour, whose tables name what is missing
            lines = make(gpu.read_parts(path))
        else:
            lines = make(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else ["Not measured yet."]
        return "\n".join([f"<!-- table: {name} -->", "", *lines, "", "<!-- end -->"])

    return re.sub(r"<!-- table: ([\w-]+) -->.*?<!-- end -->", fill, text, flags=re.S)


def step_table(result: dict[str, Any]) -> list[str]:
    """rloo_step.json: every row."""
    rows = []
    for row in result["rows"]:
        stock, ours = (_amount(row, name) for name in ("stock", "ours"))
        bar = row.get("at_least", row.get("at_most"))
        limits = "" if bar is None else f"{bar:g} / {row['aim']:g}"
        held = {None: "", True: "held", False: "**missed**"}[row["holds"]] + (
            ", aim reached" if row["aim_reached"] else ""
        )
        rows.append([row["what"], row["workload"], f"`{row['side']}`", stock, ours, step_value(row), limits, held])
    return table(["part", "workload", "`memory`", "stock", "ours", "result", "bar / aim", ""], rows)


def real_model_table(result: dict[str, Any]) -> list[str]:
    """real_model.json: a row for each command of each seed."""
    rows = []
    for run in result["runs"]:
        for part in (name for name in ("sft", "train") if name in run):
            found = run[part]
            ends = [
                "{reward:.3f} ({reward_low:.3f} to {reward_high:.3f})".format(**found[when])
                for when in ("before", "after")
            ]
            cells = [f"`{run['config']}`", str(run["seed"]), f"`{part}`", *ends, found["verdict"]]
            rows.append([*cells, f"{found['minutes']:.0f}", str(run["threads"]), f"{found['peak_gib']:.1f}"])
    head = ["config", "seed", "command", "held-out reward before", "after", "verdict"]
    return table([*head, "minutes", "threads", "GiB"], rows)


def short_real_model_table(result: dict[str, Any]) -> list[str]:
    """real_model.json, for the README: a row for each command, with a cell of all seeds."""
    rows = []
    for config, part in (("smollm2_sums", "train"), ("smollm2_words", "sft"), ("smollm2_words", "train")):
        runs = [run for run in result["runs"] if run["config"] == config]
        found = [run[part] for run in runs]
        ends = [
            "<br>".join("{reward:.2f} ({reward_low:.2f} to {reward_high:.2f})".format(**one[when]) for one in found)
            for when in ("before", "after")
        ]
        minutes = [f"{run[part]['minutes']:.0f} ({run['threads']})" for run in runs]
        verdicts = [one["verdict"] for one in found if one["verdict"]]
        cost = ["<br>".join(minutes), f"{max(one['peak_gib'] for one in found):.1f}"]
        rows.append([f"`{part} {config}`", *ends, "<br>".join(verdicts), *cost])
    return table(["command", "held-out reward before", "after", "verdict", "minutes (threads)", "GiB"], rows)


def real_step_table(result: dict[str, Any]) -> list[str]:
    """real_model_speed.json: a row for each limit of the completions."""
    rows = []
    for row in result["rows"]:
        sides = [[step[name] for step in row["steps"]] for name in ("trl", "ours")]
        cells = [f"{row['limit']}, {row['prompts'] * row['generations']} completions"]
        cells.append("equal work" if row["equal_work"] else "as they are")
        cells.append(f"{statistics.mean(one['tied_share'] for one in sides[1]):.0%}")
        cells += [f"{statistics.mean(one['mean_tokens'] for one in side):.0f}" for side in sides]
        cells += [f"{statistics.median(one['cpu_s'] for one in side):.1f} s" for side in sides]
        for name in ("cpu_s", "generation_cpu_s", "rest_cpu_s", "cpu_ms_per_token", "wall_s"):
            found = row["ratios"][name]
            cells.append(f"{statistics.median(found):.2f}x ({min(found):.2f} to {max(found):.2f})")
        rows.append(cells)
    head = ["limit", "setting", "groups tied", "tokens, TRL", "kit", "TRL", "kit", "whole step"]
    return table([*head, "generation", "rest", "per token", "wall clock"], rows)


def short_real_step_table(result: dict[str, Any]) -> list[str]:
    """real_model_speed.json, for the README: per completion token, since each side samples its own."""
    rows = []
    for row in result["rows"]:
        spent = [statistics.median(step[side]["cpu_ms_per_token"] for step in row["steps"]) for side in ("trl", "ours")]
        found, setting = row["ratios"]["cpu_ms_per_token"], "equal work" if row["equal_work"] else "as they are"
        spread = f" ({min(found):.1f} to {max(found):.1f})" if len(found) > 1 else ", one pair"
        ratio = f"{statistics.median(found):.1f}x{spread}"
        what = f"{row['prompts'] * row['generations']} of at most {row['limit']} tokens"
        rows.append([what, setting, *(f"{value:.0f} ms" for value in spent), ratio])
    return table(["completions", "setting", "TRL 1.16", "this kit", "ratio"], rows)


def real_parts_table(result: dict[str, Any]) -> list[str]:
    """real_model_speed.json: the CPU time of the kit's step by section, a column for each limit."""
    shown = [row for row in result["rows"] if not row["equal_work"]]
    columns = [[step["ours"]["sections_cpu_s"] for step in row["steps"]] for row in shown]
    rows = []
    for section in sorted({name for steps in columns for step in steps for name in step}):
        cells = [section]
        for steps in columns:
            spent = sum(step.get(section, 0.0) for step in steps)
            cells.append(f"{spent / len(steps):.1f} s ({spent / sum(sum(step.values()) for step in steps):.0%})")
        rows.append(cells)
    titles = (f"{row['prompts'] * row['generations']} of at most {row['limit']} tokens" for row in shown)
    return table(["section", *titles], rows)


def short_step_table(result: dict[str, Any]) -> list[str]:
    """rloo_step.json: the promised rows, for the README."""
    rows = [
        [row["what"], row["workload"], f"`{row['side']}`", step_value(row)]
        for row in result["rows"]
        if row["holds"] is not None and row["what"] != "gradient"
    ]
    return table(["part", "workload", "`rloo.memory`", "vs. stock TRL"], rows)


def export_table(result: dict[str, Any]) -> list[str]:
    """export_parity.json: every row."""
    rows = [
        [
            row["run"], f"`{row['target']}`", row["kind"] or "LoRA", f"{row['loader']} {row['version']}",
            f"{row['largest']:.1e}", f"{row['mean']:.1e}", f"{row['equal']} of {row['prompts']}",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    return table(["model", "target", "file", "loaded by", "largest, nats", "mean, nats", "greedy texts equal"], rows)


def _amount(row: dict[str, Any], side: str) -> str:
    if f"{side}_cpu_s" in row:
        return f"{statistics.median(row[f'{side}_cpu_s']):.2f} s"
    if f"{side}_mib" in row:
        return f"{statistics.median(row[f'{side}_mib']):.0f} MiB"
    return ""


def demo_table(result: dict[str, Any]) -> list[str]:
    """demo_phase.json: every run, and the share."""
    rows = []
    for before, after in zip(result["runs"]["before"], result["runs"]["after"], strict=True):
        cells = [str(before["seed"])]
        for kind in ("cpu_s", "wall_s", "reward_last_steps"):
            digits = 3 if kind.startswith("reward") else 1
            cells += [f"{before[kind]:.{digits}f}", f"{after[kind]:.{digits}f}"]
        rows.append(cells)
    share, wall = result["cpu_share"], result["wall_share"]
    head = ["seed", "processor s before", "after", "wall s before", "after", "reward of the last 10 steps before"]
    verdict = "held" if result["holds"] else "**missed**"
    return [
        *table([*head, "after"], rows),
        "",
        f"In all {share['value']:.2f} of the processor's time before ({share['low']:.2f} to {share['high']:.2f}), "
        f"{wall['value']:.2f} of the wall clock; at most {result['at_most']}: {verdict}. "
        f"Before is `{result['before'][:7]}`.",
    ]


def learning_table(result: dict[str, Any]) -> list[str]:
    """demo_learning*.json: accuracy and the length of the thinking before and after, each run."""
    rows = []
    for run in result["runs"]:
        pair = (run["before"], run["after"])
        cells = [run["family"]] if "family" in run else []
        cells += [str(run["seed"]), *(f"{one['accuracy']:.3f} ({one['low']:.3f} to {one['high']:.3f})" for one in pair)]
        cells += [f"{one['greedy_accuracy']:.3f}" for one in pair]
        if pair[0]["mean_thinking_tokens"] is not None:
            cells += [f"{one['mean_thinking_tokens']:.1f}" for one in pair]
        rows.append(cells)
    head = ["seed", "sampled before", "after", "greedy before", "after", "thinking tokens before", "after"]
    head = (["family"] if "family" in result["runs"][0] else []) + head
    return table(head[: len(rows[0])], rows)


def kl_mechanism_table(result: dict[str, Any]) -> list[str]:
    """kl_forms.json: the reward of one more thinking token under each form alone."""
    rows = []
    for probe in result.get("mechanism", []):
        task = probe["task_reward_slope"]
        drift = f"{probe['drift']}, {probe['steps']} steps, {probe['kl_per_token']:.4f} nats a token"
        rows.append([drift, "the task reward", "", _interval(task, "{:+.4f}"), ""])
        for form in probe["forms"]:
            beta, token = f"{form['beta_of_equal_spread']:.2g}", _interval(form["thinking_token"], "{:+.4f}")
            rows.append([drift, form["form"], beta, token, _interval(form["correlation"], "{:+.2f}")])
    return table(["drift", "form", "beta", "reward of one more thinking token", "correlation"], rows)


def kl_training_table(result: dict[str, Any]) -> list[str]:
    """kl_forms.json: the arms, each over its seeds."""
    rows = []
    for name in dict.fromkeys(run["arm"] for run in result.get("runs", [])):
        runs = [run for run in result["runs"] if run["arm"] == name]
        cells = [name, str(len(runs))]
        for figure, digits in (("mean_thinking_tokens", 1), ("closed_share", 3), ("accuracy", 3)):
            for when in ("before", "after"):
                values = [run[when][figure] for run in runs]
                spread = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if when == "after" else ""
                cells.append(f"{sum(values) / len(values):.{digits}f}{spread}")
        rows.append(cells)
    head = ["arm", "seeds", "thinking tokens before", "after", "closed before", "after", "accuracy before", "after"]
    return table(head, rows)


def rates_table(result: dict[str, Any]) -> list[str]:
    """learning_rates.json: each rate over its seeds."""
    rows = []
    for trained, rate in dict.fromkeys((run["trained"], run["rate"]) for run in result["runs"]):
        runs = [run for run in result["runs"] if (run["trained"], run["rate"]) == (trained, rate)]
        cells = [trained, f"{rate:g}", str(len(runs))]
        for figure in ("accuracy", "greedy_accuracy"):
            for when in ("before", "after"):
                values = [run[when][figure] for run in runs]
                cells.append(f"{sum(values) / len(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        rows.append(cells)
    return table(["trained", "rate", "seeds", "accuracy before", "after", "greedy before", "after"], rows)


def decode_table(result: dict[str, Any]) -> list[str]:
    """decode_step.json: a row for each length of the cache, and rows of equal and of unequal length."""
    rows = []
    for row in result["rows"]:
        before, after = (f"{1000 * statistics.median(row[f'{side}_cpu_s']):.0f} ms" for side in ("before", "after"))
        size, apart = f"{row['cache_mib']} MiB", f"{row['logits_apart']:.1e}"
        rows.append([f"{row['tokens']:,}", row["rows"], size, before, after, step_value(row), apart])
    head = ["tokens", "rows", "cache", "before", "grouped heads", "ratio", "logits apart"]
    count = result["operations"]
    return [
        *table(head, rows),
        "",
        f"Operations of a step in {count['layers']} layers, 4-bit with LoRA: {count['before']:,} before, "
        f"{count['after']:,} now.",
    ]


def _interval(figure: dict[str, float], form: str) -> str:
    return f"{form} ({form} to {form})".format(figure["value"], figure["low"], figure["high"])


def rewards_table(result: dict[str, Any]) -> list[str]:
    """rewards.json."""
    rows = [
        [f"`{row['reward']}`", *(f"{row[name] / 1e6:.1f}" for name in ("tokens_per_s", "low", "high"))]
        for row in result["rows"]
    ]
    return table(["reward", "million tokens a second", "lower quartile", "upper"], rows)


def health_table(result: dict[str, Any]) -> list[str]:
    """health_runs.json: every run, and how many passed."""
    rows = []
    for run in result["runs"]:
        others = ", ".join(f"`{name}`" for name in run["others"])
        found = "" if run["found"] is None else f"`{run['rule']}`, step {run['found']} (since {run['since']})"
        rows.append([
            run["fault"], str(run["steps"]), str(run["onset"]) if run["rule"] else "", found or "nothing", others,
            "held" if run["holds"] else "**missed**",
        ])  # fmt: skip
    return table(["fault", "steps", "from step", "found", "also found", ""], rows)


TABLES: dict[str, tuple[Callable[[Any], list[str]], str]] = {
    "export-parity": (export_table, "export_parity.json"),
    "step": (step_table, "rloo_step.json"),
    "real-model": (real_model_table, "real_model.json"),
    "real-model-short": (short_real_model_table, "real_model.json"),
    "real-step": (real_step_table, "real_model_speed.json"),
    "real-step-short": (short_real_step_table, "real_model_speed.json"),
    "real-parts": (real_parts_table, "real_model_speed.json"),
    "step-short": (short_step_table, "rloo_step.json"),
    "step-files": (step_files_table, "step_files.json"),
    "decode": (decode_table, "decode_step.json"),
    "demo": (demo_table, "demo_phase.json"),
    "demo-habit": (demo_table, "demo_habit_phase.json"),
    "demo-learning": (learning_table, "demo_learning.json"),
    "demo-families": (learning_table, "demo_learning_families.json"),
    "demo-instruct": (learning_table, "demo_learning_arithmetic_instruct.json"),
    "gym-learning": (learning_table, "demo_learning_reasoning_gym_chain_sum.json"),
    "kl-mechanism": (kl_mechanism_table, "kl_forms.json"),
    "kl-training": (kl_training_table, "kl_forms.json"),
    "relatives-setting": (relatives.setting_line, "relatives.json"),
    "relatives-picture": (relatives.picture_lines, "relatives.json"),
    "relatives-arms": (relatives.arms_table, "relatives.json"),
    "relatives-differences": (relatives.differences_table, "relatives.json"),
    "relatives-grpo": (relatives.grpo_table, "relatives.json"),
    "learning-rates": (rates_table, "learning_rates.json"),
    "health": (health_table, "health_runs.json"),
    "rewards": (rewards_table, "rewards.json"),
    "startup": (startup_table, "startup.json"),
    "calibration": (plan_calibration.calibration_table, "plan_calibration.json"),
    "step-times": (step_times.times_table, ""),
    "step-hours": (step_times.hours_table, ""),
    "step-gpus": (step_times.gpus_table, ""),
    "step-assumptions": (step_times.assumptions_table, ""),
    "step-claims": (step_times.claims_table, ""),
    "gpu-line": (gpu.gpu_line, "gpu"),
    "gpu-short": (gpu.short_table, "gpu"),
    "gpu-checks": (gpu.checks_table, "gpu"),
    "gpu-scores": (gpu.scores_table, "gpu"),
    "gpu-expected": (gpu.expected_table, "gpu"),
    "gpu-decoding": (gpu.decoding_table, "gpu"),
    "gpu-ratios": (gpu.ratios_table, "gpu"),
    "gpu-configs": (gpu.configs_table, "gpu"),
    "gpu-plan": (gpu.plan_table, "gpu"),
}
