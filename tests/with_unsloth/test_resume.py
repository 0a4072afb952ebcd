"""A run on Unsloth that is stopped by Ctrl-C and goes on in another process's place: the run that was never cut."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

KEYS = ("rloo.max_steps=2", "rloo.learning_rate=0.01", "rloo.save_steps=1", "run.evaluate=false")


@pytest.fixture
def start(make_run: Any, load: Any, tmp_path: Path) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """`start(name, stop=False, resume=False)`: the run `name`, which Ctrl-C stops in its first step where `stop`."""

    def run(name: str, stop: bool = False, resume: bool = False) -> tuple[Any, dict[str, Any]]:
        import rloo_kit

        def count_letters(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
            if stop and trainer_state.global_step == 0:
                os.kill(os.getpid(), signal.SIGINT)
            return [float(sum(token < 70 for token in ids)) for ids in completion_ids]

        config = make_run(*KEYS, f"run.output_dir={tmp_path}", f"run.name={name}")
        policy = load(*KEYS)
        data = rloo_kit.load_data(config, policy.tokenizer)
        result = rloo_kit.train(config, policy, data, [count_letters], resume=resume)
        weights = {name: value.detach() for name, value in policy.model.named_parameters() if value.requires_grad}
        return result, weights

    return run


def test_resume_is_the_run_that_was_never_cut(start: Any) -> None:
    """A resume that forgets the optimizer, the prompts' order or the sampler's state is another run."""
    import torch

    whole, expected = start("whole")
    cut, _ = start("cut", stop=True)
    assert (cut.steps, cut.stopped) == (1, "interrupted")
    resumed, found = start("cut", resume=True)
    assert (resumed.steps, resumed.stopped) == (2, None)
    assert found.keys() == expected.keys() and found
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    rewards = [[row["reward"] for row in result.metrics] for result in (whole, resumed)]
    assert rewards[0] == rewards[1] and len(rewards[0]) == 2
    assert any(row["grad_norm"] > 0 for row in whole.metrics)
