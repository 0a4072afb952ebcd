"""Steps at full length: they are the run's own at their longest, and leave nothing but changed weights."""

from pathlib import Path
from typing import Any

import pytest

from rloo_kit import load_config, load_policy
from rloo_kit.preflight.trial_steps import load_of, rows_of_a_pass, take_steps

DEMO = Path(__file__).resolve().parents[2] / "configs" / "arithmetic_thinking.yaml"


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_steps_are_taken_in_the_largest_pass(beta: float, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a KL penalty a pass is a whole group; a measurement of single sequences says that it fits. Two steps, for
    the optimizer's state; the adapter "ref" and the gradients are gone afterwards."""
    monkeypatch.setenv("RLOO_KIT_BACKEND", "transformers")
    words = ["data.max_prompt_length=16", "rloo.max_completion_length=112", "model.max_seq_length=128"]
    words += ["rloo.num_generations=4", "rloo.per_device_train_batch_size=8", "rloo.tokens_per_pass=300"]
    run = load_config(DEMO, *words, f"model.name={tiny_folder}", "model.family=auto", f"rloo.beta={beta}")
    policy = load_policy(run, check=False)
    generations, completions = rows_of_a_pass(load_of(run, policy))
    assert (generations, completions) == ((4, 4) if beta else (3, 3))
    backbone = policy.model.get_base_model().model
    plain, tokens = backbone.forward, []

    def counted(*args: Any, **named: Any) -> Any:
        tokens.append((args[0] if args else named["input_ids"]).numel())
        return plain(*args, **named)

    monkeypatch.setattr(backbone, "forward", counted)
    before = {name: value.detach().clone() for name, value in policy.model.named_parameters() if value.requires_grad}
    engines: list[str] = []
    take_steps(policy, run, lambda engine: engines.append(engine.name))
    assert engines == ["native", "native"], "each step is in the place of one with a rollout"
    group = 16 + generations * 112  # the prompt once for all
    assert max(tokens) == (group if beta else 16 + 2 * 112)
    now = dict(policy.model.named_parameters())
    assert any(not now[name].equal(value) for name, value in before.items())
    assert all(value.grad is None for value in now.values())
    assert list(policy.model.peft_config) == ["default"] and not policy.model.training
