"""Our settings of GRPO's family against the real `trl.GRPOTrainer`: advantages, loss and LoRA gradients.

Its Triton kernel has the stand-in of `test_equality_with_stock`; its trainer, its padding and its loss are its own.
"""

import pytest
import torch

from rloo_kit.config.methods import METHODS
from rloo_kit.loop.options import RLOOConfig
from rloo_kit.loop.trainer import RLOOTrainer
from tests.loop.test_equality_with_stock import (
    RELATIVE,
    _batch_loss_gradients,
    _lora,
    _make,
    _relative,
    reward_by_length,
    reward_unless_72,
    stock_head,  # noqa: F401
)

# By case: the method's name, what TRL is asked for, what both are asked for.
CASES = {
    "grpo": ("GRPO", {"loss_type": "grpo"}, {}),
    "dr_grpo": ("Dr. GRPO", {"loss_type": "dr_grpo", "scale_rewards": "none"}, {}),
    "dapo": ("DAPO", {"loss_type": "dapo"}, {}),
    "gspo": ("GSPO", {"loss_type": "grpo", "importance_sampling_level": "sequence"}, {}),
    "grpo, truncated masked": ("GRPO", {"loss_type": "grpo"}, {"mask_truncated_completions": True}),
    "dapo, truncated masked": ("DAPO", {"loss_type": "dapo"}, {"mask_truncated_completions": True}),
    "grpo, off-policy": ("GRPO", {"loss_type": "grpo"}, {"num_iterations": 2, "epsilon": 0.05}),
    "dapo, off-policy": ("DAPO", {"loss_type": "dapo"}, {"num_iterations": 2}),
    "dr_grpo, off-policy": ("Dr. GRPO", {"loss_type": "dr_grpo", "scale_rewards": "none"}, {"num_iterations": 2}),
}
LONGEST = 6  # max_completion_length, by which TRL's dr_grpo divides where ours has the sum of a completion


@pytest.mark.parametrize("reward", [reward_by_length, reward_unless_72])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_trls_grpo(case, reward, stock_head, make_tiny_model, tiny_tokenizer, tmp_path):  # noqa: F811
    """Who sets the keys of GRPO expects the numbers of TRL's GRPO, deviation, epsilon and divisor included."""
    import trl

    method, theirs, options = CASES[case]
    bounds = {name: value for name, value in METHODS[method].items() if name.startswith("epsilon")} | options
    ours = METHODS[method] | bounds
    results = []
    for trainer_class, config_class, more in (
        (trl.GRPOTrainer, trl.GRPOConfig, theirs | bounds), (RLOOTrainer, RLOOConfig, ours)
    ):  # fmt: skip
        model = _lora(make_tiny_model())
        trainer = _make(trainer_class, config_class, model, tiny_tokenizer, tmp_path, [reward], beta=0.0, **more)
        if trainer_class is trl.GRPOTrainer:
            trainer.current_gradient_accumulation_steps = 1
            canned = trainer._generate_single_turn
            trainer._generate_single_turn = lambda prompt_ids, *_, canned=canned: (canned(prompt_ids), None)
        results.append(_batch_loss_gradients(trainer, drift=0.1 if "num_iterations" in options else None))
    (their_advantages, their_loss, their_gradients), (advantages, loss, gradients) = results
    assert their_advantages.abs().max() > 0.05, "the case carries no signal"
    assert _relative(advantages, their_advantages) < RELATIVE
    scale = LONGEST if theirs["loss_type"] == "dr_grpo" else 1.0
    assert abs(loss - scale * their_loss) <= RELATIVE * max(1.0, abs(their_loss))
    assert gradients and gradients.keys() == their_gradients.keys()
    together = [torch.cat([grads[name].flatten() for name in sorted(grads)]) for grads in (gradients, their_gradients)]
    assert together[1].norm() > 1e-4, "the case has no gradient"
    assert _relative(together[0], scale * together[1]) < RELATIVE
