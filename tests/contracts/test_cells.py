"""The runner of what needs a GPU (`benchmarks/cells.py`), and the checks of `tests/on_gpu` that it runs, without a GPU.

The cells here are small programs; they are started by the runner in a process of its own, as `make test-gpu` does.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.on_gpu.edge import GB, GIB, Memory

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """\
import argparse, json, sys
sys.path[:0] = [{root!r}]
sys.path.append({benchmarks!r})
from pathlib import Path
import cells, reporting
reporting.settle()
folder = Path({folder!r})
begin = "import sys; sys.path.append({benchmarks!r}); import cells; open({count!r}, 'a').write('+'); "
programs = json.loads((folder / "programs.json").read_text())
found = [
    cells.Cell(name, cells.python("-c", begin + text), "a test", limit_s=limit, environment=dict(CELL=name))
    for name, (text, limit) in programs.items()
]
parser = argparse.ArgumentParser()
cells.add_arguments(parser, folder / "results")
sys.exit(cells.run_cells(found, parser.parse_args(), "the test's command"))
"""


class Runner:
    """A command of some cells in a folder of its own."""

    def __init__(self, folder: Path, programs: dict[str, tuple[str, int]]) -> None:
        self.folder = folder
        paths = {"root": str(ROOT), "benchmarks": str(ROOT / "benchmarks"), "folder": str(folder)}
        (folder / "program.py").write_text(PROGRAM.format(**paths, count=str(folder / "count")), encoding="utf-8")
        (folder / "programs.json").write_text(json.dumps(programs), encoding="utf-8")

    def start(self, *options: str) -> "subprocess.Popen[str]":
        command = [sys.executable, str(self.folder / "program.py"), *options]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.folder)

    def run(self, *options: str) -> tuple[int, str]:
        process = self.start(*options)
        printed, _ = process.communicate(timeout=120)
        return process.returncode, printed

    def result(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / "results" / f"{name}.json").read_text(encoding="utf-8"))

    @property
    def started(self) -> int:
        """Cells that were started so far."""
        file = self.folder / "count"
        return len(file.read_text(encoding="utf-8")) if file.is_file() else 0


@pytest.fixture
def make_runner(tmp_path: Path) -> Callable[..., Runner]:
    """`make_runner(name=(program, limit_s))`."""
    return lambda **programs: Runner(tmp_path, programs)


def wait_for(condition: Callable[[], Any], seconds: float = 30) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


SLEEPER = "import subprocess; p = subprocess.Popen(['sleep', '300']); cells.report(pid=p.pid); p.wait()"


def test_each_cell_says_what_became_of_it(make_runner: Any) -> None:
    """One check that hung took the figures of all the others with it, and left its child on the GPU."""
    runner = make_runner(
        good=("cells.report(a=1, d={'x': 1}); cells.report(d={'y': 2})", 60),
        absent=("cells.skip('vLLM is not installed')", 60),
        broken=("cells.report(a=1); raise ValueError('no such kernel')", 60),
        hangs=(SLEEPER, 1),
    )
    code, printed = runner.run("--rehearse")
    assert code == 1 and "1 passed, 2 failed, 1 skipped" in printed
    good, hangs = runner.result("good"), runner.result("hangs")
    assert good["state"] == "passed" and good["values"] == {"a": 1, "d": {"x": 1, "y": 2}}
    assert good["rehearsed"] is True and good["machine"]["gpu"] == "none: rehearsed on the CPU"
    assert good.keys() >= {"command", "measured", "revision", "machine", "versions", "seconds", "sources"}
    assert (runner.result("absent")["state"], runner.result("absent")["reason"]) == ("skipped", "vLLM is not installed")
    broken = runner.result("broken")
    assert broken["state"] == "failed" and "no such kernel" in broken["reason"] and broken["values"] == {"a": 1}
    assert hangs["state"] == "failed" and "longer than its limit of 4 s" in hangs["reason"]
    assert not is_running(hangs["values"]["pid"]), "what the cell started goes on"


def test_what_passed_is_not_run_again(make_runner: Any) -> None:
    """Of thirty minutes on a GPU, twenty went into checks that had passed the day before."""
    runner = make_runner(good=("pass", 60), broken=("1 / 0", 60))
    runner.run("--rehearse")
    assert runner.started == 2
    assert "good: passed before" in runner.run("--rehearse")[1] and runner.started == 3  # the broken one
    runner.run("--rehearse", "--only", "good", "--again", "good")
    assert runner.started == 4
    for key, value in (("sources", "older"), ("versions", {}), ("machine", {"gpu": "another GPU"})):
        file = runner.folder / "results" / "good.json"
        before = runner.started
        file.write_text(json.dumps(runner.result("good") | {key: value}), encoding="utf-8")
        runner.run("--rehearse", "--only", "goo*")
        assert runner.started == before + 1, key
    code, printed = runner.run("--rehearse", "--only", "bad")
    assert code == 1 and "no cell is called bad; there are: good, broken" in printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_leaves_what_was_measured(make_runner: Any, number: int) -> None:
    """Ctrl-C on the runner left the cell's process training on the GPU, and its file said that it was running."""
    runner = make_runner(long=(SLEEPER, 200))
    process = runner.start("--rehearse")
    file = runner.folder / "results" / "long.json"
    wait_for(lambda: file.is_file() and runner.result("long")["values"])
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    stopped = runner.result("long")
    assert stopped["state"] == "stopped" and stopped["values"].keys() == {"pid"}
    assert not is_running(stopped["values"]["pid"])


