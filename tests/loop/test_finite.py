"""Numbers that are none: how they get through stock TRL, that ours tells them, and when a run stops for them."""

from typing import Any

import pytest
import torch

from rloo_kit.errors import NonFiniteError, RlooKitError
from rloo_kit.gradient.advantages import baseline_advantages, kl_penalty_rows, zero_unscored
from rloo_kit.gradient.objective import Objective, all_finite, policy_loss
from rloo_kit.runs.watch import FiniteWatch
from tests.loop.test_equality_with_stock import _lora, _make, _torch_head

LARGEST = torch.finfo(torch.float32).max


@pytest.fixture
def stock(monkeypatch: Any, make_tiny_model: Any, tiny_tokenizer: Any, tmp_path: Any) -> Any:
    """`stock(reward, logp=None)`: TRL's own batch, with that log-probability put into the first completion's pass."""
    import trl
    from trl.trainer import utils

    class StandIn:
        apply = staticmethod(_torch_head)

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", StandIn)

    def run(reward: Any, logp: float | None = None) -> Any:
        trainer = _make(trl.RLOOTrainer, trl.RLOOConfig, _lora(make_tiny_model()), tiny_tokenizer, tmp_path, [reward])
        score, calls = trainer._get_per_token_logps_and_entropies, []

        def broken(*arguments: Any, **keywords: Any) -> Any:
            logps, *rest = score(*arguments, **keywords)
            calls.append(1)
            if logp is not None and len(calls) == 1:  # the policy's pass; the reference's comes second
                logps = logps.clone()
                logps[0, 0] = logp
            return logps, *rest

        trainer._get_per_token_logps_and_entropies = broken
        trainer.model.train()
        inputs = [{"prompt": trainer.train_dataset[row]["prompt"]} for row in (0, 2) for _ in range(4)]
        batch = trainer._generate_and_score_completions(inputs)
        return batch["advantages"], trainer._compute_loss(trainer.model, batch)

    return run


def by_length(completion_ids: Any, **_: Any) -> list[float]:
    return [len(ids) / 3 for ids in completion_ids]


def test_an_infinite_reward_is_an_advantage_of_3e38_in_stock_trl(stock: Any) -> None:
    """`nan_to_num` was meant for unscored samples; it also turns infinity into the largest float, and the siblings'
    into its negative. Ours has no number for it: unscored before the baseline, or told by `all_finite` after it."""

    def infinite(completion_ids: Any, **_: Any) -> list[float]:
        return [float("inf") if index == 0 else float(len(ids)) for index, ids in enumerate(completion_ids)]

    advantages, loss = stock(infinite)
    assert advantages[:4].abs().max() == LARGEST and not loss.abs() < 1e30
    ours = baseline_advantages(torch.tensor([torch.inf, 1.0, 2.0, 3.0]), 4, "leave_one_out")
    assert not all_finite(zero_unscored(ours)) and zero_unscored(ours).abs().max() == torch.inf


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_a_broken_kl_is_silent_in_stock_trl(stock: Any, value: float) -> None:
    """A log-probability of minus infinity (float16 overflow) is a KL of minus infinity: the row has the largest reward
    there is, and its siblings the advantage -3.4e38. NaN makes the row "not scored" without a word, though it was. Ours
    stays what it is and is told."""
    advantages, loss = stock(by_length, value)
    sound, _ = stock(by_length)
    if value == -torch.inf:
        assert (advantages[1:4] == -LARGEST).all() and not loss.abs() < 1e30
    else:
        assert advantages[0] == 0.0 and sound[0] != 0.0 and torch.isfinite(advantages).all()
    kl = torch.tensor([value, 0.1, 0.2, 0.3])
    for form in ("sum", "length_normalized", "per_token"):
        assert not all_finite(kl_penalty_rows(kl, torch.ones(4), [2, 2], form))
        assert all_finite(kl_penalty_rows(kl, torch.tensor([0, 1, 1, 1]), [2, 2], form)), "a masked token has no KL"


def test_nan_times_an_advantage_of_zero_is_nan_and_is_told() -> None:
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
