"""Evaluation during training: it changes nothing of the run, keeps the best weights, stops, and survives a resume."""

import json
import os
import random
import shutil
import signal

import numpy
import pytest
import torch
from safetensors.torch import load_file

from rloo_kit import load_config
from rloo_kit.errors import ConfigError
from rloo_kit.results.verdict import load_result
from rloo_kit.rewards import AnswerReward
from rloo_kit.runs.rollouts import read_rollouts
from tests.clocks import CLOCKS
from tests.loop.conftest import assert_same, by_ids, lines, status, weights

LEARNS = ("rloo.learning_rate=0.2", "eval.num_samples=4", "eval.measure=reward")  # each evaluation is the best so far
EVERY_TWO = ("data.test_size=6", "eval.every_steps=2", "eval.every_prompts=4", "rloo.max_steps=6")


def found_by(folder):
    """Step and value of each evaluation, and which was the best."""
    return [(row["step"], row["value"], row["is_best"], row["best_step"]) for row in lines(folder, "evaluations.jsonl")]


def low_ids(completion_ids, **_):
    """A reward that a few steps raise."""
    return [1 - sum(ids) / len(ids) / 264 for ids in completion_ids]


def drawing(completion_ids, **_):
    """A reward with noise from both generators that are not torch's."""
    return [sum(ids) % 17 / 17 + 0.1 * random.random() + 0.1 * numpy.random.rand() for ids in completion_ids]


def falling(limit, best=2):
    """A reward of training that rises; evaluations earn 1 .. `best` up to step `limit`, and then less than 0."""
    calls = []

    def reward(completion_ids, trainer_state, **_):
        if trainer_state.global_step != limit:  # a rollout of training
            return low_ids(completion_ids)
        calls.append(len(completion_ids))
        return [float(len(calls) if len(calls) <= best else -len(calls))] * len(completion_ids)

    return reward


def test_an_evaluation_changes_nothing_of_the_training(start):
    """Evaluations that drew from training's random numbers made every run with them another run."""
    results = []
    for name, every in (("with", 1), ("without", 0)):
        random.seed(0)
        numpy.random.seed(0)
        words = (*EVERY_TWO, f"eval.every_steps={every}", "rloo.beta=0.1", f"run.name={name}")
        results.append(start(*words, rewards=[drawing]))
    one, other = results
    assert_same(*(weights(result.folder / "checkpoints" / "checkpoint-6") for result in results))
    assert list(read_rollouts(one.folder)) == list(read_rollouts(other.folder))
    figures = lambda row: {key: row[key] for key in row if key not in CLOCKS and key[:5] != "eval/"}  # noqa: E731
    rows = [list(map(figures, result.metrics)) for result in results]
    assert rows[0] == rows[1] and len(rows[0]) == 6
    assert len(found_by(one.folder)) == 7 and not (other.folder / "evaluations.jsonl").exists()
    assert {row["measure"] for row in lines(one.folder, "evaluations.jsonl")} == {"reward"}, "not exact match"


@pytest.mark.slow
def test_every_evaluated_step_is_in_metrics_and_in_the_line(start, capsys):
    """The held-out measure was in a separate file, where neither the progress line nor a tracker showed it."""
    compared = AnswerReward(think_end_id=260)  # made in Python, so known by its name only
    keys = (*EVERY_TWO, "eval.every_steps=4", "eval.num_samples=2")
    result = start(*keys, rewards=[by_ids, compared])
    assert [step for step, *_ in found_by(result.folder)] == [0, 4, 6], "the start and the last step too"
    assert {row["step"]: "eval/accuracy" in row for row in result.metrics} == {n: n in (4, 6) for n in range(1, 7)}
    row, evaluation = result.metrics[3], lines(result.folder, "evaluations.jsonl")[1]
    for name in ("accuracy", "accuracy_low", "accuracy_high", "reward", "reward_low", "reward_high"):
        assert isinstance(row[f"eval/{name}"], float), name
    assert row["eval/reward"] == pytest.approx(evaluation["evaluation"]["measures"]["reward"]["value"])
    assert row["eval/accuracy"] == evaluation["value"] and evaluation["measure"] == "accuracy"
    printed = capsys.readouterr().out
    assert "held-out at step 4: accuracy 0.000 [0.000, " in printed and "| held-out 0.000 |" in printed


@pytest.mark.slow
def test_a_full_model_gets_its_best_weights_back(start):
    """Without an adapter the best weights are a whole model."""
    words = (*EVERY_TWO, "eval.measure=reward", "model.lora=null", "rloo.learning_rate=1e-3", "rloo.max_steps=4")
    folder = start(*words, rewards=[falling(4)]).folder
    found = [load_file(folder / name / "model.safetensors") for name in ("adapter", "best", "checkpoints/checkpoint-4")]
    assert_same(*found[:2])
    assert any(not torch.equal(tensor, found[2][name]) for name, tensor in found[0].items())
    live = dict(start.policy.model.named_parameters())
    assert all(torch.equal(tensor, live[name]) for name, tensor in found[1].items() if name in live)


