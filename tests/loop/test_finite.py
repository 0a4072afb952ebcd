"""Numbers that are none: that the loop finds them, and when a run stops for them."""

import pytest
import torch

from rloo_kit.errors import NonFiniteError, RlooKitError
from rloo_kit.gradient.advantages import baseline_advantages, kl_penalty_rows, zero_unscored
from rloo_kit.gradient.objective import Objective, all_finite, policy_loss
from rloo_kit.runs.watch import FiniteWatch


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_a_broken_kl_stays_what_it_is(value: float) -> None:
    """A log-probability of minus infinity (float16 overflow) is an advantage of 3.4e38 in stock TRL, by `nan_to_num`,
    and -3.4e38 for its siblings; NaN makes the row "not scored" without a word."""
    kl = torch.tensor([value, 0.1, 0.2, 0.3])
    for form in ("sum", "length_normalized", "per_token"):
        assert not all_finite(kl_penalty_rows(kl, torch.ones(4), [2, 2], form))
        assert all_finite(kl_penalty_rows(kl, torch.tensor([0, 1, 1, 1]), [2, 2], form)), "a masked token has no KL"
    advantages = zero_unscored(baseline_advantages(torch.tensor([torch.inf, 1.0, 2.0, 3.0]), 4, "leave_one_out"))
    assert not all_finite(advantages) and advantages.abs().max() == torch.inf


def test_nan_times_an_advantage_of_zero_is_nan_and_is_found() -> None:
    """A row that is not scored has advantage 0, but 0 x NaN is NaN: one row spoils the loss of all."""
    logps = torch.tensor([torch.nan, -1.0])
    loss = policy_loss(logps, logps.detach(), [1, 1], torch.ones(2), torch.tensor([0.0, 1.0]), Objective())
    assert not all_finite(loss.per_row) and not all_finite(logps, mask=torch.ones(2))


# ------------------------------------------------------------------------------------------ counting


def test_it_stops_after_so_many_in_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    """One float16 overflow is weather; a policy that has blown up skips every step to the end, at full cost."""
    watch = FiniteWatch(patience=3)
    for step, broken in enumerate(["the KL", "the KL", None, "the loss", "the loss"], 1):
        watch.observe(step, broken)
        assert not watch.exceeded
    watch.observe(6, "the gradient")
    assert watch.exceeded and (watch.skipped, watch.in_a_row) == (5, 3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "WARNING: step 1 is skipped: NaN or infinity in the KL (1 in a row; 3 stop the run)"
    assert [line.split()[2] for line in lines] == ["1", "2", "5", "6"], "the 1st, 2nd and 4th, and the one that stops"


def test_the_error_says_where_the_state_is_and_what_to_change() -> None:
    """ "loss is NaN" after a night tells nobody where to go on from."""
    watch = FiniteWatch(patience=1)
    watch.observe(9, "the gradient")
    error = watch.make_error("outputs/x")
    assert isinstance(error, NonFiniteError) and isinstance(error, RlooKitError)
    assert isinstance(error, FloatingPointError)
    for words in ("NaN or infinity in the gradient", "max_skipped_steps = 1", "outputs/x", "learning_rate", "delta"):
        assert words in str(error)
