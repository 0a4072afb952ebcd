"""The benchmarks start, compare the same work, and the pages show what they measured; the GPU cells are rehearsed.

The cells of the first tests are small programs, started by `benchmarks/cells.py` in a process of its own.
"""

import doctest
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.on_gpu.edge import GB, GIB, Memory

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if "argparse.ArgumentParser" in path.read_text("utf-8"))
DOCTESTS = sorted(path.stem for path in FOLDER.glob("*.py") if ">>> " in path.read_text("utf-8"))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """`module(name)` imports a file of the folder, which lies last on the path: its rewards.py is not the package."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    return importlib.import_module


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_benchmark_starts(script: str) -> None:
    """A benchmark that does not start is found out a release later, when its figures are wanted."""
    done = subprocess.run([sys.executable, str(FOLDER / script), "--help"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", DOCTESTS)
def test_examples_hold(name: str, module: Any) -> None:
    """The folder's rewards.py hides the package from pytest's collection of doctests."""
    failed, tried = doctest.testmod(module(name))
    assert tried > 0 and failed == 0


@pytest.mark.parametrize("name", ["docs/benchmarks.md", "README.md"])
def test_the_page_shows_what_was_measured(name: str, module: Any) -> None:
    """A figure that was typed in by hand outlives the code that it was measured with."""
    page = (ROOT / name).read_text(encoding="utf-8")
    assert module("doc_tables").with_tables(page) == page, "run: python benchmarks/rloo_step.py --write-table"


def test_the_readme_shows_what_the_demo_measured() -> None:
    """The first table that a reader sees was once of another revision's demo."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    runs = json.loads((FOLDER / "results" / "demo_learning.json").read_text(encoding="utf-8"))["runs"]
    for run in runs:
        pair = (run["before"], run["after"])
        cells = [f"{one['accuracy']:.3f} ({one['low']:.3f} to {one['high']:.3f})" for one in pair]
        cells += [f"{one['greedy_accuracy']:.3f}" for one in pair]
        assert f"| {' | '.join([str(run['seed']), *cells])} |" in readme
        assert run["bar_held"] and all(one["num_prompts"] >= 1000 for one in pair)


def test_stand_in_computes_what_trl_s_head_computes(module: Any) -> None:
    """Stock TRL is measured through it: one that is wrong, or that has other tiles, measures something else."""
    import torch

    head = module("trl_head")
    assert head.tile_sizes() == {"tile_tokens": 4096, "tile_columns": 32768}
    torch.manual_seed(0)
    before, head.StandIn.token_chunk = head.StandIn.token_chunk, 7
    try:
        hidden, weight, targets = torch.randn(20, 8, requires_grad=True), torch.randn(50, 8), torch.randint(50, (20,))
        logps, entropy, *_ = head.StandIn.apply(hidden, weight, None, targets, 0.7, 16, None, 1.0, ("entropy",))
        upstream = torch.randn(20)
        (gradient,) = torch.autograd.grad(logps, hidden, upstream)
    finally:
        head.StandIn.token_chunk = before
    plain = (hidden @ weight.T / 0.7).log_softmax(dim=1)
    expected = plain.gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(logps, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, -(plain.exp() * plain).sum(dim=1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, hidden, upstream)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["fast", pytest.param("low", marks=pytest.mark.slow)])
