"""What TRL's own suite asks of its RLOO trainer and `test_equality_with_stock.py` does not run on both trainers.

Rewards and reward models, datasets, evaluation and the log here; models and adapters in `test_trl_adapters.py`; what is
refused in `test_trl_refusals.py`. Tools, environments and multimodal models do not apply: the kit trains on text, and
TRL's RLOO calls no tools.
"""

import asyncio
import copy
import functools

import pytest
import torch
from datasets import Dataset, IterableDataset
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


def stream(number):
    return IterableDataset.from_generator(lambda: ({"prompt": f"{n}+2="} for n in range(number)))


# -------------------------------------------------------------------------------------------------------------- rewards


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


# ------------------------------------------------------------------------------------------------------------- datasets


def test_conversations_come_back_as_messages(trl_train):
    """A reward written for conversations reads `completion[0]["content"]`; text in its place is an IndexError."""
    seen = []

    def reward(prompts, completions, **_):
        seen.extend(zip(prompts, completions, strict=True))
        return [float(len(completion[0]["content"])) for completion in completions]

    completions = [[66, EOS], [67, 68, EOS], [69, 70, 71, EOS], [72, 73, 74, 75, EOS]]
    run = trl_train(reward, completions, arguments={"train_dataset": conversations()})
    assert run.kept == set() and len(seen) == 8
    for prompt, completion in seen:
        assert [message["role"] for message in (*prompt, *completion)] == ["user", "assistant"]
    assert sorted({row["reward"] for row in run.rows}) == [1.0, 2.0, 3.0, 4.0]


# ----------------------------------------------------------------------------------------------- evaluation and the log


def held_out(number):
    return Dataset.from_dict({"prompt": [f"{n}+5=" for n in range(number)]})


def watched(seen):
    """The reward by ids; notes the prompts that it is called with."""

    def reward(prompts, completion_ids, **_):
        seen.append(list(prompts))
        return by_ids(completion_ids)

    return reward


@pytest.mark.parametrize("generations", [None, 1, 2])
def test_evaluation_during_training(generations, trl_train):
    """Evaluated prompts that got into the training window would be trained on; one completion has no baseline."""
    seen = []
    run = trl_train(
        watched(seen), arguments={"eval_dataset": held_out(3)}, eval_strategy="steps", eval_steps=2, max_steps=4,
        num_generations_eval=generations, per_device_eval_batch_size=4, eval_on_start=True,
    )  # fmt: skip
    assert run.kept == set() and all(row["prompt"].endswith("+1=") for row in run.rows) and len(run.rows) == 16
    evaluations = [logs for logs in run.trainer.state.log_history if "eval_loss" in logs]
    assert [logs["step"] for logs in evaluations] == [0, 2, 4]
    for logs in evaluations:
        assert 0 <= logs["eval_reward"] <= 1 and logs["eval_completions/mean_length"] > 0
        assert logs["eval_loss"] == pytest.approx(0.0, abs=1e-5) and "eval_kl" in logs
    judged = [prompt for prompts in seen for prompt in prompts if prompt.endswith("+5=")]
    assert {prompt: judged.count(prompt) for prompt in judged} == dict.fromkeys(
        [f"{n}+5=" for n in range(3)], 3 * (generations or 4)
    )


def test_several_evaluation_sets_and_one_by_hand(trl_train):
    """A dict of datasets is evaluated under each name; by hand any other may be given, a stream too."""
    seen = []
    sets = {"easy": held_out(2), "hard": stream(3)}
    run = trl_train(
        watched(seen), arguments={"eval_dataset": sets}, eval_strategy="steps", eval_steps=2, num_generations_eval=2,
        per_device_eval_batch_size=2,
    )  # fmt: skip
    names = [name for logs in run.trainer.state.log_history for name in logs if name.endswith("_loss")]
    assert run.kept == set() and names == ["eval_easy_loss", "eval_hard_loss", "train_loss"]
    policy = {name: value.clone() for name, value in run.trainer.model.state_dict().items()}
    for data, number in ((held_out(5), 5), (stream(4), 4)):
        seen.clear()
        found = run.trainer.evaluate(data, metric_key_prefix="eval_later")
        assert "eval_later_loss" in found and len([prompt for prompts in seen for prompt in prompts]) == 2 * number
    assert all(policy[name].equal(value) for name, value in run.trainer.model.state_dict().items())
    assert len(run.rows) == 8, "listeners hear of training only"


