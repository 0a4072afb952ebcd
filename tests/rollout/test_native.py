"""The native loop against `generate` and against scoring: token by token, in distribution, and when memory runs out."""

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from rloo_kit.errors import BackendError
from rloo_kit.rollout import decoders, layers
from rloo_kit.rollout.choice import resolve_engine
from rloo_kit.rollout.draw import draw
from rloo_kit.rollout.native import make_decoder
from rloo_kit.rollout.types import Limits
from tests.rollout.models import (
    BUDGET,
    END_OF_TEXT,
    FILTERS,
    MODULES,
    PROMPTS,
    TURN_END,
    adapted,
    budget_kinds,
    check_kept,
    check_logps,
    engine_for,
    lean,
    run_out_above,
    shake,
)  # fmt: skip


@pytest.fixture
def make_model(make_tiny_model: Callable[..., Any]) -> Callable[..., Any]:
    """`make_model(lora=True, ends=0.0, **config)`: large random weights and adapter; ends are likelier by `ends`."""

    def build(lora: bool = True, ends: float = 0.0, seed: int = 0, **config: Any) -> Any:
        model = make_tiny_model(seed, **({"tie_word_embeddings": False, "initializer_range": 0.3} | config))
        model = lean(model, {END_OF_TEXT: ends, TURN_END: ends})
        return adapted(model) if lora else model

    return build


