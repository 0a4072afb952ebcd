"""What TRL's own suite asks of its RLOO trainer: the reference, the objective and batches. See `test_trl_cases.py`."""

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from tests.loop.conftest import COMPLETIONS, EOS, by_ids

# -------------------------------------------------------------------------------------------------------- the reference


def test_a_reference_that_follows(trl_train):
    """`sync_ref_model` moves the reference every so many steps: half of the way here, and in no other step."""
    seen = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            seen.append(tuple(model.lm_head.weight.detach().clone() for model in pair))

    pair = []
    options = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}

    def watch(trainer):
        pair.extend((trainer.model, trainer.ref_model))
        trainer.add_callback(Watch())

    run = trl_train(before=watch, max_steps=3, **options)
    assert run.kept == set()
    (_, first), (policy, second), (_, third) = seen
    assert torch.allclose(second, (policy + first) / 2, atol=1e-6) and not second.equal(first) and third.equal(second)


# ------------------------------------------------------------------------------------------------------------ objective


def test_normalised_advantages(trl_train):
    """Rewards in the hundreds make steps of another size than rewards below one; normalised they are alike."""
    run = trl_train(
        lambda completion_ids, **_: [100.0 * value for value in by_ids(completion_ids)], normalize_advantages=True,
        per_device_train_batch_size=8, beta=0.0,
    )  # fmt: skip
    assert run.kept == set()
    for first in (0, 8):
        advantages = torch.tensor([row["advantage"] for row in run.rows[first : first + 8]])
        assert advantages.mean().item() == pytest.approx(0.0, abs=1e-4)
        assert advantages.std().item() == pytest.approx(1.0, abs=1e-3)


def test_clipped_rewards(trl_train):
    """One reward of 1000 must not carry the group; the log keeps what was earned."""
    run = trl_train(lambda completion_ids, **_: [-50.0, 0.0, 0.5, 1000.0], reward_clip_range=(-1, 1), beta=0.0)
    clipped = [-1.0, 0.0, 0.5, 1.0]
    assert run.kept == set() and [row["reward"] for row in run.rows[:4]] == [-50.0, 0.0, 0.5, 1000.0]
    for row, own in zip(run.rows, clipped * 2, strict=True):
        assert row["advantage"] == pytest.approx(own - (sum(clipped) - own) / 3, abs=1e-5)


CUT = [70, 71, 72, 73, 74, 75]


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_truncated_completions_are_masked(beta, trl_train):
    """A step of cut-off thoughts alone has nothing to learn from: weights that drift there drift on noise."""
    options = {"mask_truncated_completions": True, "beta": beta}
    whole = trl_train(completions=[CUT, [66, EOS], [67, 68, 69, 70, 71, EOS], [72, 256]], **options)
    assert whole.kept == set() and [row["truncated"] for row in whole.rows[:4]] == [True, False, False, False]
    nothing = trl_train(completions=[CUT, [*CUT[1:], 76], [77, *CUT[1:]], CUT[::-1]], **options)
    assert not nothing.moved and all(row["truncated"] for row in nothing.rows)
    assert len({row["reward"] for row in nothing.rows}) > 1, "they did earn different rewards"


def test_completions_are_used_several_times(trl_train):
    """`num_iterations=2` samples every second step, and the second use is off-policy."""
    run = trl_train(num_iterations=2, max_steps=4)
    assert run.kept == set() and [row["step"] for row in run.rows] == [0] * 4 + [2] * 4
    assert [step["val/ratio"] == pytest.approx(1.0, abs=1e-4) for step in run.steps] == [True, False] * 2
    assert ["reward" in step and step["reward"] is not None for step in run.steps] == [True, False] * 2


