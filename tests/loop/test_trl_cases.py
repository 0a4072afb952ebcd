"""What TRL's own suite asks of its RLOO trainer, asked of ours through `train()`: rewards and reward models.

Data sets, evaluation and the log: `test_trl_cases_data.py`; models and adapters: `test_trl_cases_policy.py`; the
objective and batches: `test_trl_cases_loop.py`; what is refused: `test_trl_refusals.py`. Cases of that suite which
other tests hold:

| case | test |
|---|---|
| one function, arguments by position, no `args` | `test_drop_in.py`: the first three |
| a warning where every reward is None | `test_trainer.py`: unscored samples (muted, and counted instead) |
| old arguments and options | `contracts/test_old_names.py`, `test_options.py`, `test_drop_in.py`: the recipe |
| temperature | `test_equality_with_stock.py`, `test_step.py`: sampler and trainer agree |
| a separate reference | `test_trainer.py`: full training |
| each sampling filter | `test_options.py`: what the loop would get wrong |
| scaled logits | `test_equality_with_stock.py`, `gradient/test_logprobs.py` (Gemma's soft cap is refused) |
| experts and their auxiliary loss | `test_equality_with_stock.py`, `test_trl_cases_policy.py` |
| resume | `test_trainer.py`, `test_run.py` |
| 4-bit | `test_trainer.py`, `test_equality_with_stock.py` |
| vLLM | `test_step.py`: vLLM is asked; `rollout/test_server.py` |
| images | `test_trainer.py`: refused |

Tools, environments and multimodal models do not apply: the kit trains on text, and TRL's RLOO calls no tools.
"""

import asyncio
import copy
import functools

import pytest
import torch
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from tests.loop.conftest import EOS, by_ids, conversations


def distinct(completions, **_):
    return [float(len(set(text))) for text in completions]


def nothing(completions, **_):
    return [None] * len(completions)


