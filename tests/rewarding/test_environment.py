"""The variables that a worker sees."""

import os
from pathlib import Path

import pytest

from rloo_kit.rewarding.worker import WorkerReward
from rloo_kit.system.isolation import Worker, worker_environment

CANARY = "canary-4f1d7c"
ASKED_FOR = "JUDGE_API_KEY"
PASSED = [
    "PATH", "LC_ALL", "PYTHONHASHSEED", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HUB_OFFLINE",
    "TOKENIZERS_PARALLELISM", "RLOO_KIT_BATCH",
]  # fmt: skip
HIDDEN = [
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "WANDB_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN", "JUPYTERHUB_API_TOKEN", "JPY_API_TOKEN", "KAGGLE_KEY", "GITHUB_TOKEN", "PGPASSWORD",
    "DATABASE_URL", "HTTPS_PROXY", "PYTHON_TOKEN", "PYTHON_KEYRING_PASSWORD", "RLOO_KIT_API_KEY", "RLOO_KIT_SECRET",
    "CUDA_LICENSE_KEY", "LC_AUTH_COOKIE", "SSH_AUTH_SOCK", "ANYTHING",
]  # fmt: skip


def test_a_worker_sees_no_secret_that_was_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of `.env` went to every reward: HF_TOKEN, WANDB_API_KEY and the hub's token."""
    for name in (*HIDDEN, ASKED_FOR):
        monkeypatch.setenv(name, CANARY)
    reward = WorkerReward("fault_examples:environment", folders=[Path(__file__).parent], env=[ASKED_FOR])
    seen: dict[str, list[str]] = {}
    reward(prompts=["p"], completions=["c"], completion_ids=[[1]], log_extra=seen.__setitem__)
    reward.worker.close()
    assert [name for name, value in zip(seen["names"], seen["values"], strict=True) if CANARY in value] == [ASKED_FOR]
    assert "PATH" in seen["names"]
    worker = Worker("test")  # the kit's own: no second way to start one
    assert [worker.call(os.getenv, name, timeout_s=60) for name in ("HF_TOKEN", "PATH")] == [None, os.environ["PATH"]]
    worker.close()


def test_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch ends what carries its mark, so the mark has to be passed on; a name that looks like a secret never is."""
    for name in (*PASSED, *HIDDEN):
        monkeypatch.setenv(name, "value")
    assert {*PASSED, *HIDDEN} & worker_environment().keys() == {*PASSED}
    assert {*HIDDEN} < worker_environment(HIDDEN).keys()