def test_a_machine_that_goes_leaves_what_was_measured(make_runner: Any) -> None:
    """A lease ends without asking: figures that were only in memory were gone."""
    runner = make_runner(long=(SLEEPER, 200))
    process = runner.start("--rehearse")
    file = runner.folder / "results" / "long.json"
    wait_for(lambda: file.is_file() and runner.result("long")["values"])
    process.kill()
    process.communicate(timeout=60)
    left = runner.result("long")
    assert left["state"] == "running" and left["values"].keys() == {"pid"}
    os.killpg(os.getpgid(left["values"]["pid"]), signal.SIGKILL)
    assert "running" in runner.run("--rehearse", "--list")[1]
    code, printed = runner.run("--rehearse", "--minutes", "0.03")
    assert code == 1 and runner.result("long")["state"] == "stopped" and runner.started == 2, printed


def test_without_a_gpu_nothing_is_run_and_nothing_claimed(make_runner: Any) -> None:
    """An empty result that says "passed" would be a figure by the next release."""
    from rloo_kit.system.environment import find_gpus

    if find_gpus().gpu is not None:
        pytest.skip("this machine has a GPU")
    runner = make_runner(good=("pass", 60))
    code, printed = runner.run()
    assert code == 0 and "no CUDA GPU: " in printed and "nothing is measured" in printed
    assert runner.started == 0 and not (runner.folder / "results").exists()


