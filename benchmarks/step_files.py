"""How many files one optimizer step enters, and how the package is cut; figures go to `results/step_files.json`.

    python benchmarks/step_files.py                              # this checkout
    python benchmarks/step_files.py --checkout ../before         # another revision as well, side by side

The step is the second of `configs/arithmetic_thinking.yaml` with a KL penalty and a table of samples, on an embedded
model of two training steps, through `rloo_kit.train`: from the trainer's `on_step_begin` to the next one, so rollout,
rewards, loss, optimizer, record and log are in it. `sys.setprofile` sees each Python call and return; a switch is one
after which another file of `rloo_kit/` or `rewards/` runs than before. `rewards/` and the `__init__` files are not
counted as modules. Left out: other threads, C functions, and the files of the libraries.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reporting

RESULT = reporting.RESULTS / "step_files.json"
# Runs with either tree's package, so it uses what both have.
PROGRAM = """
import json, os, sys
root = os.path.realpath(".") + os.sep
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
def mean_id(completion_ids, **_):  # the model cannot add, and where all rewards are equal no gradient is computed
    return [sum(ids) / len(ids) / 320 for ids in completion_ids]
rewards = [*kit.build_rewards(run, policy.tokenizer), mean_id]
from transformers.trainer_callback import CallbackHandler
entered, last, switches, steps = set(), None, 0, 0

def enter(path):
    global last, switches
    if path.startswith((root + "rloo_kit", root + "rewards")):
        switches += last is not None and last != path
        last = path
        entered.add(path[len(root):])

def profile(frame, event, _):
    if event == "call":
        enter(frame.f_code.co_filename)
    elif event == "return" and frame.f_back is not None:
        enter(frame.f_back.f_code.co_filename)

plain = CallbackHandler.on_step_begin
def on_step_begin(*arguments):
    global steps
    steps += 1
    sys.setprofile(profile if steps == 2 else None)
    return plain(*arguments)

CallbackHandler.on_step_begin = on_step_begin
kit.train(run, policy, data, rewards)
sys.setprofile(None)
assert steps == 3, steps
print("figures: " + json.dumps({"files": sorted(entered), "switches": switches}))
"""


def trace_step(tree: Path) -> dict[str, Any]:
    """Files that the second step enters, and the switches between them, in a fresh process with that tree's package."""
    environment = os.environ | {"PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "RLOO_KIT_BACKEND": "transformers"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", PROGRAM, folder]
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
    parser.add_argument("--checkout", type=Path, help="folder of another revision, to stand before this one")
    parser.add_argument("--results", type=Path, default=RESULT)
    options = parser.parse_args()
    trees = {"before": options.checkout.resolve()} if options.checkout else {}
    rows = []
    for name, tree in (trees | {"now": reporting.ROOT}).items():
        step = trace_step(tree)
        revision = reporting.git("rev-parse", "HEAD", folder=tree)
        rows.append({"tree": name, "revision": revision, **read_sources(tree), "entered": len(step["files"]), **step})
    print("\n".join(reporting.step_files_table({"rows": rows})))
    reporting.write(reporting.header("benchmarks/step_files.py") | {"rows": rows}, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
