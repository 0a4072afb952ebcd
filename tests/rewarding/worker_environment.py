"""The names of the variables that a worker sees: `python tests/rewarding/worker_environment.py`.

A secret of a made-up value is set in this process under many names, and looked for in the worker. Exits with 1 where
it is found under a name that was not asked for.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # from any folder, without an installed kit
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rloo_kit.rewarding.worker import WorkerReward

CANARY = "canary-4f1d7c"
SECRETS = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN", "JUPYTERHUB_API_TOKEN", "JPY_API_TOKEN", "KAGGLE_KEY", "GITHUB_TOKEN", "PGPASSWORD",
    "DATABASE_URL", "HTTPS_PROXY", "PYTHON_KEYRING_PASSWORD", "RLOO_KIT_SECRET", "CUDA_LICENSE_KEY", "LC_AUTH_COOKIE",
    "SSH_AUTH_SOCK", "MY_OWN_THING",
)  # fmt: skip
ASKED_FOR = "JUDGE_API_KEY"


def look() -> tuple[list[str], list[str]]:
    """The names that a worker sees, and those under which it sees the canary; `JUDGE_API_KEY` was asked for."""
    os.environ |= dict.fromkeys((*SECRETS, ASKED_FOR), CANARY)
    reward = WorkerReward(
        "fault_examples:environment", folders=[Path(__file__).parent], timeout_s=60.0, env=[ASKED_FOR]
    )
    seen: dict[str, list[str]] = {}
    reward(prompts=["p"], completions=["c"], completion_ids=[[1]], log_extra=seen.__setitem__)
    reward.worker.close()
    return seen["names"], [name for name, value in zip(seen["names"], seen["values"], strict=True) if CANARY in value]


if __name__ == "__main__":
    names, found = look()
    print(f"of {len(os.environ)} variables the worker sees {len(names)}: {', '.join(names)}")
    print(f"the canary was set under {len(SECRETS)} names and asked for under {ASKED_FOR}; seen as: {', '.join(found)}")
    sys.exit(found != [ASKED_FOR])