def test_a_machine_without_git_is_measured_too(benchmark_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rented machine got a copy of the files, and every command ended in a traceback about git."""
    reporting = benchmark_module("reporting")
    monkeypatch.setenv("PATH", "/nowhere")
    assert reporting._git("rev-parse", "HEAD") == ""


def test_a_cell_takes_eight_minutes_at_most(benchmark_module: Any) -> None:
    """A machine's command ends after ten, whoever is measuring. (A rehearsal has four times as long.)"""
    cells = benchmark_module("cells")
    with pytest.raises(ValueError, match="may take 481 s; a cell has 480 at most"):
        cells.Cell("long", ("true",), "too long", limit_s=481)


# ------------------------------------------------------------------------------------------------- tests/on_gpu


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`benchmark_module(name)` imports a file of benchmarks/, which lies last on the path."""
    import importlib

    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    return importlib.import_module


def test_every_check_of_tests_gpu_is_a_cell(benchmark_module: Any) -> None:
    """A check that no cell runs is never run: nobody calls pytest on a rented GPU."""
    listed = list(benchmark_module("tests.on_gpu.run").list_cells())
    targets = {argument for cell in listed for argument in cell.command if argument.startswith("tests/on_gpu/")}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/on_gpu"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    collected = {line for line in found.splitlines() if line.startswith("tests/on_gpu/")}
    assert collected
    assert {target for target in targets if "[" in target} <= collected
    covered = {test for test in collected if any(test == target or test.startswith(f"{target}[") for target in targets)}
    assert covered == collected
    assert len({cell.name for cell in listed}) == len(listed)


def test_results_of_a_gpu_are_of_a_gpu(benchmark_module: Any) -> None:
    """A rehearsal's figures in the folder of results would be quoted."""
    folder = ROOT / "benchmarks" / "results" / "gpu"
    find = benchmark_module("cells").results_folder
    assert find(SimpleNamespace(rehearse=True, results=folder)) == ROOT / "outputs" / "rehearsal" / "gpu"
    assert find(SimpleNamespace(rehearse=False, results=folder)) == folder
    for file in folder.glob("*.json"):
        result = json.loads(file.read_text(encoding="utf-8"))
        assert result["rehearsed"] is False and result["machine"]["gpu_gib"] > 0, file.name
        assert result["state"] in ("passed", "failed", "skipped", "stopped"), file.name


def test_a_gpu_is_played_by_a_cap() -> None:
    """12 GB on the box are 11.2 GiB, and CUDA's context is none of torch's: a cap of 12 GiB shows nothing."""
    fractions = []
    cuda = SimpleNamespace(
        mem_get_info=lambda: (70 * GIB, 80 * GIB),
        memory_reserved=lambda: 9 * GIB,
        synchronize=lambda: None,
        empty_cache=lambda: None,
        set_per_process_memory_fraction=fractions.append,
    )
    with Memory(cuda, "cuda").capped(12) as limit:
        assert limit == pytest.approx(12 * GB / GIB - 1)  # 10 GiB are taken, 9 of them by torch
    assert fractions == [pytest.approx(limit / 80), 1.0]
    with pytest.raises(ValueError, match="cannot be played"), Memory(cuda, "cuda").capped(100):
        pass


def test_the_rehearsals_cap_holds() -> None:
    """The rehearsal has to run out of memory where the GPU would, or its handling is never run."""
    code = (
        "from tests.on_gpu.edge import HostMemory, Memory, holds; memory = Memory(HostMemory(), 'cpu')\n"
        "with memory.capped(2) as limit: print(limit < 1.9, holds(memory, 1), holds(memory, 2))\n"
        "print(holds(memory, 2))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "True", "False", "True"], done.stderr


@pytest.mark.slow
def test_the_checks_of_a_gpu_are_rehearsed(tmp_path: Path) -> None:
    """Code that runs for the first time on a rented GPU spends the lease on its typing errors."""
    environment = os.environ | {
        "RLOO_KIT_UNSLOTH_PYTHON": str(tmp_path / "none"),  # through transformers
        "RLOO_KIT_CELL_SCRATCH": str(tmp_path / "scratch"),
        "OMP_NUM_THREADS": "1",
    }
    names = [f"{name}_transformers" for name in ("log_probs", "ratio", "gradients", "gpu_8gb_bf16", "gpu_24gb_bf16")]
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "run.py"), "--rehearse", "--results", str(tmp_path / "out")]
    command += ["--only", *names, "packed_kernel", "life_0.6b", "merge_0.6b", "embedded"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "9 passed; figures" in done.stdout
    values = {file.stem: json.loads(file.read_text())["values"] for file in (tmp_path / "out").glob("*.json")}
    assert values["gpu_24gb_bf16_transformers"]["peaks_gib"].keys() == {"rollout", "training"}
    assert values["life_0.6b"]["stages"].keys() >= {"load", "two steps", "resumed for two steps", "inference"}
