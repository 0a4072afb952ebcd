"""The objective and the weights that correct for another sampler, against plain Python."""

import itertools
import math
import random

import pytest
import torch

from rloo_kit.gradient.objective import Objective, correction_weights, policy_loss, spread, sum_rows
from tests.choices import choices

RATIO_FORMS = choices("ratio_form")
NAN, INF = math.nan, math.inf
# (log-probability, advantage, kept) of each token. The second completion is empty, the fourth wholly masked, the third
# has forced tokens in its middle.
ROWS = [
    [(-0.5, 0.7, 1), (-1.5, 0.4, 1), (-0.2, 0.3, 1), (-2.0, -0.2, 1)],
    [],
    [(-0.3, -1.1, 1), (-4.0, -0.9, 0), (-3.0, -0.7, 0), (-0.6, -0.8, 1)],
    [(-1.0, 0.5, 0), (-1.0, 0.5, 0)],
    [(-2.5, 2.0, 1)],
]
LENGTHS = [len(row) for row in ROWS]
CASES = [(ratio, False, None) for ratio in RATIO_FORMS] + [("per_token", True, mean) for mean in (None, "completion")]


@pytest.mark.parametrize(("ratio_form", "of_tokens", "mean"), CASES)
def test_on_policy_gradients_equal_plain_python(ratio_form, of_tokens, mean):
    """On-policy a token's gradient is minus its advantage, over the completion's tokens where a mean is taken."""
    tokens = [token for row in ROWS for token in row]
    logps, every, mask = (torch.tensor(part) for part in zip(*tokens, strict=True))
    per_row = [row[0][1] if row else 0.3 for row in ROWS]
    advantages = every if of_tokens else torch.tensor(per_row)
    settings = Objective(ratio_form=ratio_form, **{"token_mean": mean} if mean else {})
    loss = policy_loss(logps.requires_grad_(), logps.detach(), LENGTHS, mask, advantages, settings)
    loss.per_row.sum().backward()
    wanted, values = [], []
    for row, whole in zip(ROWS, per_row, strict=True):
        kept = max(sum(token[2] for token in row), 1)
        share = 1 / kept if "length_normalized" in ratio_form or mean else 1.0
        terms = [-(token[1] if of_tokens else whole) * token[2] * share for token in row]
        wanted += terms
        values.append(sum(terms))
    assert logps.grad.tolist() == pytest.approx(wanted, abs=1e-6)
    if of_tokens:
        assert loss.per_row.tolist() == pytest.approx(values, abs=1e-6)
    assert (loss.ratio == 1.0).all() and not (loss.clipped_low + loss.clipped_high).any()
    assert loss.per_row[1] == 0 and loss.per_row[3] == 0, "an empty and a wholly masked completion have no loss"
    assert loss.ratio.shape == loss.per_row.shape


@pytest.mark.parametrize("ratio_form", RATIO_FORMS)
def test_off_policy_values_and_gradients_equal_plain_python(ratio_form):
    """min(ratio A, clip(ratio) A) is written with the bounds in the logarithm; every side of every bound counts."""
    settings = Objective(0.2, 0.3, ratio_form)
    for shift, advantage in itertools.product([-2.0, -0.3, -0.1, 0.0, 0.1, 0.2, 0.5, 1.5], [-1.5, 0.0, 0.7]):
        logps = torch.full((2,), -1.0 + shift / 2, dtype=torch.float64, requires_grad=True)
        old = torch.full((2,), -1.0, dtype=torch.float64)
        loss = policy_loss(logps, old, [2], torch.ones(2), torch.tensor([advantage]), settings)
        loss.per_row.sum().backward()
        ratio = math.exp(shift if ratio_form == "sum" else shift / 2)
        objective = min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
        inside = not ((advantage < 0 and ratio < 0.8) or (advantage > 0 and ratio > 1.3))
        terms, share = (2, 1.0) if ratio_form == "per_token" else (1, 1.0 if ratio_form == "sum" else 0.5)
        assert loss.per_row.item() == pytest.approx(-terms * objective, abs=1e-6)
        assert logps.grad.tolist() == pytest.approx([-share * ratio * advantage * inside] * 2, abs=1e-6)
        low, high = (part.max().item() for part in (loss.clipped_low, loss.clipped_high))
        assert (low, high) == (advantage < 0 and ratio < 0.8, advantage > 0 and ratio > 1.3)


def test_a_long_sum_of_log_probabilities_keeps_its_digits():
    """Near 16,000 float32 steps by 1e-3: a ratio of two sums is 1 for 1.0004 (measured in TRL)."""
    tokens = 16384
    old = -torch.linspace(0.5, 1.5, tokens)
    new = old + 1e-3 * torch.cos(torch.arange(tokens))
    exact = (new.double() - old.double()).sum().exp().item()
    ours = policy_loss(new, old, [tokens], torch.ones(tokens), torch.tensor([-1.0]), Objective())
    assert abs(ours.ratio.item() - exact) < 1e-6


def test_a_ratio_that_overflows_has_no_nan_in_its_gradient():
    """exp(100) is infinite in float32; the clip picks the finite branch, and autograd multiplies 0 with infinity."""
    for advantage in (1.0, 0.0):
        ours = torch.tensor([0.0], requires_grad=True)
        loss = policy_loss(ours, torch.tensor([-100.0]), [1], torch.ones(1), torch.tensor([advantage]), Objective())
        loss.per_row.sum().backward()
        assert loss.per_row.isfinite().all() and ours.grad.tolist() == [0.0]


