"""The options of the rollout through real runs on a tiny Qwen3: forced closes, dynamic sampling."""

from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rewards
from rloo_kit.runs.rollouts import read_rollouts
from tests.loop.conftest import by_ids


@pytest.fixture
def start(start):
    """The loop's `start`, with room for an answer."""
    words = ("rloo.max_steps=2", "rloo.max_completion_length=8", "run.sample_every_steps=1", "run.num_samples=4")
    return partial(start, *words)


def test_a_forced_close_is_seen_by_rewards_and_kept(start, capsys):
    """A random model never closes its thinking: without a budget each completion is a cut-off thought, with one each
    has an answer that is scored, and the close earns nothing."""
    seen: list[list[bool]] = []

    def watch(completion_ids: Any, thinking_forced: Any, **columns: Any) -> list[float]:
        assert "prompt" not in columns and len(thinking_forced) == len(completion_ids)
        seen.append(list(thinking_forced))
        return [float(sum(ids) % 5) for ids in completion_ids]

    form = rewards.think_format_reward.with_(think_end_id=260, eos_token_ids=(258, 256))
    budget = ("rloo.thinking_budget=3", "rloo.answer_budget=4")
    answer = rewards.answer_reward.with_(think_end_id=260)
    result = start(*budget, rewards=[watch, form, answer])
    rows = list(read_rollouts(result.folder))
    assert [row["forced"] for row in rows] == [flag for batch in seen for flag in batch]
    assert sum(row["forced"] for row in rows) > len(rows) / 2
    for row in rows:
        if not row["forced"]:
            continue
        assert row["completion_ids"][3] == 260 and row["thinking_tokens"] == 3 and row["closed"]
        assert len(row["completion_ids"]) <= 8 and row["rewards"]["think_format_reward"] == 0.0
        assert set(row["columns"]) == {"answer", "question"}, "the flag is no column of the data"
    for metrics in result.metrics:
        step = [row for row in rows if row["step"] == metrics["step"]]
        assert metrics["thinking/forced_ratio"] == pytest.approx(sum(row["forced"] for row in step) / len(step))
        assert metrics["thinking/forced_accuracy"] == pytest.approx(
            sum(row["rewards"]["answer_reward"] for row in step if row["forced"]) / sum(row["forced"] for row in step)
        )
    assert "closed by the budget" in capsys.readouterr().out, "in the table of samples"


def tied_for_even_prompts(prompts: Any, completion_ids: Any, **columns: Any) -> list[float]:
    """Equal for every completion of an even prompt; different for nearly every one of an odd prompt."""
    even = [int(answer) % 2 == 0 for answer in columns["answer"]]
    return [0.5 if tied else sum(ids) % 97 / 97 for tied, ids in zip(even, completion_ids, strict=True)]


def test_groups_without_a_learning_signal_give_way_to_fresh_prompts(start):
    """With enough rounds a batch holds groups that differ and nothing else, each of one prompt, and its own rewards."""
    result = start("rollout.resample_rounds=6", "rloo.max_steps=3", rewards=[tied_for_even_prompts])
    rows = list(read_rollouts(result.folder))
    assert len(rows) == 3 * 8
    replaced = [metrics["rollout/resampled_groups"] for metrics in result.metrics]
    assert sum(replaced) > 0, "half of the prompts are tied, so some of the six groups are"
    for start_row in range(0, len(rows), 4):
        group = rows[start_row : start_row + 4]
        assert len({row["prompt"] for row in group}) == 1
        assert int(group[0]["columns"]["answer"]) % 2 == 1, "an even prompt is left"
        for row in group:
            assert row["reward"] == pytest.approx(sum(row["completion_ids"]) % 97 / 97), "another row's reward"
            assert f"add {row['columns']['answer']}<" in row["prompt"]
        assert len({row["reward"] for row in group}) > 1
    for metrics in result.metrics:
        assert metrics["frac_score_zero_std"] == 0.0
        assert metrics["sampling/logp_difference_max"] < 1e-4, "another row's log-probabilities"


def test_rounds_are_a_limit(start):
    """Where every prompt is tied, drawing until the batch is full never ends."""
    calls: list[int] = []

    def always(completion_ids: Any, **_: Any) -> list[float]:
        calls.append(len(completion_ids))
        return [1.0] * len(completion_ids)

    result = start("rollout.resample_rounds=2", "rloo.max_steps=1", rewards=[always])
    assert calls == [8, 8, 8] and len(list(read_rollouts(result.folder))) == 8
    assert result.metrics[0]["rollout/resampled_groups"] == 0 and result.metrics[0]["frac_score_zero_std"] == 1.0


def test_a_resumed_run_draws_what_the_whole_one_drew(start):
    """The reservoir's place is part of the state: lost, a resumed run trains on other prompts than the uncut one."""
    options = ("rollout.resample_rounds=2",)
    whole = start("rloo.max_steps=4", "run.name=whole", *options, rewards=[tied_for_even_prompts])
    start("rloo.max_steps=2", *options, rewards=[tied_for_even_prompts])
    resumed = start("rloo.max_steps=4", *options, rewards=[tied_for_even_prompts], resume=True)
    assert [row["completion_ids"] for row in read_rollouts(resumed.folder)] == [
        row["completion_ids"] for row in read_rollouts(whole.folder)
    ]
    expected = load_file(whole.adapter_folder / "adapter_model.safetensors")
    for name, tensor in load_file(resumed.adapter_folder / "adapter_model.safetensors").items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("engine", ["native", "generate"])
def test_accepted_filters_are_corrected_and_logged(engine, make_trainer, capsys):
    """The sampler's log-probabilities are those of what the filter left, the trainer's those of the whole: the weight
    of each token is the share that was kept, and the gap is in the log."""
    options = {"max_steps": 1, "per_device_train_batch_size": 8, "max_completion_length": 6, "rollout_engine": engine}
    steps = {}
    for correction in ("auto", "none"):
        trainer = make_trainer(
            [by_ids], accept_truncated_sampling=True, top_k=20, sampler_correction=correction, beta=0.0, **options
        )
        assert "truncated sampling: top_p=1, top_k=20" in capsys.readouterr().out
        trainer.train()
        (steps[correction],) = [logs for logs in trainer.state.log_history if "loss" in logs]
    for step in steps.values():  # of 264 tokens of a random model 20 have a tenth of the probability, or less
        assert step["sampling/logp_difference_mean"] > 1
    assert 0 < steps["auto"]["sampling/importance_weight_mean"] < 0.3
    assert "sampling/importance_weight_mean" not in steps["none"]
    assert 0 < steps["auto"]["grad_norm"] < 0.3 * steps["none"]["grad_norm"]
