"""`time/*` of a real trainer: what each part of a step is, and that nothing of a run's time is counted twice or lost.

The clock stands still but for what the tests let sampling, rewards and gradients take.
"""

from types import SimpleNamespace

import pytest

from rloo_kit.loop.step import RLOOStep
from rloo_kit.results.plots import split_time
from rloo_kit.rollout.engine import Engine
from rloo_kit.runs.rollouts import read_rollouts
from tests.loop.conftest import EOS, by_ids

SAMPLING, REWARD, GRADIENT = 3.0, 0.25, 1.0
PARTS = ("rollout", "reward", "gradient", "evaluation")
EVERY_TWO = ("data.test_size=6", "eval.every_steps=2", "eval.every_prompts=4", "eval.measure=reward")


@pytest.fixture
def clock(monkeypatch):
    found = SimpleNamespace(now=1000.0, samplings=0)
    sample, loss = Engine.sample, RLOOStep.loss

    def slow_sample(*arguments, **named):
        found.now, found.samplings = found.now + SAMPLING, found.samplings + 1
        return sample(*arguments, **named)

    def slow_loss(*arguments, **named):
        found.now += GRADIENT
        return loss(*arguments, **named)

    def slow_reward(completion_ids, **columns):
        found.now += REWARD
        return by_ids(completion_ids, **columns)

    found.reward = slow_reward
    monkeypatch.setattr(Engine, "sample", slow_sample)
    monkeypatch.setattr(RLOOStep, "loss", slow_loss)
    monkeypatch.setattr("time.monotonic", lambda: found.now)
    return found


def totals(rows):
    """Seconds of all steps by part: each row's mean times the steps that it covers."""
    steps = [row["step"] - before for row, before in zip(rows, [0, *(row["step"] for row in rows)], strict=False)]
    return [
        sum(row.get(f"time/{part}_s", 0.0) * count for row, count in zip(rows, steps, strict=True)) for part in PARTS
    ]


@pytest.mark.parametrize("engine", ["native", "generate"])
def test_each_part_of_a_step_has_its_time(engine, start, clock):
    """One number for a rollout and its rewards could not say whether the GPU or a judge was slow."""
    result = start("rloo.max_steps=2", f"rollout.engine={engine}", rewards=[clock.reward])
    for row in result.metrics:
        assert [row.get(f"time/{part}_s") for part in PARTS] == [SAMPLING, REWARD, GRADIENT, None]
        lengths = [one["completion_tokens"] for one in read_rollouts(result.folder) if one["step"] == row["step"]]
        assert row["time/tokens_per_s"] == pytest.approx(sum(lengths) / SAMPLING)
        assert row["time/decode_ms_per_token_step"] == pytest.approx(1000 * SAMPLING / max(lengths))
    assert result.metrics[-1]["seconds"] == 2 * (SAMPLING + REWARD + GRADIENT)


def test_rollouts_and_steps_are_counted_once(start, clock):
    """Half of the gradient's time was "the rest" of a step of two rollouts; one of two steps was counted twice."""
    words = ("rloo.max_steps=2", "rloo.gradient_accumulation_steps=2", "rloo.steps_per_generation=1")
    assert totals(start(*words, rewards=[clock.reward]).metrics) == [4 * SAMPLING, 4 * REWARD, 4 * GRADIENT, 0.0]
    words = ("rloo.max_steps=4", "rloo.num_iterations=2", "run.name=reused")
    rows = start(*words, rewards=[clock.reward]).metrics
    assert totals(rows) == [2 * SAMPLING, 2 * REWARD, 4 * GRADIENT, 0.0]
    assert [row["time/rollout_s"] for row in rows] == [3, 0, 3, 0] and "time/tokens_per_s" not in rows[1]


def test_evaluations_are_their_own(start, clock):
    """An evaluation also samples, but for no step. The run's time is the sum of the parts."""
    rows = start("rloo.max_steps=4", *EVERY_TWO, rewards=[clock.reward]).metrics
    assert totals(rows) == [4 * SAMPLING, 4 * REWARD, 4 * GRADIENT, 3 * (SAMPLING + REWARD)] and clock.samplings == 7
    found = split_time(rows)
    assert sum(found.seconds.values()) == rows[-1]["seconds"] / 4 and found.seconds["the rest"] == 0.0


def test_an_engine_that_does_not_count_has_no_token_steps(make_trainer):
    """vLLM decodes in its own loop: 0 ms a token step would be the fastest engine of all."""
    trainer = make_trainer(by_ids, per_device_train_batch_size=8, max_steps=1, beta=0.0)
    trainer._generate_single_turn = lambda prompt_ids, *_: [[70 + n, EOS] for n in range(len(prompt_ids))]
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["time/tokens_per_s"] > 0 and "time/decode_ms_per_token_step" not in logs
