"""Runs the twelve tasks end to end and prints a table: verdict, leading measure, figures that are wrong.

    python tests/tasks/run.py [--model smollm2/instruct] [--only NAME] [--keep DIR]

Without `--model` on the embedded model, about a minute. The exit code is the number of tasks with a problem.
"""

import argparse
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.tasks.check import check_run
from tests.tasks.recompute import Recomputed
from tests.tasks.surfaces import run_task
from tests.tasks.tasks import BY_NAME, MODELS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODELS["toy"]["model"]["name"])
    parser.add_argument("--only", action="append", choices=[*BY_NAME], help="a task; may be repeated")
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: a temporary one")
    words = parser.parse_args()
    model = "toy" if words.model == MODELS["toy"]["model"]["name"] else "real"
    MODELS[model]["model"]["name"] = words.model
    wrong = 0
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in words.only or BY_NAME:
            folder = (words.keep or Path(temporary)).resolve() / name
            try:
                surfaces = run_task(BY_NAME[name], model, folder)
                problems = check_run(BY_NAME[name], model, surfaces)
                run = Recomputed(surfaces.folder, folder / "rewards.py")
                ends = [run.sides[when].measure(run.leads) for when in ("before", "after")]
                shown = " -> ".join("-" if one is None else f"{one.value:.3f}" for one in ends)
                row = (name, run.status["verdict"]["kind"], f"{run.leads} {shown}", str(len(problems)))
            except Exception as error:
                traceback.print_exc()
                problems, row = [str(error)], (name, "failed", "-", "1")
            rows.append(row)
            wrong += bool(problems)
            print(f"\n{name}: {len(problems)} problems", *problems, sep="\n  ", flush=True)
    print()
    for row in (("task", "verdict", "leading measure", "problems"), *rows):
        print(f"{row[0]:12} {row[1]:12} {row[2]:28} {row[3]}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
