"""Shared by the benchmarks: process set-up, the header of a results file, the lines that several print."""

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
SMALL_MODULE = 100  # lines
STEP_FILES = {
    "modules": "modules",
    "lines": "lines",
    "small": f"modules of under {SMALL_MODULE} lines",
    "one_importer": "modules imported by at most one other",
    "circles": "circles of modules",
    "entered": "files that one step enters",
    "switches": "switches between files in one step",
    "entered_all": "files, with everything",
    "switches_all": "switches, with everything",
}


def settle() -> None:
    """Called first by a benchmark: one thread, no network; `rewards` is the package, not the file in this folder."""
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
        "revision": git("rev-parse", "HEAD") or os.environ.get("RLOO_KIT_REVISION", ""),  # an archive has no .git
        "changed_files": bool(git("status", "--porcelain", "--", "rloo_kit", "rewards", "configs", "benchmarks")),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "load_at_start": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        },
        "versions": installed_versions(),
    }


def processor() -> str:
    """The processor's name as the system reports it."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def git(*arguments: str, folder: Path = ROOT) -> str:
    """What git prints; empty on a machine without git or with only a copy of the files."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def load_file(path: str) -> Any:
    """A Python file of this repository by its path, imported once; an installed package `tests` does not shadow it.

    Args:
        path: from the root folder, "tests/with_unsloth/interpreter.py".
    """
    name = "rloo_kit_file_" + re.sub(r"\W", "_", path)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def write(result: dict[str, Any], target: Path, quiet: bool = False) -> None:
    """Write a results file, and print its path unless quiet."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if not quiet:
        print(f"figures: {target}", flush=True)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def step_line(row: dict[str, Any]) -> str:
    """One row of rloo_step.json as text."""
    return f"{row['what']}, {row['side']} ({row['workload']}): {step_value(row)}{_bar(row)}"


def step_value(row: dict[str, Any]) -> str:
    if "ratio" in row:
        return f"{row['ratio']:.2f}x ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
    return f"{row['share']:.2f} of stock" if "share" in row else f"{row['relative_error']:.1e}"


def _bar(row: dict[str, Any]) -> str:
    if row["holds"] is None:
        return ""
    bar = row.get("at_least", row.get("at_most"))
    return f"; {'at least' if 'at_least' in row else 'at most'} {bar:g}: {'held' if row['holds'] else 'MISSED'}"


def decode_line(row: dict[str, Any]) -> str:
    """One row of decode_step.json as text."""
    return f"{row['tokens']} tokens, {row['rows']} rows: {step_value(row)}"


def kl_line(run: dict[str, Any]) -> str:
    """One run of kl_forms.json as text."""
    before, after = run["before"], run["after"]
    return (
        f"{run['arm']}, seed {run['seed']}: thinking {before['mean_thinking_tokens']:.1f} -> "
        f"{after['mean_thinking_tokens']:.1f} tokens, accuracy {before['accuracy']:.3f} -> {after['accuracy']:.3f}"
    )


def startup_table(result: dict[str, Any]) -> list[str]:
    """startup.json; with another checkout, also its seconds and the ratio."""
    compared = any("ratio" in row for row in result["rows"])
    rows = []
    for row in result["rows"]:
        cells = [f"`{row['what']}`", *(f"{row[name]:.2f}" for name in ("seconds", "low", "high"))]
        if compared:
            names = ("before_seconds", "ratio", "cpu_s", "before_cpu_s", "cpu_ratio")
            cells += [f"{row[name]:.2f}" if name in row else "" for name in names]
        rows.append(cells)
    more = ["seconds before", "ratio", "processor s", "processor s before", "ratio"] if compared else []
    return table(["command", "seconds", "smallest", "largest", *more], rows)


def step_files_table(result: dict[str, Any]) -> list[str]:
    """step_files.json: a column for each revision, and the files left out of the step proper."""
    head = ["", *(f"{row['tree']} (`{row['revision'][:7]}`)" for row in result["rows"])]
    shown = [{**row, "circles": len(row["circles"])} for row in result["rows"]]
    known = [name for name in STEP_FILES if name in shown[0]]  # older revisions have only the count with everything
    lines = table(head, [[STEP_FILES[name], *(str(row[name]) for row in shown)] for name in known])
    if "left_out" in result:
        names = ", ".join(f"`{name}`" for name in result["left_out"])
        lines += ["", f"Counted only with everything: calls into {names}, and what they call until they return."]
    return lines
