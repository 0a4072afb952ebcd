#!/usr/bin/env python3
"""A run's folder with many GiB of completions: peak memory and seconds to open it, each in a separate process.

    python benchmarks/rollouts_load.py --gib 5      both layouts: one plain rollouts.jsonl, and the parts the kit writes
    python benchmarks/rollouts_load.py --levels     compression: MB/s and ratio on the same rows, by gzip's level

The completions have --tokens tokens (4000, like those of a thinking model), words drawn from the kit's own pages. The
bar is on memory: AT_MOST_MIB above what the command takes on a run without completions. Exit code 1 above it.
"""

import argparse
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reporting

reporting.settle()

AT_MOST_MIB = 64
ROWS = 8  # completions a step
REWIND = "from pathlib import Path; from rloo_kit.runs.run_dir import RunDir; RunDir(Path({folder!r})).rewind({step})"
MEASURED = """
import resource, subprocess, sys, time
started = time.monotonic()
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, time.monotonic() - started)
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--levels", action="store_true")
    parser.add_argument("--folder", type=Path, help="where the run is created and removed (default: the system's)")
    parser.add_argument("--out", type=Path, default=reporting.RESULTS / "rollouts_load.json")
    options = parser.parse_args(arguments)
    if options.levels:
        compare_levels(options.tokens)
        return 0
    result = reporting.header("benchmarks/rollouts_load.py") | {"gib": options.gib, "tokens": options.tokens}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result["rows"] = measure(Path(folder), int(options.gib * 2**30), options.tokens)
    head = ["layout", "what", "peak (MiB)", "above an empty run (MiB)", "seconds"]
    rows = [
        [row["layout"], row["what"], *(f"{row[name]:.{n}f}" for name, n in CELLS.items())] for row in result["rows"]
    ]
    print("\n".join(reporting.table(head, rows)))
    result["holds"] = all(row["above_mib"] <= AT_MOST_MIB for row in result["rows"])
    print(f"at most {AT_MOST_MIB} MiB above an empty run: {'held' if result['holds'] else 'MISSED'}")
    reporting.write(result, options.out)
    return 0 if result["holds"] else 1


CELLS = {"peak_mib": 0, "above_mib": 0, "seconds": 1}


def measure(folder: Path, size: int, tokens: int) -> list[dict[str, Any]]:
    """Every command on an empty run and on both layouts of a large one."""
    rows: list[dict[str, Any]] = []
    empty: dict[str, float] = {}
    for layout in ("empty", "one file", "parts"):
        run = make_run(folder / layout.replace(" ", "_"))
        started = time.monotonic()
        steps = fill(run, layout, size, tokens)
        if steps:
            disk = sum(path.stat().st_size for path in run.glob("rollouts*"))
            print(f"{layout}: {steps} steps, {disk / 2**30:.2f} GiB on disk, in {time.monotonic() - started:.0f} s")
        for what, command in commands(run, steps).items():
            code, peak_kib, seconds = run_measured(command)
            if steps and code:
                raise SystemExit(f"{what} ended with {code}: {' '.join(command)}")
            peak = peak_kib / 1024
            if not steps:
                empty[what] = peak
                continue
            above = {"peak_mib": peak, "above_mib": peak - empty[what], "seconds": seconds}
            rows.append({"layout": layout, "what": what} | {name: round(value, 1) for name, value in above.items()})
        for path in run.glob("rollouts*"):
            path.unlink()
    return rows


def make_run(folder: Path) -> Path:
    """A run of the shipped demo with metrics, without completions."""
    from rloo_kit import load_config
    from rloo_kit.runs.run_dir import RunDir

    words = (f"run.output_dir={folder.parent}", f"run.name={folder.name}")
    config = load_config(reporting.ROOT / "configs" / "arithmetic_thinking.yaml", *words)
    with RunDir.create(config) as run_dir:
        metrics = [{"step": step, "loss": 0.1, "reward": 0.5, "run": run_dir.id} for step in range(1, 101)]
        run_dir.append_jsonl("metrics.jsonl", metrics)
        run_dir.set_status("interrupted", step=100, max_steps=200)
    return folder


def fill(run: Path, layout: str, size: int, tokens: int) -> int:
    """Write `size` bytes of completions in a layout; returns the number of steps."""
    from rloo_kit.runs.rollouts import FILE_BYTES, Rollouts

    if layout == "empty":
        return 0
    made = list(itertools.islice(make_steps(tokens), 20))  # repeated in turn, further apart than gzip looks back
    lines = [[json.dumps(row, ensure_ascii=False) for row in rows] for rows in made]
    bytes_a_step = sum(len(line.encode()) for step in lines for line in step) / len(made)
    steps = max(int(size / bytes_a_step), 20)
    for step in range(1, steps + 1):
        with open(run / "rollouts.jsonl", "a", encoding="utf-8") as file:
            if layout == "one file" or file.tell() <= FILE_BYTES:
                changed = (re.sub(r'"step": \d+', f'"step": {step}', line, count=1) for line in lines[step % 20])
                file.write("".join(f"{line}\n" for line in changed))
                continue
        Rollouts(run).append([row | {"step": step} for row in made[step % 20]])
    return steps


def commands(run: Path, steps: int) -> dict[str, list[str]]:
    """The commands that open a run; the last one drops the last ten steps, so it comes last."""
    show = [sys.executable, "-m", "rloo_kit.cli", "show", str(run), "--completions", "4"]
    rewind = REWIND.format(folder=str(run), step=max(steps - 10, 0))
    return {
        "rloo-kit report": [sys.executable, "-m", "rloo_kit.cli", "report", str(run / "config.yaml")],
        "rloo-kit show --completions": show,
        "rloo-kit show --step 1": [*show, "--step", "1"],
        "rloo-kit show --step (the middle)": [*show, "--step", str(steps // 2)],
        "--resume's rewind by ten steps": [sys.executable, "-c", rewind],
    }


def run_measured(command: list[str]) -> tuple[int, float, float]:
    """Exit code, peak memory in KiB and seconds of a command, which is the only child of a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *command], capture_output=True, text=True, cwd=reporting.ROOT,
        env=reporting.os.environ | {"PYTHONPATH": str(reporting.ROOT)}, check=True,
    )  # fmt: skip
    code, peak, seconds = done.stdout.split()
    return int(code), float(peak), float(seconds)


