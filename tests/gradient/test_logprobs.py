"""Scoring against the plain softmax: values, gradients, and what is never held in memory."""

import pytest
import torch

from rloo_kit.gradient import logprobs


def _naive(hidden, weight, bias, targets, temperature):
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
    logps = logits.log_softmax(dim=-1)
    return logps.gather(1, targets[:, None]).squeeze(1), -(logps.exp() * logps).sum(dim=-1)


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles of tokens and of vocabulary, the last of each partial."""
    monkeypatch.setattr(logprobs, "TILE_TOKENS", (16, 16))
    monkeypatch.setattr(logprobs, "TILE_VOCABULARY", (20, 20))


def _both(tensors, targets, trained, temperature=0.7):
    """Values and gradients of ours and of the plain softmax; `trained` says which of states, weight, bias are."""
    upstream = torch.randn(len(targets), generator=torch.Generator().manual_seed(1)).double()
    results = []
    for score in (logprobs.score_tokens, _naive):
        leaves = [
            None if tensor is None else tensor.clone().requires_grad_(flag)
            for tensor, flag in zip(tensors, trained, strict=True)
        ]
        logps, entropies = score(*leaves, targets, temperature)
        (logps * upstream).sum().backward()
        results.append((logps.detach(), entropies, [leaf.grad for leaf in leaves if leaf is not None]))
    return results


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("head_is_trained", [False, True])
def test_values_and_gradients_equal_the_plain_softmax(with_bias, head_is_trained, small_tiles):
    """A frozen head takes another way than a trained one, and both sum over tiles of the vocabulary."""
    torch.manual_seed(0)
    tensors = [torch.randn(37, 12, dtype=torch.float64), torch.randn(51, 12, dtype=torch.float64)]
    tensors.append(torch.randn(51, dtype=torch.float64) if with_bias else None)
    ours, naive = _both(tensors, torch.randint(0, 51, (37,)), (True, head_is_trained, head_is_trained))
    assert torch.allclose(ours[0].double(), naive[0], rtol=1e-6, atol=1e-5)  # logits are taken to float32
    assert torch.allclose(ours[1].double(), naive[1], rtol=1e-6, atol=1e-5)
    for gradient, expected in zip(ours[2], naive[2], strict=True):
        assert (gradient is None) == (expected is None)
        if gradient is not None:
            assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-5)
    assert not ours[1].requires_grad


def test_logits_far_apart_do_not_overflow(small_tiles):
    """Sums are kept relative to the largest logit so far; one tile of the vocabulary may tower over the others."""
    torch.manual_seed(0)
    tensors = [torch.randn(40, 12), torch.randn(51, 12), torch.zeros(51)]
    tensors[2][[3, 25, 45]] = torch.tensor([-300.0, 200.0, 250.0])
    ours, naive = _both(tensors, torch.randint(0, 51, (40,)), (True, False, False), temperature=1.0)
    assert torch.allclose(ours[0], naive[0], rtol=1e-6, atol=1e-5) and ours[0].min() < -100
    assert torch.allclose(ours[1], naive[1], atol=1e-5)
    assert torch.allclose(ours[2][0], naive[2][0], rtol=1e-4, atol=1e-5)


def test_a_sure_token_keeps_its_gradient_in_16_bits(small_tiles):
    """In bfloat16 p = 0.999 is 1: the slope W[target] - sum of p W came out as rounding errors of W[target]."""
    torch.manual_seed(0)
    weight = torch.randn(51, 12).bfloat16()
    targets = torch.arange(40)
    hidden = weight[targets] * 1.1
    slopes = []
    for dtype in (torch.bfloat16, torch.float64):
        states = hidden.detach().to(dtype).requires_grad_()
        logps, _ = logprobs.score_tokens(states, weight.to(dtype), None, targets, 1.0)
        logps.sum().backward()
        slopes.append((logps, states.grad.double()))
    sure = (slopes[1][0] > -2e-3).nonzero().flatten()
    assert len(sure) >= 5
    off = (slopes[0][1] - slopes[1][1])[sure].norm(dim=1) / slopes[1][1][sure].norm(dim=1)
    assert off.median() < 0.1


@pytest.mark.parametrize("trained", [False, True])
def test_never_holds_tokens_times_vocabulary(trained, monkeypatch):
    """3,000 tokens of Qwen3's 151936 rows would be 1.8 GB of logits in one piece; a tile is 2 MiB."""
    largest, calls = 0, 0
    plain = logprobs._tile_logits

    def watched(*arguments):
        nonlocal largest, calls
        logits = plain(*arguments)
        largest, calls = max(largest, logits.numel()), calls + 1
        return logits

    monkeypatch.setattr(logprobs, "_tile_logits", watched)
    hidden, weight = torch.randn(100, 2, requires_grad=True), torch.randn(151936, 2, requires_grad=trained)
    logps, _ = logprobs.score_tokens(hidden, weight, None, torch.randint(0, 151936, (100,)), 1.0)
    logps.sum().backward()
    assert 0 < largest <= 2**19
    assert calls == 149 * (2 if trained else 1)  # a frozen head is passed through once, forward and backward together
    assert hidden.grad.abs().sum() > 0
