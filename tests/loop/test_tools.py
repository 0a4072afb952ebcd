"""A run whose completions call tools: what is trained is what was sampled, and nothing else."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from rloo_kit.loop.options import RLOOConfig
from rloo_kit.loop.trainer import RLOOTrainer
from tests.episodes import TEMPLATE, THINK_END, Scripted, add, call, with_tools
from tests.loop.conftest import with_adapter

SCRIPT = [
    ["I add." + call("add", a=2, b=3), "So five.</think>\n\n5"],
    ["</think>\n\n4"],
    ["hm" + call("add", a=20, b=3), "and" + call("add", a=23, b=1), "yes</think>\n\n24"],
    ["no</think>\n\n<tool_call>\nadd 1 2\n</tool_call>", "</think>\n\n3"],
]
RESULT = "\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n"


def by_tokens(completion_ids: Any, completion_mask: Any, **_: Any) -> list[float]:
    """Different for each row, by the model's own tokens."""
    rows = zip(completion_ids, completion_mask, strict=True)
    return [sum(token for token, own in zip(ids, mask, strict=True) if own) % 19 / 19 for ids, mask in rows]


def make(
    model: Any, tokenizer: Any, folder: Any, script: Any = SCRIPT, rewards: Any = (by_tokens,), **options: Any
) -> Any:
    tools = {name: options.pop(name) for name in ("tools", "environment_factory") if name in options}
    config = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True,
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 300, "beta": 0.0,
        "learning_rate": 1e-2, "shuffle_dataset": False, "logging_steps": 1, "save_strategy": "no",
    } | options  # fmt: skip
    trainer = RLOOTrainer(
        model=model,
        reward_funcs=list(rewards),
        args=RLOOConfig(**config),
        train_dataset=Dataset.from_dict({"prompt": ["2+3=", "20+3+1="]}),
        processing_class=with_tools(tokenizer),
        **{"tools": [add]} | tools,
    )
    trainer.rloo.sampler.engine = Scripted(trainer.processing_class, script)
    return trainer


def first_step(trainer: Any) -> tuple[Any, float, dict[str, torch.Tensor]]:
    """The first rollout, its loss, and the gradients."""
    rows = [dict(trainer.train_dataset[number]) for number in (0, 1) for _ in range(4)]
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer.rloo.roll_out(trainer.model, rows, leave_open=True)
    loss = trainer._compute_loss(trainer.model, {"rollout": batch, "rows": list(range(8))})
    loss.backward()
    found = {name: one.grad.clone() for name, one in trainer.model.named_parameters() if one.grad is not None}
    return batch, loss.item(), found


def by_hand(model: Any, batch: Any, options: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the episodes as single sequences: leave-one-out, with the KL's mean over the trained tokens."""
    model.eval()
    rewards, logps, masks, corrections = [], [], [], []
    for row, done in enumerate(batch.judged.completions):
        mask = torch.ones(len(done.ids))
        for start, end in (*done.context, *done.forced):
            mask[start:end] = 0.0

        def score(prompt: list[int] = done.prompt_ids, ids: list[int] = done.ids) -> torch.Tensor:
            logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]

        own = score()
        with torch.no_grad(), model.disable_adapter():
            kl = ((own.detach() - score()) * mask).sum() / mask.sum()
        reward = batch.judged.raw_scores[row] - options.get("beta", 0.0) * kl
        sampled = torch.tensor(done.logps).nan_to_num(0.0)
        weight = torch.ones(len(done.ids))
        if "sampler_correction" in options:
            weight = (own.detach() - sampled).exp().clamp(max=2.0)
        rewards.append(reward), logps.append(own), masks.append(mask), corrections.append(weight)
    groups = torch.stack(rewards).view(2, 4)
    advantages = (groups - (groups.sum(1, keepdim=True) - groups) / 3).flatten()
    terms = zip(advantages, logps, masks, corrections, strict=True)
    loss = -sum(a * (one * mask * weight).sum() for a, one, mask, weight in terms) / 8
    model.zero_grad()
    loss.backward()
    return loss.item(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "KL": {"beta": 0.5, "kl_form": "length_normalized", "reference": "base"},
    "KL, balanced": {"beta": 0.5, "kl_form": "length_normalized", "reference": "base", "memory": "balanced"},
    "one sequence at a time": {"memory": "low"},
    "small passes": {"tokens_per_pass": 150},
    "budgets": {"thinking_budget": 4},
    "correction": {"sampler_correction": "token"},
}


