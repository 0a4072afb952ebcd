"""What TRL's own suite asks of its RLOO trainer: datasets, evaluation and the log. See `test_trl_cases.py`."""

import copy

import pytest
from datasets import Dataset, IterableDataset

from tests.loop.conftest import EOS, by_ids, conversations


def stream(number):
    return IterableDataset.from_generator(lambda: ({"prompt": f"{n}+2="} for n in range(number)))


# ------------------------------------------------------------------------------------------------------------ datasets


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


@pytest.mark.parametrize("thinks", [True, False])
def test_chat_template_kwargs_reach_the_prompt(thinks, trl_train, tiny_tokenizer):
    """`enable_thinking=False` that is not passed on trains a model to think where it is asked not to."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template += "{% if enable_thinking is false %}</think>{% endif %}"
    asked = []

    def watch(trainer):
        plain = trainer._generate_single_turn
        trainer._generate_single_turn = lambda ids, *rest: (asked.extend(ids), plain(ids, *rest))[1]

    arguments = {"train_dataset": conversations(), "processing_class": tokenizer}
    run = trl_train(
        arguments=arguments, before=watch, chat_template_kwargs={} if thinks else {"enable_thinking": False}
    )
    assert run.kept == set()
    ends = {tokenizer.decode(ids).rpartition("<think>")[2].strip() for ids in asked}
    assert ends == {"" if thinks else "</think>"}


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2, "num_iterations": 2}], ids=["plain", "reused"]
)
def test_an_iterable_data_set(options, trl_train):
    """A streamed dataset has no length and no sampler, and its groups must hold one prompt each all the same."""
    run = trl_train(arguments={"train_dataset": stream(9)}, max_steps=4, per_device_train_batch_size=4, **options)
    assert run.kept == set() and run.trainer.state.global_step == 4
    prompts = [row["prompt"] for row in run.rows]
    groups = [prompts[first : first + 4] for first in range(0, len(prompts), 4)]
    assert len(groups) == 4 and all(len(set(group)) == 1 for group in groups)
    assert len({group[0] for group in groups}) == 4


def test_every_prompt_comes_once_an_epoch(trl_train):
    """Without `max_steps` a run is counted in epochs; prompts seen twice in one were left out in another."""
    run = trl_train(num_train_epochs=2, max_steps=-1, per_device_train_batch_size=8)
    prompts = [row["prompt"] for row in run.rows][::4]
    assert run.kept == set() and run.trainer.state.global_step == 6
    assert sorted(prompts[:6]) == sorted(prompts[6:]) == [f"{n}+1=" for n in range(6)]
    assert prompts[:6] != sorted(prompts[:6]), "shuffled"


def test_loader_workers(trl_train):
    """The loader's processes read rows only; what they hand over must still be whole groups."""
    run = trl_train(dataloader_num_workers=2, per_device_train_batch_size=8)
    assert run.kept == set() and len(run.rows) == 16
    assert all(len({row["prompt"] for row in run.rows[first : first + 4]}) == 1 for first in range(0, 16, 4))


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


def test_steps_between_two_logs_are_in_the_log_once(trl_train):
    """A log of every second step holds the mean of both; what is left at the end is in the summary."""
    values = iter([1.0, 2.0, 6.0])
    run = trl_train(lambda completions, **_: [next(values)] * len(completions), logging_steps=2, max_steps=3)
    first, last = run.trainer.state.log_history
    assert first["reward"] == 1.5 and first["step"] == 2
    assert last["reward"] == 6.0 and last["rewards/<lambda>/mean"] == 6.0 and last["train_loss"] is not None
    tokens = sum(row["prompt_tokens"] + row["completion_tokens"] for row in run.rows)
    assert run.trainer.state.num_input_tokens_seen == last["num_tokens"] == tokens
