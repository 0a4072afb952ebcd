"""Models that read images, through Unsloth's FastVisionModel, which runs transformers' code for them."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.with_unsloth import programs

KINDS = ("qwen3_vl", "qwen2_5_vl", "qwen3_5", "gemma3")


@pytest.fixture(autouse=True)
def on_this_machine(unsloth: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchvision transformers has no processor for videos, and Unsloth refuses a checkpoint whose processor
    does not load: it gets one without that half. Without bfloat16 it loads Qwen3.5 in float16, though float32 is asked.
    """
    from tests.images.models import make_processor

    for module in ("loader", "vision"):
        monkeypatch.setattr(f"unsloth.models.{module}.is_bfloat16_supported", lambda: True)
    if find_spec("torchvision") is None:
        stand_in = "unsloth.models.vision._construct_vlm_processor_fallback"
        monkeypatch.setattr(stand_in, lambda name, *_, **__: (make_processor(name), None))


@pytest.fixture
def folder_of(tmp_path: Path) -> Any:
    from tests.images.models import make

    return lambda kind: make(kind, tmp_path / kind)


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    import torch

    assert (found["logps"] - expected["logps"]).abs().max() < 1e-5
    if mine := found["gradients"]:
        wanted = expected["gradients"]
        assert wanted.keys() == mine.keys()
        size = torch.cat([value.flatten() for value in wanted.values()]).norm()
        assert torch.cat([(mine[name] - value).flatten() for name, value in wanted.items()]).norm() < 1e-5 * size


@pytest.mark.parametrize("kind", KINDS)
def test_scores_and_samples(
    kind: str, folder_of: Any, load: Any, in_transformers: Any, tmp_path: Path, capsys: Any
) -> None:
    """`generate` filled a cache of fixed size, whose mask is made before the model reads the ids: prompts of different
    lengths ended in an error, and what Gemma3 sampled was 0.15 nats off, because an image's tokens saw only those
    before them."""
    import torch

    from rloo_kit.gradient.packing import Group
    from rloo_kit.gradient.scorer import Scorer
    from rloo_kit.models.policy import save_adapter
    from rloo_kit.rollout.choice import build_engine
    from rloo_kit.rollout.completions import find_end_ids
    from rloo_kit.rollout.types import Limits

    folder = folder_of(kind)
    policy = load("model.vision=true", model=folder, moved=True)
    assert "differently" not in capsys.readouterr().out and policy.tokenizer.vision
    assert all("language_model" in name for name in programs.trained(policy.model))
    save_adapter(policy, tmp_path)
    compare(programs.images(policy), in_transformers("images", folder, tmp_path))
    ends = find_end_ids(policy)
    engine = build_engine(policy.model, backend=policy.backend, temperature=1.0, end_ids=ends, pad_id=256)
    prompts = [list(ids) for ids in policy.tokenizer(programs.illustrated() * 2)["input_ids"]]
    found = engine.sample(prompts, Limits(7))
    policy.model.train()
    pairs = zip(prompts, found.completion_ids, strict=True)
    groups = [Group(torch.tensor(prompt), [torch.tensor(ids)]) for prompt, ids in pairs]
    with torch.no_grad():
        logps = Scorer(policy.model, 1.0, pad_id=256, layout="padded").score(policy.model, groups).logps
    sampled = torch.tensor([logp for row in found.sampler_logps for logp in row])
    assert (logps - sampled).abs().max() < 1e-4


def test_a_step_and_a_second_run(folder_of: Any, load: Any, in_transformers: Any, tmp_path: Path) -> None:
    """The tower is trained too. Unsloth has one function for adapters on its own layers and one for all others, and
    the first refused to continue this one."""
    from datasets import Dataset

    from rloo_kit import RLOOConfig, RLOOTrainer
    from rloo_kit.models.policy import save_adapter

    folder = folder_of("qwen3_vl")
    policy = load("model.lora.vision=true", model=folder)
    before = {name: value.detach().clone() for name, value in programs.trained(policy.model).items()}
    args = RLOOConfig(
        output_dir=str(tmp_path / "run"), use_cpu=True, bf16=False, max_steps=1, per_device_train_batch_size=4,
        num_generations=2, max_completion_length=6, learning_rate=0.5, optim="sgd", report_to="none", seed=3,
        save_strategy="no", logging_steps=1, **policy.config_arguments,
    )  # fmt: skip

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 7) for ids in completion_ids]

    rows = Dataset.from_dict({"prompt": programs.illustrated()[:1] * 2})
    trainer = RLOOTrainer(policy.model, reward, args, rows, processing_class=policy.tokenizer)
    trainer.train()
    moved = [name for name, value in programs.trained(policy.model).items() if not value.equal(before[name])]
    assert {"visual" in name for name in moved} == {True, False}
    assert trainer.state.log_history[0]["sampling/logp_difference_max"] < 1e-4
    save_adapter(policy, tmp_path / "adapter")
    again = load(f"model.adapter={tmp_path / 'adapter'}", model=folder)
    compare(programs.images(again), in_transformers("images", folder, tmp_path / "adapter"))