def test_the_bounds_of_the_ratio_are_two(trl_train):
    """`epsilon_high` read as the lower bound, or not at all, lets a good completion's probability run away."""
    shares = []
    for epsilons in (
        {"epsilon": 1e-6},
        {"epsilon": 0.999, "epsilon_high": 1e-6},
        {"epsilon": 0.999, "epsilon_high": 1e9},
    ):
        run = trl_train(
            completions=COMPLETIONS, num_iterations=3, max_steps=3, beta=0.0, learning_rate=1e-2, **epsilons
        )
        assert run.kept == set()
        shares.append([sum(step[f"clip_ratio/{side}_mean"] for step in run.steps) for side in ("low", "high")])
    assert shares[0][0] > 0 and shares[0][1] > 0
    assert shares[1][0] == 0 and shares[1][1] > 0 and shares[2] == [0, 0]


def test_padding_to_a_multiple_is_the_same_run(trl_train):
    """Padding is a matter of kernels; weights that depend on it have attended to it."""
    policies = [trl_train(pad_to_multiple_of=multiple).trainer.model.state_dict() for multiple in (None, 8)]
    assert all(torch.allclose(value, policies[1][name], atol=1e-6) for name, value in policies[0].items())


def test_neutral_generation_kwargs_are_taken(trl_train):
    """Scripts spell out what is the default already."""
    assert trl_train(generation_kwargs={"do_sample": True, "use_cache": True, "top_p": 1.0}).kept == set()


# -------------------------------------------------------------------------------------------------------------- batches


def test_a_group_larger_than_a_micro_batch(trl_train):
    """A group may lie across micro-steps: its baseline is the whole group's all the same."""
    run = trl_train(per_device_train_batch_size=2, num_generations=8, gradient_accumulation_steps=4, beta=0.0)
    assert run.kept == set() and len(run.rows) == 16
    for first in (0, 8):
        group = run.rows[first : first + 8]
        total = sum(row["reward"] for row in group)
        assert len({row["prompt"] for row in group}) == 1
        assert all(
            row["advantage"] == pytest.approx(row["reward"] - (total - row["reward"]) / 7, abs=1e-5) for row in group
        )


def test_which_prompts_a_step_gets(trl_train):
    """Four micro-steps a rollout, used twice, three a step: no other order gives each prompt as often as the next."""
    data, micro_steps = Dataset.from_dict({"prompt": [f"{n}=" for n in range(17)]}), []

    def count(trainer):
        plain = trainer.training_step
        trainer.training_step = lambda *a, **k: (micro_steps.append(trainer.state.global_step), plain(*a, **k))[1]

    run = trl_train(
        arguments={"train_dataset": data}, before=count, gradient_accumulation_steps=3, steps_per_generation=4,
        per_device_train_batch_size=6, num_iterations=2, shuffle_dataset=False, num_train_epochs=3, max_steps=-1,
    )  # fmt: skip
    first, second = [[f"{n}=" for n in numbers for _ in range(4)] for numbers in (range(6), range(6, 12))]
    assert run.kept == set() and len(micro_steps) == 48, "3 epochs x 2 rollouts x 4 micro-steps x 2 uses"
    assert [row["prompt"] for row in run.rows] == (first + second) * 3
    assert run.trainer.state.global_step == 18, "16 micro-steps an epoch are five steps of 3 and one of 1"


def test_an_evaluation_by_hand_of_half_groups_is_refused(trl_train):
    """With `eval_strategy="no"` nothing checks the batch of `evaluate()` before rewards are grouped."""
    run = trl_train(per_device_eval_batch_size=3)
    with pytest.raises(ValueError, match="per_device_eval_batch_size"):
        run.trainer.evaluate(Dataset.from_dict({"prompt": list("012")}))


def test_an_optimizer_and_callbacks_of_ones_own(trl_train, make_tiny_model):
    """An optimizer that is passed in and replaced by AdamW runs at a learning rate that the user did not choose."""
    model, calls = make_tiny_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    class Count(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            calls.append((state.global_step, optimizer.param_groups[0]["lr"]))

    arguments = {"model": model, "optimizers": (optimizer, scheduler), "callbacks": [Count()]}
    run = trl_train(arguments=arguments, beta=0.0, learning_rate=0.0)
    assert run.kept == set() and calls == [(1, 0.25), (2, 0.125)] and run.trainer.optimizer.optimizer is optimizer


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
