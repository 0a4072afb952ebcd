"""Classes of models through the kit: loaded, scored, trained, sampled and saved, each against plain code.

`make test-zoo` prints the table.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import rloo_kit as kit
from rloo_kit._stack import load_stack
from rloo_kit.errors import BackendError
from rloo_kit.gradient.packing import Group
from rloo_kit.gradient.scorer import LAYOUTS, Scorer
from rloo_kit.models.adapters import find_bare_layers
from rloo_kit.rollout.choice import build_engine, resolve_engine
from rloo_kit.rollout.types import Limits
from tests.gradient.test_scorer import by_logits, gradients_of
from tests.models.zoo import BASE, OTHER_LAYERS, ZOO, make_model, save_model, save_multimodal
from tests.rollout.models import check_logps, shake

RUN = """
model: {{name: {folder}, dtype: float32, max_seq_length: 128}}
data: {{source: embedded/addition, num_prompts: 8, test_size: 2, max_prompt_length: 64}}
rewards: [{{name: length_reward}}]
rloo: {{max_steps: 1, max_completion_length: 12, num_generations: 4, per_device_train_batch_size: 8, beta: 0.0}}
run: {{output_dir: {folder}}}
"""
PACKED = ("Qwen2", "Qwen3", "Qwen3Moe", "Llama", "SmolLM3", "Phi3")
BARE = dict.fromkeys(("GptOss", "MiniMax"), ["experts"])  # stacked experts that PEFT cannot adapt
LENGTHS = ((9, (12, 1, 5, 40)), (3, (7, 2, 9, 30)))  # tokens of the prompts and of their completions
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3, 4, 5], [70, 71, 72, 73, 74, 75]]
TEXTS = ["What is 1+1?", "A longer prompt than the other"]
# Of log-probabilities in nats. Recurrent layers compute a row at once in training and token by token in sampling.
TOLERANCE, SAMPLED, SAMPLED_RECURRENT = 1e-5, 2e-5, 2e-3
SIZED = 2e-5  # of a gradient's norm

pytestmark = pytest.mark.usefixtures("libraries")


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLOO_KIT_BACKEND", "transformers")
    load_stack()


def load(folder: Path, *overrides: str) -> Any:
    file = folder / "run.yaml"
    file.write_text(RUN.format(folder=folder))
    run = kit.load_config(file, *overrides)
    return run, kit.load_policy(run)


def draw_groups() -> list[Group]:
    generator = torch.Generator().manual_seed(3)
    draw = lambda length: torch.randint(0, 256, (length,), generator=generator)  # noqa: E731
    return [Group(draw(prompt), [draw(length) for length in lengths]) for prompt, lengths in LENGTHS]


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "Qwen3" else pytest.mark.slow) for kind in ZOO if kind != "Gemma2"]
)
def test_a_class_is_exact(kind: str, tmp_path: Path, tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Classes were packed, sampled or adapted wrongly, and each passed every check that was made on Qwen3."""
    folder = save_model(kind, tiny_tokenizer, tmp_path / kind)
    run, policy = load(folder)
    model, groups = policy.model, draw_groups()
    shake(model, scale=0.05)
    model.train()
    expected = by_logits(model, groups)
    gradient = gradients_of(model, expected)

    auto, apart = Scorer(model, 1.0, pad_id=256), [0.0]
    assert auto.layout == ("shared" if kind in PACKED else "padded") and OTHER_LAYERS.get(kind, "") in auto.reason
    for layout in LAYOUTS if kind in PACKED else LAYOUTS[-1:]:
        logps = Scorer(model, 1.0, pad_id=256, layout=layout).score(model, groups, need_entropy=False).logps
        apart.append((logps - expected).abs().max().item())
        assert off(gradients_of(model, logps), gradient) < SIZED, layout
    assert max(apart) < TOLERANCE

    engine, _ = resolve_engine("auto", "transformers", model)
    assert engine == ("native" if kind in PACKED else "generate")
    for name in dict.fromkeys((engine, "generate")):  # generate pads the shorter prompts on the left
        torch.manual_seed(5)
        found = build_engine(model, name, temperature=1.0, end_ids=[258], pad_id=256).sample(PROMPTS * 2, Limits(24))
        is_plain = OTHER_LAYERS.get(kind, "sliding_attention") == "sliding_attention"
        check_logps(model, PROMPTS * 2, found, tolerance=SAMPLED if is_plain else SAMPLED_RECURRENT)

    mine, plain = step_gradients(run, policy, groups, tmp_path)
    assert off(mine, plain) < SIZED

    kit.save_adapter(policy, tmp_path / "adapter")
    _, again = load(folder, f"model.adapter={tmp_path / 'adapter'}")
    with torch.no_grad():
        ids = torch.tensor(PROMPTS[:1])
        assert (again.model.eval()(ids).logits - model.eval()(ids).logits).abs().max() < TOLERANCE

    bare = find_bare_layers(model)
    assert bare == sorted(BARE.get(kind, ())) and (", ".join(bare) or "trained, on") in policy.describe()
    if kind in ("Qwen3", "Phi3", "Lfm2", "Qwen3_5"):  # seven names that are Qwen3's reached a part of the others
        adapted = {name.partition(".lora_")[0] for name, _ in model.named_parameters() if ".lora_A." in name}
        linear = [name for name, layer in make_model(kind).named_modules() if isinstance(layer, torch.nn.Linear)]
        assert adapted == {f"base_model.model.{name}" for name in linear if name != "lm_head"}
    with capsys.disabled():
        figures = f"{max(apart):.0e} nats | {off(mine, plain):.0e}"
        print(f"\n| {kind} | {auto.layout} | {engine} | {figures} | {', '.join(bare) or '-'} |", end="")


