"""The variables that a worker sees."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rloo_kit.system.worker import Worker, worker_environment

COMMAND = Path(__file__).with_name("worker_environment.py")


def test_a_worker_sees_no_secret_that_was_not_asked_for() -> None:
    """All of `.env` went to every reward: HF_TOKEN, WANDB_API_KEY and the hub's token."""
    done = subprocess.run([sys.executable, str(COMMAND)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seen as: JUDGE_API_KEY\n" in done.stdout and "PATH" in done.stdout


@pytest.mark.parametrize(
    ("name", "passed"),
    [
        ("PATH", True),
        ("LC_ALL", True),
        ("PYTHONHASHSEED", True),
        ("CUDA_VISIBLE_DEVICES", True),
        ("OMP_NUM_THREADS", True),
        ("HF_HUB_OFFLINE", True),
        ("TOKENIZERS_PARALLELISM", True),
        ("RLOO_KIT_BATCH", True),
        ("HF_TOKEN", False),
        ("HF_ENDPOINT", False),
        ("PYTHON_TOKEN", False),
        ("RLOO_KIT_API_KEY", False),
        ("ANYTHING", False),
    ],
)
def test_the_list(monkeypatch: pytest.MonkeyPatch, name: str, passed: bool) -> None:
    """A batch ends what carries its mark, so the mark has to be passed on; a name that looks like a secret never is."""
    monkeypatch.setenv(name, "value")
    assert (name in worker_environment()) == passed
    assert worker_environment([name])[name] == "value"


def test_the_kits_own_workers_see_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a second way to start a worker."""
    monkeypatch.setenv("HF_TOKEN", "canary")
    worker = Worker("test")
    assert [worker.call(os.getenv, name, timeout_s=60) for name in ("HF_TOKEN", "PATH")] == [None, os.environ["PATH"]]
    worker.close()
