"""The logged loss and the gradient of real training steps, against plain torch that shares nothing with the kit."""

from typing import Any

import pytest
import torch
from transformers import TrainerCallback

ENDS = (256, 258)
COMPLETIONS = [
    [72, 260, 70, 258], [72, 73, 74, 75, 76, 77], [260, 258], [65, 66, 67, 260, 68, 70],
    [90, 258], [91, 92, 93], [94, 95, 96, 97, 98, 258], [99, 260, 258],
]  # fmt: skip


def by_ids(completion_ids, **_):
    """Different for each completion, so that those that are cut off differ from the mean of the others."""
    return [sum(ids) % 17 / 17 - (ids[-1] not in ENDS) for ids in completion_ids]


def by_ids_or_nothing(completion_ids, **_):
    """None for three completions, one of them cut off."""
    return [
        None if ids[0] in (72, 94) else value for ids, value in zip(completion_ids, by_ids(completion_ids), strict=True)
    ]


def first_group_only(completion_ids, **_):
    """The second group earns the same: its advantages are 0, and its rows are skipped."""
    values = by_ids(completion_ids)
    return [value if place < 4 else 0.5 for place, value in enumerate(values)]


def leave_one_out(rewards: list[float | None], size: int = 4) -> list[float]:
    advantages = []
    for place, own in enumerate(rewards):
        group = [one for one in rewards[place // size * size :][:size] if one is not None]
        advantages.append(0.0 if own is None else own - (sum(group) - own) / (len(group) - 1))
    return advantages


def row_logps(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


class Reference(TrainerCallback):
    """Before each optimizer step, the loss and its gradient at the step's weights. `masked`: leave out completions that
    were cut off; `token_mean`: as in the options, with a ratio per token."""

    def __init__(self, trainer: Any, reward: Any, masked: bool, token_mean: str | None):
        self.trainer, self.masked, self.token_mean, self.old = trainer, masked, token_mean, None
        self.advantages = leave_one_out(reward(completion_ids=COMPLETIONS))
        self.trained = [one for one in trainer.model.parameters() if one.requires_grad]
        self.losses, self.gaps, self.norms = [], [], []

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        sampled = self.trainer._window.prompts  # of this rollout: the sampler decides which
        rows = [row_logps(self.trainer.model, ids.tolist(), own) for ids, own in zip(sampled, COMPLETIONS, strict=True)]
        if self.old is None:
            self.old = [row.detach() for row in rows]
        terms, tokens = [], 0
        for row, old, advantage, ids in zip(rows, self.old, self.advantages, COMPLETIONS, strict=True):
            if self.masked and ids[-1] not in ENDS:
                terms.append(torch.zeros(()))  # left out: its ratio is not 1, it has none
                continue
            tokens += len(ids)
            log_ratio = row - old if self.token_mean else (row - old).sum()[None]
            ratio = log_ratio.exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
            terms.append(-gain / (len(ids) if self.token_mean == "completion" else 1))
        loss = sum(terms) / (tokens if self.token_mean == "batch" else len(terms))
        expected = torch.cat([one.flatten() for one in torch.autograd.grad(loss, self.trained)])
        found = torch.cat([one.grad.flatten() for one in self.trained])
        self.losses.append(loss.item())
        self.norms.append(expected.norm().item())
        self.gaps.append((found - expected).norm().item() / expected.norm().item())


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "nothing masked": (by_ids, {"mask_truncated_completions": False}),
    "masked": (by_ids, {}),
    "accumulated": (by_ids, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
    "pass by pass": (by_ids, {"memory": "low"}),
    "two epochs over a rollout": (by_ids, {"num_iterations": 2, "max_steps": 2}),
    "a tied group": (first_group_only, {}),
    "a tied group, accumulated": (
        first_group_only,
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 2},
    ),
    "unscored": (by_ids_or_nothing, {}),
    "per token": (by_ids, {"ratio_form": "per_token"}),
    "mean over the completion": (by_ids, {"token_mean": "completion"}),
    "mean over the step's tokens": (by_ids, {"token_mean": "batch", "per_device_train_batch_size": 4,
                                             "gradient_accumulation_steps": 2}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_logged_loss_is_the_one_whose_gradient_is_taken(case, make_trainer):
    """Under a truncation mask the logged loss was not an independent reference's, although the gradients agreed. The
    reference kept a masked completion with a ratio of 1 (as TRL does), which adds minus its advantage: a number that no
    weight changes. Left out of the loss means a term of 0, and the mean is over all completions all the same."""
    reward, options = CASES[case]
    settings = {
        "mask_truncated_completions": True, "per_device_train_batch_size": 8, "max_completion_length": 6, "beta": 0.0,
        "max_steps": 1, "max_grad_norm": 0.0, "learning_rate": 0.03, "temperature": 1.0,
    } | options  # fmt: skip
    trainer = make_trainer([reward], COMPLETIONS, **settings)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    form = "none" if options.get("ratio_form") else options.get("token_mean")
    reference = Reference(trainer, reward, settings["mask_truncated_completions"], form)
    trainer.add_callback(reference)
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert len(logs) == len(reference.losses) == settings["max_steps"]
    for row, expected, gap, norm in zip(logs, reference.losses, reference.gaps, reference.norms, strict=True):
        assert norm > 1e-3 and gap < 1e-4, (norm, gap)
        assert row["loss"] == pytest.approx(expected, abs=1e-6)
        assert row["loss/policy_avg"] == pytest.approx(expected, abs=1e-6)
    if settings["mask_truncated_completions"]:
        assert abs(reference.losses[0]) > 0.01, (
            "the masked completions' advantages are missing from the sum, which is 0"
        )