VARIANTS = {  # config of the model, whether it has an adapter, the decoder that is chosen for it
    "adapter": ({}, True, "DirectDecoder"),
    "no adapter, tied head": ({"tie_word_embeddings": True}, False, "DirectDecoder"),
    "biases": ({"attention_bias": True}, True, "DirectDecoder"),
    "another activation": ({"hidden_act": "gelu"}, True, "ModuleDecoder"),
    "one key for all heads": ({"hidden_act": "gelu", "num_key_value_heads": 1}, True, "ModuleDecoder"),
    "another activation, eager": ({"hidden_act": "gelu", "attn_implementation": "eager"}, True, "ModuleDecoder"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_is_generates_token_by_token(make_model, monkeypatch, variant):
    """A wrong mask, position or slot shows as an answer to another prompt, and the reward drops a little."""
    config, lora, decoder = VARIANTS[variant]
    model = make_model(lora, ends=2.0, **config)
    assert type(make_decoder(model)).__name__ == decoder
    limits = Limits(14)
    wanted = engine_for(model, "generate", 0.0).sample(PROMPTS, limits).completion_ids
    assert len({len(ids) for ids in wanted}) > 1 and any(ids[-1] in (TURN_END, END_OF_TEXT) for ids in wanted)
    assert len({tuple(ids) for ids in wanted}) > 3
    monkeypatch.setattr("rloo_kit.rollout.decoders.CACHE_BLOCK", 4)
    longest_first = [float(len(ids)) for ids in wanted]
    for rows, expected in ((None, None), (3, None), (2, longest_first)):
        found = engine_for(model, "native", 0.0, rows=rows).sample(PROMPTS, limits, expected_lengths=expected)
        assert found.completion_ids == wanted and found.sampler_logps is None


@pytest.mark.parametrize("name", ["native", "generate"])
def test_sampler_logps_are_those_of_scoring(make_model, name):
    """Were they another token's, or another temperature's, the correction would be noise."""
    model = make_model(ends=3.0)
    torch.manual_seed(0)
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    found = engine_for(model, name, 0.7, rows=5).sample(prompts, Limits(12))
    assert len({len(ids) for ids in found.completion_ids}) > 3
    check_logps(model, prompts, found, 0.7, tolerance=2e-5)  # logits of 20: the scores are off by 6e-6 themselves


@pytest.mark.parametrize(("case", "engine"), [*((case, "native") for case in FILTERS), ("all", "generate")])
def test_what_is_drawn_is_what_the_filters_leave(case, engine, make_model):
    """A log-probability of the whole distribution under a filtered draw would hide the gap that is to be corrected."""
    model, filters, temperature = make_model(initializer_range=0.2), FILTERS[case], 0.8
    found = engine_for(model, engine, temperature, filters=filters).sample(PROMPTS * 2, Limits(8))
    check_kept(model, PROMPTS * 2, found, filters, temperature)


@pytest.mark.parametrize("autocast", [False, True])
def test_no_merged_copy_in_sixteen_bits(make_model, autocast):
    """An adapter's update of 1e-4 is rounded away in 16 bits; in mixed precision sampling is under autocast too."""
    model = make_model(ends=2.0).to(torch.float32 if autocast else torch.bfloat16)
    engine = engine_for(model)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = engine.sample(PROMPTS, Limits(8))
        assert engine.decoder.__name__ == ("ModuleDecoder" if autocast else "DirectDecoder")
        check_logps(model, PROMPTS, found, tolerance=0.2)


def test_weights_are_read_anew_in_every_rollout(make_model):
    """The decoder keeps a copy of the weights; a stale one would sample from the policy before the step."""
    model, seen = make_model(), []
    engine = engine_for(model, "native", 0.0)
    for change in (lambda: None, lambda: shake(model, seed=2), model.disable_adapter_layers):
        change()
        completion_ids = engine.sample(PROMPTS, Limits(8)).completion_ids
        assert completion_ids == engine_for(model, "generate", 0.0).sample(PROMPTS, Limits(8)).completion_ids
        assert completion_ids not in seen
        seen.append(completion_ids)


@pytest.mark.parametrize("name", ["native", "generate"])
def test_the_model_is_as_it_was_afterwards(make_model, name):
    """A rollout in the middle of training: dropout has to be off while sampling, and on again, weights untouched."""
    settings = LoraConfig(r=4, target_modules=MODULES, lora_dropout=0.9, init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(make_model(lora=False), settings)
    model.gradient_checkpointing_enable()
    model.train()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    torch.manual_seed(0)
    found = engine_for(model, name).sample(PROMPTS, Limits(6))
    assert [module.training for module in model.modules()] == modes and all(modes)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert torch.is_grad_enabled() and model.is_gradient_checkpointing
    check_logps(model, PROMPTS, found)


@pytest.mark.parametrize("vocabulary", [7, 700])
def test_draws_follow_the_softmax(vocabulary):
    """Both ways of drawing: Pearson's statistic is within 4 standard deviations of its mean."""
    count, generator = 10_000, torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(vocabulary, generator=generator)
    logits[1::3] = -torch.inf
    torch.manual_seed(4)
    tokens, logps = draw(logits.expand(count, -1), 1.5)
    exact = (logits.double() / 1.5).softmax(0)
    assert torch.allclose(logps.double(), exact[tokens].log(), atol=1e-5)
    counts = torch.bincount(tokens, minlength=vocabulary).double()
    assert counts[1::3].sum() == 0
    rare = exact * count <= 10
    cells = torch.stack((torch.cat((counts[~rare], counts[rare].sum()[None])),
                         count * torch.cat((exact[~rare], exact[rare].sum()[None]))))  # fmt: skip
    found, wanted = cells[:, cells[1] > 0]
    freedom = len(found) - 1
    assert freedom > 2 and abs(((found - wanted) ** 2 / wanted).sum() - freedom) < 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("name", ["native", "generate"])
def test_a_budget_in_both_engines(make_model, name):
    """What is forced is marked and has no log-probability; what follows it is the model's own answer to it."""
    model = make_model(ends=3.0)
    with torch.no_grad():
        model.get_base_model().lm_head.bias[260] = 3.0
    torch.manual_seed(1)
    prompts, limits = [prompt for prompt in PROMPTS for _ in range(4)], BUDGET
    found = engine_for(model, name, rows=7).sample(prompts, limits)
    check_logps(model, prompts, found)
    assert budget_kinds(found, limits) == {"forced", "closed", "ended"}


@pytest.mark.parametrize(("name", "on_cpu"), [("native", False), ("native", True), ("generate", False)])
def test_rows_are_halved_and_nothing_is_lost(make_model, monkeypatch, name, on_cpu):
    """An hour of rollout ended out of memory: what is finished stays, the rest goes on with half the rows."""
    model = make_model(hidden_act="gelu", ends=1.0)
    wanted = engine_for(model, "generate", 0.0).sample(PROMPTS, Limits(20)).completion_ids
    seen: list[int] = []
    run_out_above(model, 3, seen, monkeypatch, on_cpu)
    said: list[str] = []
    engine = engine_for(model, name, 0.0, say=said.append)
    if name == "generate":
        engine.check_padding()  # of two prompts
        seen.clear()
    assert engine.sample(PROMPTS, Limits(20)).completion_ids == wanted
    failed_at = seen[3 if name == "native" else 0]  # rows in the call that failed
    assert engine.rows == failed_at // 2 and len(said) == 1
    assert f"out of memory with {failed_at} completions at once" in said[0]
    assert f"rollout.rows={failed_at // 2}" in said[0]
    if name == "native":
        assert sum(seen) == sum(map(len, wanted)) + failed_at  # no token was made twice
    assert engine.sample(PROMPTS, Limits(20)).completion_ids == wanted and len(said) == 1


def test_memory_that_runs_out_while_rows_are_let_in(make_model, monkeypatch):
    """The rows whose prompts did not fit are neither live nor waiting at that moment; they were forgotten."""
    model = make_model(ends=2.0)
    wanted = engine_for(model, "generate", 0.0).sample(PROMPTS, Limits(20)).completion_ids
    prefill = layers.DirectDecoder.prefill

    def failing(self: Any, prompts: list[list[int]], *more: Any) -> Any:
        if len(prompts) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prefill(self, prompts, *more)

    monkeypatch.setattr(layers.DirectDecoder, "prefill", failing)
    said: list[str] = []
    assert engine_for(model, "native", 0.0, say=said.append).sample(PROMPTS, Limits(20)).completion_ids == wanted
    assert len(said) == 1 and "with 6 completions at once; 6 continue" in said[0]


@pytest.mark.parametrize("name", ["native", "generate"])
def test_one_row_that_does_not_fit_and_other_errors_are_errors(make_model, monkeypatch, name):
    """Halving one row for ever would hang the run; a fault of the model would be hidden behind ever fewer rows."""
    model = make_model(hidden_act="gelu")
    with monkeypatch.context() as patch:
        run_out_above(model, 0, [], patch)
        with pytest.raises(torch.OutOfMemoryError):
            engine_for(model, name, 0.0, say=lambda line: None).sample(PROMPTS, Limits(20))

    def broken(*args: Any, **named: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(model.get_base_model(), "forward", broken)
    said: list[str] = []
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        engine_for(model, name, 0.0, say=said.append).sample(PROMPTS, Limits(20))
    assert not said


def test_masked_memory_is_finite():
    """Fresh memory may hold NaNs, and weight 0 times NaN is NaN: whole rows were lost to masked tokens."""
    cache = decoders.SlotCache(slots=3, block_tokens=4)
    state = torch.ones(2, 1, 2)  # two rows, one head, two dimensions
    for positions in ([6, 0], [9, 1]):
        cache.begin(torch.tensor(positions), max(positions) + 1)
        assert all(torch.isfinite(held).all() for held in cache.write(0, state, state))
    cache.shrink(1)
    cache.begin(torch.tensor([12]), 13)
    assert cache.write(0, state[:1], state[:1])[0].size(0) == 1


def test_nothing_of_a_rollout_stays_alive(make_model, monkeypatch):
    """The cache and the decoder's copy of the weights are as large as the model; training needs the room."""
    made: list[weakref.ref[Any]] = []
    for kind in (decoders.SlotCache, layers.DirectDecoder):

        def begin(self: Any, *args: Any, plain: Any = kind.__init__, **named: Any) -> None:
            made.append(weakref.ref(self))
            plain(self, *args, **named)

        monkeypatch.setattr(kind, "__init__", begin)
    engine = engine_for(make_model(), rows=2)
    gc.collect()
    gc.disable()  # what goes only with the collector may stay for the whole of a step
    try:
        engine.sample(PROMPTS, Limits(6))
        assert len(made) >= 2 and not [one() for one in made if one() is not None]
    finally:
        gc.enable()


def test_broken_weights_are_named(make_model):
    """From NaN logits any token can be drawn, and a run went on for hours on noise."""
    model = make_model(lora=False)
    with torch.no_grad():
        model.lm_head.bias[3] = torch.nan
    with pytest.raises(BackendError, match="logits contain a NaN.*rloo.learning_rate"):
        engine_for(model).sample(PROMPTS, Limits(3))


def test_the_choice_is_explained(make_model, make_tiny_model):
    """One line says which engine runs and why; an engine that cannot run is refused with the key to change."""
    model = make_model()
    assert resolve_engine("auto", "transformers", model)[0] == "native"
    assert resolve_engine("generate", "transformers", model) == ("generate", "rollout.engine asks for it")
    engine = engine_for(model, "auto")
    assert engine.name == "native" and engine.reason and "\n" not in engine.reason
    sliding = make_tiny_model(use_sliding_window=True, sliding_window=8, max_window_layers=1)
    name, reason = resolve_engine("auto", "transformers", sliding)
    assert name == "generate" and "qwen3 has layers that do not attend to all tokens" in reason
    flash = make_tiny_model()
    flash.config._attn_implementation = "flash_attention_2"  # takes (B, L) only: it was handed the loop's 4-D mask
    assert resolve_engine("auto", "transformers", flash)[0] == "generate"
    with pytest.raises(BackendError, match="its attention, flash_attention_2, does not take a mask"):
        engine_for(flash, "native")
    with pytest.raises(BackendError, match="rollout.engine is native, but qwen3 has layers.*rollout.engine=generate"):
        engine_for(sliding, "native")
    prompted = get_peft_model(make_model(lora=False), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert resolve_engine("auto", "transformers", prompted) == ("generate", "its adapter adds virtual tokens")
    with pytest.raises(BackendError, match="vLLM is not installed: .*constraints-vllm.*rollout.engine=auto"):
        engine_for(model, "vllm")
    with pytest.raises(BackendError, match="rollout.engine is server, but no server was named.*rollout.server_url"):
        engine_for(model, "server")
