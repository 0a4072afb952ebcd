"""What the shipped batch learns, through the real command; figures go to `results/batch_arithmetic.json`.

    python benchmarks/batch_arithmetic.py               # six new runs, about a quarter of an hour on two free cores
    python benchmarks/batch_arithmetic.py --resume      # only missing or failed runs; then the figures of all

A run's seed sets its adapter, the order of its prompts and its sampling; the model, the problems and their split are
the same for all six. Left out: times, which depend on what else the machine is doing.
"""

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import reporting
from reporting import ROOT

RESULT = reporting.RESULTS / "batch_arithmetic.json"
CONFIG = "configs/batch_arithmetic.yaml"
TEXT = ("name", "state")
FIGURES = tuple(
    f"{name}_{when}"
    for name in ("accuracy", "accuracy_low", "accuracy_high", "greedy_accuracy", "thinking_tokens", "closed_share")
    for when in ("before", "after")
)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of comparison.csv: name, state, parameters and figures, as numbers."""
    with (folder / "comparison.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = [*(name for name in rows[0] if name.startswith("parameters.")), "steps", "eval_prompts_after", *FIGURES]
    return [
        {name: row[name] for name in TEXT} | {name: json.loads(row[name] or "null") for name in wanted} for row in rows
    ]


def main() -> int:
    """Run the batch and write the results; the exit code is the batch's."""
    reporting.settle()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    flag = "--resume" if options.resume else "--overwrite"
    command = [str(Path(sys.executable).with_name("rloo-kit")), "batch", CONFIG, f"output_dir={options.output}", flag]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code:
        return code
    folder = options.output / Path(CONFIG).stem
    rows = read_rows(folder)
    head = reporting.header("benchmarks/batch_arithmetic.py") | {"command": f"rloo-kit batch {CONFIG}"}
    reporting.write(head | {"runs": rows}, RESULT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
