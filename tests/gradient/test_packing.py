"""Layouts, what a pass costs, buckets; the attention function, and that a model which has it is otherwise unchanged."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from rloo_kit.gradient import packing
from rloo_kit.gradient.packing import Group, count_tokens, lay_out, plan_attention


def make_group(first: int, prompt: int, *completions: int) -> Group:
    """Token ids that count up from `first`, so that every token of a test is another one."""
    ids = iter(range(first, first + prompt + sum(completions)))
    draw = lambda length: torch.tensor([next(ids) for _ in range(length)], dtype=torch.long)  # noqa: E731
    return Group(draw(prompt), [draw(length) for length in completions])


GROUPS = [make_group(0, 3, 2, 0, 4), make_group(20, 1, 5)]  # 0-2 | 3 4 | | 5-8 ;  20 | 21-25


def test_a_prompt_is_laid_out_once_for_its_group():
    """Repeating it K times is what costs, and a position that goes on counting would be another prompt's."""
    laid = lay_out(GROUPS, "shared")
    assert laid.input_ids.tolist() == [[*range(9), *range(20, 26)]]
    assert laid.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]]
    assert laid.sequences == [[(0, 3), (3, 5)], [(0, 3), (5, 5)], [(0, 3), (5, 9)], [(9, 10), (10, 15)]]
    assert laid.groups == [(3, [2, 0, 4]), (1, [5])]
    for layout, tokens in {"shared": 15, "repeated": 21, "padded": 28}.items():
        assert lay_out(GROUPS, layout).input_ids.numel() == count_tokens(GROUPS, layout) == tokens


def test_groups_without_completions_cost_nothing():
    """A pass may be handed a group whose rows are all left out."""
    groups = [Group(torch.tensor([7, 8]), []), *GROUPS]
    assert count_tokens(groups, "shared") == 15
    assert torch.equal(lay_out(groups, "shared").input_ids, lay_out(GROUPS, "shared").input_ids)


def make_plan(layout: str = "shared") -> Any:
    lengths = ((5, (7, 0, 60)), (1, (3,)), (2, (1, 8)))
    groups = [
        Group(torch.zeros(p, dtype=torch.long), [torch.zeros(c, dtype=torch.long) for c in cs]) for p, cs in lengths
    ]
    laid = lay_out(groups, layout)
    return laid, plan_attention(laid)


def one_by_one(query: Any, key: Any, value: Any, laid: Any) -> torch.Tensor:
    """(T, A, D): every sequence alone through SDPA; a shared prompt's tokens are the same in each."""
    out = torch.zeros_like(query)
    for spans in laid.sequences:
        places = torch.cat([torch.arange(*span) for span in spans])
        parts = [states[places].transpose(0, 1)[None] for states in (query, key, value)]
        alone = scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        out = out.index_copy(0, places, alone)
    return out


@pytest.mark.parametrize("layout", ["shared", "repeated"])
@pytest.mark.parametrize("spared", [0, 10**9])
def test_attention_by_plan_is_that_of_each_sequence(layout, spared, monkeypatch):
    """Values and all three gradients; with a bucket for each length and with a single one that is filled up."""
    monkeypatch.setattr(packing, "SPARED_CALL", spared)
    laid, plan = make_plan(layout)
    assert (len(plan.buckets) == 1) == (spared > 0)
    torch.manual_seed(0)
    tokens = laid.input_ids.numel()
    states = [torch.randn(tokens, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    weights = torch.randn(tokens, 4, 8, dtype=torch.float64)
    results = []
    for out in (packing.attend_by_plan(*states, plan), one_by_one(*states, laid)):
        results.append([out, *torch.autograd.grad((out * weights).sum(), states)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_flat_form_for_a_gpu_is_the_same_attention(monkeypatch):
    """The kernel for varying lengths takes a GPU; its arguments and the way back are checked with a stand-in."""

    def stand_in(query, key, value, first, second, longest, longest_key, *, scale, window_size, enable_gqa):
        assert torch.equal(first, second) and longest == longest_key and window_size == (-1, 0)
        parts = []
        for start, end in zip(first.tolist(), first.tolist()[1:], strict=False):
            assert end - start <= longest
            rows = [states[start:end].transpose(0, 1)[None] for states in (query, key, value)]
            out = scaled_dot_product_attention(*rows, is_causal=True, scale=scale, enable_gqa=enable_gqa)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr(packing, "_varlen_attention", stand_in)
    laid, plan = make_plan()
    torch.manual_seed(0)
    states = [torch.randn(laid.input_ids.numel(), heads, 8) for heads in (4, 2, 2)]
    found = packing._attend_in_one_call(*states, plan, 0.3)
    torch.testing.assert_close(found, packing.attend_by_plan(*states, plan, 0.3))


def test_a_gpu_without_the_kernel_takes_the_buckets(monkeypatch):
    """On a T4, or with a torch whose kernel knows no grouped heads, the self-check met the kernel's error and padded
    every row of the run; the buckets were there all the time."""
    half = SimpleNamespace(is_cuda=True, dtype=torch.float16, device="cuda:0")
    if torch.__version__ < "2.13":  # in 2.11 it knows neither grouped heads nor a scale
        knowing = lambda query, *, scale, window_size, enable_gqa: query  # noqa: E731
        monkeypatch.setattr(packing, "_varlen_attention", knowing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert packing._takes_one_call(half)
    assert not packing._takes_one_call(SimpleNamespace(**vars(half) | {"dtype": torch.float32}))
    assert not packing._takes_one_call(torch.zeros(1, dtype=torch.float16))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not packing._takes_one_call(half)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for kernel in (None, lambda query, key, value, first, second, longest, longest_key, *, is_causal: query):
        monkeypatch.setattr(packing, "_varlen_attention", kernel)
        assert not packing._takes_one_call(half)


def test_generation_with_left_padding_is_unchanged(make_tiny_model):
    """The name of the attention is set for good, so every other use of the model goes through it too."""
    ids = torch.randint(0, 256, (3, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1], [1] * 6])
    plain, installed = make_tiny_model(), make_tiny_model()
    packing.install(installed)
    assert installed.config._attn_implementation == packing.NAME
    expected, found = (
        model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, output_logits=True,
                       return_dict_in_generate=True)
        for model in (plain, installed)
    )  # fmt: skip
    assert torch.equal(expected.sequences, found.sequences)
    assert all(torch.equal(*logits) for logits in zip(expected.logits, found.logits, strict=True))
    assert torch.equal(*(model(ids, attention_mask=mask).logits for model in (plain, installed)))


def test_a_saved_model_knows_nothing_of_it(tiny_model, tmp_path):
    """A config with our attention's name would not load where the kit is not installed."""
    from transformers import AutoModelForCausalLM

    packing.install(tiny_model)
    tiny_model.save_pretrained(tmp_path)
    assert packing.NAME not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
