"""What a reward may do to its worker, and what the run makes of it: an unscored sample with a line, never more."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch

from rloo_kit.errors import LONGEST_ERROR, WholeBatchError
from rloo_kit.rewarding import worker as reward_worker
from rloo_kit.rewarding.guard import guard
from rloo_kit.rewarding.worker import WorkerReward, end_workers
from rloo_kit.system import isolation as system_worker
from rloo_kit.system.isolation import RUN_MARK, WORKER_MARK
from rloo_kit.system.user_code import make_plain

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
LIMIT_S = 0.8


KILLED = f"took longer than {LIMIT_S:g} s and was killed (timeout_s)"
# A reward of fault_examples, and what the message says; None where the call succeeds.
FAULTS = {
    "detached_and_hangs": KILLED,
    "detached_and_exits": "ended its process with exit code 7",
    "calls_exit": "SystemExit: enough",
    "forks_and_both_return": None,
    "raises_interrupt": "KeyboardInterrupt",
    "aborts": "crashed with SIGABRT",
    "closes_every_file": "ended its process with exit code",
    "writes_to_descriptor_1": None,
    "part_of_a_reply": KILLED,
    "forged_pickle": "sent a reply that cannot be read",
    "a_megabyte_of_error": "(1,000,001 characters)",
    "logs_too_much": "the limit is 16,777,216",
    "logs_what_is_no_number": "could not convert string to float: 'long'",
    "sets_an_alarm": None,
    "ignores_signals": KILLED,
    "hangs_at_exit": None,
    "asks_for_all_memory": "MemoryError",
}


def make(name: str, timeout_s: float = LIMIT_S, env: tuple[str, ...] = ()) -> WorkerReward:
    return WorkerReward(f"fault_examples:{name}", folders=[HERE], timeout_s=timeout_s, env=env)


def call(reward: Any, completion: str, **columns: Any) -> Any:
    return reward(prompts=["p"], completions=[completion], completion_ids=[[1]], **columns)


def marked(mark: str, value: str | None = None) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            here = process.environ().get(mark)
            if here is not None and value in (None, here) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def own_run() -> str:
    return system_worker._watch_over(os.getpid())


CORE = ("detached_and_hangs", "calls_exit", "forged_pickle", "a_megabyte_of_error")


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in CORE else pytest.mark.slow) for one in FAULTS])
def test_a_fault_costs_one_call_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    """A detached child that kept the pipe open stopped a run for ever; a forged reply ran code in the run's process."""
    before, children = os.getcwd(), set(psutil.Process().children(recursive=True))
    words, reward = FAULTS[name], make(name, LIMIT_S if FAULTS[name] == KILLED else 60.0)
    guarded = guard(reward)
    reward.load()
    columns = {"path": str(tmp_path / "made"), "log_extra": lambda *args: None, "log_metric": lambda *args: None}
    bad = call(guarded.score, "bad", **columns)
    message = " | ".join(bad.failures)
    reward.timeout_s = 60.0
    assert bad.values == ([1.0] if words is None else [None]) and call(guarded, "good", **columns) == [1.0]
    reward.worker.close()
    assert (words or "") in message and (words is None) == (message == "")
    assert len(message.encode()) < LONGEST_ERROR + 500
    assert not list(tmp_path.iterdir()) and os.getcwd() == before
    new = set(psutil.Process().children(recursive=True)) - children
    assert marked(RUN_MARK, own_run()) == [] and all("import watch;" in p.cmdline()[2] for p in new)


def test_children_with_a_clean_environment_are_ended_while_their_parent_lives(tmp_path: Path) -> None:
    """A sandbox starts programs with an empty environment: the mark does not find them, and one of them stayed."""
    reward = make("clean_children_without_end")
    reward.load()
    with pytest.raises(WholeBatchError, match="took longer"):
        call(reward, "bad", path=str(tmp_path))
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            assert process.cmdline()[:1] != [str(tmp_path)] or process.status() == psutil.STATUS_ZOMBIE


def test_a_reply_to_no_call_is_never_taken_for_one() -> None:
    """Each call would get the rewards of the one before."""
    reward = make("extra_reply", timeout_s=60.0)
    assert call(reward, "bad") == [1.0]
    time.sleep(0.5)
    with pytest.raises(WholeBatchError, match="sent a reply that cannot be read"):
        call(reward, "good")
    assert call(reward, "good") == [1.0]
    reward.worker.close()


