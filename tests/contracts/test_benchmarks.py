"""The benchmarks start, compare the same work, and the pages show what they measured; the first hour on a GPU gets
through checks that fail, hang and die, which `first_hour_worker.py` plays in the place of a worker.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rloo_kit.rollout.types import Limits
from tests.rollout.models import PROMPTS, adapted, engine_for

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if "argparse.ArgumentParser" in path.read_text("utf-8"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_benchmark_starts(script: str) -> None:
    """A benchmark that does not start is found out a release later, when its figures are wanted."""
    done = subprocess.run([sys.executable, str(FOLDER / script), "--help"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_pages_show_what_was_measured(module: Any) -> None:
    """A figure that was typed in by hand outlives the code that it was measured with."""
    tables = module("tables")
    for path in tables.PAGES:
        page = path.read_text(encoding="utf-8")
        assert module("reporting").with_tables(page, tables.TABLES) == page, f"{path}: python benchmarks/tables.py"


def test_the_pages_quote_one_run_of_the_demo() -> None:
    """README.md and docs/results.md had the verdicts of two revisions, of a command that gives the same each time."""
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/results.md")]
    quoted = {" ".join(re.findall(r"learnt: Accuracy rose .*?\.\n", page, re.DOTALL)[0].split()) for page in pages}
    (sentence,) = quoted
    run = json.loads((FOLDER / "results" / "demo_learning.json").read_text(encoding="utf-8"))["runs"][0]
    old, new = run["before"], run["after"]
    for words, name, unit, scale in (
        ("Accuracy rose", "accuracy", " %", 100),
        ("greedy", "greedy_accuracy", " %", 100),
        ("thinking", "mean_thinking_tokens", "", 1),
    ):
        assert f"{words} from {scale * old[name]:.0f}{unit} to {scale * new[name]:.0f}" in sentence


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


@pytest.mark.slow
def test_both_sides_take_the_same_step(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are imposed on both sides alike, and their gradients agree; else the ratio compares different work."""
    workload, sides, head = module("step_workload"), module("step_sides"), module("trl_head")
    monkeypatch.setattr(workload, "SHORTEST", 3)
    monkeypatch.setattr(workload, "LONGEST", 12)
    load = workload.Workload()
    with head.installed():
        built = [sides.build_side(side, load) for side in ("stock", "fast")]
        for side in built:
            canned, real = side.step(canned=True), side.step(canned=False)
            assert canned.generation_s < 0.1 * canned.whole_s and real.generation_s > canned.generation_s
            assert side.completion_lengths == workload.completion_lengths(load)
    assert sides.gradient_error(built[1], built[0]) < 1e-5


def test_the_check_of_padding_keeps_its_own_lengths(module: Any, make_tiny_model: Any) -> None:
    """`generate` first continues prompts of its own, without an imposed length: the first GPU stopped here."""
    engine = engine_for(adapted(make_tiny_model()), "generate")
    lengths = [2 + row for row in range(len(PROMPTS))]
    trainer = SimpleNamespace(model=engine._model)
    with module("step_sides").impose_lengths(trainer, PROMPTS, lengths, engine.sampling.end_ids[0]):
        rollout = engine.sample(PROMPTS, Limits(20))
    assert [len(ids) for ids in rollout.completion_ids] == lengths


# ---------------------------------------------------------------------------------------- the first hour on a GPU


@pytest.fixture
def run_call(module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, Any]]:
    """`run_call(*names)`: exit code and lines of a call with stand-ins for its checks."""
    hour, checks = module("first_hour"), module("on_gpu.checks")
    stand_in = module("tests.contracts.first_hour_worker")
    monkeypatch.setattr(hour, "WORKER", Path(stand_in.__file__))
    monkeypatch.setattr(checks, "list_checks", lambda: stand_in.CHECKS)
    for name, value in {"CLOSING_S": 0.0, "GRACE_S": 0.5, "POLL_S": 0.05}.items():
        monkeypatch.setattr(hour, name, value)

    def run(*names: str, call: int = 1, adds: bool = False) -> tuple[int, Any]:
        out = tmp_path / "out"
        code = hour.CallRun(call, list(names), out, 300.0, False, tmp_path, adds).run({"machine": {"gpu": "none"}})
        return code, checks.read_part(out / f"call{call}.jsonl")

    return run


def states(part: Any) -> dict[str, str]:
    return {name.partition("/")[2]: found.state for name, found in part.checks.items()}


