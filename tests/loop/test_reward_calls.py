"""Rewards as published recipes write them, through the trainer: TRL calls the guard, the guard calls the reward."""

import asyncio
import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from datasets import Dataset

from rloo_kit.completion import Completion
from rloo_kit.config.run import RunConfig
from rloo_kit.data.load import load_data
from rloo_kit.evals.evaluate import HeldOutRewards
from rloo_kit.rewarding.guard import NamedReward
from rloo_kit.rewarding.registry import make_rewards
from rloo_kit.rewarding.worker import WorkerReward
from tests.rewarding import recipes

COMPLETIONS = [[70, 260, 71, 258], [70, 71, 258], [260, 258], [90, 258]] * 2


def length_reward(completions):
    return [float(len(text)) for text in completions]


def scaled(scale, *, completion_ids):
    return [scale * len(ids) for ids in completion_ids]


class Judge:
    def get_rewards(self, prompts, completions):
        return [1.0] * len(completions)


def test_published_rewards_train(make_trainer):
    """TRL passes all it has, whatever the signature; awaited rewards run together, and equal names stay apart."""
    worker = WorkerReward(
        "reward_examples:published", folders=[Path(__file__).parents[1] / "rewarding"], timeout_s=30.0
    )
    here = {}

    async def waiting(completions):
        here["called"] = asyncio.Event()
        await asyncio.wait_for(here["called"].wait(), timeout=10)
        return length_reward(completions)

    async def calling(completions):
        await asyncio.sleep(0)
        here["called"].set()
        return length_reward(completions)

    rewards = [
        length_reward, functools.partial(scaled, 0.5), functools.partial(scaled, 3.0), waiting, calling, Judge(),
        NamedReward(worker, "worker", 2.0),
    ]  # fmt: skip
    trainer = make_trainer(rewards, completions=COMPLETIONS, max_steps=1, per_device_train_batch_size=8)
    rows: list[dict[str, Any]] = []
    trainer.rollout_listeners.append(rows.extend)
    trainer.train()
    worker.worker.close()
    logs = {name.removeprefix("rewards/"): value for name, value in trainer.state.log_history[0].items()}
    assert logs["failed_ratio"] == 0.0 and logs["Judge/mean"] == 1.0
    assert (
        logs["scaled/mean"] == 0.5 * sum(map(len, COMPLETIONS)) / 8 and logs["scaled_2/mean"] == 6 * logs["scaled/mean"]
    )
    assert logs["scaled_2/std"] == pytest.approx(6 * logs["scaled/std"])
    assert logs["length_reward/mean"] == logs["waiting/mean"] == logs["calling/mean"] == logs["worker/mean"] > 0
    assert all(row["rewards"]["scaled_2"] == 6 * row["rewards"]["scaled"] for row in rows)


def test_what_a_reward_must_not_spoil(make_trainer, capsys):
    """Finite rewards with an infinite sum made every advantage NaN; a reward that seeds torch seeds no rollout."""
    options = {"max_steps": 1, "per_device_train_batch_size": 8, "beta": 0.0}

    def rows_of(rewards, **more):
        trainer, rows = make_trainer(rewards, **options | more), []
        trainer.rollout_listeners.append(rows.extend)
        trainer.train()
        return trainer.state.log_history[0], rows

    def large(completions):
        return [1e38, *range(1, 8)]

    def larger(completions):
        return [1.5e38, *range(1, 8)]

    logs, rows = rows_of([large, larger], completions=COMPLETIONS, reward_weights=[1.0, 2.0])
    assert "the weighted sum of the rewards of sample 0 is beyond float32" in (printed := capsys.readouterr().out)
    assert "large 1e+38 x 1, larger 1.5e+38 x 2 (12% of the samples" in printed
    assert logs["rewards/failed_ratio"] == logs["rewards/unscored_ratio"] == 1 / 8
    assert [row["reward"] for row in rows] == [None, *(3.0 * n for n in range(1, 8))]
    advantages = [row["advantage"] for row in rows]
    assert advantages[:4] == pytest.approx([0.0, 3 - 7.5, 6 - 6.0, 9 - 4.5]), "siblings are compared with each other"

    def plain(completion_ids):
        return [float(sum(ids) % 7) for ids in completion_ids]

    def seeding(completion_ids):
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(0)
        return plain(completion_ids)

    found = [
        [(row["prompt"], row["completion_ids"]) for row in rows_of(reward, max_steps=3, max_completion_length=6)[1]]
        for reward in (seeding, plain)
    ]
    assert found[0] == found[1] and len({str(ids) for _, ids in found[0]}) > 8


TEXTS = ["so 5 </think> <answer>5</answer>", "no no no no <answer>7</answer>", "", "2 and 3 </think> 5"]
ROWS = [{"problem": asked, "solution": gold} for asked, gold in recipes.KNOWN.items()]
EXPECTED = {
    "numbers": [1.5, -0.5, -0.5, -0.5],
    "unique_letters": [16.0, 12.0, 0.0, 14.0],
    "accuracy": [1.0, 0.0, 0.0, 0.0],
    "cosine": [0.884, -0.897, -1.0, -0.961],
    "by_text": [11.0, 10.1, 10.0, 10.0],
    "judge": [1.0, 1.0, 0.0, 0.0],
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["command", "text", "messages"])
def test_rewards_of_published_recipes(way, trl_train, tiny_folder, tiny_tokenizer, tmp_path):
    """Published rewards work from a config's worker, a notebook's list and TRL's trainer, on text and on messages."""
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    columns = {"prompt_column": "problem", "answer_column": "solution"}
    run = RunConfig(
        model={"name": str(tiny_folder), "family": "thinking"},
        data={"source": str(source), "system_prompt": "Be brief.", "test_size": 0, **columns},
        run={"evaluate": False},
        rewards=[{"name": f"{recipes.__file__}:{name}"} for name in EXPECTED],
        rloo={"max_steps": 1},
    )
    functions: list[Any] = make_rewards(run, tiny_tokenizer) if way == "command" else recipes.RECIPES
    if way == "command":
        data = load_data(run, tiny_tokenizer).train
    else:
        asked = [row["problem"] for row in ROWS]
        prompts = asked if way == "text" else [[{"role": "user", "content": one}] for one in asked]
        columns = {"prompt": prompts, "answer": [row["solution"] for row in ROWS]}
        data = Dataset.from_dict(columns | {name: [row[name] for row in ROWS] for name in ROWS[0]})
    ids = [[*tiny_tokenizer(text)["input_ids"], tiny_tokenizer.eos_token_id] for text in TEXTS]
    if way == "command":
        held_out = HeldOutRewards(run, functions)
        row = data[0]
        done = [Completion(ids[n], text, True, prompt=row["prompt"], row=row) for n, text in enumerate(TEXTS)]
        _, measured = held_out.score(done, 4)
        assert {name: pytest.approx(values[0], abs=1e-3) for name, values in measured.items()} == EXPECTED
    trained = trl_train(functions, completions=ids, arguments={"train_dataset": data}, max_steps=1)
    found = [row["rewards"] for row in trained.rows]
    assert {name: pytest.approx([row[name] for row in found], abs=1e-3) for name in EXPECTED} == EXPECTED