@pytest.mark.slow
def test_a_run_is_stopped_early_and_its_adapter_is_the_best(start, capsys):
    """A run that got worse for half a night was saved as it was at the end; adapter/ holds the best weights."""
    words = (*EVERY_TWO, "eval.patience=2", "eval.measure=reward", "rloo.max_steps=12")
    result = start(*words, rewards=[falling(12)])
    folder = result.folder
    assert found_by(folder) == [(0, 1.0, True, 0), (2, 2.0, True, 2), (4, -3.0, False, 2), (6, -4.0, False, 2)]
    assert (result.stopped, result.steps, result.adapter_step) == ("early", 6, 2)
    assert_same(weights(folder / "adapter"), weights(folder / "best"))
    parameters = start.policy.model.named_parameters()
    live = {name.replace(".default", ""): value.detach() for name, value in parameters if "lora_" in name}
    assert_same(live, weights(folder / "best"))
    record = json.loads((folder / "best" / "evaluation.json").read_text())
    assert (record["step"], record["value"], record["measure"]) == (2, 2.0, "reward")
    said = status(folder)
    assert said["state"] == "finished" and said["adapter_step"] == 2
    assert "at step 6 of 12" in said["stopped_early"] and "best 2.000 at step 2" in said["stopped_early"]
    printed = capsys.readouterr().out
    assert "stopped early at step 6 of 12" in printed and "holds the weights of step 2" in printed
    two_steps = start(*EVERY_TWO, "rloo.max_steps=2", "eval.every_steps=0", "run.name=short", rewards=[low_ids])
    assert_same(weights(folder / "adapter"), weights(two_steps.folder / "adapter"))
    last = weights(folder / "checkpoints" / "checkpoint-6")
    assert any(not torch.equal(tensor, last[name]) for name, tensor in weights(folder / "adapter").items())


def stopping_at(step):
    """`low_ids`, with a Ctrl-C in the rollout that is sampled after `step` steps; evaluations see another state."""
    sent = []

    def reward(completion_ids, trainer_state, **_):
        if trainer_state.global_step == step and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))
        return low_ids(completion_ids)

    return reward


@pytest.mark.slow
def test_a_resumed_run_has_the_best_of_one_that_was_never_cut(start):
    """The best so far, the used-up patience and an evaluation that Ctrl-C put off come back."""
    words = (*EVERY_TWO, *LEARNS, "eval.patience=9", "rloo.max_steps=4")
    whole = start(*words, "run.name=whole", rewards=[low_ids])
    for step in (1, 2):
        cut = start(*words, f"run.name=cut{step}", rewards=[stopping_at(step)])
        assert cut.stopped == "interrupted" and cut.steps == step + 1
        resumed = start(*words, f"run.name=cut{step}", resume=True, rewards=[stopping_at(99)])
        assert found_by(resumed.folder) == found_by(whole.folder) and len(found_by(whole.folder)) == 3
        assert resumed.adapter_step == whole.adapter_step > 0
        for name in ("adapter", "checkpoints/checkpoint-4"):
            assert_same(weights(resumed.folder / name), weights(whole.folder / name))


@pytest.mark.slow
def test_best_weights_that_are_gone_are_said(start, capsys):
    """A best evaluation whose weights were lost would still beat all later ones, and adapter/ would stay as it was."""
    words = (*EVERY_TWO, "eval.measure=reward", "rloo.save_steps=2", "rloo.save_total_limit=null")
    folder = start(*words, rewards=[falling(6)]).folder
    (folder / "checkpoints" / "checkpoint-6" / "optimizer.pt").unlink()
    shutil.rmtree(folder / "best")
    again = start(*words, rewards=[falling(6)], resume=True)
    assert "does not hold the weights of step 2" in capsys.readouterr().out
    assert again.adapter_step == 6 and found_by(folder)[-1] == (6, 1.0, True, 6)
    assert start(*words, rewards=[falling(6)], resume=True).adapter_step == 6, "nor does it win when it is read again"
    assert "does not hold the weights" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_resume_forgets_what_came_after_its_checkpoint(start):
    """A best evaluation of step 6 stood in a run that had gone back to step 2, and won for good."""
    words = (*EVERY_TWO, *LEARNS, "rloo.save_steps=2", "rloo.save_total_limit=null")
    first = start(*words, rewards=[low_ids])
    before, adapter = found_by(first.folder), weights(first.folder / "adapter")
    for step in (4, 6):
        (first.folder / "checkpoints" / f"checkpoint-{step}" / "optimizer.pt").unlink()
    again = start(*words, resume=True, rewards=[low_ids])
    assert again.steps == 6 and found_by(again.folder) == before
    assert again.adapter_step == first.adapter_step == 6
    shutil.rmtree(again.folder / "best")
    assert start(*words, resume=True, rewards=[low_ids]).adapter_step == 6
    for name in ("adapter", "best"):
        assert_same(weights(again.folder / name), adapter)


