"""Stand-ins for measuring memory: checkpoints with random weights, and full caches."""

import shutil
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen2Config, Qwen3_5TextConfig, Qwen3Config

from rloo_kit.config.run import RunConfig
from rloo_kit.data.light_tokenizer import ROWS
from rloo_kit.embedded.model import build_tokenizer
from rloo_kit.errors import BackendError
from rloo_kit.models.checkpoint import write_shards
from rloo_kit.plan.shapes import DELTA_KEYS, ModelShape, find_shape

BLOCK = 2**20  # random numbers that are drawn; tensors repeat them
POSITIONS = 40960  # of Qwen3


# ------------------------------------------------------------------------------------------------ random weights


def save_random_checkpoint(run: RunConfig, folder: str | Path) -> Path:
    """Write config, bf16 weights and a tokenizer of single bytes into `folder`.

    Args:
        run: its model's shape is found as in `plan_vram`, without a network.

    Returns:
        The folder, for `model.name`.

    Raises:
        ConfigError: the shape is unknown. BackendError: the weights do not fit the disk.
    """
    kind = "instruct" if "instruct" in run.model.name.lower() else "thinking"
    return save_random_model(find_shape(run), folder, kind, max(POSITIONS, run.model.max_seq_length))


def save_random_model(
    shape: ModelShape, folder: str | Path, kind: str = "thinking", positions: int = POSITIONS, **values: Any
) -> Path:
    """The same for a shape; `kind` is the tokenizer's, `values` are further keys of the config."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = 2 * shape.num_weights, shutil.disk_usage(folder).free
    if needed > 0.95 * free:
        raise BackendError(
            f"a random checkpoint of {shape.size} takes {needed / 2**30:.1f} GiB, and "
            f"{folder} has {free / 2**30:.1f} GiB free: set TMPDIR to a folder on a larger disk"
        )
    config = make_config(shape, positions, **values)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = {name: value.shape for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        sizes.pop("lm_head.weight")
    draw = _random_numbers(config)

    def read(name: str) -> torch.Tensor:
        size = sizes[name]
        is_norm = len(size) == 1 and name.endswith("norm.weight")
        return torch.ones(size) if is_norm else draw(size.numel()).view(size)

    write_shards(sizes, read, folder, config.dtype)
    build_tokenizer(kind, "qwen3" if shape.vocab_size >= ROWS["qwen3"] else "compact").save_pretrained(folder)
    return folder


def make_config(shape: ModelShape, positions: int = POSITIONS, **values: Any) -> Any:
    """transformers' config for a shape (Qwen3.5, Qwen3, Qwen2 or Llama, by its delta nets, norms and biases) with
    `positions` tokens and further `values`; without them there are no special tokens."""
    kind = Qwen3Config if shape.qk_norm else Qwen2Config if shape.qkv_bias else LlamaConfig
    if (net := shape.delta) is not None:
        kinds = ["linear_attention" if layer in net.layers else "full_attention" for layer in range(shape.num_layers)]
        kind, heads = Qwen3_5TextConfig, dict(zip(DELTA_KEYS, astuple(net)[1:], strict=True))
        values = {"layer_types": kinds} | heads | values
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


def _random_numbers(config: Any) -> Callable[[int], torch.Tensor]:
    """Normal numbers with the config's standard deviation: drawn on a GPU, else one block repeated."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device, "dtype": torch.float32}
    if device == "cuda":
        return lambda count: torch.randn(count, **options).mul_(config.initializer_range).to(config.dtype).cpu()
    block = torch.randn(BLOCK, **options).mul_(config.initializer_range).to(config.dtype)
    return lambda count: block.repeat(-(-count // BLOCK))[:count]


# ------------------------------------------------------------------------------------------------ full caches


def fill_slots(decoder: Any, cache: Any, rows: list[Any], first: int) -> None:
    """Fill slots of the native engine with one token's keys and values at every position."""
    states: dict[int, tuple[Any, Any]] = {}  # (G, 1, D) by layer

    def insert(layer: int, _first: int, _count: int, keys: Any, values: Any) -> None:
        states[layer] = keys, values

    decoder.prefill([[0]], SimpleNamespace(insert=insert), [(0, 1)])
    for layer, (keys, values) in states.items():
        for slot, row in enumerate(rows, first):
            length = len(row.prefix)
            cache.insert(layer, slot, 1, keys.expand(-1, length, -1), values.expand(-1, length, -1))


def fill_cache(model: Any, rows: int, width: int) -> Any:
    """transformers' cache for (B, P) prefixes without their last token: views of one token's keys and values, which the
    first step materialises layer by layer."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device)
    one = model(input_ids=ids, use_cache=True).past_key_values
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for place, found in enumerate(one.layers if hasattr(one, "layers") else one):
        if hasattr(found, "recurrent_states"):  # a delta net's, which one token fills
            found.reorder_cache(torch.zeros(rows, dtype=torch.long))
            cache.layers[place] = found
        else:
            pair, layer = (found.keys, found.values) if hasattr(found, "keys") else found, cache.layers[place]
            wide = [states.expand(rows, -1, width - 1, -1) for states in pair]
            layer.lazy_initialization(*wide)
            layer.keys, layer.values = wide
    return cache