def classifier(seed=0, name=""):
    """A reward model with random weights: one layer, one output."""
    config = Qwen3Config(
        vocab_size=264, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, num_labels=1, pad_token_id=256,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForSequenceClassification(config)
    model.config.name_or_path = name
    return model


# -------------------------------------------------------------------------------------------------------------- rewards


def test_weighted_rewards_are_in_the_log_under_their_names(trl_train):
    """A sum without the weights in the log is another reward than the one that is trained."""
    run = trl_train([by_ids, distinct], reward_weights=[0.7, 0.3], max_steps=2)
    assert run.kept == set() and run.trainer.reward_func_names == ["by_ids", "distinct"]
    for row in run.rows:
        parts = (row["rewards"]["by_ids"], row["rewards"]["distinct"])
        assert row["reward"] == pytest.approx(0.7 * parts[0] + 0.3 * parts[1], rel=1e-5)
    for step in run.steps:
        means = 0.7 * step["rewards/by_ids/mean"] + 0.3 * step["rewards/distinct/mean"]
        assert step["reward"] == pytest.approx(means, rel=1e-5)
        assert step["rewards/by_ids/std"] >= 0 and step["rewards/distinct/std"] >= 0


@pytest.mark.parametrize("other", [[], [by_ids]], ids=["alone", "with another"])
def test_a_reward_that_never_applies(other, trl_train):
    """None read as 0 pulls the baseline down; alone it would train on noise."""
    run = trl_train([nothing, *other], beta=0.0)
    assert bool(run.moved) is bool(other)
    for step in run.steps:
        assert step["rewards/nothing/mean"] is None
        assert step["rewards/unscored_ratio"] == (0.0 if other else 1.0) and step["rewards/failed_ratio"] == 0.0
    assert all(row["reward"] == (row["rewards"]["by_ids"] if other else None) for row in run.rows)


def test_a_reward_that_applies_to_some_prompts_only(trl_train):
    """A mathematics reward and a code reward share a dataset: neither may move the other's baseline."""

    def even(completion_ids, kind, **_):
        return [value if k == "even" else None for value, k in zip(by_ids(completion_ids), kind, strict=True)]

    def odd(completions, kind, **_):
        return [value if k == "odd" else None for value, k in zip(distinct(completions), kind, strict=True)]

    data = Dataset.from_dict({"prompt": list("012345"), "kind": ["even", "odd"] * 3})
    run = trl_train([even, odd], arguments={"train_dataset": data}, per_device_train_batch_size=8, beta=0.0)
    assert run.kept == set()
    for first in range(0, len(run.rows), 4):
        group = run.rows[first : first + 4]
        kind = group[0]["columns"]["kind"]
        scores = [row["rewards"][kind] for row in group]
        assert [row["reward"] for row in group] == scores and None not in scores
        for row, own in zip(group, scores, strict=True):
            assert row["advantage"] == pytest.approx(own - (sum(scores) - own) / 3, abs=1e-5)


class AsyncJudge:
    async def __call__(self, completion_ids, **_):
        await asyncio.sleep(0)
        return by_ids(completion_ids)


async def scaled(completions, scale, **_):
    return [scale * value for value in distinct(completions)]


def test_async_rewards_run_side_by_side_with_plain_ones(trl_train):
    """Awaited one after the other, judges behind an API take as long as all of them together; this one never ends."""
    here = {}

    async def waiting(completions, **_):
        here["called"] = asyncio.Event()
        await asyncio.wait_for(here["called"].wait(), timeout=10)
        return distinct(completions)

    async def calling(completions, log_metric, **_):
        await asyncio.sleep(0)
        here["called"].set()
        log_metric("calls", 1.0)
        return nothing(completions)

    rewards = [waiting, by_ids, calling, functools.partial(scaled, scale=0.5), AsyncJudge()]
    run = trl_train(rewards)
    assert run.trainer.reward_func_names == ["waiting", "by_ids", "calling", "scaled", "AsyncJudge"]
    assert run.kept == set() and all(step["calls"] == 1.0 for step in run.steps)
    for row in run.rows:
        found = row["rewards"]
        assert found["waiting"] == 2 * found["scaled"] and found["AsyncJudge"] == pytest.approx(found["by_ids"])
        assert found["calling"] is None


@pytest.mark.parametrize("kind", [torch.tensor, tuple, lambda values: [int(10 * value) for value in values]])
def test_what_a_reward_may_return(kind, trl_train):
    """A reward that computes with torch hands back a tensor, one that counts whole numbers."""
    run = trl_train(lambda completion_ids, **_: kind(by_ids(completion_ids)))
    assert run.kept == set() and all(step["rewards/failed_ratio"] == 0.0 for step in run.steps)
    assert len({row["reward"] for row in run.rows}) > 2


def test_columns_and_the_state_reach_a_reward_in_the_order_of_its_samples(trl_train):
    """A column in another order than its completions grades each answer against another question; the dataset's own
    `completion` is no column, it would be given twice."""
    seen = []

    def reward(prompts, completions, completion_ids, answer, trainer_state, **columns):
        assert [f"{n}+1=" for n in answer] == prompts and len(completions) == len(completion_ids)
        seen.append((trainer_state.global_step, trainer_state.max_steps, sorted(columns)))
        return by_ids(completion_ids)

    data = Dataset.from_dict(
        {"prompt": [f"{n}+1=" for n in range(6)], "answer": list(range(6)), "completion": ["x"] * 6}
    )
    run = trl_train(reward, arguments={"train_dataset": data}, per_device_train_batch_size=8)
    assert run.kept == set()
    assert seen == [(0, 2, ["log_extra", "log_metric"]), (1, 2, ["log_extra", "log_metric"])]


def test_unused_columns_are_removed_where_asked(trl_train):
    """TRL keeps them by default because rewards need them; a user who removes them has heavy ones."""
    seen = set()

    def reward(completion_ids, **columns):
        seen.update(columns)
        return by_ids(completion_ids)

    data = Dataset.from_dict({"prompt": list("012345"), "heavy": ["x"] * 6})
    run = trl_train(reward, arguments={"train_dataset": data}, remove_unused_columns=True)
    assert run.kept == set() and "heavy" not in seen and "completions" in seen


def test_what_rewards_log_themselves(trl_train, capsys):
    """A figure of one micro-batch must be averaged over the step, and a column stay with its completions."""
    calls = []

    def reward(completion_ids, log_metric, log_extra, **_):
        calls.append(len(completion_ids))
        log_metric("judged", float(len(calls)))
        log_metric("judged", float(len(calls)) + 1)
        log_extra("first_id", [f"id{ids[0]}" for ids in completion_ids])
        return by_ids(completion_ids)

    completions = [[66, EOS], [67, EOS], [68, 69, EOS], [70, EOS]]
    run = trl_train(reward, completions, log_completions=True)
    assert [step["judged"] for step in run.steps] == [1.5, 2.5]
    table = capsys.readouterr().out
    assert "first_id" in table and all(f"id{ids[0]}" in table for ids in completions)


def test_completions_are_printed_with_their_rewards(trl_train, capsys):
    """A table with another completion's advantage sends its reader after the wrong bug."""
    completions = [[ids, ids, EOS] for ids in (64, 65, 66, 67)]  # `a` is 64 in the byte alphabet
    run = trl_train(lambda completion_ids, **_: [0.0, 1.0, 2.0, 5.0], completions, log_completions=True, beta=0.0)
    lines = [line for line in capsys.readouterr().out.splitlines() if "0+1=" in line or "Advantage" in line]
    assert any("Prompt" in line and "Completion" in line for line in lines)
    cells = {tuple(cell.strip() for cell in line.strip("│ ").split("│")) for line in lines}
    for row in run.rows:
        if row["prompt"] == "0+1=":
            expected = ("0+1=", row["completion"], f"{row['reward']:.2f}", f"{row['advantage']:.2f}")
            assert expected in cells


# -------------------------------------------------------------------------------------------------------- reward models


@pytest.mark.parametrize("chat", [False, True], ids=["text", "conversations"])
def test_a_reward_model_scores_what_was_written(chat, trl_train, tiny_tokenizer):
    """A reward model that is padded on the wrong side, or trained along, scores something else from step to step."""
    judge, other = classifier(name="some/judge"), copy.deepcopy(tiny_tokenizer)
    other.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    before = copy.deepcopy(judge.state_dict())
    arguments = {"reward_processing_classes": [other, None]} | ({"train_dataset": conversations()} if chat else {})
    run = trl_train([judge, by_ids], arguments=arguments)
    assert run.kept == set() and run.trainer.reward_func_names == ["judge", "by_ids"]
    assert all(before[name].equal(value) for name, value in judge.state_dict().items())
    assert all(parameter.grad is None for parameter in judge.parameters())
    for row in run.rows:
        text = row["prompt"] + row["completion"] if not chat else None
        text = text or f"[user]{row['prompt'][0]['content']}[assistant]{row['completion'][0]['content']}"
        with torch.no_grad():
            expected = judge(**other(text, return_tensors="pt", add_special_tokens=False)).logits.item()
        assert row["rewards"]["judge"] == pytest.approx(expected, abs=1e-5)


def test_a_reward_model_by_its_folder_next_to_a_function(trl_train, tiny_tokenizer, tmp_path):
    """A folder's name in the list is a checkpoint, with the tokenizer that lies in it, and not a function's name."""
    classifier().save_pretrained(tmp_path / "judge")
    tiny_tokenizer.save_pretrained(tmp_path / "judge")
    run = trl_train([str(tmp_path / "judge"), distinct], reward_weights=[2.0, 0.5])
    assert run.kept == set() and run.trainer.reward_func_names == ["judge", "distinct"]
    assert len({row["rewards"]["judge"] for row in run.rows}) == len(run.rows)
    for row in run.rows:
        assert row["reward"] == pytest.approx(2 * row["rewards"]["judge"] + row["rewards"]["distinct"] / 2, abs=1e-5)


def test_a_tokenizer_for_each_reward_model(trl_train, tiny_tokenizer):
    """With one tokenizer for two models the second scores the first one's token ids."""
    judges = [classifier(0, "a/first"), classifier(1, "a/second")]
    with pytest.raises(ValueError, match=r"\(1\) must match the number of reward functions \(2\)"):
        trl_train(judges, arguments={"reward_processing_classes": tiny_tokenizer})
    run = trl_train(judges, arguments={"reward_processing_classes": [copy.deepcopy(tiny_tokenizer), tiny_tokenizer]})
    assert run.kept == set() and run.trainer.reward_func_names == ["first", "second"]
    assert run.trainer.reward_processing_classes[1] is tiny_tokenizer
    alone = trl_train(classifier(), arguments={"reward_processing_classes": tiny_tokenizer})
    assert alone.kept == set() and alone.trainer.reward_processing_classes == [tiny_tokenizer]