def test_an_evaluation_counts_each_completion_once(trl_train):
    """A mean of batches' means: one of five prompts, alone in the last batch, was a third of `eval_reward`, which picks
    the best checkpoint."""
    values = []

    def reward(completion_ids, **_):
        values.append(by_ids(completion_ids))
        return values[-1]

    run = trl_train(reward, per_device_eval_batch_size=8)
    values.clear()
    found = run.trainer.evaluate(held_out(5))
    assert [len(batch) for batch in values] == [8, 8, 4]
    expected = sum(map(sum, values)) / 20
    assert found["eval_reward"] == pytest.approx(expected, rel=1e-5)
    assert found["eval_rewards/reward/mean"] == pytest.approx(expected, rel=1e-5)


def test_the_best_checkpoint_by_its_reward_is_loaded_at_the_end(trl_train):
    """`metric_for_best_model` reads what evaluation returns; without the reward in it the last checkpoint wins."""
    scores = iter([0.9, 0.1])
    now = [0.0]

    def reward(prompts, completion_ids, **_):
        if prompts[0].endswith("+5="):
            now[0] = next(scores)
            return [now[0]] * len(prompts)
        return by_ids(completion_ids)

    at_first = {}

    def keep(trainer):
        plain = trainer._save_checkpoint
        trainer._save_checkpoint = lambda *a, **k: (
            at_first.setdefault("model", copy.deepcopy(trainer.model.state_dict())), plain(*a, **k)
        )[1]  # fmt: skip

    run = trl_train(
        reward, arguments={"eval_dataset": held_out(1)}, before=keep, eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_reward",
        greater_is_better=True, per_device_eval_batch_size=4,
    )  # fmt: skip
    assert run.trainer.state.best_metric == pytest.approx(0.9) and run.trainer.state.best_global_step == 1
    assert all(at_first["model"][name].equal(value) for name, value in run.trainer.model.state_dict().items())
    assert run.kept == set()


def test_an_evaluation_by_hand_of_half_groups_is_refused(trl_train):
    """With `eval_strategy="no"` nothing checks the batch of `evaluate()` before rewards are grouped."""
    run = trl_train(per_device_eval_batch_size=3)
    with pytest.raises(ValueError, match="per_device_eval_batch_size"):
        run.trainer.evaluate(Dataset.from_dict({"prompt": list("012")}))


def test_trls_own_config(trl_train, tmp_path):
    """A script that builds `trl.RLOOConfig` and changes only the trainer's import."""
    import trl

    config = trl.RLOOConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_steps=2, learning_rate=0.1, num_generations=2,
        per_device_train_batch_size=4, logging_steps=1, max_completion_length=6, save_strategy="no",
    )  # fmt: skip
    run = trl_train(arguments={"args": config})
    assert run.kept == set() and len(run.steps) == 2 and run.trainer.args is config


@pytest.mark.slow
def test_a_compiled_model(trl_train):
    """`torch_compile` wraps the model; scores must go through the wrapper, or nothing is compiled (8 s on a CPU)."""
    from torch._dynamo.utils import counters

    counters.clear()
    run = trl_train(torch_compile=True, torch_compile_backend="eager")
    assert run.kept == set() and all(step["sampling/logp_difference_max"] < 1e-4 for step in run.steps)
    assert counters["stats"]["unique_graphs"] > 0
