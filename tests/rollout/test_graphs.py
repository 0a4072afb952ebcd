"""Token steps that a CUDA graph replays, without a GPU: a step is recorded as what it does to tensors and then replayed
on the same ones, which is what a graph is. Whatever Python computes between two tokens, a replay does not see."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rloo_kit.rollout import graphs
from rloo_kit.rollout.decoders import ModuleDecoder, SlotCache
from rloo_kit.rollout.graphs import TokenSteps
from rloo_kit.rollout.native import make_decoder
from rloo_kit.rollout.types import CompletionState, Limits
from tests.episodes import Echo
from tests.rollout.models import (
    BUDGET,
    FILTERS,
    MODULES,
    PROMPTS,
    THINK_END,
    TURN_END,
    adapted,
    check_kept,
    check_logps,
    engine_for,
    lean,
    shake,
)
from tests.rollout.replay import Recording, record

SIZES = {
    "vocab_size": 264, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1,
    "bos_token_id": None, "eos_token_id": 258, "pad_token_id": 256, "tie_word_embeddings": True,
}  # fmt: skip
SHAPES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "smollm2": (LlamaConfig, LlamaForCausalLM, {
        "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 192, "head_dim": 64
    }),
    "qwen2.5": (Qwen2Config, Qwen2ForCausalLM, {}),
    "yarn": (Qwen3Config, Qwen3ForCausalLM, {
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4
        }
    }),
}  # fmt: skip
KINDS = {  # dtype of the model, 4-bit weights
    "float32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "nf4": (torch.bfloat16, True),
    "nf4, float32": (torch.float32, True),
    "some 4-bit, float32": (torch.float32, True),  # as dynamic 4-bit models are
}
IN_16_BITS = ["lm_head", "model.layers.1.mlp", "model.layers.2.self_attn.k_proj", "model.layers.0.mlp.down_proj"]
ONE_STEP = 2**-7  # bf16 keeps 8 bits: two neighbours differ by at most 1/128 of their size


@pytest.fixture
def make_model(tmp_path: Any) -> Callable[..., Any]:
    """`make_model(kind, shape="qwen3", **config)`: random weights, an adapter on all layers, not the identity."""

    def build(kind: str, shape: str = "qwen3", **config: Any) -> Any:
        dtype, in_4bit = KINDS[kind]
        made, model_class, own = SHAPES[shape]
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = model_class(made(**SIZES | own | config)).to(dtype).eval()
        if in_4bit:
            model.save_pretrained(tmp_path / "model")
            nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
            form = BitsAndBytesConfig(
                load_in_4bit=True, llm_int8_skip_modules=IN_16_BITS if "some" in kind else None, **nf4
            )
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=form, dtype=dtype)
            for module in model.modules():
                if hasattr(module, "support_avx512bf16_for_cpu"):
                    module.support_avx512bf16_for_cpu = False
        return adapted(model, scale=0.1).eval()

    return build


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures are recordings, of many shapes even for short rows."""
    monkeypatch.setattr(graphs, "capture", record)
    monkeypatch.setattr(graphs, "LENGTH_BLOCK", 8)


def in_graphs(engine: Any) -> Any:
    engine.uses_graphs = True
    return engine


def leaning(model: Any, turn: float, think: float = 0.0) -> Any:
    base = lean(model.get_base_model(), {TURN_END: turn, THINK_END: think})
    base.lm_head.to(base.dtype)
    return model


@pytest.mark.parametrize(
    ("shape", "kind"),
    [*((shape, "nf4, float32") for shape in SHAPES), ("qwen3", "float32"), ("qwen2.5", "some 4-bit, float32")],
)
def test_log_probabilities_are_those_of_single_sequences(make_model, replayed, shape, kind):
    """Unequal prompts, fewer slots than rows, budgets: each token as likely as the model's own forward says."""
    model = leaning(make_model(kind, shape), turn=4.0, think=3.0)
    torch.manual_seed(1)
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    for engine in (engine_for(model, rows=7), in_graphs(engine_for(model, rows=7))):
        found = engine.sample(prompts, BUDGET)
        assert engine.decoder.__name__ == "DirectDecoder"
        assert engine.uses_graphs == (engine.counts["replays"] > 10) == (engine.counts["captures"] > 2)
        assert len({len(ids) for ids in found.completion_ids}) > 3 and any(found.forced) and not all(found.forced)
        check_logps(model, prompts, found, tolerance=1e-5)


