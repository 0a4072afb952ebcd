"""A training set that is a stream (`datasets.IterableDataset`): it has no length, and no row has a number."""

import pytest

from tests.loop.conftest import stream


@pytest.mark.parametrize("shuffled", [True, False], ids=["shuffled", "in order"])
def test_a_stream_that_ends_starts_over(shuffled, trl_train):
    """Every prompt once a pass; each pass in another order, unless shuffling is off."""
    run = trl_train(arguments={"train_dataset": stream(5)}, max_steps=10, shuffle_dataset=shuffled)
    prompts = [row["prompt"] for row in run.rows][::4]
    assert [row["prompt"] for row in run.rows] == [prompt for prompt in prompts for _ in range(4)], "whole groups"
    first, second, everything = prompts[:5], prompts[5:], [f"{n}+2=" for n in range(5)]
    assert sorted(first) == sorted(second) == everything
    assert (first != second) if shuffled else first == second == everything


CASES = {
    "in the first pass": (20, 6, 3, {}),
    "in a later pass": (5, 9, 7, {}),
    "between two passes": (5, 8, 5, {}),
    "short steps": (5, 9, 5, {"gradient_accumulation_steps": 2, "steps_per_generation": 1}),
    "reused rollouts": (3, 12, 8, {"num_iterations": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_goes_on_in_the_stream(case, trl_train, tmp_path):
    """transformers takes a stream for one pass: resumed behind its end a run skipped the rest of the first pass, and
    started over with the second one."""
    number, steps, cut, more = CASES[case]
    options = {"output_dir": str(tmp_path / "cut"), "max_steps": steps, "save_strategy": "steps", "save_steps": cut}
    data = {"train_dataset": stream(number)}
    whole = trl_train(arguments=data, **options, **more)

    def resume(trainer):
        plain = trainer.train
        trainer.train = lambda: plain(resume_from_checkpoint=str(tmp_path / "cut" / f"checkpoint-{cut}"))

    resumed = trl_train(arguments=data, before=resume, **options, **more)
    assert resumed.trainer.state.global_step == steps
    assert 0 < len(resumed.rows) < len(whole.rows)
    rest = whole.rows[-len(resumed.rows) :]
    for name in ("prompt", "completion_ids", "step"):
        assert [row[name] for row in resumed.rows] == [row[name] for row in rest], name
    assert resumed.steps[-1]["grad_norm"] == whole.steps[-1]["grad_norm"]
