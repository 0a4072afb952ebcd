"""What a fresh process loads: set-up has to come before torch, and `--help` has to answer at once."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ["torch", "transformers", "trl", "peft", "datasets", "accelerate", "bitsandbytes", "unsloth"]
HEAVY += ["numpy", "pandas", "pyarrow", "IPython"]
REPORT = f"import json, sys; print('LOADED', json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"


def run_fresh(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=120)


def loaded_after(code: str) -> list[str]:
    done = run_fresh(f"{code}\n{REPORT}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rsplit("LOADED", 1)[1])


def test_light_imports_load_nothing_heavy() -> None:
    """With torch loaded by `import rloo_kit`, setup_environment() would always come too late to set anything."""
    code = """
import rewards, rloo_kit, rloo_kit.think_tags, rloo_kit.cli, rloo_kit.plan.planner
dir(rloo_kit), rloo_kit.load_config, rloo_kit.RlooKitError
rloo_kit.compare, rloo_kit.write_report, rloo_kit.plan_vram, rloo_kit.build_rewards
from rloo_kit.system import environment, doctor, versions
from rloo_kit.config import run, old_names
from rloo_kit.runs import folder
from rloo_kit.health import watch
from rloo_kit.batch import runner
from rloo_kit.notebook import kernel
from rloo_kit.results import report
"""
    assert loaded_after(code) == []


def test_rewards_need_no_installed_package(repository: Path) -> None:
    """-I and -S leave the installed packages out of sight: whatever rewards imports is the standard library."""
    code = f"import sys; sys.path.insert(0, {str(repository)!r}); import rewards; print(rewards.__file__)"
    done = run_fresh(code, "-I", "-S")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(repository / "rewards" / "__init__.py")


@pytest.mark.slow
def test_a_rewards_module_of_the_user_does_not_break_the_kit(tmp_path: Path, repository: Path) -> None:
    """`rewards.py` next to a script shadowed the kit's package; and no worker runs the script again."""
    (tmp_path / "rewards.py").write_text(
        "def brevity(completions, **columns):\n    return [0.5 for _ in completions]\n"
    )
    (tmp_path / "script.py").write_text(
        "import rewards, rloo_kit\n"
        "from rloo_kit.rewards import answer_reward\n"
        "from rloo_kit.rewarding.registry import REGISTRY\n"
        "from rloo_kit.rewarding.worker import WorkerReward\n"
        "import os\n"
        "mine = WorkerReward('rewards:brevity', params={}, folders=[os.getcwd()], timeout_s=60)\n"
        "kits = WorkerReward('rloo_kit.rewards:answer_reward', params={}, folders=[], timeout_s=60)\n"
        "print(mine(completions=['a'], completion_ids=[[1]]), rewards.__file__)\n"
        "print(kits(completions=['a</think>4'], completion_ids=[[1, 151668, 2]], answer=['4']))\n"
    )
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"[0.5] {tmp_path / 'rewards.py'}", "[1.0]"]


def test_a_copied_rewards_folder_works_under_any_name(tmp_path: Path, repository: Path) -> None:
    """People copy the folder; absolute imports inside it would look for the name that it had here."""
    shutil.copytree(repository / "rewards", tmp_path / "their_rewards")
    code = "from their_rewards import thinking_reward; print(thinking_reward.__class__.__module__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "their_rewards.thinking", done.stderr


def test_an_unknown_public_name_says_what_there_is() -> None:
    """A module __getattr__ that returned None for a misspelt name would fail far away."""
    import rloo_kit

    with pytest.raises(AttributeError, match=r"no attribute 'trian'; it offers .*train"):
        rloo_kit.trian  # noqa: B018
