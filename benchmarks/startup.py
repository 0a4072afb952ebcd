"""How long the package takes to start, in fresh processes; figures go to `results/startup.json`.

    python benchmarks/startup.py

`import rloo_kit` and `rloo-kit --help` load no heavy library (a test holds them to it); beside them stand what they
would take if they did. Every command runs once to warm the file cache, then ten times in turn with the others; the
median of the wall clock is reported, with the smallest and the largest. Left out: the first start after installing,
which compiles.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import reporting

RESULT = reporting.RESULTS / "startup.json"


def commands() -> dict[str, list[str]]:
    """Name -> what is started."""
    python, folder = sys.executable, Path(sys.executable).parent
    code = {"python": "pass", "import rewards": "import rewards", "import rloo_kit": "import rloo_kit"}
    heavy = {"import torch": "import torch", "from trl import RLOOTrainer": "from trl import RLOOTrainer"}
    found = {name: [python, "-c", text] for name, text in code.items()}
    found["rloo-kit --help"] = [str(folder / "rloo-kit"), "--help"]
    return found | {name: [python, "-c", text] for name, text in heavy.items()}


def main() -> int:
    """Start everything in turn and write the results."""
    reporting.settle()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--results", type=Path, default=RESULT)
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in commands()}
    for turn in range(options.repeats + 1):
        for name, command in commands().items():
            started = time.perf_counter()
            subprocess.run(command, cwd=reporting.ROOT, check=True, capture_output=True)
            if turn:
                times[name].append(time.perf_counter() - started)
    rows = []
    for name, seconds in times.items():
        rows.append({"what": name, "seconds": statistics.median(seconds), "low": min(seconds), "high": max(seconds)})
        print(f"{name}: {rows[-1]['seconds']:.3f} s ({min(seconds):.3f} to {max(seconds):.3f})", flush=True)
    head = reporting.header("benchmarks/startup.py") | {"repeats": options.repeats}
    reporting.write(head | {"rows": rows}, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
