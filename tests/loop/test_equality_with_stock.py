"""Our trainer against TRL's own, on the same prompts, completions and rewards: one step, and whole runs of a few steps.

Stock TRL scores through a Triton kernel that needs an accelerator. Inside these tests it gets a pure-torch stand-in
for that kernel and nothing else; its trainers, their padding and their loss are their own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Cohere2Config, Cohere2ForCausalLM

from rloo_kit.config.checks import METHODS
from rloo_kit.loop.options import RLOOConfig
from rloo_kit.loop.trainer import RLOOTrainer
from tests.loop.conftest import SIZES, TWO_GROUPS, by_ids, by_length, mixture, unless_72, with_adapter

RELATIVE = 1e-5
LONGEST = 6  # max_completion_length, by which TRL's dr_grpo divides where ours has the sum of a completion
MASKED = torch.tensor([ids[-1] not in (256, 258) for ids in TWO_GROUPS])
CUT = [[70, 71, 72, 73, 74, 75], [71, 72, 73, 74, 75, 76], [77, 71, 72, 73, 74, 75], [75, 74, 73, 72, 71, 70]]
DEFAULTS = {
    "per_device_train_batch_size": 8, "num_generations": 4, "gradient_checkpointing": False, "shuffle_dataset": False,
    "learning_rate": 1e-2,
}  # fmt: skip
CLOCKS = ("step_time", "runtime", "per_second")


def _torch_head(hidden, weight, bias, labels, temperature, _chunk, _softcap, scale, outputs):
    """The contract of TRL's fused head in plain torch: log-probabilities, and the entropy without a gradient."""
    logits = (torch.nn.functional.linear(hidden, weight, bias) * scale / temperature).float()
    logps = logits.log_softmax(dim=-1)
    entropy = -(logps.exp() * logps).sum(dim=-1).detach() if "entropy" in outputs else None
    return logps.gather(1, labels[:, None]).squeeze(1), entropy, None, None, None


@pytest.fixture(autouse=True)
def stock_head(monkeypatch):
    from trl.trainer import utils

    class StandIn:
        apply = staticmethod(_torch_head)

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", StandIn)


def sometimes(completion_ids, **_):
    """None where the first id is odd: the term is dropped there."""
    return [None if ids[0] % 2 else 0.25 for ids in completion_ids]


def as_tensor(completion_ids, **_):
    return torch.tensor(by_ids(completion_ids))


def even(completion_ids, kind, **_):
    """With `odd`: rewards of two tasks in one dataset."""
    return [value if k == "even" else None for value, k in zip(by_ids(completion_ids), kind, strict=True)]


def odd(completion_ids, kind, **_):
    return [value if k == "odd" else None for value, k in zip(by_length(completion_ids), kind, strict=True)]


def _scaled():
    torch.manual_seed(0)
    return Cohere2ForCausalLM(Cohere2Config(**SIZES, sliding_window=8, logit_scale=4.0))


def _sides(name="RLOO"):
    """TRL's trainer and ours, each with its config."""
    import trl

    return (getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")), (RLOOTrainer, RLOOConfig)


def _make(sides, model, tokenizer, folder, rewards, completions=TWO_GROUPS, data=None, arguments=None, **options):
    trainer_class, config_class = sides
    config = config_class(
        output_dir=str(folder / trainer_class.__module__), use_cpu=True, bf16=False, report_to="none",
        disable_tqdm=True, max_completion_length=LONGEST, **DEFAULTS | options,
    )  # fmt: skip
    prompts = ["What is 1+1?", "Hi", "A much longer prompt than the others", "x"]
    trainer = trainer_class(
        model=model,
        reward_funcs=list(rewards),
        args=config,
        train_dataset=data or Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        **arguments or {},
    )
    canned = lambda ids, *_: [list(completions[row % len(completions)]) for row in range(len(ids))]  # noqa: E731
    is_grpo = trainer_class.__name__ == "GRPOTrainer"
    trainer._generate_single_turn = (lambda ids, *_: (canned(ids), None)) if is_grpo else canned
    return trainer


def _batch_loss_gradients(trainer, drift=None):
    inputs = [trainer.train_dataset[row] for row in (0, 2) for _ in range(4)]
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    if isinstance(trainer, RLOOTrainer):
        batch = {"rollout": trainer.rloo.roll_out(trainer.model, inputs)}
        advantages = batch["rollout"].advantages.trained
    else:
        batch = trainer._generate_and_score_completions(inputs)
        advantages = batch["advantages"]
    if drift:
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if "lora_B.default" in name:
                    parameter.add_(drift * torch.sin(torch.arange(parameter.numel()).view_as(parameter) * 1.7))
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None and ".ref." not in name
    }
    return advantages, loss.detach(), gradients


