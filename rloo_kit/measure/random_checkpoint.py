"""A checkpoint of a run's true shape with random weights, made on the spot: to measure memory without a download.

Sizes, memory and speed are those of the real model; what it writes is noise. Weights are a block of random numbers laid
end to end, shard by shard, so that no more than a shard is in memory. Left out: experts, and which layers Unsloth's
dynamic copies keep in 16 bit.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rloo_kit._stack import load_stack
from rloo_kit.embedded.tokenizer import ROWS, build_tokenizer
from rloo_kit.errors import BackendError
from rloo_kit.plan.shapes import ModelShape, find_shape

SHARD_BYTES = 2**31
BLOCK = 2**20  # random numbers that are made; tensors repeat them
DEVIATION = 0.02
POSITIONS = 40960  # of Qwen3


def save_random_checkpoint(run: Any, folder: str | Path) -> Path:
    """Write config, bf16 weights and a tokenizer of single bytes into `folder`.

    Args:
        run: a `RunConfig`; its model's shape is found as `plan_vram` finds it, without a network.

    Returns:
        the folder, to be a `model.name`.

    Raises:
        ConfigError: the shape is not known. BackendError: the disk has no room for the weights.
    """
    stack = load_stack()
    folder, shape = Path(folder), find_shape(run)
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = 2 * shape.num_weights, shutil.disk_usage(folder).free
    if needed > 0.95 * free:
        raise BackendError(
            f"a random checkpoint of {run.model.name} takes {needed / 2**30:.1f} GiB, and {folder} has "
            f"{free / 2**30:.1f} GiB free: set TMPDIR to a folder on a larger disk"
        )
    config = make_config(shape, max(POSITIONS, run.model.max_seq_length))
    config.save_pretrained(folder)
    _save_weights(config, folder, stack.torch)
    kind = "instruct" if "instruct" in run.model.name.lower() else "thinking"
    vocabulary = "qwen3" if shape.vocab_size >= ROWS["qwen3"] else "compact"
    build_tokenizer(kind, vocabulary).save_pretrained(folder)
    return folder


def make_config(shape: ModelShape, positions: int = POSITIONS, **values: Any) -> Any:
    """The config of transformers for a shape: Qwen3, Qwen2 or Llama, as its norms and biases say.

    Args:
        positions: tokens of the longest sequence. values: further keys of the config; no token ends a text otherwise.
    """
    library = load_stack().transformers
    kind = library.Qwen3Config if shape.qk_norm else library.Qwen2Config if shape.qkv_bias else library.LlamaConfig
    return kind(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=positions,
        rope_parameters={"rope_theta": 1_000_000.0, "rope_type": "default"},
        tie_word_embeddings=shape.tied,
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "dtype": "bfloat16"} | values,
    )


def _save_weights(config: Any, folder: Path, torch: Any) -> None:
    """Shards of at most SHARD_BYTES (or one tensor), and the index that says where each tensor is."""
    from safetensors.torch import save_file

    numbers = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)).mul_(DEVIATION).bfloat16()
    places: dict[str, str] = {}
    total = 0
    for number, names in enumerate(_cut(_list_tensors(config)), 1):
        shard = f"model-{number:05d}.safetensors"
        tensors = {}
        for name, size in names:
            count = size.numel()
            is_norm = len(size) == 1 and name.endswith("norm.weight")
            flat = torch.ones(count).bfloat16() if is_norm else numbers.repeat(-(-count // BLOCK))[:count]
            tensors[name] = flat.view(size).contiguous()
            total += 2 * count
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, shard)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _list_tensors(config: Any) -> list[tuple[str, Any]]:
    """Names and sizes of what a checkpoint of this config holds."""
    stack = load_stack()
    with stack.torch.device("meta"):
        model = stack.transformers.AutoModelForCausalLM.from_config(config)
    left_out = "lm_head.weight" if config.tie_word_embeddings else None
    return [(name, value.shape) for name, value in model.state_dict().items() if name != left_out]


def _cut(tensors: list[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
    chosen: list[tuple[str, Any]] = []
    held = 0
    for name, size in tensors:
        if chosen and held + 2 * size.numel() > SHARD_BYTES:
            yield chosen
            chosen, held = [], 0
        chosen.append((name, size))
        held += 2 * size.numel()
    yield chosen
