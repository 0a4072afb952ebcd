"""What Unsloth changes in the config: printed in one line, and set back to what the run says."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.with_unsloth.programs import make_trainer


def stock_class() -> type:
    """TRL's own config, below the one that Unsloth writes."""
    import trl

    return next(cls for cls in reversed(trl.RLOOConfig.__mro__) if cls.__name__ == "RLOOConfig")


def differences(config: Any, expected: Any) -> dict[str, tuple[Any, Any]]:
    """Fields of TRL's config in which two configs differ."""
    pairs = {field.name: (getattr(config, field.name), getattr(expected, field.name)) for field in fields(expected)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@pytest.mark.parametrize(
    "given",
    [{}, {"learning_rate": 5e-5, "num_generations": 8, "optim": "adamw_8bit"}, {"gradient_checkpointing": False}],
    ids=["nothing given", "Unsloth's own values", "no checkpointing"],
)
def test_the_config_is_trls(given: dict[str, Any], unsloth: Any, tmp_path: Path) -> None:
    """Learning rate, group size, batch, optimizer and seed were Unsloth's, whatever TRL's documentation says."""
    import trl

    from rloo_kit import RLOOConfig

    named = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False} | given
    expected = stock_class()(**named)
    found = differences(RLOOConfig(**named), expected)
    assert set(found) <= {"gradient_checkpointing_kwargs"}, found  # reentrant, unless another form is asked for
    unsloths = differences(trl.RLOOConfig(**named), expected)
    assert {"seed", "weight_decay"} <= set(unsloths), "there is nothing to set back any more"


def test_the_reentrant_form_gives_way_where_another_is_asked_for(unsloth: Any, tmp_path: Path) -> None:
    """`use_reentrant: false` in a file was turned into true without a word."""
    import trl

    from rloo_kit import RLOOConfig

    named: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    for cls, expected in ((trl.RLOOConfig, True), (RLOOConfig, False)):
        config = cls(**named, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
        assert config.gradient_checkpointing_kwargs == {"use_reentrant": expected}


def test_the_constructor_of_the_trainer(load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It set `bf16_full_eval`, which casts the float32 adapter in place, and turned `use_vllm` on, which merges."""
    from rloo_kit import RLOOConfig

    policy = load()
    policy.model.vllm_engine = policy.model.get_base_model().vllm_engine = object()
    named = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": True, "beta": 0.0, "reward_weights": [1.0]}
    named |= policy.config_arguments | {"rollout_engine": "generate"}
    expected = stock_class()(**{name: value for name, value in named.items() if name != "rollout_engine"})
    capsys.readouterr()
    trainer = make_trainer(policy, RLOOConfig(**named), ["ab", "h"])
    assert differences(trainer.args, expected) == {} and policy.tokenizer.padding_side == "left"
    assert not trainer.use_vllm and hasattr(policy.model, "vllm_engine")
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("kept settings that Unsloth would change: ")]
    assert len(lines) == 1
    for message in ("bf16_full_eval False (Unsloth: True)", "padding_side left (Unsloth: right)"):
        assert message in lines[0], lines[0]


def test_a_model_that_is_not_what_was_asked_for(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Without bfloat16 Unsloth loads float16, and what it cannot quantise plain; both in a banner that is not read."""
    load()
    assert "differently than requested" not in capsys.readouterr().out
    load("model.dtype=bfloat16", "model.load_in_4bit=true")
    expected = "model.dtype bfloat16 (Unsloth: float16), model.load_in_4bit True (Unsloth: False)"
    assert f"Unsloth loaded the model differently than requested: {expected}\n" in capsys.readouterr().out
