"""Shared by the benchmarks: process set-up, the header of a results file, and how figures get into the pages."""

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Tables = dict[str, tuple[Callable[[Any], list[str]], str]]


def settle() -> None:
    """Called first by a benchmark: one thread, no network, and `import tests` works from this folder."""
    for name, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}.items():
        os.environ.setdefault(name, value)  # before torch reads it
    sys.path.insert(0, str(ROOT))


def header(script: str) -> dict[str, Any]:
    """Command, date, revision, machine and versions: the beginning of every results file."""
    from rloo_kit.system.versions import installed_versions

    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    processor = re.search(r"model name\s*:\s*(.+)", cpuinfo)
    return {
        "command": " ".join(["python", script, *sys.argv[1:]]),
        "measured": time.strftime("%Y-%m-%d"),
        "revision": git("rev-parse", "HEAD") or os.environ.get("RLOO_KIT_REVISION", ""),  # an archive has no .git
        "changed_files": bool(git("status", "--porcelain", "--", "rloo_kit", "rewards", "configs", "benchmarks")),
        "machine": {
            "processor": processor[1].strip() if processor else platform.machine(),
            "cores": os.cpu_count(),
            "load_at_start": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        },
        "versions": installed_versions(),
    }


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


def target_of(name: str) -> Path:
    """Where the results go: the file after `--out`, from the root folder, or `name` in the results."""
    return ROOT / sys.argv[sys.argv.index("--out") + 1] if "--out" in sys.argv else RESULTS / name


def write(result: dict[str, Any], target: Path, quiet: bool = False) -> None:
    """Write a results file, and print its path unless quiet."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if not quiet:
        print(f"figures: {target}", flush=True)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def step_value(row: dict[str, Any]) -> str:
    """The figure of one row of rloo_step.json."""
    if "ratio" in row:
        return f"{row['ratio']:.2f}x ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
    return f"{row['share']:.2f} of stock" if "share" in row else f"{row['relative_error']:.1e}"


def write_tables(tables: Tables, pages: Iterable[Path], results: Path = RESULTS) -> None:
    """Write the figures of the results files into the pages."""
    for page in pages:
        page.write_text(with_tables(page.read_text(encoding="utf-8"), tables, results), encoding="utf-8")
        print(f"tables: {page.relative_to(ROOT)}", flush=True)


def with_tables(text: str, tables: Tables, results: Path = RESULTS) -> str:
    """A page's text with each `<!-- table: NAME -->` .. `<!-- end -->` filled from the results, so that no figure is
    typed by hand.

    Args:
        tables: by name, the function that makes the lines, and the file of results that it reads; "" if it reads none.
    """

    def fill(match: "re.Match[str]") -> str:
        make, file = tables[match.group(1)]
        path = results / file
        if path.suffix == ".json":
            lines = make(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else ["Not measured yet."]
        else:
            lines = make(path)
        return "\n".join([f"<!-- table: {match.group(1)} -->", "", *lines, "", "<!-- end -->"])

    return re.sub(r"<!-- table: ([\w-]+) -->.*?<!-- end -->", fill, text, flags=re.S)
