"""Scoring against the plain softmax: values, gradients, and what is never held in memory."""

import pytest
import torch

from rloo_kit import logprobs
from rloo_kit.errors import BackendError


def _naive(hidden, weight, bias, targets, temperature):
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
    logps = logits.log_softmax(dim=-1)
    return logps.gather(1, targets[:, None]).squeeze(1), -(logps.exp() * logps).sum(dim=-1)


@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_equal_the_plain_softmax(with_bias, monkeypatch):
    """A head with a backward pass of its own is worth nothing if one of its three gradients is off."""
    monkeypatch.setattr(logprobs, "MAX_TILE_TOKENS", 16)  # several tiles, the last one partial
    torch.manual_seed(0)
    tensors = [torch.randn(37, 12, dtype=torch.float64), torch.randn(51, 12, dtype=torch.float64)]
    tensors.append(torch.randn(51, dtype=torch.float64) if with_bias else None)
    targets = torch.randint(0, 51, (37,))
    upstream = torch.randn(37, dtype=torch.float64)
    results = []
    for score in (logprobs.score_tokens, _naive):
        leaves = [None if tensor is None else tensor.clone().requires_grad_() for tensor in tensors]
        logps, entropies = score(*leaves, targets, 0.7)
        (logps * upstream).sum().backward()
        results.append((logps, entropies, [leaf.grad for leaf in leaves if leaf is not None]))
    ours, naive = results
    assert torch.allclose(ours[0].double(), naive[0], rtol=1e-6, atol=1e-5)  # logits are taken to float32
    assert torch.allclose(ours[1].double(), naive[1], rtol=1e-6, atol=1e-5)
    for gradient, expected in zip(ours[2], naive[2], strict=True):
        assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-5)
    assert not ours[1].requires_grad


def test_never_holds_tokens_times_vocabulary():
    """3,000 tokens of Qwen3's 151936 rows would be 1.8 GB of logits in one piece; a tile is at most 16 MiB."""
    largest = 0
    plain = logprobs._tile_logits

    def watched(*arguments):
        nonlocal largest
        logits = plain(*arguments)
        largest = max(largest, logits.numel())
        return logits

    logprobs._tile_logits = watched
    try:
        hidden = torch.randn(100, 2, requires_grad=True)
        logps, _ = logprobs.score_tokens(hidden, torch.randn(151936, 2), None, torch.randint(0, 151936, (100,)), 1.0)
        logps.sum().backward()
    finally:
        logprobs._tile_logits = plain
    assert 0 < largest <= max(logprobs.TILE_ELEMENTS, 16 * 151936)
    assert hidden.grad.abs().sum() > 0


def test_ragged_batch_equals_one_by_one(tiny_model):
    """Padding must not be seen: each completion scores the same alone, in a batch, and in another order."""
    logprobs.attach_token_scoring(tiny_model, temperature=1.0)
    generator = torch.Generator().manual_seed(0)
    lengths = [(3, 9), (11, 2), (1, 5), (7, 1)]
    prompts = [torch.randint(0, 256, (p,), generator=generator) for p, _ in lengths]
    completions = [torch.randint(0, 256, (c,), generator=generator) for _, c in lengths]
    together, entropies = logprobs.completion_scores(tiny_model, prompts, completions, width=9, pad_id=256)
    in_twos, _ = logprobs.completion_scores(tiny_model, prompts, completions, width=9, pad_id=256, batch_size=2)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        logits = tiny_model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, completion[:, None]).squeeze(1)
        count = len(completion)
        assert torch.allclose(together[row, :count], expected, atol=1e-5)
        assert torch.allclose(in_twos[row, :count], expected, atol=1e-5)
        assert (together[row, count:] == 0).all()
        assert (entropies[row, :count] > 0).all()


def test_a_head_that_bends_its_logits_is_refused(make_tiny_model):
    """Soft-capped logits scored as plain ones would be log-probabilities of another model."""
    model = make_tiny_model()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(BackendError, match="final_logit_softcapping"):
        logprobs.attach_token_scoring(model, temperature=1.0)
