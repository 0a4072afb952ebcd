"""What a run may change when it is resumed, by its configuration alone."""

from pathlib import Path

import pytest

from rloo_kit.config.run import load_config, refuse_changes
from rloo_kit.errors import ConfigError

DEMO = Path(__file__).resolve().parents[2] / "configs" / "arithmetic_thinking.yaml"
VLLM = ["gpu_memory_utilization=0.5", "float8_kv_cache=true", "max_num_seqs=4", "enforce_eager=true"]


@pytest.mark.parametrize("word", ["rollout.engine=vllm", *(f"rollout.vllm.{word}" for word in VLLM)])
def test_how_vllm_divides_the_gpu_may_change(word: str, tmp_path: Path) -> None:
    """A run that died because vLLM took too much has to be resumed with less; what is trained stays the same."""
    then = load_config(DEMO).to_yaml()
    refuse_changes(then, load_config(DEMO, word).to_yaml(), tmp_path)
    older = then.replace(then[then.index("  vllm:") : then.index("  resample_rounds")], "")
    assert "gpu_memory_utilization" not in older, "a run from before these keys"
    refuse_changes(older, load_config(DEMO, word).to_yaml(), tmp_path)


def test_what_would_train_differently_may_not(tmp_path: Path) -> None:
    """The exceptions must not have become the rule."""
    with pytest.raises(ConfigError, match=r"rollout.resample_rounds: 0 then, 2 now"):
        refuse_changes(load_config(DEMO).to_yaml(), load_config(DEMO, "rollout.resample_rounds=2").to_yaml(), tmp_path)


def test_a_run_from_before_its_cache_went(tmp_path: Path) -> None:
    """Every older run's file has `rollout.cache`: plain loads and resumes, another one is refused by its name."""
    now = load_config(DEMO).to_yaml()
    older = now.replace("  resample_rounds", "  cache: plain\n  resample_rounds")
    refuse_changes(older, now, tmp_path)
    file = tmp_path / "older.yaml"
    file.write_text(older)
    with pytest.warns(FutureWarning, match="rollout.cache was removed"):
        assert load_config(file).to_yaml() == now
    eight_bit = older.replace("cache: plain", "cache: int8")
    with pytest.raises(ConfigError, match="rollout.cache: 'int8' then"):
        refuse_changes(eight_bit, now, tmp_path)
    file.write_text(eight_bit)
    with pytest.raises(ConfigError, match="rollout.cache is 'int8'.*removed"):
        load_config(file)


def test_a_run_from_before_all_linear_layers_were_the_default(tmp_path: Path) -> None:
    """Every older run's file has Qwen3's seven names, which the default now finds; other names stay other names."""
    now = load_config(DEMO).to_yaml()
    names = "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]"
    older = now.replace("target_modules: null", f"target_modules: {names}")
    assert older != now
    refuse_changes(older, now, tmp_path)
    with pytest.raises(ConfigError, match=r"model.lora.target_modules"):
        refuse_changes(now.replace("target_modules: null", "target_modules: [q_proj]"), now, tmp_path)


def test_worked_answers_may_change_and_older_runs_have_none(tmp_path: Path) -> None:
    """`sft:` is over before a run begins: another one of it, or a run from before the section, resumes."""
    then = load_config(DEMO).to_yaml()
    refuse_changes(then, load_config(DEMO, "sft.max_steps=5", "sft.learning_rate=1e-3").to_yaml(), tmp_path)
    older = then[: then.index("sft:")] + then[then.index("health:") :]
    refuse_changes(older, then, tmp_path)
