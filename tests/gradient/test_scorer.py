"""The scorer against single sequences through the model's own logits: values, gradients, and what it falls back to."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rloo_kit.gradient import packing
from rloo_kit.gradient import scorer as scorer_module
from rloo_kit.gradient.packing import Group
from rloo_kit.gradient.scorer import LAYOUTS, Scorer, _check_groups
from rloo_kit.models.transformers import keep_4bit_weights
from tests.models import zoo
from tests.rollout.models import adapted

LENGTHS = ((6, (9, 0, 3, 40)), (1, (5,)), (3, (1, 1)))


@pytest.fixture
def groups() -> list[Group]:
    generator = torch.Generator().manual_seed(3)
    draw = lambda length: torch.randint(0, 256, (length,), generator=generator)  # noqa: E731
    return [Group(draw(prompt), [draw(length) for length in lengths]) for prompt, lengths in LENGTHS]


@pytest.fixture
def make_adapter(make_tiny_model: Callable[..., Any]) -> Callable[..., Any]:
    """`make_adapter(model=None, **config)`: LoRA on all seven projections, not the identity."""
    return lambda model=None, **config: adapted(make_tiny_model() if model is None else model, **config)


def by_logits(model: Any, groups: list[Group], temperature: float = 1.0) -> torch.Tensor:
    """(N,): each completion alone, a plain call, the softmax of its logits."""
    logps = []
    for group in groups:
        for completion in group.completions:
            row = torch.cat([group.prompt, completion])[None]
            logits = model(input_ids=row).logits[0, len(group.prompt) - 1 : -1].float() / temperature
            logps.append(logits.log_softmax(-1).gather(1, completion[:, None]).squeeze(1))
    return torch.cat(logps)


def gradients_of(model: Any, logps: torch.Tensor) -> torch.Tensor:
    """Of a weighted sum, in everything that is trained, end to end; through `.backward()`, as training does."""
    model.zero_grad()
    (logps * torch.linspace(-1, 2, len(logps))).sum().backward()
    return torch.cat([value.grad.flatten().clone() for value in model.parameters() if value.requires_grad])


def compare(model: Any, scorer: Scorer, groups: list[Group], rtol: float = 1e-6) -> None:
    expected = by_logits(model, groups, scorer.temperature)
    gradient = gradients_of(model, expected)
    found = scorer.score(model, groups).logps
    assert (found - expected).abs().max() < max(rtol, 1e-6) * 10
    off = (gradients_of(model, found) - gradient).norm() / gradient.norm()
    assert off < rtol * 2, f"gradients are off by {off:.2g}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_plain_model_scores_as_its_logits_say(layout, tied, make_tiny_model, groups):
    """Every parameter is trained, the head too: its gradient goes another way than that of the states."""
    model = make_tiny_model(tie_word_embeddings=tied)
    for temperature in (2.0, 0.8):  # a second scorer takes the model's calls over
        compare(model, Scorer(model, temperature, pad_id=256, layout=layout), groups)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_adapter_scores_as_its_logits_say(layout, make_adapter, groups):
    """The usual case: the call goes through PEFT, the head is frozen."""
    policy = make_adapter()
    scorer = Scorer(policy, 1.0, pad_id=256, layout=layout)
    compare(policy, scorer, groups)
    with torch.no_grad(), policy.disable_adapter():
        scores = scorer.score(policy, groups, need_entropy=False)
        torch.testing.assert_close(scores.logps, by_logits(policy, groups), rtol=1e-6, atol=1e-5)
    assert scores.entropies is None and scorer.score(policy, groups).entropies.shape == scores.logps.shape


def test_four_bits(make_tiny_model, make_adapter, groups, tmp_path):
    """The base that most runs have; its layers are called with one long row where they saw a batch of short ones."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    make_tiny_model(hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    policy = make_adapter(AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings)).eval()
    keep_4bit_weights(policy)  # as the trainer does: else a call in eval mode ends all gradients through the base
    scorer = Scorer(policy, 1.0, pad_id=256)
    assert scorer.layout == "shared", scorer.reason
    compare(policy.train(), scorer, groups, rtol=1e-5)
    policy.eval()(input_ids=groups[0].prompt[None])
    compare(policy.train(), scorer, groups, rtol=1e-5)


def lose_plan(monkeypatch: Any) -> None:
    """Packed rows attend as one sequence from here on."""

    def leaking(laid: Any) -> Any:
        tokens = laid.input_ids.numel()
        every = torch.arange(tokens)
        bounds = torch.tensor([0, tokens], dtype=torch.int32)
        return packing.AttentionPlan([packing.Bucket(every, 1, tokens)], every, every, every, bounds, tokens)

    monkeypatch.setattr(packing, "plan_attention", leaking)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packing_that_leaks_is_not_used(dtype, make_adapter, make_tiny_model, groups, monkeypatch):
    """`attention_mask=None` attends across sequences: what 16 bits forgive must be less than a lost plan does."""
    policy = make_adapter(make_tiny_model().to(dtype))
    assert Scorer(policy, 1.0, pad_id=256).layout == "shared"
    lose_plan(monkeypatch)
    scorer = Scorer(policy, 1.0, pad_id=256)
    assert scorer.layout == "padded" and "off by" in scorer.reason and "repeated rows:" in scorer.reason
    if dtype == torch.float32:
        assert "shared rows: log-probabilities are off by" in scorer.reason
        compare(policy, scorer, groups)