def _relative(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1e-12)).item()


# ------------------------------------------------------------------------------------------------------------ one step


@dataclass(frozen=True)
class Step:
    """A step whose advantages, loss and gradients have to be TRL's.

    Attributes:
        options: of both configs. theirs, ours: of one of them.
        rewards: the reward functions. model: makes a model of which all weights are trained; None: an adapter that has
            left its reference. trainer: TRL's. drift: how far the adapter moves between the rollout and the loss.
        layout: of our rows. scale: of TRL's loss, where ours is another multiple of it.
    """

    options: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    rewards: tuple[Callable[..., Any], ...] = (by_length,)
    model: Callable[[], Any] | None = None
    trainer: str = "RLOO"
    drift: float | None = None
    layout: str | None = None
    scale: float = 1.0


def _grpo(method, theirs, **options):
    """Our settings of one of GRPO's family, with the bounds of both."""
    bounds = {name: value for name, value in METHODS[method].items() if name.startswith("epsilon")} | options
    scale = LONGEST if theirs["loss_type"] == "dr_grpo" else 1.0
    drift = 0.1 if "num_iterations" in options else None
    ours = {name: value for name, value in METHODS[method].items() if name not in bounds}
    return {"options": {"beta": 0.0} | bounds, "theirs": theirs, "ours": ours} | {
        "trainer": "GRPO", "drift": drift, "scale": scale,
    }  # fmt: skip


