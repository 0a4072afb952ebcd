"""Whether RLOO has a signal: prompts with right and wrong completions, counted for a policy with known
probabilities."""

from types import SimpleNamespace
from typing import Any

import pytest

from rloo_kit.config.schema import RewardSection
from rloo_kit.errors import ConfigError
from rloo_kit.evals.difficulty import Signal, measure_signal, select_prompts
from tests.evals.test_difficulty import cache, make_dataset, make_run, policy  # noqa: F401 - fixtures


@pytest.mark.parametrize(
    ("rates", "verdict", "word"),
    [
        ([0.0] * 9 + [0.5], "too low", "sft.max_steps"),
        ([0.0] * 8 + [0.5, 0.125], "enough", "enough signal for RLOO"),
        ([1.0] * 9 + [0.875], "too easy", "data.source"),
        ([0.0] * 10, "too low", "sft.source"),
    ],
)
def test_the_verdict(rates: list[float], verdict: str, word: str) -> None:
    """A prompt that is always solved gives as little signal as one that never is; the mean pass rate alone shows
    neither."""
    signal = Signal(rates, 8)
    assert signal.verdict == verdict and word in str(signal)
    assert signal.num_mixed == sum(rate not in (0.0, 1.0) for rate in rates)
    assert signal.share.low <= signal.num_mixed / 10 <= signal.share.high


def test_it_samples_as_rloo_does(policy: Any) -> None:  # noqa: F811
    """The policy sometimes answers 7 or 8, so a prompt is sometimes solved if one of them is the answer, and else
    never."""
    run = make_run(difficulty_samples=0)
    run.rloo.per_device_train_batch_size = 64
    run.rloo.num_generations = 64
    data = SimpleNamespace(train=make_dataset(["7", "9", None, "8", "7"]))
    signal = measure_signal(run, policy, data, 3)
    assert signal is not None and signal.num_generations == run.rloo.num_generations == 64
    assert len(signal.rates) == 3 and signal.rates[1] == 0.0, "the row without an answer is passed over"
    assert signal.num_mixed == 2
    assert run.rollout.difficulty_samples == 0, "the run is asked, not changed"
    assert measure_signal(run, policy, SimpleNamespace(train=make_dataset([None, None])), 3) is None


def test_the_signal_of_an_own_reward(policy: Any, tmp_path: Any) -> None:  # noqa: F811
    """An SFT whose own reward had reached 98 % had a pass rate of 0 % by exact match: "a higher sft.learning_rate"."""
    (tmp_path / "mine.py").write_text(
        "def has(completions, level, **_):\n"
        "    return [float(each > 1 or '7' in text) for text, each in zip(completions, level)]\n"
    )
    data = SimpleNamespace(train=make_dataset(["0"] * 3).add_column("level", [1, 1, 2]))
    run = make_run(difficulty_samples=0)
    run.rloo.per_device_train_batch_size = run.rloo.num_generations = 64
    run.rewards = [RewardSection(name=f"{tmp_path / 'mine.py'}:has")]
    signal = measure_signal(run, policy, data, 3)
    assert signal is not None and signal.num_mixed == 2 and signal.verdict == "enough" and signal.rates[2] == 1.0
    assert 0.1 < signal.rates[0] < 0.9 and "unequal rewards among 64 completions" in str(signal)
    solved = measure_signal(run, policy, SimpleNamespace(train=data.train.select([2])), 1)
    assert solved is not None and solved.verdict == "too easy" and "harder prompts (data.source)" in str(solved)
    with pytest.raises(ConfigError, match="rollout.difficulty_samples=0"):
        select_prompts(
            make_run().model_copy(update={"rewards": run.rewards}), policy, data.train, SimpleNamespace(resumed=False)
        )