@pytest.mark.slow
def test_each_check_says_what_became_of_it(run_call: Any, module: Any, tmp_path: Path) -> None:
    """One check that hung took all figures with it; a check that is run again, or another GPU, must not mix them."""
    expected = {
        "passes": "passed", "does_not_apply": "skipped", "fails": "failed", "depends": "not run", "is_long": "not run",
        "runs_out": "out of memory", "overruns": "over budget", "dies": "failed", "hangs": "failed",
    }  # fmt: skip
    code, part = run_call(*(f"transformers/{name}" for name in expected))
    assert code == 1 and states(part) == expected
    found = {name.partition("/")[2]: one for name, one in part.checks.items()}
    assert found["passes"].values == {"a": 1, "d": {"x": 1, "y": 2}} and found["fails"].values == {"a": 1}
    assert "no such kernel" in found["fails"].reason and "fails has not passed" in found["depends"].reason
    assert found["is_long"].reason == "no time left", "the lease ends whether the list is done or not"
    assert found["dies"].values == {"a": 1} and "exit code 5" in found["dies"].reason
    orphan, deadline = found["hangs"].values["pid"], time.monotonic() + 30
    while psutil.pid_exists(orphan) and psutil.Process(orphan).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the check's child goes on"
        time.sleep(0.1)  # killed, and on a busy machine not gone or reaped yet

    hour, out = module("first_hour"), tmp_path / "out"
    known, good = sys.modules["tests.contracts.first_hour_worker"].CHECKS, {"passes", "does_not_apply"}
    assert hour.choose(2, (), out) == [hour.MAKER, *(name for name in known if name not in
                                                     {f"transformers/{one}" for one in good})]  # fmt: skip
    code, part = run_call("transformers/fails", "transformers/follows", adds=True)
    assert code == 1 and states(part) == expected | {"follows": "passed"}
    hour.refuse_another_gpu(out, "none")
    with pytest.raises(SystemExit, match="has results of none and this is NVIDIA B: name another folder"):
        hour.refuse_another_gpu(out, "NVIDIA B")


def test_lanes_run_side_by_side_and_before_the_rest(run_call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One backend after the other leaves 15 of 16 cores idle; a lane that goes on is in a timed check's figures."""
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0")
    names = ["sees_variables", "passes", "meets_another"]
    code, part = run_call(*(f"{backend}/{name}" for name in names for backend in ("unsloth", "transformers")))
    assert code == 0 and {found.state for found in part.checks.values()} == {"passed"}
    order = [name.partition("/")[2] for name in part.checks]
    assert order == 2 * ["meets_another"] + 2 * ["sees_variables"] + 2 * ["passes"]
    assert part.value("unsloth/sees_variables", "found") == {"ON": "1", "TORCH_CUDNN_SDPA_DEPRIORITIZED": None}


def test_a_backend_that_cannot_start_takes_only_its_own_checks(run_call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers does not wait for a library that this driver is too old for, nor behind a driver's error."""
    monkeypatch.setenv(sys.modules["tests.contracts.first_hour_worker"].UNUSABLE, "yes")
    names = ["unsloth/passes", "unsloth/follows", "transformers/loses_the_driver", "transformers/passes"]
    code, part = run_call(*names)
    assert code == 1 and any("no module named triton" in note for note in part.notes)
    assert [part.checks[name].state for name in names] == ["failed", "not run", "failed", "passed"]
    assert "could not start" in part.checks[names[0]].reason


def test_without_a_gpu_nothing_is_run_and_nothing_claimed(tmp_path: Path) -> None:
    """An empty result that says "passed" would be a figure by the next release."""
    from rloo_kit.system.gpu import find_gpus

    if find_gpus().gpu is not None:
        pytest.skip("this machine has a GPU")
    command = [sys.executable, str(FOLDER / "first_hour.py"), "--call", "1", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=60)
    assert done.returncode == 2 and "no CUDA GPU: " in done.stdout and not (tmp_path / "out").exists()


def test_the_list_is_whole(module: Any) -> None:
    """An expectation of a check that was renamed is silently compared with nothing."""
    known = module("on_gpu.checks").list_checks()
    assert all(check.what and check.budget_s > 0 for check in known.values())
    assert {one.check for one in module("on_gpu.expected").EXPECTED} <= known.keys()
    assert {check.needs for check in known.values() if check.needs} <= known.keys()
    assert module("first_hour").MAKER in known
    assert module("first_hour").SECONDS[1] < 570, "one command there may last 570 s"
