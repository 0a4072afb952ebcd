"""What a run may change when it is resumed, by its configuration alone."""

from pathlib import Path

import pytest

from rloo_kit.config.run import load_config, refuse_changes
from rloo_kit.errors import ConfigError

DEMO = Path(__file__).resolve().parents[2] / "configs" / "arithmetic_thinking.yaml"
VLLM = ["gpu_memory_utilization=0.5", "float8_kv_cache=true", "max_num_seqs=4", "enforce_eager=true"]
MAY = ["rollout.engine=vllm", "rloo.memory=low", "rloo.max_steps=9999", "sft.max_steps=5", "health.no_signal=stop"]
MAY += ["rloo.save_steps=1", "run.name=other"]


@pytest.mark.parametrize("word", [*MAY, *(f"rollout.vllm.{word}" for word in VLLM)])
def test_what_trains_the_same_may_change(word: str, tmp_path: Path) -> None:
    """A run that died because vLLM took too much has to be resumed with less; `sft:` is over before a run begins."""
    refuse_changes(load_config(DEMO).to_yaml(), load_config(DEMO, word).to_yaml(), tmp_path)


@pytest.mark.parametrize("word", ["rollout.resample_rounds=2", "rloo.beta=0.5", "rloo.max_steps=1", "run.seed=5"])
def test_what_would_train_differently_may_not(word: str, tmp_path: Path) -> None:
    """The exceptions must not have become the rule."""
    key, _, value = word.partition("=")
    with pytest.raises(ConfigError, match=rf"{key}: .* then, {value} now"):
        refuse_changes(load_config(DEMO).to_yaml(), load_config(DEMO, word).to_yaml(), tmp_path)


def test_a_run_from_before_a_key_or_its_default(tmp_path: Path) -> None:
    """Every older run's file lacks sections, has `rollout.cache`, and Qwen3's seven names, which the default finds."""
    now = load_config(DEMO).to_yaml()
    names = "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]"
    plain = now.replace("  resample_rounds", "  cache: plain\n  resample_rounds")
    for older in (
        now.replace(now[now.index("  vllm:") : now.index("  resample_rounds")], ""),
        now[: now.index("sft:")] + now[now.index("health:") :],
        now.replace("target_modules: null", f"target_modules: {names}"),
        plain,
    ):
        assert older != now
        refuse_changes(older, now, tmp_path)
    with pytest.raises(ConfigError, match=r"model.lora.target_modules"):
        refuse_changes(now.replace("target_modules: null", "target_modules: [q_proj]"), now, tmp_path)
    with pytest.raises(ConfigError, match="rollout.cache: 'int8' then"):
        refuse_changes(plain.replace("cache: plain", "cache: int8"), now, tmp_path)
    file = tmp_path / "older.yaml"
    file.write_text(plain)
    with pytest.warns(FutureWarning, match="rollout.cache was removed"):
        assert load_config(file).to_yaml() == now
    file.write_text(plain.replace("cache: plain", "cache: int8"))
    with pytest.raises(ConfigError, match="rollout.cache is 'int8'.*removed"):
        load_config(file)