def make_steps(tokens: int) -> Iterator[list[dict[str, Any]]]:
    """Rows as the kit writes them, with pieces of the kit's pages in random order as text."""
    pages = " ".join(path.read_text(encoding="utf-8") for path in sorted((reporting.ROOT / "docs").glob("*.md")))
    words = re.findall(r"\s*\S{1,6}", pages)
    ids = {word: number for number, word in enumerate(dict.fromkeys(words))}
    generator, step = random.Random(0), 0
    while True:
        step, rows = step + 1, []
        for _ in range(ROWS):
            drawn: list[str] = []
            while len(drawn) < tokens:
                start = generator.randrange(len(words))
                drawn += words[start : start + generator.randrange(4, 24)]
            drawn = drawn[:tokens]
            prompt, text = "".join(words[step % 1000 : step % 1000 + 60]), "".join(drawn)
            reward = float(generator.random() < 0.5)
            rows.append(
                {
                    "step": step, "prompt": prompt, "completion": text,
                    "completion_ids": [ids[word] for word in drawn], "prompt_tokens": 60, "completion_tokens": tokens,
                    "thinking_tokens": tokens - 100, "closed": True, "truncated": False, "forced": False, "kl": 0.01,
                    "rewards": {"answer_reward": reward}, "reward": reward, "advantage": reward - 0.5,
                    "columns": {"answer": str(step)},
                }
            )  # fmt: skip
        yield rows


def compare_levels(tokens: int) -> None:
    """MB/s and ratio of 32 MB of rows by zlib's level, on one core."""
    steps, data = make_steps(tokens), b""
    while len(data) < 32e6:
        data += "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in next(steps)).encode()
    for level in (1, 3, 6, 9):
        started = time.process_time()
        compressed = len(zlib.compress(data, level))
        seconds = time.process_time() - started
        print(f"level {level}: {len(data) / 1e6 / seconds:.0f} MB/s, a {len(data) / compressed:.1f}th of the size")


if __name__ == "__main__":
    sys.exit(main())
