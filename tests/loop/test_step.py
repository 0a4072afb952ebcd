"""Rollouts inside the trainer: the thinking budget, who counts in a baseline, fresh prompts, the gap to the sampler."""

import math

import pytest
import torch

THINK_END, EOS = 260, 258


@pytest.fixture
def make_trainer(make_trainer):
    """`make_trainer(reward, **options)`: two groups a step by the kit's own engine, without a KL penalty."""
    defaults = {"max_completion_length": 12, "per_device_train_batch_size": 8, "max_steps": 1, "beta": 0.0}

    def build(reward, prompts=8, **options):
        trainer = make_trainer(reward, prompts=prompts, **defaults | options)
        trainer.rows = []
        trainer.rollout_listeners.append(trainer.rows.extend)
        return trainer

    return build


def first_id(completion_ids, **_):
    return [float(ids[0]) for ids in completion_ids]


def test_the_close_of_a_thought_carries_nothing(make_trainer):
    """Closing a thought must not be learnt as the model's own doing."""
    trainer, batches = make_trainer(first_id, thinking_budget=5, answer_budget=3), []
    plain = trainer.rloo.settle
    trainer.rloo.settle = lambda batch: (plain(batch), batches.append(batch))
    trainer.train()
    forced = [index for index, row in enumerate(trainer.rows) if row["forced"]]
    assert len(forced) >= 4, "random weights seldom close by themselves"
    for index, row in enumerate(trainer.rows):
        kept = batches[0].mask[index].int().tolist()
        if index in forced:
            assert row["completion_ids"][5] == THINK_END and len(kept) <= 5 + 1 + 3
            assert kept == [1] * 5 + [0] + [1] * (len(kept) - 6)
            assert math.isnan(batches[0].sampler_logps[index][5])
        else:
            assert all(kept)


def constant(completion_ids, **_):
    return [1.0] * len(completion_ids)


@pytest.mark.parametrize("reward", [first_id, constant])
def test_sampler_and_trainer_agree_where_they_are_one_program(reward, make_trainer):
    """The gap is what 4-bit kernels and bf16 make; in float32 on one machine there is none to speak of. A step without
    any signal has one too: the log had a hole there, just where one looks for the reason."""
    trainer = make_trainer(reward, temperature=0.8)
    trainer.train()
    logs = trainer.state.log_history[0]
    assert 0 <= logs["sampling/logp_difference_mean"] < 1e-5
    assert logs["sampling/logp_difference_max"] < 1e-4


@pytest.fixture
def corrected_gradient(make_trainer):
    """`corrected_gradient(form, shift)`: a step's gradient and its log where the sampler's log-probabilities are lower
    than the trainer's by `shift` (nats): one number, or one for each of the 8 completions."""

    def run(form, shift, **options):
        shifts = shift if isinstance(shift, list) else [shift] * 8
        torch.manual_seed(0)
        trainer = make_trainer(
            first_id, sampler_correction=form, sampler_correction_cap=2.0, max_grad_norm=0.0, **options
        )
        sample, close, kept = trainer.rloo.sampler.engine.sample, trainer._close_step, []

        def shifted(*arguments):
            rollout = sample(*arguments)
            rows = zip(rollout.sampler_logps, shifts, strict=True)
            return type(rollout)(rollout.completion_ids, rollout.forced, [[p - by for p in row] for row, by in rows])

        def keep():
            close()
            kept.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad]))

        trainer.rloo.sampler.engine.sample, trainer._close_step = shifted, keep
        trainer.train()
        return kept[0], trainer.state.log_history[0], trainer.rows

    return run


@pytest.mark.parametrize("form", ["token", "sequence"])
def test_the_correction_weighs_gradients_by_the_gap(form, corrected_gradient):
    """A sampler that is off by a factor biases every step; the weight that corrects it is cut off at the cap."""
    plain, logs, _ = corrected_gradient("none", 10.0)
    assert logs["sampling/logp_difference_mean"] == pytest.approx(10.0, abs=1e-3)
    weighed, logs, _ = corrected_gradient(form, 10.0)
    assert logs["sampling/importance_weight_mean"] == pytest.approx(2.0)
    assert torch.allclose(weighed, 2.0 * plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["token_mask", "sequence_mask"])
def test_a_masked_correction_drops_a_completion_alone(form, corrected_gradient):
    """Its siblings go on being compared with it: the advantages stay, and only its own part leaves the gradient."""
    plain, _, _ = corrected_gradient("none", 0.0)
    alone, rest = 5, [row for row in range(8) if row != 5]
    without, logs, rows = corrected_gradient(form, [10.0 * (row == alone) for row in range(8)])
    only, _, others = corrected_gradient(form, [10.0 * (row != alone) for row in range(8)])
    assert [row["advantage"] for row in rows] == [row["advantage"] for row in others]
    assert rows[alone]["advantage"] != 0 and without.any() and only.any()
    assert torch.allclose(without + only, plain, rtol=1e-3, atol=1e-6)
    assert not torch.allclose(without, plain, rtol=1e-3, atol=1e-6)
    lengths = [len(row["completion_ids"]) for row in rows]
    kept = sum(lengths[row] for row in rest) / sum(lengths)
    assert logs["sampling/importance_weight_mean"] == pytest.approx(kept, abs=1e-4)


@pytest.mark.parametrize("counts", [True, False])
def test_a_masked_completion_leaves_the_baseline_by_choice(counts, make_trainer):
    """TRL masks a truncated completion's gradient and goes on comparing its siblings with it."""
    completions = [[70, EOS], [71, EOS], [72, EOS], [90, 91, 92]] * 2
    trainer = make_trainer(first_id, mask_truncated_completions=True, baseline_includes_masked=counts)
    trainer._generate_single_turn = lambda prompt_ids, *_: [list(ids) for ids in completions]
    trainer.train()
    siblings = [71, 72, 90] if counts else [71, 72]
    assert trainer.rows[0]["advantage"] == pytest.approx(70 - sum(siblings) / len(siblings))
    assert (trainer.rows[3]["advantage"] == 0.0) is not counts


def test_the_loop_remembers_its_rewards_across_a_resume(make_trainer, tmp_path):
    """`normalize_rewards: running` started from zero after a resume, and with it the scale of every advantage."""
    options = {"normalize_rewards": "running", "resample_rounds": 1, "save_strategy": "steps", "save_steps": 1}
    first = make_trainer(first_id, **options)
    first.train()
    state = first.rloo.rewarder.moments.to_dict()
    assert state["count"] == 8
    resumed = make_trainer(first_id, **options | {"max_steps": 2})
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert resumed.rloo.rewarder.moments.to_dict()["count"] == 16
    assert [log["episode"] for log in resumed.state.log_history if "episode" in log] == [8.0, 16.0], "of the whole run"
    ids = [row["completion_ids"][0] for row in first.rows + resumed.rows]
    assert resumed.rloo.rewarder.moments.to_dict()["mean"] == pytest.approx(sum(ids) / 16)