@pytest.mark.slow
def test_a_worker_that_never_reads_is_ended_after_the_limit() -> None:
    """The request was written without a limit: a stopped worker and a batch larger than the pipe hung the run."""
    reward = make("stops_later_detached", timeout_s=10.0)
    assert call(reward, "bad") == [1.0]
    process = psutil.Process(reward.worker._process.pid)  # type: ignore[union-attr]
    until = time.monotonic() + 10
    while process.status() != psutil.STATUS_STOPPED and time.monotonic() < until:
        time.sleep(0.02)
    assert process.status() == psutil.STATUS_STOPPED
    reward.timeout_s = LIMIT_S
    started = time.monotonic()
    with pytest.raises(WholeBatchError, match="took longer than"):
        call(reward, "good" * 1_000_000)
    assert time.monotonic() - started < 60, "the child lives for 600 s"
    reward.timeout_s = 30.0
    assert call(reward, "good" * 1_000_000) == [1.0]
    reward.worker.close()


def test_a_worker_that_dies_before_a_call_is_replaced_with_its_reward() -> None:
    """The next process had not imported the reward, and every later sample of the run failed."""
    reward = make("leaks", timeout_s=30.0)
    assert call(reward, "good") == [1.0]
    path = Path(f"/proc/{reward.worker._process.pid}/oom_score_adj")  # type: ignore[union-attr]
    assert path.read_text().strip() == "1000", "where memory runs out, Linux ends it before the run"

    class Deadly:
        def __reduce__(self) -> Any:
            process = psutil.Process(reward.worker._process.pid)  # type: ignore[union-attr]
            process.kill()
            while process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
            return str, ()

    with pytest.raises(WholeBatchError, match="was killed with SIGKILL"):
        reward(prompts=["p"], completions=["good"], completion_ids=[[1]], column=[Deadly()])
    assert call(reward, "good") == [1.0]
    reward.worker.close()


def test_a_slow_import_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message named timeout_s, which does not apply."""
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    monkeypatch.setattr(reward_worker, "START_TIMEOUT_S", 1.0)
    reward = WorkerReward("slow_module:f", folders=[tmp_path])
    with pytest.raises(WholeBatchError, match="importing 'slow_module:f' took longer than 1 s .* inside the function"):
        reward.load()
    assert not reward.worker.running


PROGRAM = """
import sys, time
from rloo_kit.rewarding.worker import WorkerReward, end_workers
reward = WorkerReward("fault_examples:detached_and_goes_on", folders=[{folder!r}], timeout_s=60)
print(reward(prompts=["p"], completions=["bad"], completion_ids=[[1]]), flush=True)
sys.stdin.readline()
{last}
"""
ENDED = "end_workers(); print('ended', flush=True); time.sleep(60)"


@pytest.mark.parametrize(
    "last", ["SIGKILL", *(pytest.param(one, marks=pytest.mark.slow) for one in (ENDED, "raise SystemExit(1)"))]
)
def test_nothing_stays_behind_when_a_run_ends(last: str) -> None:
    """A program that a reward had left running kept a core busy for days; after SIGKILL only the watchdog is left."""
    program = PROGRAM.format(folder=str(HERE), last=last)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", program], text=True, env=environment, **pipes)
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "[1.0]\n"
        children = psutil.Process(process.pid).children()  # other tests have workers too, at the same time
        (mark,) = {child.environ().get(RUN_MARK) for child in children} - {None}
        (watchdog,) = [child for child in children if mark in child.cmdline()]
        assert len(marked(RUN_MARK, mark)) >= 2, "the worker and its detached grandchild"
        if last == "SIGKILL":
            os.kill(process.pid, signal.SIGKILL)
            until = time.monotonic() + 20
            while (marked(RUN_MARK, mark) or watchdog.is_running()) and time.monotonic() < until:
                time.sleep(0.1)
            assert not watchdog.is_running()
        process.stdin.close()
        assert process.stdout.readline() == ("ended\n" if last == ENDED else "")
        assert marked(RUN_MARK, mark) == []
    finally:
        process.kill()
        process.wait()


def test_one_watchdog_serves_all_workers_of_a_process() -> None:
    """Guards against a process more for every restart of a worker."""
    rewards = [make("leaks", timeout_s=30.0) for _ in range(2)]
    assert [call(reward, "good") for reward in rewards] == [[1.0], [1.0]]
    mine = [one for one in psutil.Process().children() if own_run() in one.cmdline()]
    assert len(mine) == 1 and len({one.environ()[WORKER_MARK] for one in marked(RUN_MARK, own_run())}) == 2
    end_workers()
    assert not any(reward.worker.running for reward in rewards) and call(rewards[0], "good") == [1.0]
    end_workers()


def test_what_a_reward_logs_is_made_plain() -> None:
    """Guards against a tensor in log_extra that cannot be sent, and against numbers that arrive as texts."""
    found = make_plain(["a", 1, numpy.float32(0.5), torch.tensor([1.5, 2.0]), {1: (2, None)}, Decimal("1.5")])
    assert found == ["a", 1, 0.5, [1.5, 2.0], {"1": [2, None]}, "Decimal('1.5')"]