@pytest.mark.slow
def test_a_run_that_was_stopped_early_stays_stopped(start, capsys):
    """`--resume` of a finished run trains no step; more patience goes on where it stopped."""
    words = (*EVERY_TWO, "eval.measure=reward", "rloo.max_steps=12")
    first = start(*words, "eval.patience=2", rewards=[falling(12)])
    for other in ((), ("eval.num_samples=2",)):  # whatever is measured, its patience is used up
        again = start(*words, "eval.patience=2", *other, rewards=[falling(12)], resume=True)
        assert (again.stopped, again.steps, again.adapter_step) == ("early", 6, 2)
        assert "stopped early (raise eval.patience to continue) already" in capsys.readouterr().out
    run = load_config(first.folder / "config.yaml", f"run.output_dir={first.folder.parent}", "run.name=tiny")
    assert (load_result(run).stopped, load_result(run).adapter_step) == ("early", 2)
    on = start(*words, "eval.patience=3", rewards=[falling(12)], resume=True)
    assert on.steps > 6 and [row[0] for row in found_by(on.folder)][:5] == [0, 2, 4, 6, 8]
    assert ("stopped_early" in status(on.folder)) == (on.stopped == "early")


@pytest.mark.slow
def test_a_finished_run_keeps_its_best_weights_whatever_else_is_measured(start):
    """A finished run that was resumed with another `eval` key, to measure more, got its last, broken weights back."""
    folder = start(*EVERY_TWO, "eval.measure=reward", rewards=[falling(6), by_ids]).folder
    best = weights(folder / "best")
    for key in ("num_samples=2", "measure=by_ids", "every_steps=0"):
        again = start(*EVERY_TWO, "eval.measure=reward", f"eval.{key}", rewards=[falling(6), by_ids], resume=True)
        assert (again.steps, again.adapter_step, status(folder)["adapter_step"]) == (6, 2, 2)
        assert_same(weights(folder / "adapter"), best)
        live = {name.replace(".default", ""): value for name, value in start.policy.model.named_parameters()}
        assert all(torch.equal(tensor, live[name]) for name, tensor in best.items())


@pytest.mark.slow
def test_the_best_so_far_is_measured_again_when_the_settings_change(start, capsys):
    """Values measured with other settings cannot be compared; training goes on as without evaluations."""
    words = (*EVERY_TWO, "eval.measure=reward", "rloo.beta=0.5", "rloo.save_steps=2")
    folder = start(*words, rewards=[falling(6)]).folder
    best = weights(folder / "best")
    more = ("rloo.max_steps=8", "eval.num_samples=2")
    again = start(*words, *more, resume=True, rewards=[falling(8, best=0)])
    assert (again.steps, again.adapter_step) == (8, 2)
    assert "held-out at step 2: reward -1.000" in capsys.readouterr().out
    assert_same(weights(folder / "adapter"), best)
    assert [row[0] for row in found_by(folder)] == [0, 2, 4, 6, 8]
    whole = start(*words, "rloo.max_steps=8", "eval.every_steps=0", "run.name=whole", rewards=[low_ids]).folder
    assert_same(*(weights(one / "checkpoints" / "checkpoint-8") for one in (folder, whole)))


def test_a_start_that_nothing_beats_is_said(start, capsys):
    """adapter/ held weights that were worse than none, and the run ended as a success."""
    words = (*EVERY_TWO, "eval.measure=reward", "rloo.max_steps=2")
    result = start(*words, rewards=[falling(2, best=0)])
    assert result.adapter_step == 2 == status(result.folder)["adapter_step"] and not (result.folder / "best").exists()
    assert "no evaluation was better than the start (reward -1.000 at step 0)" in capsys.readouterr().out


def test_an_unknown_measure_is_refused_before_anything_is_done(start, tmp_path):
    """An unknown `eval.measure` is refused before the evaluation ahead of training, which may take an hour."""
    with pytest.raises(ConfigError, match=r"eval.measure is brevity.*set one of: auto, accuracy, reward, by_ids"):
        start(*EVERY_TWO, "eval.measure=brevity")
    assert not (tmp_path / "outputs").exists()
    with pytest.raises(ConfigError, match=r"patience is 3.*eval.every_steps"):
        start("eval.patience=3")
    with pytest.raises(ConfigError, match=r"eval.every_steps is 2, but data.test_size is 0"):
        start(*EVERY_TWO, "data.test_size=0")


@pytest.mark.slow
def test_an_evaluation_that_fails_does_not_count(start, capsys):
    """A judge that was down for an evaluation counted as a policy that had got worse, and stopped the run."""

    def flaky(completion_ids, trainer_state, **_):
        if trainer_state.global_step == 6:
            flaky.calls = getattr(flaky, "calls", 0) + 1
            if flaky.calls > 1:
                raise ConnectionError("the judge is down")
        return by_ids(completion_ids)

    result = start(*EVERY_TWO, "eval.measure=reward", "eval.patience=1", rewards=[flaky])
    assert (result.stopped, result.steps) == (None, 6)
    assert [value is None for _, value, _, _ in found_by(result.folder)] == [False, True, True, True]
    printed = capsys.readouterr().out
    assert "the judge is down (100% of the held-out completions have no reward)" in printed
    assert "held-out at step 2: reward could not be measured, so it does not count" in printed
