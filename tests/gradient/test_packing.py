"""Layouts, what a pass costs, buckets; the attention function, and that a model which has it is otherwise unchanged."""

import functools
import inspect
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from rloo_kit.gradient import packing
from rloo_kit.gradient.packing import Group, count_tokens, lay_out, plan_attention
from rloo_kit.gradient.scorer import Scorer


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
    states = random_states(laid.input_ids.numel(), 4, 2)
    expected = with_gradients(one_by_one(*states, laid), states)
    assert_close(with_gradients(packing.attend_by_plan(*states, plan), states), expected, rtol=1e-10, atol=1e-12)


def by_sequence(query, key, value, bounds, longest, scale):
    """Attention of varying lengths in plain torch; fewer key heads are grouped heads."""
    parts = []
    for start, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        assert end - start <= longest
        rows = [states[start:end].transpose(0, 1)[None] for states in (query, key, value)]
        out = scaled_dot_product_attention(*rows, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def kernel_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):  # fmt: skip
    """The signature of `varlen_attn` in torch 2.11."""
    assert torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k and window_size == (-1, 0) and return_aux is None
    return by_sequence(query, key, value, cu_seq_q, max_q, scale)


def kernel_2_13(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """The same in torch 2.13, with its guard."""
    if not enable_gqa and query.size(1) != key.size(1):
        raise ValueError("Expect query and key/value to have the same number of heads")
    return kernel_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


@functools.wraps(kernel_2_11)  # with its signature
def refuses_groups(query, key, *rest, **options):
    if query.size(1) != key.size(1):
        raise RuntimeError("Number of heads in key/value must equal query")
    return kernel_2_11(query, key, *rest, **options)


@functools.wraps(kernel_2_11)
def loses_gradient(query, key, *rest, **options):
    """Right values, and half of the keys' gradient."""
    return kernel_2_11(query, (key + key.detach()) / 2, *rest, **options)


def use_kernel(monkeypatch: Any, kernel: Any) -> list[tuple[int, int]]:
    """From here on the CPU counts as a GPU with that kernel; the list gets the query and key heads of its calls."""
    calls = []

    @functools.wraps(kernel)
    def counted(query, key, *args, **options):
        calls.append((query.size(1), key.size(1)))
        return kernel(query, key, *args, **options)

    monkeypatch.setattr(packing, "varlen_attn", counted)
    monkeypatch.setattr(packing, "TAKES_GROUPED", "enable_gqa" in inspect.signature(kernel).parameters)
    monkeypatch.setattr(packing, "_takes_one_call", lambda query: True)
    return calls


def random_states(tokens: int, heads: int, key_heads: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    counts = (heads, key_heads, key_heads)
    return [torch.randn(tokens, count, 8, dtype=torch.float64, requires_grad=True) for count in counts]


def with_gradients(out: torch.Tensor, states: list[torch.Tensor]) -> list[torch.Tensor]:
    """The values and the three gradients."""
    return [out, *torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), states)]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("kernel", "heads"), [(kernel_2_11, (4, 4)), (kernel_2_11, (4, 2)), (kernel_2_13, (4, 2))])
def test_one_call_equals_the_buckets_with_every_torch(kernel, heads, checkpointed, monkeypatch):
    """torch 2.11's kernel has no `enable_gqa`; its arguments and the way back are checked with stand-ins."""
    laid, plan = make_plan()
    states = random_states(laid.input_ids.numel(), *heads)
    expected = with_gradients(packing.attend_by_plan(*states, plan, 0.3), states)
    calls = use_kernel(monkeypatch, kernel)
    attend = functools.partial(checkpoint, packing.attend_by_plan, use_reentrant=False)
    out = (attend if checkpointed else packing.attend_by_plan)(*states, plan, 0.3)
    assert_close(with_gradients(out, states), expected, rtol=1e-6, atol=1e-6)
    assert set(calls) == {heads}


@pytest.mark.parametrize(
    ("kernel", "reason"), [(refuses_groups, "RuntimeError: Number of heads"), (loses_gradient, "gradients are off")]
)
def test_a_kernel_that_fails_is_not_used(kernel, reason, tiny_model, monkeypatch):
    """The scorer compares every layout, and with it the kernel, with single sequences; the reason is printed."""
    use_kernel(monkeypatch, kernel)
    scorer = Scorer(tiny_model, 1.0, pad_id=256)
    assert scorer.layout == "padded" and reason in scorer.reason


def test_the_kernel_is_used_where_the_gpu_has_it(monkeypatch):
    """On a T4 the buckets serve."""
    half = SimpleNamespace(is_cuda=True, dtype=torch.float16, device="cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert packing._takes_one_call(half)
    assert not packing._takes_one_call(SimpleNamespace(**vars(half) | {"dtype": torch.float32}))
    assert not packing._takes_one_call(torch.zeros(1, dtype=torch.float16))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not packing._takes_one_call(half)


def test_the_installed_torch_has_the_signature_of_a_stand_in():
    """A further argument, or another name, is looked at here before a GPU meets it."""
    signature = lambda kernel: {  # noqa: E731
        one.name: (one.kind, one.default) for one in inspect.signature(kernel).parameters.values()
    }
    known = {"2.11": kernel_2_11, "2.13": kernel_2_13}
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in known:
        pytest.skip(f"no stand-in for torch {version}")
    assert signature(packing.varlen_attn) == signature(known[version])


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


@pytest.mark.parametrize(
    ("major", "variable", "before", "inside"),
    [
        (9, None, True, False),
        (10, None, True, False),
        (9, None, False, False),  # a user's own setting stays
        (9, "0", True, True),
        (8, None, True, True),
        (12, None, True, True),
        (None, None, True, True),
    ],
)
def test_sdpa_leaves_cudnn_out_where_torch_prefers_it(major, variable, before, inside, monkeypatch):
    """On an H100 cuDNN built a plan for every key length, so for every token of a rollout: 100 ms a token at 0.6B."""
    if variable is not None:
        monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", variable)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: major is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, 0))
    backends = torch.backends.cuda
    others = (backends.flash_sdp_enabled, backends.mem_efficient_sdp_enabled, backends.math_sdp_enabled)
    plain, found = [read() for read in others], backends.cudnn_sdp_enabled()
    backends.enable_cudnn_sdp(before)
    try:
        with pytest.raises(ZeroDivisionError), packing.without_cudnn(), packing.without_cudnn():
            assert backends.cudnn_sdp_enabled() is inside and [read() for read in others] == plain
            raise ZeroDivisionError
        assert backends.cudnn_sdp_enabled() is before
    finally:
        backends.enable_cudnn_sdp(found)
