"""The section `sft:`: there in every run, with a learning rate that follows what is trained."""

from pathlib import Path

import pytest

from rloo_kit.config.run import load_config
from rloo_kit.config.sft import FULL_SFT_RATE, LORA_SFT_RATE
from rloo_kit.errors import ConfigError

DEMO = Path(__file__).resolve().parents[2] / "configs" / "arithmetic_thinking.yaml"


def test_every_run_has_it_with_defaults() -> None:
    """A file from before the section resolves, and its resolved file loads back."""
    run = load_config(DEMO)
    assert (run.sft.source, run.sft.completion_column, run.sft.learning_rate) == (None, "completion", LORA_SFT_RATE)
    assert load_config(DEMO, "model.lora=null").sft.learning_rate == FULL_SFT_RATE
    assert load_config(DEMO, "model.lora=null", "sft.learning_rate=1e-3").sft.learning_rate == 1e-3
    assert load_config(DEMO, "model.lora=null", "sft.max_steps=3").sft.learning_rate == FULL_SFT_RATE
    assert not run.sft.to_arguments(), "no key of it is one of RLOOConfig's"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sft.max_step=3", "sft.max_step.*max_steps"),
        ("sft.max_steps=0", "sft.max_steps.*1"),
        ("sft.learning_rate=0", "sft.learning_rate"),
        ("sft.thinking_column=completion", "sft.thinking_column=null"),
        ("sft=null", "sft"),
    ],
)
def test_wrong_keys(override: str, message: str) -> None:
    """An error that does not name the key is searched for in the file."""
    with pytest.raises(ConfigError, match=message):
        load_config(DEMO, override)
