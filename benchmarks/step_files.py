"""The files that one optimizer step enters, and the package's structure; figures go to `results/step_files.json`.

    python benchmarks/step_files.py                              # this checkout
    python benchmarks/step_files.py --checkout ../before         # also another revision, side by side
    python benchmarks/step_files.py --pairs                      # also the most frequent switches between files

The step is the second of `configs/arithmetic_thinking.yaml` with a KL penalty and a table of samples, on an embedded
model of two training steps, through `rloo_kit.train`: from the trainer's `on_step_begin` to the next one, so it
includes rollout, rewards, loss, optimizer, record and log. `sys.setprofile` sees each Python call and return; a switch
is one after which a different file of `rloo_kit/` or `rewards/` runs. Not seen: other threads, C functions, and library
files.

There are two counts. With everything: `entered_all`, `switches_all`. The step proper, sampling to optimizer: `entered`,
`switches`, `files`; a call into a file in `LEFT_OUT` (reward functions, logging, the run folder) does not count, nor
does anything that it calls. The list goes by file and applies to revisions from d78a95a on.

`rewards/` and the `__init__` files are not counted as modules.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import reporting

RESULT = reporting.RESULTS / "step_files.json"
LEFT_OUT = (
    "rewards/",
    "rloo_kit/rewards/",
    "rloo_kit/loop/metrics.py",
    "rloo_kit/loop/callbacks.py",
    "rloo_kit/loop/health.py",
    "rloo_kit/results/",
    "rloo_kit/runs/",
    "rloo_kit/system/console.py",
    "rloo_kit/system/processes.py",
)
TOP_PAIRS = 15
# Runs with either tree's package, so it uses what both have.
PROGRAM = """
import json, os, sys
sys.path.append(sys.argv[2])  # last: this folder's rewards.py is not the package
from step_files import StepTrace
trace = StepTrace(os.path.realpath("."))
import rloo_kit as kit
kit.setup_environment("transformers")
from importlib.util import find_spec
from importlib import import_module
new = find_spec("rloo_kit.embedded") is not None
model = import_module("rloo_kit.embedded.model" if new else "rloo_kit.tiny_model").build("thinking", steps=2)
run = kit.load_config("configs/arithmetic_thinking.yaml", f"model.name={model}", f"run.output_dir={sys.argv[1]}",
                      "rloo.max_steps=3", "rloo.beta=0.05", "run.sample_every_steps=1")
policy = kit.load_policy(run)
data = kit.load_data(run, policy.tokenizer)
def mean_id(completion_ids, **_):  # the model cannot add, and equal rewards give no gradient
    return [sum(ids) / len(ids) / 320 for ids in completion_ids]
rewards = [*kit.build_rewards(run, policy.tokenizer), mean_id]
from transformers.trainer_callback import CallbackHandler
steps = 0

plain = CallbackHandler.on_step_begin
def on_step_begin(*arguments):
    global steps
    steps += 1
    sys.setprofile(trace if steps == 2 else None)
    return plain(*arguments)

CallbackHandler.on_step_begin = on_step_begin
kit.train(run, policy, data, rewards)
sys.setprofile(None)
assert steps == 3 and trace.depth == 0, (steps, trace.depth)
print("figures: " + json.dumps(trace.figures()))
"""


class StepTrace:
    """For `sys.setprofile`: the files of a tree's package that run, in total and in the step proper."""

    def __init__(self, tree: str):
        self.root = tree + os.sep
        self.counted = tuple(self.root + name for name in ("rloo_kit/", "rewards/"))
        self.left_out = tuple(self.root + name for name in LEFT_OUT)
        self.depth = 0  # calls into left-out files that have not returned
        self.proper: list[str] = []  # one entry for each stretch in a file
        self.everything: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """A generator's `yield` is a return and its resumption a call; an exception that leaves a frame returns too."""
        left_out = frame.f_code.co_filename.startswith(self.left_out)
        if event == "call":
            self.depth += left_out
            self._enter(frame)
        elif event == "return":
            self.depth -= left_out
            if frame.f_back is not None:
                self._enter(frame.f_back)

    def _enter(self, frame: FrameType) -> None:
        path = frame.f_code.co_filename
        if path.startswith(self.counted):
            for walk in (self.everything,) if self.depth else (self.everything, self.proper):
                if not walk or walk[-1] != path:
                    walk.append(path)

    def figures(self) -> dict[str, Any]:
        """Files and switches of both counts; `pairs`: (from, to, switches) of the step proper, most frequent first."""
        walks = (self.proper, self.everything)
        proper, everything = ([path.removeprefix(self.root) for path in walk] for walk in walks)
        pairs = Counter(pairwise(proper))
        return {
            "entered": len(set(proper)),
            "switches": max(len(proper) - 1, 0),
            "entered_all": len(set(everything)),
            "switches_all": max(len(everything) - 1, 0),
            "files": sorted(set(proper)),
            "pairs": [(*pair, count) for pair, count in pairs.most_common()],
        }