def test_masked_tokens_have_no_ratio_no_loss_and_no_gradient():
    """A forced `</think>` has whatever log-probability it has, minus infinity included."""
    logps = torch.tensor([-0.5, -torch.inf, -0.7], requires_grad=True)
    old = torch.tensor([-0.5, -3.0, -0.7])
    for form in RATIO_FORMS:
        logps.grad = None
        loss = policy_loss(
            logps, old, [3], torch.tensor([True, False, True]), torch.tensor([2.0]), Objective(ratio_form=form)
        )
        loss.per_row.sum().backward()
        assert (loss.ratio == 1.0).all() and loss.per_row.isfinite().all()
        share = 0.5 if form == "length_normalized" else 1.0
        assert logps.grad.tolist() == pytest.approx([-2.0 * share, 0.0, -2.0 * share])


@pytest.mark.parametrize("ratio_form", RATIO_FORMS)
def test_weights_scale_the_gradient_of_their_token(ratio_form):
    """The gap between sampler and trainer is a constant of each token; clipping must not see it."""
    logps = torch.tensor([-0.5, -1.0, -0.7], requires_grad=True)
    weights = torch.tensor([0.5, 2.0, 1.0])
    rest = (torch.ones(3), torch.tensor([1.0, -1.0]), Objective(ratio_form=ratio_form), weights)
    loss = policy_loss(logps, logps.detach(), [2, 1], *rest)
    loss.per_row.sum().backward()
    share = 0.5 if ratio_form == "length_normalized" else 1.0
    assert logps.grad.tolist() == pytest.approx([-0.5 * share, -2.0 * share, 1.0])
    assert (loss.ratio == 1.0).all()


def test_no_rows_and_sums_of_rows():
    """A pass whose rows were all skipped must not fail on an empty stack."""
    nothing = torch.zeros(0)
    assert policy_loss(nothing, nothing, [], nothing, nothing, Objective()).per_row.shape == (0,)
    assert spread(nothing, []).shape == (0,), "of no rows at all there is nothing to repeat"
    assert sum_rows(torch.tensor([1.0, 2.0, 3.0]), [2, 0, 1]).tolist() == [3.0, 0.0, 3.0]
    assert sum_rows(torch.full((100_000,), 0.1), [100_000]).item() == pytest.approx(10_000.000149, abs=1e-4)


# ---------------------------------------------------------------- weights that correct for the sampler


FORMS = ("sequence", "token", "sequence_mask", "token_mask")


def oracle(logps: list[float], sampled: list[float], mask: list[int], lengths: list[int], form: str) -> list[float]:
    """The definition, a token at a time."""

    def weigh(ratio: float) -> float:
        if form in ("token", "sequence"):
            return min(ratio, 2.0)
        return ratio if ratio <= 2.0 else 0.0

    weights: list[float] = []
    for length in lengths:
        start = len(weights)
        logs = [
            logps[i] - sampled[i] if mask[i] and not math.isnan(sampled[i]) else 0.0
            for i in range(start, start + length)
        ]
        weights += [weigh(math.exp(log)) for log in (logs if "token" in form else [sum(logs)] * length)]
    return weights


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_its_formula(form):
    """Rows of any length, an empty one among them, with masked tokens and tokens that were not sampled."""
    draw = random.Random(7)
    for _ in range(3):
        lengths = [3, 0, 1, 6, 2]
        total = sum(lengths)
        logps = [draw.uniform(-4, 0) for _ in range(total)]
        sampled = [NAN if draw.random() < 0.2 else logp + draw.gauss(0, 0.7) for logp in logps]
        mask = [int(draw.random() < 0.8) for _ in range(total)]
        wide = [torch.tensor(values, dtype=torch.float64) for values in (logps, sampled, mask)]
        found = correction_weights(*wide, lengths, form)
        assert found.tolist() == pytest.approx(oracle(logps, sampled, mask, lengths, form))
        narrow = correction_weights(*(values.float() for values in wide), lengths, form)
        assert narrow.dtype == torch.float32 and torch.allclose(narrow.double(), found, rtol=1e-5)


def weigh(difference: list[float], lengths: list[int], form: str) -> list[float]:
    """Weights of tokens whose log-ratio is `difference`."""
    logps = torch.tensor(difference)
    zeros, ones = torch.zeros_like(logps), torch.ones_like(logps)
    return correction_weights(logps, zeros, ones, lengths, form).tolist()


@pytest.mark.parametrize("form", FORMS)
def test_values_that_overflow(form):
    """exp of 1000 nats is infinity, and infinity times a gradient of 0 is NaN: the cap or the mask comes first."""
    masked = form.endswith("_mask")
    assert weigh([1000.0, -1000.0], [1, 1], form) == [0.0 if masked else 2.0, 0.0]
    never = correction_weights(torch.tensor([-1.0]), torch.tensor([-INF]), torch.ones(1), [1], form)
    assert never.tolist() == [0.0 if masked else 2.0], "the sampler thought it impossible"
    gone = correction_weights(torch.tensor([-INF]), torch.tensor([-1.0]), torch.ones(1), [1], form)
    assert gone.tolist() == [0.0], "the trainer thinks it impossible"
    long = weigh([0.01] * 16_000, [16_000], form)  # 160 nats in all
    expected = math.exp(0.01) if "token" in form else 0.0 if masked else 2.0
    assert long == pytest.approx([expected] * 16_000)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_broken_stays_visible(form):
    """A NaN must reach the check for finite losses, not vanish in a mask; a masked one may."""
    logps, sampled = torch.tensor([NAN, -1.0], requires_grad=True), torch.tensor([-1.0, -1.0])
    assert not correction_weights(logps, sampled, torch.ones(2), [2, 0], form).requires_grad
    assert math.isnan(correction_weights(logps, sampled, torch.ones(2), [1, 1], form)[0])
    assert correction_weights(logps, sampled, torch.tensor([0, 1]), [1, 1], form).tolist() == [1.0, 1.0]
