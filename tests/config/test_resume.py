"""What a run may change when it is resumed, by its configuration alone."""

import re
from pathlib import Path

import pytest

from rloo_kit.config.run import load_config, refuse_changes
from rloo_kit.errors import ConfigError

DEMO = Path(__file__).resolve().parents[2] / "configs" / "arithmetic_thinking.yaml"
VLLM = ["gpu_memory_utilization=0.5", "float8_kv_cache=true", "enforce_eager=true"]
MAY = ["rollout.engine=vllm", "rloo.memory=low", "rloo.max_steps=9999", "sft.max_steps=5", "health.stop=[no_signal]"]
MAY += ["rloo.save_steps=1", "run.name=other"]


def test_what_may_change_and_what_may_not(tmp_path: Path) -> None:
    """A run that died because vLLM took too much has to be resumed with less; `sft:` is over before a run begins."""
    before = load_config(DEMO).to_yaml()
    refuse_changes(before, load_config(DEMO, *MAY, *(f"rollout.vllm.{word}" for word in VLLM)).to_yaml(), tmp_path)
    words = ("rollout.difficulty_samples=2", "rloo.beta=0.5", "rloo.max_steps=1", "run.seed=5")
    with pytest.raises(ConfigError) as caught:
        refuse_changes(before, load_config(DEMO, *words).to_yaml(), tmp_path)
    for key, value in (word.split("=") for word in words):
        assert re.search(rf"{key}: .* then, {value} now", str(caught.value))


def test_a_run_from_before_a_key(tmp_path: Path) -> None:
    """A saved file without a key that is newer has that key's default."""
    now = load_config(DEMO).to_yaml()
    for older in (
        now.replace(now[now.index("  vllm:") : now.index("  difficulty_samples")], ""),
        now[: now.index("sft:")] + now[now.index("health:") :],
    ):
        assert older != now
        refuse_changes(older, now, tmp_path)
    with pytest.raises(ConfigError, match=r"model.lora.target_modules"):
        refuse_changes(now.replace("target_modules: null", "target_modules: [q_proj]"), now, tmp_path)