SINGLE = ("one sequence at a time", "small passes")  # no prompt is shared there
LAYOUTS = [(case, layout) for case in CASES for layout in ("shared", "repeated", "padded")[case in SINGLE :]]


@pytest.mark.parametrize(("case", "layout"), LAYOUTS)
def test_an_episode_is_its_single_sequence_with_a_mask(case, layout, make_tiny_model, tiny_tokenizer, tmp_path):
    """Episodes that are tokenized again train on ids that were never sampled, and on the tools' results."""
    trainer = make(with_adapter(make_tiny_model()), tiny_tokenizer, tmp_path, **CASES[case])
    trainer.rloo.scorer.scorer.layouts = (layout,)
    trainer.rloo.scorer.scorer.layout = layout
    batch, _, found = first_step(trainer)
    _, expected = by_hand(trainer.model, batch, CASES[case])
    assert found.keys() == expected.keys()
    largest = max(one.abs().max() for one in expected.values())
    worst = max((one - expected[name]).abs().max() for name, one in found.items())
    assert worst <= 1e-6 * max(1.0, largest), f"{worst / largest:.1e} of the largest gradient"


def test_ids_are_the_sampled_ones_and_only_the_result_is_rendered(make_tiny_model, tiny_tokenizer, tmp_path):
    """The second turn continues behind the first as it was sampled, its result as the template writes it."""
    trainer = make(make_tiny_model(), tiny_tokenizer, tmp_path)
    batch, _, _ = first_step(trainer)
    found, encode = batch.judged.completions, lambda text: tiny_tokenizer(text, add_special_tokens=False)["input_ids"]
    end = "<|im_end|>"
    whole = [
        SCRIPT[0][0] + end + RESULT.format(5) + SCRIPT[0][1] + end,
        SCRIPT[1][0] + end,
        SCRIPT[2][0] + end + RESULT.format(23) + SCRIPT[2][1] + end + RESULT.format(24) + SCRIPT[2][2] + end,
    ]
    assert [done.ids for done in found[:3]] == list(map(encode, whole))
    results = [[tiny_tokenizer.decode(done.ids[slice(*span)]) for span in done.context] for done in found]
    assert results[:3] == [[RESULT.format(5)], [], [RESULT.format(23), RESULT.format(24)]]
    assert "error: the call cannot be read" in results[3][0]
    assert found[0].text == "So five.</think>\n\n5", "rewards read the answer, not the call"
    assert [[message["role"] for message in done.episode.messages] for done in found[:3]] == [
        ["assistant", "tool", "assistant"], ["assistant"], ["assistant", "tool"] * 2 + ["assistant"],
    ]  # fmt: skip
    assert found[3].episode.count("invalid") == 1 and all(done.ended for done in found)
    prompt = tiny_tokenizer.decode(found[0].prompt_ids)
    assert prompt == "2+3=", "a rendered prompt stays as it is"


def test_a_budget_holds_in_each_turn(make_tiny_model, tiny_tokenizer, tmp_path):
    """Counted from the completion's start, the second turn could not think at all."""
    long = [["abcdefgh" + call("add", a=1, b=1), "ijklmnop</think>\n\n2"]] * 4
    trainer = make(make_tiny_model(), tiny_tokenizer, tmp_path, long, thinking_budget=6)
    batch, _, _ = first_step(trainer)
    found = batch.judged.completions
    first, second = found[0].turns
    assert (first.index(THINK_END), second.index(THINK_END)) == (6, 6)
    assert [ids for start, end in found[0].forced for ids in found[0].ids[start:end]] == [THINK_END] * 2
    row = trainer.rloo.recorder._describe(batch)[0].tolist()
    assert row[4] == 12.0, "thinking_tokens: of both turns, without the tool's result"


