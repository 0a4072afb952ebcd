"""The wheel in an environment without the checkout: what `pip install` gives to somebody who has no clone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REWARDS = """
from rloo_kit.rewards import answer_reward

def brevity(completions, completion_ids, **columns):
    return [1.0 / (1 + len(ids)) for ids in completion_ids]
"""


def run(*command: object, cwd: Path, **variables: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_an_installed_wheel_trains_beside_a_rewards_module_of_the_user(repository: Path, tmp_path: Path) -> None:
    """The user's `rewards.py` shadowed the kit's; a source distribution lost the link rloo_kit/rewards."""
    source = tmp_path / "source"  # what a source distribution holds: the files without the link
    for name in ("rloo_kit", "rewards"):
        shutil.copytree(repository / name, source / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    (source / "rloo_kit" / "rewards").unlink(missing_ok=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, source / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "-q", "--no-deps", "-w", tmp_path / "dist", source, cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    ask = ("-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    libraries, site = (run(one, *ask, cwd=tmp_path).strip() for one in (sys.executable, python))
    # The libraries of this environment without its editable rloo-kit: a .pth inside such a folder is not followed.
    (Path(site) / "libraries.pth").write_text(libraries + "\n", encoding="utf-8")
    wheel = next((tmp_path / "dist").glob("*.whl"))
    run(*pip, "--python", python, "install", "-q", "--no-deps", "--ignore-installed", wheel, cwd=tmp_path)

    work = tmp_path / "work"
    work.mkdir()
    (work / "rewards.py").write_text(REWARDS, encoding="utf-8")
    config = (repository / "configs" / "arithmetic_thinking.yaml").read_text(encoding="utf-8")
    (work / "run.yaml").write_text(config, encoding="utf-8")
    build = "from rloo_kit.demo.embedded import build; print(build(steps=2, report=lambda line: None))"
    model = run(python, "-c", build, cwd=work).strip()
    small = ["rloo.num_generations=2", "rloo.per_device_train_batch_size=4", "rloo.max_completion_length=8"]
    small += ["data.num_prompts=8", "data.test_size=4"]
    rewards = "rewards=[{name: answer_reward}, {name: 'rewards:brevity', weight: 0.1}]"
    command = (python, "-m", "rloo_kit.cli", "train", "run.yaml", f"model.name={model}", "rloo.max_steps=2", rewards)
    printed = run(*command, *small, cwd=work, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    assert "brevity" in printed and list((work / "outputs").glob("*/report.html")), "with its templates"
    where = run(python, "-P", "-c", "import rloo_kit.rewards as r; print(r.__file__)", cwd=work).strip()
    assert Path(where).is_relative_to(tmp_path / "venv"), where
