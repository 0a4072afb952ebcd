"""The package's start-up time in fresh processes; figures go to `results/startup.json`.

    python benchmarks/startup.py
    python benchmarks/startup.py --against ../before       # alternates with another checkout, and adds the ratio

`import rloo_kit` and `rloo-kit --help` load no heavy library (a test checks it); `import torch` shows the cost of one.
`load_stack()` loads all libraries of a run. "train one small step" covers everything that a run of the embedded model
imports, and a step of four short completions. Everything runs once to warm the file cache, then `--repeats` times in
turn; the median wall-clock and processor seconds are reported with the smallest and the largest. A ratio is the median
over the turns. Left out: the first start after installing, which compiles.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import reporting

RESULT = reporting.RESULTS / "startup.json"
CONFIG = "configs/arithmetic_thinking.yaml"
TRAIN = f"""
import rloo_kit as kit, sys
from importlib.util import find_spec
from importlib import import_module
kit.setup_environment("transformers")
new = find_spec("rloo_kit.embedded") is not None
model = import_module("rloo_kit.embedded.model" if new else "rloo_kit.tiny_model").build("thinking", steps=2)
run = kit.load_config("{CONFIG}", f"model.name={{model}}", f"run.output_dir={{sys.argv[1]}}", "rloo.max_steps=1",
    "rloo.per_device_train_batch_size=4", "rloo.num_generations=2", "rloo.max_completion_length=4",
    "data.num_prompts=40", "data.test_size=4")
policy = kit.load_policy(run)
data = kit.load_data(run, policy.tokenizer)
kit.train(run, policy, data, kit.build_rewards(run, policy.tokenizer))
"""
HELP = "import sys; sys.argv[0] = 'rloo-kit'; from rloo_kit.cli import main; main()"
SHARED = {"python": "pass", "import rewards": "import rewards", "import torch": "import torch"}
COMPARED = {  # run in the tree's folder, with its package
    "import rloo_kit": "import rloo_kit",
    "rloo-kit --help": HELP,
    "load_config": f"import rloo_kit; rloo_kit.load_config('{CONFIG}')",
    "load_stack()": "from rloo_kit._stack import load_stack; load_stack()",
    "train one small step": TRAIN,
}
KINDS = ("seconds", "cpu_s")


def start(tree: Path, code: str, *words: str) -> dict[str, float]:
    """Wall-clock and processor seconds of a process that runs the code with a tree's package."""
    environment = os.environ | {"PYTHONPATH": str(tree), "RLOO_KIT_BACKEND": "transformers"}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{code.strip()}\nended with exit code {done.returncode} in {tree}:\n{done.stderr[-3000:]}")
    return {"seconds": wall, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def measure(trees: list[Path], names: list[str], repeats: int) -> dict[str, list[list[dict[str, float]]]]:
    """The starts of each tree, by name; the trees take turns, in changing order, and the first turn is discarded."""
    found: dict[str, list[list[dict[str, float]]]] = {name: [[] for _ in trees] for name in names}
    for turn in range(repeats + 1):
        for name in names:
            order = list(enumerate(trees[:1] if name in SHARED else trees))
            for place, tree in order if turn % 2 else reversed(order):
                with tempfile.TemporaryDirectory() as folder:
                    words = {"rloo-kit --help": ["--help"], "train one small step": [folder]}.get(name, [])
                    once = start(tree, (SHARED | COMPARED)[name], *words)
                if turn:
                    found[name][place].append(once)
    return found


def summarize(name: str, starts: list[list[dict[str, float]]]) -> dict[str, Any]:
    """A row: seconds with smallest and largest; with another tree, its seconds as `before_...` and the ratios."""
    row: dict[str, Any] = {"what": name}
    for prefix, times in zip(("", "before_"), starts, strict=False):
        for kind in KINDS if times else ():
            values = [one[kind] for one in times]
            end = "" if kind == "seconds" else "cpu_"
            row |= {f"{prefix}{kind}": statistics.median(values)}
            row |= {f"{prefix}{end}low": min(values), f"{prefix}{end}high": max(values)}
    if len(starts) > 1 and starts[1]:
        for kind, ratio in zip(KINDS, ("ratio", "cpu_ratio"), strict=True):
            row[ratio] = statistics.median(mine[kind] / theirs[kind] for mine, theirs in zip(*starts, strict=True))
    return row


def main() -> int:
    """Start everything in turn and write the results."""
    reporting.settle()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--against", type=Path, help="folder of another checkout to compare with")
    parser.add_argument("--only", nargs="+", choices=[*SHARED, *COMPARED], default=[*SHARED, *COMPARED], metavar="WHAT")
    parser.add_argument("--results", type=Path, default=RESULT)
    options = parser.parse_args()
    trees = [reporting.ROOT, *([options.against.resolve()] if options.against else [])]
    rows = [summarize(*item) for item in measure(trees, options.only, options.repeats).items()]
    head = reporting.header("benchmarks/startup.py") | {"repeats": options.repeats}
    if options.against:
        head["before"] = reporting.git("rev-parse", "HEAD", folder=trees[1])
    print("\n".join(reporting.startup_table({"rows": rows})), flush=True)
    reporting.write(head | {"rows": rows}, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