def test_both_sides_take_the_same_step(name: str, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are imposed on both sides alike, and their gradients agree; else the ratio compares different work."""
    workload, sides, head = module("step_workload"), module("step_sides"), module("trl_head")
    monkeypatch.setattr(workload, "SHORTEST", 3)
    monkeypatch.setattr(workload, "LONGEST", 12)
    load = workload.Workload()
    with head.installed():
        built = [sides.build_side(side, load) for side in ("stock", name)]
        for side in built:
            canned, real = side.step(canned=True), side.step(canned=False)
            assert canned.generation_s < 0.1 * canned.whole_s and real.generation_s > canned.generation_s
            assert side.completion_lengths == workload.completion_lengths(load)
    assert sides.gradient_error(built[1], built[0]) < 1e-5


# --------------------------------------------------------------------------------------------------- cells on a GPU

PROGRAM = """\
import argparse, sys
sys.path[:0] = [{root!r}]
sys.path.append({benchmarks!r})
from pathlib import Path
import cells, reporting
reporting.settle()
begin = "import sys; sys.path.append({benchmarks!r}); import cells; "
found = [cells.Cell(name, cells.python("-c", begin + text), "a test", limit_s=limit)
         for name, (text, limit) in {programs!r}.items()]
parser = argparse.ArgumentParser()
cells.add_arguments(parser, Path({results!r}))
sys.exit(cells.run_cells(found, parser.parse_args(), "the test's command"))
"""
CELLS = {
    "good": ("cells.report(a=1, d={'x': 1}); cells.report(d={'y': 2})", 60),
    "absent": ("cells.skip('vLLM is not installed')", 60),
    "broken": ("cells.report(a=1); raise ValueError('no such kernel')", 60),
    "hangs": ("import subprocess; p = subprocess.Popen(['sleep', '99']); cells.report(pid=p.pid); p.wait()", 1),
}


def run_cells(folder: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what was printed, and each cell's result."""
    results = folder / "results"
    values = {"root": str(ROOT), "benchmarks": str(FOLDER), "programs": CELLS, "results": str(results)}
    command = [sys.executable, "-c", PROGRAM.format(**values), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120)
    found = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in results.glob("*.json")}
    return done.returncode, done.stdout + done.stderr, found


def test_each_cell_says_what_became_of_it(tmp_path: Path) -> None:
    """One check that hung took the figures of all the others with it, and left its child on the GPU."""
    code, printed, found = run_cells(tmp_path, "--rehearse")
    assert code == 1 and "1 passed, 2 failed, 1 skipped" in printed
    assert found["good"]["state"] == "passed" and found["good"]["values"] == {"a": 1, "d": {"x": 1, "y": 2}}
    assert found["good"]["rehearsed"] is True
    assert (found["absent"]["state"], found["absent"]["reason"]) == ("skipped", "vLLM is not installed")
    assert "no such kernel" in found["broken"]["reason"] and found["broken"]["values"] == {"a": 1}
    assert "limit of 4 s" in found["hangs"]["reason"]
    orphan, deadline = found["hangs"]["values"]["pid"], time.monotonic() + 30
    while psutil.pid_exists(orphan) and psutil.Process(orphan).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the cell's child goes on"
        time.sleep(0.1)  # killed, and on a busy machine not gone or reaped yet
    assert "good: passed before" in run_cells(tmp_path, "--rehearse", "--only", "good")[1]
    assert "there are: good, absent" in run_cells(tmp_path, "--rehearse", "--only", "bad")[1]


def test_without_a_gpu_nothing_is_run_and_nothing_claimed(tmp_path: Path) -> None:
    """An empty result that says "passed" would be a figure by the next release."""
    from rloo_kit.system.environment import find_gpus

    if find_gpus().gpu is not None:
        pytest.skip("this machine has a GPU")
    code, printed, found = run_cells(tmp_path)
    assert code == 0 and "no CUDA GPU: " in printed and not found


def test_every_check_of_tests_on_gpu_is_a_cell(module: Any) -> None:
    """A check that no cell runs is never run: nobody calls pytest on a rented GPU."""
    listed = list(module("tests.on_gpu.run").list_cells())
    targets = {argument for cell in listed for argument in cell.command if argument.startswith("tests/on_gpu/")}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/on_gpu"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    collected = {line for line in found.splitlines() if line.startswith("tests/on_gpu/")}
    assert collected and {target for target in targets if "[" in target} <= collected
    assert {test for test in collected if test in targets or test.partition("[")[0] in targets} == collected
    jobs = module("step_cuda").list_cells()
    assert len({cell.name for cell in [*listed, *jobs]}) == len(listed) + len(jobs)