@pytest.mark.parametrize("kind", ["bf16", "nf4"])
@pytest.mark.parametrize("shape", ["qwen3", "llama", "smollm2", "qwen2.5"])
def test_sixteen_bits_differ_by_their_rounding(make_model, replayed, shape, kind):
    """The decoder's logits are as near to those in float32 as the modules' own, within their dtype's rounding."""
    model = make_model(kind, shape)
    rows = torch.randint(256, (16, 9), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [row[: 3 + number % 7] for number, row in enumerate(rows)]
    with torch.no_grad():
        own = torch.stack([model(input_ids=torch.tensor([row])).logits[0, -1] for row in rows]).float()
        found = step_logits(make_decoder(model), rows)
        plain = as_float32(model)
        exact = torch.stack([plain(input_ids=torch.tensor([row])).logits[0, -1] for row in rows])
    assert type(make_decoder(model)).__name__ == "DirectDecoder"
    off, own_off, largest = (found - exact).abs(), (own - exact).abs(), exact.abs().max()
    assert 0 < own_off.max() < 4 * ONE_STEP * largest, "the modules' own rounding is what is compared with"
    assert off.max() < max(ONE_STEP * largest, 2 * own_off.max())
    assert off.square().mean().sqrt() < 1.2 * own_off.square().mean().sqrt() + 1e-6


def step_logits(decoder: Any, rows: list[list[int]]) -> torch.Tensor:
    cache = SlotCache(len(rows))
    decoder.prefill([row[:-1] for row in rows], cache, [(number, 1) for number in range(len(rows))])
    positions = torch.tensor([len(row) - 1 for row in rows])
    cache.begin(positions, max(map(len, rows)))
    return decoder.decode(torch.tensor([row[-1] for row in rows]), positions, cache).float()


def as_float32(model: Any) -> Any:
    """The same model with every weight unpacked, rounded as it is stored, and computed in float32."""
    from bitsandbytes.functional import dequantize_4bit

    base = model.get_base_model()
    config = {name: value for name, value in base.config.to_dict().items() if name != "quantization_config"}
    plain = type(base)(type(base.config)(**config))
    weights = {}
    for name, module in base.named_modules():
        if hasattr(module, "base_layer"):
            weight = module.base_layer.weight
            if hasattr(weight, "quant_state"):
                weight = dequantize_4bit(weight.data, weight.quant_state)
            weights[f"{name}.weight"] = weight.float() + module.get_delta_weight("default").float()
            if module.base_layer.bias is not None:
                weights[f"{name}.bias"] = module.base_layer.bias.float()
    rest = {name: value.float() for name, value in base.state_dict().items() if name in plain.state_dict()}
    plain.load_state_dict(rest | weights)
    return plain.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_from_graphs_is_the_rollout_without(make_model, replayed, monkeypatch, kind):
    """Bit for bit the same steps launched from Python; in float32 also those of rows and lengths not rounded up."""
    model = leaning(make_model(kind), turn=3.0, think=2.0)
    for options, limits in (({"filters": FILTERS["all"]}, Limits(12)), ({}, BUDGET), ({"temperature": 0.0}, Limits(9))):
        found = []
        for captured in (record, lambda function, pool: function, None):
            monkeypatch.setattr(graphs, "capture", captured)
            torch.manual_seed(2)
            engine = engine_for(model, rows=5, **options)
            engine.uses_graphs = captured is not None
            found.append(engine.sample(PROMPTS * 2, limits))
        replay, eager, plain = found
        assert str(replay) == str(eager)  # NaN where forced
        if "float32" in kind:
            assert replay.completion_ids == plain.completion_ids and replay.forced == plain.forced
            if "filters" in options:
                check_kept(model, PROMPTS * 2, replay, FILTERS["all"], 1.0)


def test_turns_with_tools_from_graphs(make_model, replayed):
    """A row that comes back is filled again while the graphs of other rows go on."""
    model, limits = leaning(make_model("nf4, float32"), turn=6.0), Limits(24, 5, 4, (THINK_END,), THINK_END)
    torch.manual_seed(0)
    found = in_graphs(engine_for(model, rows=3)).sample(PROMPTS, limits, dialogue=Echo())
    assert sum(len(spans) == 2 for spans in found.context) > 2
    check_logps(model, PROMPTS, found, tolerance=1e-5)


@pytest.mark.parametrize(("method", "call"), [("compute", 4), ("__init__", 1)])
def test_rows_are_halved_when_memory_runs_out(make_model, replayed, monkeypatch, method, call):
    """The failed attempt's buffers go, every row continues from its tokens; the first buffers may not fit either."""
    model, said = make_model("nf4, float32"), []
    wanted = engine_for(model, temperature=0.0).sample(PROMPTS, Limits(20)).completion_ids
    plain, calls = getattr(TokenSteps, method), []

    def failing(*arguments: Any, **named: Any) -> Any:
        calls.append(method)
        if len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return plain(*arguments, **named)

    monkeypatch.setattr(TokenSteps, method, failing)
    engine = in_graphs(engine_for(model, temperature=0.0, say=said.append))
    assert engine.sample(PROMPTS, Limits(20)).completion_ids == wanted
    assert engine.rows == 3 and len(said) == 1 and "6 completions at once; 6 continue" in said[0]
    assert engine.uses_graphs and engine.counts["replays"]


@pytest.mark.parametrize("budget", [True, False])
def test_the_cache_is_as_long_as_the_budgets_let_a_row_grow(make_model, replayed, monkeypatch, budget):
    """The plan counts the budgets. Graphs reserved `max_completion_length`: 74 GiB for a run that was planned at 8."""
    model, made = make_model("bf16"), []
    plain = SlotCache.reserve
    monkeypatch.setattr(SlotCache, "reserve", lambda self, length: (plain(self, length), made.append(self.capacity))[0])
    limits = Limits(200, 6, 4, (7, THINK_END, 8), THINK_END) if budget else Limits(20)
    found = in_graphs(engine_for(model)).sample(PROMPTS, limits)
    assert max(made) == 48 and max(map(len, found.completion_ids)) <= 20  # 20 of a prompt and 13 or 20, in blocks of 16


CAPTURES = {  # what a capture gives, and what the line says
    "out of memory": (Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")), "(CUDA out of memory)"),
    "an error": (Mock(side_effect=RuntimeError("CUDA error: not now\nmore")), "(CUDA error: not now)"),
    "a kernel missed": (lambda function, pool: lambda: None, "draws other tokens"),
}


@pytest.mark.parametrize("name", CAPTURES)
def test_without_a_capture_the_rollout_goes_on(make_model, monkeypatch, name):
    """One line says so once; memory that runs out in a capture does not halve rows that fit."""
    model, said = make_model("nf4, float32"), []
    capture, message = CAPTURES[name]
    monkeypatch.setattr(graphs, "capture", capture)
    engine = in_graphs(engine_for(model, temperature=0.0, say=said.append))
    wanted = engine_for(model, temperature=0.0).sample(PROMPTS, Limits(9)).completion_ids
    for _ in range(2):
        assert engine.sample(PROMPTS, Limits(9)).completion_ids == wanted
    assert len(said) == 1 and "no CUDA graph of a token step (" in said[0] and message in said[0]
    assert engine.rows is None and not engine.uses_graphs
    assert engine.counts["captures"] == 1 and not engine.counts["replays"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_reads_nothing_back_and_stays_where_it_is(make_model, kind):
    """Another step touches the same memory with the same operations, and reads no value back."""
    model = make_model(kind)
    engine, decoder = engine_for(model, filters=FILTERS["all"]), make_decoder(model)
    with torch.no_grad():
        steps = TokenSteps(engine, decoder, SlotCache(4), longest=250)
        rows = [CompletionState(Limits(30), [TURN_END], number, prompt) for number, prompt in enumerate(PROMPTS[:3])]
        decoder.prefill([row.prompt[:-1] for row in rows], steps.cache, [(number, 1) for number in range(3)])
        found: list[Recording] = []
        steps.draw(rows, None)  # the first one makes the cache
        for token in (7, 11):
            for row in rows:
                row.take(token, 0.0)
            with Recording() as recording:
                steps._run(len(rows), 256)
            found.append(recording)
        first, second = found
        assert [one[0] for one in first.operations] == [one[0] for one in second.operations]
        assert first.outside() == second.outside()
        before = steps._drawn.clone()
        with FakeTensorMode(allow_non_fake_inputs=True):
            drawn = steps.compute(steps._inputs, steps._uniform, 256)
        assert drawn.shape == (2, 4) and torch.equal(steps._drawn, before)
    assert type(decoder).__name__ == "DirectDecoder"


def test_less_than_half_of_the_operations(make_model):
    """Through the modules a token of a 4-bit model with an adapter took 181 operations a layer."""
    model = make_model("nf4", num_hidden_layers=6)
    found, positions = {}, torch.tensor([3, 2])
    for decoder in (ModuleDecoder(model), make_decoder(model)):
        cache = SlotCache(2)
        with torch.no_grad():
            for counts in (False, True):
                cache.begin(positions, 4)
                with Recording() if counts else nullcontext() as recording:
                    decoder.decode(torch.tensor([5, 6]), positions, cache)
        found[type(decoder).__name__] = len(recording.operations) / 6
    assert found["DirectDecoder"] < 0.5 * found["ModuleDecoder"], found


def test_joined_matrices_take_no_memory(make_model):
    """Three 4-bit matrices become views of one: a copy would be the whole model again."""
    model = make_model("nf4")
    attention = model.get_base_model().model.layers[0].self_attn
    weights = [getattr(attention, name).base_layer.weight for name in ("q_proj", "k_proj", "v_proj")]
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        before, sizes = model(input_ids=ids).logits, [weight.numel() for weight in weights]
        decoder = make_decoder(model)
        pointers = [weight.data_ptr() for weight in weights]
        assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
        assert weights[0].untyped_storage().nbytes() == sum(sizes)
        assert torch.equal(step_logits(decoder, ids.tolist()), step_logits(make_decoder(model), ids.tolist()))
        assert torch.equal(model(input_ids=ids).logits, before)
        make_decoder(model)
        assert [weight.data_ptr() for weight in weights] == pointers


def test_training_after_a_rollout_is_as_without(make_model):
    """On-policy the importance ratio is 1 and the gradient that of a model that never sampled."""
    gradients = []
    for samples in (False, True):
        model = make_model("nf4, float32")
        if samples:
            in_graphs(engine_for(model)).sample(PROMPTS, Limits(4))
        model.train()
        model(input_ids=torch.tensor([[5, 6, 7, 8]]), labels=torch.tensor([[5, 6, 7, 8]])).loss.backward()
        gradients.append([value.grad for value in model.parameters() if value.grad is not None])
    assert len(gradients[0]) == 2 * 7 * 3
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


ALMOST = {  # layers that have other positions, scales or rotations, which a few tokens hardly show
    "SmolLM3": {"no_rope_layers": [1, 1, 0]},
    "Granite": {"residual_multiplier": 0.9},
    "Ernie4_5": {},
    "Ministral3": {},
}


@pytest.mark.parametrize("name", ALMOST)
def test_classes_that_are_almost_plain_go_through_the_modules(name):
    """In bf16 five tokens were within the check's tolerance, and the rollout's log-probabilities off by 0.1."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | ALMOST[name])
    model = adapted(transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16), scale=0.1).eval()
    assert type(make_decoder(model)).__name__ == "ModuleDecoder"


def test_the_check_sees_a_wrong_scale(make_model, monkeypatch):
    """Of a class that is called plain and is not; and it does not see rounding."""
    for kind in KINDS:
        model = make_model(kind)
        assert type(make_decoder(model)).__name__ == "DirectDecoder"
        for layer in model.get_base_model().model.layers:
            layer.register_forward_hook(lambda _layer, inputs, found: inputs[0] + 0.8 * (found - inputs[0]))
        assert type(make_decoder(model)).__name__ == "ModuleDecoder"


def test_a_merged_adapter_that_is_switched_off_is_not_sampled(make_model):
    """PEFT takes it out of the weights again at its next call."""
    model = make_model("bf16")
    model.merge_adapter()
    assert type(make_decoder(model)).__name__ == "DirectDecoder"
    model.disable_adapter_layers()
    assert type(make_decoder(model)).__name__ == "ModuleDecoder"


def test_adapters_that_are_not_two_matrices_go_through_the_modules(make_tiny_model):
    """DoRA scales rows by their length: two matrices alone would sample another policy."""
    base = make_tiny_model(tie_word_embeddings=False).to(torch.bfloat16)
    settings = {"r": 4, "target_modules": MODULES, "task_type": "CAUSAL_LM"}
    dora = get_peft_model(base, LoraConfig(**settings, use_dora=True))
    assert type(make_decoder(dora)).__name__ == "ModuleDecoder"
    some = get_peft_model(
        make_tiny_model(initializer_range=0.2).to(torch.bfloat16),
        LoraConfig(**settings | {"target_modules": ["k_proj", "up_proj"]}),
    )
    shake(some, scale=0.3)
    rows, found = [[5, 6, 7, 9], [3, 4]], []
    for switched_on in (True, False):
        if not switched_on:
            some.disable_adapter_layers()
        with torch.no_grad():
            decoder = make_decoder(some.eval())
            assert type(decoder).__name__ == "DirectDecoder"
            found.append(step_logits(decoder, rows))
            own = torch.stack([some(input_ids=torch.tensor([row])).logits[0, -1] for row in rows]).float()
        assert (found[-1] - own).abs().max() < 2 * ONE_STEP * own.abs().max()
    assert (found[0] - found[1]).abs().max() > 10 * ONE_STEP * found[0].abs().max()