def test_the_check_has_as_many_tokens_as_a_gpu_s_kernels_need(make_tiny_model, monkeypatch):
    """20 tokens are one block of flex attention: what was wrong from the second block on passed the check."""
    model, plain = make_tiny_model(), packing.attend_by_plan

    def wrong_behind_a_block(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = plain(query, *rest)
        return torch.cat([out[:128], out[128:].roll(1, 0)])

    assert sum(len(group.prompt) + sum(map(len, group.completions)) for group in _check_groups(model)) == 21
    monkeypatch.setattr(packing, "attend_by_plan", wrong_behind_a_block)
    assert Scorer(model, 1.0, pad_id=256).layout == "shared", "the short check finds it: the long one shows nothing"
    monkeypatch.setattr(scorer_module, "CHECK_SHARE_OFF_GPU", 1.0)
    groups = _check_groups(model)
    assert sum(len(group.prompt) + sum(map(len, group.completions)) for group in groups) == 1024
    scorer = Scorer(model, 1.0, pad_id=256)
    assert scorer.layout == "padded" and "shared rows: log-probabilities are off by" in scorer.reason
    monkeypatch.setattr(packing, "attend_by_plan", plain)
    assert Scorer(make_tiny_model().bfloat16(), 1.0, pad_id=256).layout == "shared"
    short = make_tiny_model(max_position_embeddings=50)
    assert max(len(one.prompt) + len(one.completions[0]) for one in _check_groups(short)) == 50


def test_the_check_trains_through_the_checkpoints_that_are_set(make_adapter, monkeypatch):
    """A recompute that attends otherwise has right values and wrong gradients; the check had switched it off."""
    policy = make_adapter().train()
    policy.gradient_checkpointing_enable({"use_reentrant": True})
    policy.enable_input_require_grads()
    plain = packing.attend_by_plan

    def wrong_in_the_backward_pass(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        return plain(query if torch._C._current_graph_task_id() == -1 else query.roll(1, 0), *rest)

    monkeypatch.setattr(packing, "attend_by_plan", wrong_in_the_backward_pass)
    trained = [value for value in policy.parameters() if value.requires_grad]
    for value in trained:
        value.grad = torch.full_like(value, 2.0)
    before = [value.grad for value in trained]
    scorer = Scorer(policy, 1.0, pad_id=256)
    assert scorer.layout == "padded" and "shared rows: gradients are off" in scorer.reason
    assert all(value.grad is gradient for value, gradient in zip(trained, before, strict=True))
    assert all(bool((gradient == 2).all()) for gradient in before)


def test_models_that_cannot_be_packed_fall_back_and_say_why(make_tiny_model, groups):
    """A sliding window, eager attention, attention that is not looked up by name: padded rows, the right numbers."""
    from transformers import BloomConfig, BloomForCausalLM

    settings = BloomConfig(vocab_size=264, hidden_size=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=258)
    bloom = BloomForCausalLM(settings).eval()
    eager = make_tiny_model()
    eager.set_attn_implementation("eager")
    sliding = make_tiny_model(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    for model, reason in ((eager, "'eager'"), (sliding, "sliding"), (bloom, "'eager'")):
        scorer = Scorer(model, 1.0, pad_id=256)
        assert scorer.layout == "padded" and reason in scorer.reason, scorer.reason
        compare(model, scorer, groups)


SCALED = {"Cohere": {"logit_scale": 0.25}, "Granite": {"logits_scaling": 4.0}, "HyperCLOVAX": {"logits_scaling": 4.0}}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_logits_are_scored_as_the_model_makes_them(name, groups):
    """Cohere multiplies its logits, Granite divides them, and HyperCLOVA X multiplies under Granite's name."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[name.lower()](
        vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0, **SCALED[name],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20.0)  # far from uniform, so that a scale shows
    compare(model, Scorer(model, 0.7, pad_id=256), groups, rtol=1e-5)


def test_a_state_along_the_row_is_not_packed():
    """Lfm2 passed in bfloat16 with rows end to end, gradient off by 1.2 %: the tolerances forgive that rounding."""
    for model in (zoo.make_model("Lfm2").bfloat16(), zoo.make_model("Lfm2", initializer_range=0.02)):
        scorer = Scorer(model, 1.0, pad_id=256)
        assert scorer.layout == "padded" and "conv" in scorer.reason
        with pytest.raises(ValueError, match="conv"):
            Scorer(model, 1.0, pad_id=256, layout="repeated")


def test_the_check_leaves_no_trace(make_adapter):
    """It runs in the middle of somebody's set-up: gradients, random numbers, modes and dropout stay as they are."""
    policy = make_adapter(lora_dropout=0.5).train()
    policy.gradient_checkpointing_enable({"use_reentrant": True})
    policy.enable_input_require_grads()
    policy.base_model.model.model.layers[0].eval()
    modes = [module.training for module in policy.modules()]
    state = torch.random.get_rng_state()
    scorer = Scorer(policy, 1.0, pad_id=256)
    assert scorer.layout == "shared", scorer.reason
    assert torch.equal(state, torch.random.get_rng_state())
    assert [module.training for module in policy.modules()] == modes
    assert all(value.grad is None for value in policy.parameters())
    assert policy.base_model.model.model.layers[1].gradient_checkpointing
