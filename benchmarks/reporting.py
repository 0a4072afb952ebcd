"""What the benchmarks share: the head of a results file, its lines on the screen, the tables of docs/benchmarks.md.

A table stands in the page between two comments that name it; `write_tables` makes it again from the files in
`benchmarks/results`, and a test compares, so that no figure in the page was typed in.
"""

import importlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")


def settle() -> None:
    """First thing in a benchmark: one thread, no network, and `rewards` is the package, not the file in this folder."""
    for name, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}.items():
        os.environ.setdefault(name, value)  # before torch reads it
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [str(ROOT), *(entry for entry in sys.path if entry != here), here]


def header(script: str) -> dict[str, Any]:
    """Command, date, revision, machine and versions: the beginning of every results file."""
    from rloo_kit.system.versions import installed_versions

    return {
        "command": " ".join(["python", script, *sys.argv[1:]]),
        "measured": time.strftime("%Y-%m-%d"),
        "revision": git("rev-parse", "HEAD"),
        "changed_files": bool(git("status", "--porcelain", "--", "rloo_kit", "rewards", "configs")),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "load_at_start": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        },
        "versions": installed_versions(),
    }


def processor() -> str:
    """The processor's name as the system gives it."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def git(*arguments: str, folder: Path = ROOT) -> str:
    """What git prints; nothing on a machine without git, to which only the files were copied."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def load_file(path: str) -> Any:
    """A Python file of this repository by its path, imported once; an installed package called `tests` is no obstacle.

    Args:
        path: from the root folder, "tests/on_gpu/edge.py".
    """
    name = "rloo_kit_file_" + re.sub(r"\W", "_", path)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def write(result: dict[str, Any], target: Path, quiet: bool = False) -> None:
    """Write a results file, and say where unless quiet."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if not quiet:
        print(f"figures: {target}", flush=True)


# -------------------------------------------------------------------------------------------------------- tables


def write_tables(pages: tuple[Path, ...] = PAGES, results: Path = RESULTS) -> None:
    """Put the figures of the results files into the pages."""
    for page in pages:
        page.write_text(with_tables(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    print(f"tables: {', '.join(map(str, pages))}", flush=True)


def with_tables(text: str, results: Path = RESULTS) -> str:
    """A page's text with each `<!-- table: NAME -->` .. `<!-- end -->` filled from the results.

    Raises:
        KeyError: a table that nobody makes.
    """

    def fill(match: "re.Match[str]") -> str:
        name = match.group(1)
        make, file = TABLES[name]
        path = results / file
        if path.suffix != ".json":  # a folder of cells: what is missing is named there
            lines = make({one.stem: json.loads(one.read_text(encoding="utf-8")) for one in sorted(path.glob("*.json"))})
        else:
            lines = make(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else ["Not measured yet."]
        return "\n".join([f"<!-- table: {name} -->", "", *lines, "", "<!-- end -->"])

    return re.sub(r"<!-- table: ([\w-]+) -->.*?<!-- end -->", fill, text, flags=re.S)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def step_line(row: dict[str, Any]) -> str:
    """One row of rloo_step.json in words."""
    return f"{row['what']}, {row['side']} ({row['workload']}): {_value(row)}{_bar(row)}"


def _value(row: dict[str, Any]) -> str:
    if "ratio" in row:
        return f"{row['ratio']:.2f}x ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
    return f"{row['share']:.2f} of stock" if "share" in row else f"{row['relative_error']:.1e}"


def _bar(row: dict[str, Any]) -> str:
    if row["holds"] is None:
        return ""
    bar = row.get("at_least", row.get("at_most"))
    return f"; {'at least' if 'at_least' in row else 'at most'} {bar:g}: {'held' if row['holds'] else 'MISSED'}"


def kl_line(run: dict[str, Any]) -> str:
    """One run of kl_forms.json in words."""
    before, after = run["before"], run["after"]
    return (
        f"{run['arm']}, seed {run['seed']}: thinking {before['mean_thinking_tokens']:.1f} -> "
        f"{after['mean_thinking_tokens']:.1f} tokens, accuracy {before['accuracy']:.3f} -> {after['accuracy']:.3f}"
    )


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
        rows.append([row["what"], row["workload"], f"`{row['side']}`", stock, ours, _value(row), limits, held])
    return table(["part", "workload", "`memory`", "stock", "ours", "result", "bar / aim", ""], rows)


def short_step_table(result: dict[str, Any]) -> list[str]:
    """rloo_step.json: what was promised, for the README."""
    rows = [
        [row["what"], row["workload"], f"`{row['side']}`", _value(row)]
        for row in result["rows"]
        if row["holds"] is not None and row["what"] != "gradient"
    ]
    return table(["part", "workload", "`rloo.memory`", "beside stock TRL"], rows)


def _amount(row: dict[str, Any], side: str) -> str:
    import statistics

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
    head = [
        "seed",
        "processor s before",
        "after",
        "wall s before",
        "after",
        "reward of the last 10 steps before",
        "after",
    ]
    verdict = "held" if result["holds"] else "**missed**"
    return [
        *table(head, rows),
        "",
        f"In all {share['value']:.2f} of the processor's time before ({share['low']:.2f} to {share['high']:.2f}), "
        f"{wall['value']:.2f} of the wall clock; at most {result['at_most']}: {verdict}. "
        f"Before is `{result['before'][:7]}`.",
    ]


def kl_mechanism_table(result: dict[str, Any]) -> list[str]:
    """kl_forms.json: what a token of thinking is worth under each form alone."""
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


def _interval(figure: dict[str, float], form: str) -> str:
    return f"{form} ({form} to {form})".format(figure["value"], figure["low"], figure["high"])


def rewards_table(result: dict[str, Any]) -> list[str]:
    """rewards.json."""
    rows = [
        [f"`{row['reward']}`", *(f"{row[name] / 1e6:.1f}" for name in ("tokens_per_s", "low", "high"))]
        for row in result["rows"]
    ]
    return table(["reward", "million tokens a second", "lower quartile", "upper"], rows)


def startup_table(result: dict[str, Any]) -> list[str]:
    """startup.json."""
    rows = [
        [f"`{row['what']}`", *(f"{row[name]:.2f}" for name in ("seconds", "low", "high"))] for row in result["rows"]
    ]
    return table(["command", "seconds", "smallest", "largest"], rows)


def _on_gpu(name: str) -> Any:
    """A table of `step_cuda_tables`, which imports this module."""

    def make(results: dict[str, Any]) -> list[str]:
        return getattr(importlib.import_module("step_cuda_tables"), name)(results)

    return make


TABLES: dict[str, tuple[Any, str]] = {
    "step": (step_table, "rloo_step.json"),
    "step-short": (short_step_table, "rloo_step.json"),
    "demo": (demo_table, "demo_phase.json"),
    "kl-mechanism": (kl_mechanism_table, "kl_forms.json"),
    "kl-training": (kl_training_table, "kl_forms.json"),
    "rewards": (rewards_table, "rewards.json"),
    "startup": (startup_table, "startup.json"),
    "cuda-gpu": (_on_gpu("gpu_line"), "step_cuda"),
    "cuda-aims": (_on_gpu("aims_table"), "step_cuda"),
    "cuda-training": (_on_gpu("training_table"), "step_cuda"),
    "cuda-whole": (_on_gpu("whole_table"), "step_cuda"),
    "cuda-floor": (_on_gpu("floor_table"), "step_cuda"),
    "cuda-profile": (_on_gpu("profile_table"), "step_cuda"),
}
