"""The card, Unsloth on it, and a random-weight Qwen3-0.6B made on the spot; nothing is downloaded.

With the variable GPU_RESULTS=FILE what was measured is written there as JSON.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# The config of Qwen3-0.6B; its weights are random here, so only sizes, speed and memory are like the real one's.
QWEN3_0_6B = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 151645,
    "pad_token_id": 151643,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs the card."""
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def card() -> Any:
    """The kit's environment on this machine's card; skips, with the reason, where there is none or no Unsloth."""
    import rloo_kit

    settled = rloo_kit.setup_environment()
    if settled.card is None:
        pytest.skip(f"no CUDA card: {settled.card_reason}")
    if settled.backend != "unsloth":
        pytest.skip(f"Unsloth is not the backend: {settled.backend_reason}")
    return settled


class Record:
    """What the tests measured: seconds and GiB by name."""

    def __init__(self) -> None:
        self.measured: dict[str, Any] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Wall time of a block, and the most memory that torch held in it."""
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        started = time.monotonic()
        yield
        torch.cuda.synchronize()
        self.measured[name] = {
            "seconds": round(time.monotonic() - started, 2),
            "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
        }


@pytest.fixture(scope="session")
def record(card: Any) -> Iterator[Record]:
    """Collects measurements; written at the end to GPU_RESULTS, if that is set."""
    import torch

    kept = Record()
    yield kept
    if target := os.environ.get("GPU_RESULTS"):
        found = {
            "device": card.card.name,
            "driver": card.card.driver,
            "capability": card.card.compute_capability,
            "precision": card.precision,
            "versions": {name: version for name, version in card.versions.items() if version},
            "cuda": torch.version.cuda,
            "command": "GPU_RESULTS=FILE make test-gpu",
            "measured": kept.measured,
        }
        Path(target).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def qwen3_folder(card: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Qwen3-0.6B with random weights and Qwen3's own token ids, as a local checkpoint (1.2 GB)."""
    import shutil

    from rloo_kit.kernel import release_memory
    from rloo_kit.tiny_tokenizer import build_tokenizer

    folder = tmp_path_factory.mktemp("qwen3_0_6b_random")
    _save_random_model(folder)
    build_tokenizer("thinking", "qwen3").save_pretrained(folder)
    release_memory(verbose=False)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _save_random_model(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(Qwen3Config(**QWEN3_0_6B)).to(torch.bfloat16)
    model.save_pretrained(folder)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Any]:
    """`make_run(name, *overrides, reward=...)`: a short run on the model `name`, in a folder of its own."""

    def build(name: object, *overrides: str, reward: str = "thinking_reward") -> Any:
        from rloo_kit import load_config

        file = tmp_path / "gpu.yaml"
        file.write_text(
            f"run: {{output_dir: {json.dumps(str(tmp_path / 'outputs'))}, sample_every_steps: 0}}\n"
            f"model: {{name: {json.dumps(str(name))}, max_seq_length: 1024, gradient_checkpointing: unsloth}}\n"
            "data: {source: embedded/addition, num_prompts: 64, test_size: 16, max_prompt_length: 128}\n"
            f"rewards: [{{name: {reward}}}]\n"
            "rloo: {max_steps: 3, per_device_train_batch_size: 8, num_generations: 4, max_completion_length: 64,\n"
            "  learning_rate: 1.0e-4, beta: 0.05, report_to: [], save_steps: 1000}\n"
        )
        return load_config(file, *overrides)

    return build