DR_GRPO = {"loss_type": "dr_grpo", "scale_rewards": "none"}
GRPO = {
    "grpo": _grpo("GRPO", {"loss_type": "grpo"}),
    "dr_grpo": _grpo("Dr. GRPO", DR_GRPO),
    "dapo": _grpo("DAPO", {"loss_type": "dapo"}),
    "gspo": _grpo("GSPO", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "grpo, truncated masked": _grpo("GRPO", {"loss_type": "grpo"}, mask_truncated_completions=True),
    "dapo, truncated masked": _grpo("DAPO", {"loss_type": "dapo"}, mask_truncated_completions=True),
    "grpo, off-policy": _grpo("GRPO", {"loss_type": "grpo"}, num_iterations=2, epsilon=0.05),
    "dapo, off-policy": _grpo("DAPO", {"loss_type": "dapo"}, num_iterations=2),
    "dr_grpo, off-policy": _grpo("Dr. GRPO", DR_GRPO, num_iterations=2),
}
UNSCORED = ("grpo", "dr_grpo", "gspo", "dapo, truncated masked", "dapo, off-policy")
NO_KL = {"beta": 0.0}
STEPS = {
    "plain": Step(),
    "no KL": Step(NO_KL),
    "weights and None": Step({"reward_weights": [0.5, 2.0]}, rewards=(by_length, sometimes)),
    "unscored samples": Step(rewards=(unless_72,)),
    "clipped rewards": Step({"reward_clip_range": (-0.2, 0.6)}),
    "normalised advantages": Step({"normalize_advantages": True}),
    "truncated masked": Step({"mask_truncated_completions": True}),
    "temperature": Step({"temperature": 0.7}),
    "off-policy": Step({"num_iterations": 2, "epsilon": 0.05, "epsilon_high": 0.1}, drift=0.2),
    "mixture": Step(NO_KL, model=mixture),
    "mixture, its own coefficient": Step(NO_KL | {"router_aux_loss_coef": 0.1, "temperature": 0.7}, model=mixture),
    "mixture without": Step(NO_KL | {"router_aux_loss_coef": 0.0}, model=mixture),
    "mixture, truncated masked": Step(NO_KL | {"mask_truncated_completions": True}, model=mixture),
    "mixture, checkpointed": Step(NO_KL | {"gradient_checkpointing": True}, model=mixture),
    "mixture, padded": Step(NO_KL, model=mixture, layout="padded"),
    "scaled logits": Step(NO_KL, model=_scaled),
    **{name: Step(**case) for name, case in GRPO.items()},
    **{f"{name}, some unscored": Step(**GRPO[name], rewards=(unless_72,)) for name in UNSCORED},
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_trls(name, make_tiny_model, tiny_tokenizer, tmp_path):
    """A subclass that drifts would train something else; keys of GRPO have the numbers of TRL's GRPO."""
    case, results = STEPS[name], []
    for sides, own in zip(_sides(case.trainer), (case.theirs, case.ours), strict=True):
        model = case.model() if case.model else with_adapter(make_tiny_model())
        trainer = _make(sides, model, tiny_tokenizer, tmp_path, case.rewards, **case.options | own)
        # the adapter is not fresh, so both take its starting copy as the reference; move the policy away from it
        with torch.no_grad():
            for parameter_name, parameter in trainer.model.named_parameters():
                if "lora_A.default" in parameter_name:
                    parameter.mul_(1.5)
        if case.layout and sides[0] is RLOOTrainer:
            trainer.rloo.scorer.scorer.layout = case.layout
        results.append((*_batch_loss_gradients(trainer, case.drift), trainer._metrics["train"].get("aux_loss")))
    (their_advantages, their_loss, their_gradients, their_aux), (advantages, loss, gradients, aux) = results
    assert their_advantages.abs().max() > 0.05, "the case carries no signal"
    assert _relative(advantages, their_advantages) < RELATIVE
    if case.options.get("mask_truncated_completions") and case.trainer == "RLOO":
        # A masked completion has a ratio of 1 at any weights, so TRL adds minus its advantage: a number without a
        # gradient. Here, left out of the loss, its term is 0.
        assert MASKED.sum() == 2 and advantages[MASKED].sum().abs() > 0.05, "else the two losses are equal"
        their_loss = their_loss + their_advantages[MASKED].sum() / len(TWO_GROUPS)
    assert abs(loss - case.scale * their_loss) <= RELATIVE * max(1.0, abs(their_loss))
    assert (aux is None) == (their_aux is None) == (case.model is not mixture or name == "mixture without")
    if name == "plain":  # two passes over one policy differ by rounding; summed over a thought it leaves the range
        metrics = trainer._metrics["train"]
        names = ("val/ratio", "val/ratio_var", "clip_ratio/region_mean")
        assert [metrics[key] for key in names] == [[1.0], [0.0], [0.0]]
        assert loss.item() == pytest.approx(-advantages.mean().item(), abs=1e-6)
    if aux is not None:
        assert aux == pytest.approx(their_aux, rel=1e-5) and aux[0] > 1
    assert gradients and gradients.keys() == their_gradients.keys()
    for parameter_name, gradient in gradients.items() if case.model else ():
        assert _relative(gradient, their_gradients[parameter_name]) < 1e-4 or gradient.norm() < 1e-6, parameter_name
    together = [torch.cat([grads[key].flatten() for key in sorted(grads)]) for grads in (gradients, their_gradients)]
    assert together[1].norm() > (1e-4 if case.trainer == "GRPO" else 1e-3), "the case has no gradient"
    assert _relative(together[0], case.scale * together[1]) < RELATIVE


# ---------------------------------------------------------------------------------------------------------- whole runs


@dataclass(frozen=True)
class Run:
    """A run whose prompts, logs and trained weights have to be TRL's.

    Attributes:
        options: of both configs. rewards: the reward functions. prompts: their number.
        completions: one a row, again from the first. why: what went wrong, or would. but: figures that differ.
    """

    why: str
    options: dict[str, Any] = field(default_factory=dict)
    rewards: tuple[Callable[..., Any], ...] = (by_ids,)
    prompts: int = 6
    completions: list[list[int]] = field(default_factory=lambda: TWO_GROUPS[:4])
    but: tuple[str, ...] = ()


THREE_UPDATES = {"num_iterations": 3, "max_steps": 3}
FOUR_SLICES = {
    "gradient_accumulation_steps": 3, "steps_per_generation": 4, "per_device_train_batch_size": 6, "num_iterations": 2,
    "num_train_epochs": 3, "max_steps": -1,
}  # fmt: skip
FOLLOWS = {"beta": 0.3, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5, "max_steps": 4}
RUNS = {
    "plain": Run("every parameter of a model that is named by its folder"),
    "KL": Run("a reference that is read from that folder", {"beta": 0.3, "max_steps": 3}),
    "a reference that follows": Run("moved every other step, half of the way, and in no other step", FOLLOWS),
    "weights": Run("a sum without the weights in the log", {"reward_weights": [0.7, 0.3]}, (by_ids, by_length)),
    "two tasks": Run("one task's reward moves the other's baseline", {"per_device_train_batch_size": 8}, (even, odd)),
    "a tensor": Run("a reward that computes with torch hands back a tensor", rewards=(as_tensor,)),
    "reused": Run("the second use of a rollout is off-policy", {"num_iterations": 2, "max_steps": 4}),
    "the upper bound": Run("read as the lower one", THREE_UPDATES | {"epsilon": 0.999, "epsilon_high": 1e-6}),
    "truncated masked": Run(
        "cut-off thoughts are trained on", {"mask_truncated_completions": True, "beta": 0.1}, but=("loss",)
    ),
    "all truncated": Run(
        "weights that drift on noise", {"mask_truncated_completions": True}, completions=CUT, but=("loss", "entropy")
    ),
    "a group over micro-batches": Run(
        "half a group's baseline",
        {"per_device_train_batch_size": 2, "num_generations": 8, "gradient_accumulation_steps": 4},
    ),
    "epochs": Run("a prompt seen twice in a pass", {"num_train_epochs": 2, "max_steps": -1, "shuffle_dataset": True}),
    "four micro-steps a rollout, three a step": Run(
        "prompts given unequally often", FOUR_SLICES, prompts=17, but=("clip_ratio", "entropy")
    ),
    "every second step logged": Run("a step logged twice", {"logging_steps": 2, "max_steps": 3}),
    "an optimizer of one's own": Run("replaced by AdamW at another rate", {"learning_rate": 0.0}),
    "frozen embeddings": Run("weights that were frozen on purpose"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_trls(name, tiny_folder, tiny_tokenizer, tmp_path):
    """Only the import changes: prompts in the same order, the same figures and the same weights in the end."""
    case, found = RUNS[name], []
    kinds = ["even" if number % 2 == 0 else "odd" for number in range(case.prompts)]
    data = Dataset.from_dict({"prompt": [f"{number}+1=" for number in range(case.prompts)], "kind": kinds})
    settings = {
        "save_strategy": "no", "logging_steps": 1, "learning_rate": 0.5, "lr_scheduler_type": "constant",
        "optim": "sgd", "max_steps": 2, "beta": 0.0, "per_device_train_batch_size": 4,
    } | case.options  # fmt: skip
    for sides in _sides():
        seen, model, arguments = [], str(tiny_folder), {}

        def watch(prompts, seen=seen, **_):
            seen.extend(prompts)
            return [0.0] * len(prompts)

        if name in ("an optimizer of one's own", "frozen embeddings"):
            model = AutoModelForCausalLM.from_pretrained(tiny_folder)
            model.get_input_embeddings().requires_grad_(name != "frozen embeddings")
        if name == "an optimizer of one's own":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            halving = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            arguments = {"optimizers": (optimizer, halving)}
        weights = {"reward_weights": [*settings["reward_weights"], 0.0]} if "reward_weights" in settings else {}
        trainer = _make(
            sides, model, tiny_tokenizer, tmp_path, (*case.rewards, watch), case.completions, data, arguments,
            **settings | weights,
        )  # fmt: skip
        before = {key: value.detach().clone() for key, value in trainer.model.named_parameters()}
        trainer.train()
        after = {key: value.detach() for key, value in trainer.model.named_parameters()}
        found.append((seen, trainer.state.log_history, before, after))
    (their_prompts, their_logs, before, theirs), (prompts, logs, _, ours) = found
    assert prompts == their_prompts and len(logs) == len(their_logs) > 1
    for row, their_row in zip(logs, their_logs, strict=True):
        for key in [key for key in their_row if not any(part in key for part in (*CLOCKS, *case.but))]:
            expected = their_row[key]
            assert row[key] == (None if expected is None else pytest.approx(expected, rel=1e-4, abs=1e-5)), key
    moved = {key for key, value in theirs.items() if not value.equal(before[key])}
    still = {"model.embed_tokens.weight"} if name == "frozen embeddings" else set()
    assert moved == (set() if name == "all truncated" else set(theirs) - still)
    for key, value in ours.items():
        assert (key in moved) == (not value.equal(before[key]))
        torch.testing.assert_close(value, theirs[key], rtol=1e-4, atol=5e-6)