def trace_step(tree: Path) -> dict[str, Any]:
    """`StepTrace.figures` of the second step, in a fresh process with that tree's package."""
    environment = os.environ | {"PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "RLOO_KIT_BACKEND": "transformers"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", PROGRAM, folder, str(Path(__file__).resolve().parent)]
        done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("figures: ")]
    if done.returncode or not lines:
        raise RuntimeError(f"the step of {tree} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix("figures: "))


def read_sources(tree: Path) -> dict[str, Any]:
    """Modules, lines and imports, from the sources of a tree; lines of the `__init__` files are counted."""
    files = [file for file in sorted((tree / "rloo_kit").rglob("*.py")) if file.parent != tree / "rloo_kit" / "rewards"]
    lines = {_name(file, tree): len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    packages = {_name(file, tree) for file in files if file.name == "__init__.py"}
    edges = {_name(file, tree): set(_imports(file, lines.keys())) - {_name(file, tree)} for file in files}
    modules = sorted(lines.keys() - packages)
    importers = {name: sum(name in targets for targets in edges.values()) for name in modules}
    return {
        "modules": len(modules),
        "lines": sum(lines.values()),
        "small": sum(lines[name] < reporting.SMALL_MODULE for name in modules),
        "one_importer": sum(count <= 1 for count in importers.values()),
        "circles": find_circles(edges),
    }


def _name(file: Path, tree: Path) -> str:
    return ".".join(file.relative_to(tree).with_suffix("").parts).removesuffix(".__init__")


def _imports(file: Path, known: Any) -> Iterator[str]:
    """Modules of the package that a file imports, inside functions too; not what only a type checker sees."""
    waiting: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield below if below in known else str(node.module)


def find_circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others.

    >>> find_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()})
    [['b', 'c']]
    """

    def reach(start: str) -> set[str]:
        found, waiting = set[str](), list(edges[start])
        while waiting:
            if (name := waiting.pop()) not in found:
                found.add(name)
                waiting += edges.get(name, ())
        return found

    reached = {name: reach(name) for name in edges}
    rings = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in edges if a in reached[a]}
    return [list(ring) for ring in sorted(rings)]


def main() -> int:
    """Count in each tree, print the table and write the results."""
    reporting.settle()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, help="folder of another revision, shown before this one")
    parser.add_argument("--pairs", action="store_true", help="print the most frequent switches between files")
    parser.add_argument("--results", type=Path, default=RESULT)
    options = parser.parse_args()
    trees = {"before": options.checkout.resolve()} if options.checkout else {}
    rows = []
    for name, tree in (trees | {"now": reporting.ROOT}).items():
        step = trace_step(tree)
        revision = reporting.git("rev-parse", "HEAD", folder=tree)
        rows.append({"tree": name, "revision": revision, **read_sources(tree), **step})
        pairs = rows[-1].pop("pairs")[: TOP_PAIRS if options.pairs else 0]
        print("\n".join([f"{name}: one step enters", *(f"  {file}" for file in step["files"])]))
        print("".join(f"{count:6d} {start} -> {end}\n" for start, end, count in pairs))
    result = {"left_out": LEFT_OUT, "rows": rows}
    print("\n".join(reporting.step_files_table(result)))
    reporting.write(reporting.header("benchmarks/step_files.py") | result, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