def test_a_template_without_tools_is_refused_by_name(make_tiny_model, tiny_tokenizer, tmp_path):
    """A template that drops tools trains a model to call what it never heard of."""
    from rloo_kit.errors import ConfigError

    for template, why in (
        (tiny_tokenizer.chat_template, "leaves"),
        (
            TEMPLATE.replace("if message.reasoning_content", "if loop.last and message.reasoning_content"),
            "prefix-preserving",
        ),
    ):
        tokenizer, model = with_tools(tiny_tokenizer), make_tiny_model()
        tokenizer.chat_template, model.config.name_or_path = template, "some/model"
        with pytest.raises(ConfigError, match=f"some/model {why}|some/model is not {why}"):
            RLOOTrainer(
                model=model, reward_funcs=by_tokens, tools=[add], processing_class=tokenizer,
                train_dataset=Dataset.from_dict({"prompt": ["x"] * 8}), peft_config=LoraConfig(r=2),
                args=RLOOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none"),
            )  # fmt: skip


class Counter:
    """An environment as users bring it from TRL: instances are reused, `reset` begins an episode."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self, prompt: str, **row: object) -> str:
        """Begin at the prompt's length."""
        self.count = len(prompt)
        return f" ({self.count})"

    def step(self, by: int) -> str:
        """Count on.

        Args:
            by: how far.
        """
        self.count += by
        return str(self.count)

    def get_reward(self) -> float:
        """What was counted."""
        return float(self.count)


def test_an_environment_of_trl_trains_unchanged(make_tiny_model, tiny_tokenizer, tmp_path):
    """`environment_factory` with its own reward: its observation is in the prompt, each row has its own instance."""
    seen = []

    def look(environments: Any, turns: Any, **_: Any) -> list[float]:
        seen.extend((one.count, len(messages)) for one, messages in zip(environments, turns, strict=True))
        return [0.0] * len(turns)

    script = [
        ["a" + call("step", by=1) + call("step", by=2).removeprefix("</think>\n\n"), "</think>\n\nx"],
        ["</think>\n\nx"], ["b" + call("step", by=50), "</think>\n\nx"], ["</think>\n\nx"],
    ]  # fmt: skip
    options = {"tools": None, "environment_factory": Counter, "max_steps": 1}
    trainer = make(with_adapter(make_tiny_model()), tiny_tokenizer, tmp_path, script, [look], **options)
    conversations = [[{"role": "user", "content": text}] for text in ("ab", "abcd")]
    trainer.train_dataset = Dataset.from_dict({"prompt": conversations})
    rows: list[Any] = []
    trainer.rollout_listeners.append(rows.extend)
    trainer.train()
    assert trainer.reward_func_names == ["look", "Counter"]
    first = [row["rewards"]["Counter"] for row in rows[:4]]
    assert first == [1.0 + 3, 1.0, 1.0 + 50, 1.0] and seen[0] == (4, 4), "one message: its length is 1"
    assert [one["role"] for one in rows[0]["completion"]] == ["assistant", "tool", "tool", "assistant"]
    assert "ab (1)" in trainer.processing_class.apply_chat_template(rows[0]["prompt"], tokenize=False)
    logs = next(one for one in trainer.state.log_history if "loss" in one)
    assert logs["tools/call_frequency"] == 0.75 and logs["tools/step/failure_frequency"] == 0.0
    assert logs["completions/mean_length"] < 60 < max(len(row["completion_ids"]) for row in rows)
    assert logs["grad_norm"] > 0