def step_gradients(run: Any, policy: Any, groups: list[Group], folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """One step's gradient of the trainer, and of REINFORCE leave-one-out written down plainly."""
    from datasets import Dataset

    from rloo_kit.loop.options import RLOOConfig
    from rloo_kit.loop.trainer import RLOOTrainer

    completions = [one.tolist() for group in groups for one in group.completions]
    prompts = [ids for text in TEXTS for ids in [policy.tokenizer(text)["input_ids"]] * len(groups[0].completions)]
    rewards = torch.tensor([len(ids) / 9 - ids[0] / 200 for ids in completions])
    model, size = policy.model, len(groups[0].completions)
    model.zero_grad()
    for prompt, ids, reward, place in zip(prompts, completions, rewards, range(len(rewards)), strict=True):
        siblings = rewards.view(-1, size)[place // size]
        advantage = reward - (siblings.sum() - reward) / (size - 1)
        logps = by_logits(model, [Group(torch.tensor(prompt), [torch.tensor(ids)])])
        (-advantage * logps.sum() / len(rewards)).backward()
    trained = [value for value in model.parameters() if value.requires_grad]
    plain = torch.cat([value.grad.flatten().clone() for value in trained])
    model.zero_grad(set_to_none=True)
    args = RLOOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, num_generations=size,
        per_device_train_batch_size=len(rewards), gradient_accumulation_steps=1, max_completion_length=64, max_steps=1,
        save_strategy="no", shuffle_dataset=False, max_grad_norm=0.0, beta=0.0, tokens_per_pass=90,
    )  # fmt: skip
    trainer = RLOOTrainer(
        model=model, args=args, processing_class=policy.tokenizer,
        reward_funcs=lambda completion_ids, **_: [len(ids) / 9 - ids[0] / 200 for ids in completion_ids],
        train_dataset=Dataset.from_dict({"prompt": TEXTS}),
    )  # fmt: skip
    trainer._generate_single_turn = lambda *_: [list(ids) for ids in completions]
    close, kept = trainer._close_step, []

    def keep() -> None:
        close()
        kept.append(torch.cat([value.grad.flatten().clone() for value in trained]))

    trainer._close_step = keep
    trainer.train()
    return kept[0], plain


def test_a_name_that_matches_nothing_is_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """PEFT asks only that one of the names is found."""
    folder = save_model("Phi3", tiny_tokenizer, tmp_path / "phi3")
    with pytest.raises(BackendError, match=r"target_modules has q_proj, up_proj, but Phi3.*gate_up_proj.*null for all"):
        load(folder, "model.lora.target_modules=[q_proj, up_proj, down_proj]")
    _, policy = load(folder, "model.lora.target_modules=[qkv_proj]")
    assert "(no adapter on down_proj, gate_up_proj, o_proj)" in policy.describe()


def test_a_model_that_overflows_in_float16_is_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """The gradients of Qwen3.5's delta layers are NaN in float16: every step would be skipped."""
    folder = save_model("Qwen3_5", tiny_tokenizer, tmp_path / "qwen3_5")
    with pytest.raises(BackendError, match=r"float16.*qwen3_5_text.*model.dtype=float32"):
        load(folder, "model.dtype=float16")
    load(save_model("Qwen3", tiny_tokenizer, tmp_path / "qwen3"), "model.dtype=float16")


def test_the_text_model_of_a_multimodal_checkpoint_is_trained(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Qwen3.5 is published with a vision tower: its text model has to be loaded whole and alone."""
    whole = save_multimodal(BASE | ZOO["Qwen3_5"], tiny_tokenizer, tmp_path)
    _, policy = load(tmp_path)
    ids = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        assert (policy.model(ids).logits - whole(ids).logits).abs().max() < TOLERANCE
    assert policy.describe().startswith("Qwen3_5ForCausalLM, 0.23 M parameters")


ODD = {
    # a router that is a linear layer by its class and returns several tensors, and draws noise in training mode
    "Phimoe": ({"num_local_experts": 4, "num_experts_per_tok": 2}, "draws random numbers in training mode"),
    "Doge": ({}, "is not causal"),  # without a mask its attention sees what follows
    "Gemma2": (ZOO["Gemma2"], "final_logit_softcapping"),  # the head is more than a matrix
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_class_is_refused(
    kind: str, tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default adapter wrapped Phimoe's router; noise and an attention that looks ahead were trained on."""
    options, refusal = ODD[kind]
    monkeypatch.setitem(ZOO, kind, options)
    monkeypatch.setattr("rloo_kit.gradient.scorer.CHECK_SHARE_OFF_GPU", 0.2)  # of a GPU's tokens: few tie in a router
    _, policy = load(save_model(kind, tiny_tokenizer, tmp_path / kind))
    shake(policy.model, scale=0.05)
    with pytest.raises(BackendError, match=refusal):
        Scorer(policy.model, 1.0, pad_id=256)


def test_windows_under_another_name(make_tiny_model: Any) -> None:
    """GPT-Neo lists its windows as attention_layers; `native` attended past them, 2.4 nats off."""
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    config = GPTNeoConfig(vocab_size=264, hidden_size=64, num_layers=2, num_heads=4, window_size=8,
                          attention_types=[[["global", "local"], 1]], max_position_embeddings=512)  # fmt: skip
    name, reason = resolve_engine("auto", "transformers", GPTNeoForCausalLM(config))
    assert name == "generate" and "do not attend to all tokens" in reason
    # A window that no layer uses is none: Qwen2-MoE lost the native engine to it.
    unused = make_tiny_model(sliding_window=4096, use_sliding_window=False)
    assert resolve_engine("auto", "transformers", unused)[0] == "native"


def test_no_adapter_outside_the_text_model(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """AutoModelForCausalLM loads Gemma 3 with its vision tower: six adapters there were saved and never trained."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sight = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = BASE | ZOO["Gemma3"]
    config = Gemma3Config(text_config=text, vision_config=sight | {"image_size": 28, "patch_size": 14},
                          mm_tokens_per_image=4, image_token_index=261, boi_token_index=262,
                          eoi_token_index=263)  # fmt: skip
    torch.manual_seed(0)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    _, policy = load(tmp_path)
    adapted = [name for name, _ in policy.model.named_parameters() if "lora_A" in name]
    assert len(adapted) == 7 * BASE["num_hidden_layers"] and not [name for name in adapted if "vision" in name]
    assert "no adapter on" not in policy.describe()
