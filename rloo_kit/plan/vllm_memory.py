"""Bytes of vLLM in the trainer's process, while it samples and while it is asleep.

It gets one share of the GPU (`gpu_memory_utilization`) for weights, buffers and the pool of its KV cache.
"""

from dataclasses import replace

from rloo_kit.config.checks import VLLM_RANKS
from rloo_kit.plan import parts
from rloo_kit.plan.parts import Load
from rloo_kit.system.gpu import GIB

BLOCK_TOKENS = 16  # per page of vLLM
OUTSIDE_GIB = 0.13  # outside torch's allocator: the column of unsloth_zoo's table in `load_vllm`
LOGITS_BYTES = 40  # per row and token of the vocabulary, in vLLM's profiling run: the slope of the same table
# CUDA graphs: fixed, and each. Assumed, not measured: 172 of a model with an adapter took 1.7 GiB in pull request 40044
# of vLLM, about 204 took 2.4 in 25914, 11 and 16 without an adapter 0.3 and 0.4 in logs that users posted.
GRAPHS_GIB, GRAPH_MIB = 0.3, 11
BATCHED_TOKENS = 8192  # per forward pass: vLLM's default for its class LLM on GPUs below 70 GiB
# (largest pool in GiB, tokens per forward pass that Unsloth sets for it): `load_vllm` of unsloth_zoo.
UNSLOTH_BATCHED_TOKENS = ((4, 2048), (12, 4096), (24, 6144), (float("inf"), 8192))


def is_shared(load: Load) -> bool:
    """Whether vLLM samples from the trained weights themselves; else from its own copy."""
    return load.fused


def weight_bytes(load: Load) -> int:
    """vLLM's weights, shared or not: in 4 bit if the policy's are, else in its compute type."""
    own = replace(load, weight_bytes=load.compute_bytes)
    return parts.body_bytes(own) + parts.table_bytes(own)


def adapter_bytes(load: Load) -> int:
    """vLLM's buffers for one adapter, at the next supported rank."""
    if load.lora_rank is None:
        return 0
    rank = next((rank for rank in VLLM_RANKS if rank >= (load.lora_rank or 0)), load.lora_rank)
    return parts.trained_weights(replace(load, lora_rank=rank)) * load.compute_bytes


def row_bytes(load: Load) -> int:
    """Keys and values of a full-length completion with its prompt, in whole pages, and its states."""
    tokens = -(-load.row_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
    return tokens * parts.cache_bytes_per_token(load) + parts.state_bytes(load)


def pool_bytes(load: Load, rows: int) -> int:
    """The KV cache pool: for `rows` full completions, or what is left of a share set in the file.

    It has room for at least one row of `load.max_length`, without which vLLM does not start.
    """
    if load.vllm_bytes is not None:
        return max(load.vllm_bytes - weight_bytes(load) - buffer_bytes(load, rows), 0)
    return max(rows * row_bytes(load), least_pool_bytes(load))


def least_pool_bytes(load: Load) -> int:
    """The pool below which vLLM does not start."""
    return max(load.max_length, load.row_tokens) * parts.cache_bytes_per_token(load) + parts.state_bytes(load)


def buffer_bytes(load: Load, rows: int) -> int:
    """Everything but weights and pool: the adapter's buffers, one forward pass, CUDA graphs, libraries."""
    shape, tokens = load.shape, BATCHED_TOKENS
    if is_shared(load):
        pool = rows * row_bytes(load) / GIB
        tokens = next(tokens for gib, tokens in UNSLOTH_BATCHED_TOKENS if pool <= gib)
    # The slope of unsloth_zoo's table over tokens, checked by a test: gate and up, their product, the residual stream.
    states = tokens * (3 * shape.intermediate_size + 4 * shape.hidden_size) * load.compute_bytes
    logits = rows * shape.vocab_size * LOGITS_BYTES
    return adapter_bytes(load) + max(states, logits) + _kept_bytes(load, rows)


def graphs(load: Load, rows: int) -> int:
    """How many CUDA graphs vLLM 0.32 captures by default: for batches of up to twice its rows, at most 512 tokens, and
    once more for decoding alone, up to its rows; with an adapter, all of these both with and without it."""
    largest = min(2 * rows, 512)
    sizes = {1, 2, 4, rows, *range(8, min(largest + 1, 256), 8), *range(256, largest + 1, 16)}
    captured = sum((size <= largest) + (size <= min(largest, rows)) for size in sizes)
    return captured if load.lora_rank is None else 2 * captured


def _kept_bytes(load: Load, rows: int) -> int:
    """Graphs and libraries, which stay while vLLM is asleep."""
    if not load.on_cuda:
        return 0
    captured = 0 if load.enforce_eager else int(GRAPHS_GIB * GIB) + graphs(load, rows) * GRAPH_MIB * 2**20
    return captured + int(OUTSIDE_GIB * GIB)


def share_bytes(load: Load, rows: int) -> int:
    """vLLM's memory while it samples, shared weights included; `gpu_memory_utilization` has to allow it."""
    return weight_bytes(load) + buffer_bytes(load, rows) + pool_bytes(load, rows)


def added_bytes(load: Load, rows: int) -> int:
    """What vLLM adds to the policy's memory while it samples: its share minus shared weights."""
    return share_bytes(load, rows) - (weight_bytes(load) if is_shared(load) else 0)


def asleep_bytes(load: Load, rows: int) -> int:
    """What stays of vLLM's memory while the policy trains.

    On a GPU the pool is freed, and a second copy of the weights moves to host memory with the adapter's buffers. On a
    CPU vLLM's sleep does nothing.
    """
    if not load.on_cuda:
        return added_bytes(load, rows)
    return _kept_bytes(load, rows) + (adapter_bytes(load) if is_shared(load) else 0)