def test_results_of_a_gpu_are_of_a_gpu(module: Any) -> None:
    """A rehearsal's figures in the folder of results would be quoted."""
    folder = FOLDER / "results" / "gpu"
    find = module("cells").results_folder
    assert find(SimpleNamespace(rehearse=True, results=folder)) == ROOT / "outputs" / "rehearsal" / "gpu"
    assert find(SimpleNamespace(rehearse=False, results=folder)) == folder


def test_a_gpu_is_played_by_a_cap() -> None:
    """12 GB on the box are 11.2 GiB, and CUDA's context is none of torch's: a cap of 12 GiB shows nothing."""
    fractions: list[float] = []
    cuda = SimpleNamespace(
        mem_get_info=lambda: (70 * GIB, 80 * GIB), memory_reserved=lambda: 9 * GIB, synchronize=lambda: None,
        empty_cache=lambda: None, set_per_process_memory_fraction=fractions.append,
    )  # fmt: skip
    with Memory(cuda, "cuda").capped(12) as limit:
        assert limit == pytest.approx(12 * GB / GIB - 1)  # 10 GiB are taken, 9 of them by torch
    assert fractions == [pytest.approx(limit / 80), 1.0]


def rehearse(folder: Path, program: str, *names: str) -> dict[str, Any]:
    """The results of cells that are run on the CPU, tiny, through transformers."""
    environment = os.environ | {"RLOO_KIT_UNSLOTH_PYTHON": str(folder / "none"), "OMP_NUM_THREADS": "1"}
    environment |= {"RLOO_KIT_CELL_SCRATCH": str(folder / "scratch"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *program.split(), "--rehearse", "--results", str(folder / "out"), "--only", *names]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    found = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in (folder / "out").glob("*.json")}
    assert found.keys() == set(names) and {one["state"] for one in found.values()} == {"passed"}
    return {name: one["values"] for name, one in found.items()}


@pytest.mark.slow
def test_the_checks_of_a_gpu_are_rehearsed(tmp_path: Path) -> None:
    """Code that runs for the first time on a rented GPU spends the lease on its typing errors."""
    names = [f"{name}_transformers" for name in ("log_probs", "ratio", "gradients", "gpu_8gb_bf16", "gpu_24gb_bf16")]
    names += ["packed_kernel", "life_0.6b", "merge_0.6b", "embedded"]
    values = rehearse(tmp_path, "tests/on_gpu/run.py", *names)
    assert values["gpu_24gb_bf16_transformers"]["peaks_gib"].keys() == {"rollout", "training"}
    assert values["life_0.6b"]["stages"].keys() >= {"load", "two steps", "resumed for two steps", "inference"}


@pytest.mark.slow
def test_the_step_on_a_gpu_is_rehearsed(tmp_path: Path) -> None:
    """All of it runs here as on a GPU, but for its sizes; a typing mistake found on a rented GPU costs an hour."""
    steps = ["training-4k-stock", "training-4k-fast", "training-4k-low", "training-4k-balanced"]
    steps += ["whole-2k-native", *(f"whole-1k-{name}" for name in ("stock", "generate", "native-int8", "server"))]
    others = ["ceilings", "profile-training-fast", "profile-decoding-native", "long-12gb-int8", "long-24gb-int8"]
    values = rehearse(tmp_path, "benchmarks/rloo_step.py --device cuda", *steps, *others)
    for name in steps:
        (step,) = values[name]["steps"]
        assert 0 < step["training_s"] <= step["whole_s"] and "peak_gib" in step
        assert (step["generation_s"] > 0.001) == name.startswith("whole")
    assert values["profile-training-fast"]["busy_s"] > 0 and values["ceilings"]["tflops"] > 0
    for name in ("long-12gb-int8", "long-24gb-int8"):
        assert values[name]["cache"] == "int8" and not values[name]["ran_out"] and values[name]["left_gib"] > 0
