"""What vLLM takes in the trainer's process, in bytes: while it samples, and while it is asleep.

It gets one share of the GPU (`gpu_memory_utilization`) for weights, buffers and the pool of keys and values.
"""

from dataclasses import replace

from rloo_kit.plan import parts
from rloo_kit.plan.parts import Load
from rloo_kit.system.gpu import GIB

BLOCK_TOKENS = 16  # of vLLM's pages
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what `max_lora_rank` takes
OUTSIDE_GIB = 0.13  # outside torch's allocator: the column of unsloth_zoo's table in `load_vllm`
LOGITS_BYTES = 40  # of each row and token of the vocabulary, in vLLM's trial run: the slope of the same table
GRAPHS_GIB = 0.8  # CUDA graphs of a model with an adapter; taken, not measured (reports say 0.4 to 1.4)
BATCHED_TOKENS = 8192  # of one forward pass: vLLM's default for its class LLM on GPUs below 70 GiB
# GiB of the pool, and the tokens of a forward pass that Unsloth takes up to there (`load_vllm` of unsloth_zoo).
UNSLOTH_BATCHED_TOKENS = ((4, 2048), (12, 4096), (24, 6144), (float("inf"), 8192))


def is_shared(load: Load) -> bool:
    """Whether vLLM samples from the very weights that are trained on; on its own copy else."""
    return load.fused


def weight_bytes(load: Load) -> int:
    """vLLM's weights, shared or not: in 4 bit as the policy's, else in the type that it computes in."""
    own = replace(load, weight_bytes=load.compute_bytes)
    return parts.body_bytes(own) + parts.table_bytes(own)


def adapter_bytes(load: Load) -> int:
    """vLLM's buffers for one adapter, at the next rank that it takes."""
    if load.lora_rank is None:
        return 0
    rank = next((rank for rank in LORA_RANKS if rank >= (load.lora_rank or 0)), load.lora_rank)
    return parts.trained_weights(replace(load, lora_rank=rank)) * load.compute_bytes


def row_bytes(load: Load) -> int:
    """Keys and values of one completion at its full length with its prompt, in whole pages."""
    return -(-load.row_tokens // BLOCK_TOKENS) * BLOCK_TOKENS * parts.cache_bytes_per_token(load)


def pool_bytes(load: Load, rows: int) -> int:
    """The pool of keys and values: for `rows` full completions, or what a share that is given leaves.

    It holds one row of `load.max_length` at least, without which vLLM does not start.
    """
    if load.vllm_bytes is not None:
        return max(load.vllm_bytes - weight_bytes(load) - buffer_bytes(load, rows), 0)
    return max(rows * row_bytes(load), least_pool_bytes(load))


def least_pool_bytes(load: Load) -> int:
    """The pool below which vLLM does not start."""
    return max(load.max_length, load.row_tokens) * parts.cache_bytes_per_token(load)


def buffer_bytes(load: Load, rows: int) -> int:
    """All that is neither weights nor pool: the adapter's buffers, one forward pass, CUDA graphs, libraries."""
    shape, tokens = load.shape, BATCHED_TOKENS
    if is_shared(load):
        pool = rows * row_bytes(load) / GIB
        tokens = next(tokens for gib, tokens in UNSLOTH_BATCHED_TOKENS if pool <= gib)
    # The slope of unsloth_zoo's table over tokens, which a test holds: gate and up, their product, the residual stream.
    states = tokens * (3 * shape.intermediate_size + 4 * shape.hidden_size) * load.compute_bytes
    logits = rows * shape.vocab_size * LOGITS_BYTES
    return adapter_bytes(load) + max(states, logits) + _kept_bytes(load)


def _kept_bytes(load: Load) -> int:
    """Graphs and libraries, which stay while vLLM is asleep."""
    graphs = 0.0 if load.enforce_eager or not load.on_cuda else GRAPHS_GIB
    return int((graphs + (OUTSIDE_GIB if load.on_cuda else 0.0)) * GIB)


def share_bytes(load: Load, rows: int) -> int:
    """All that vLLM takes while it samples, shared weights included: what `gpu_memory_utilization` has to allow."""
    return weight_bytes(load) + buffer_bytes(load, rows) + pool_bytes(load, rows)


def added_bytes(load: Load, rows: int) -> int:
    """What comes to the policy's memory while vLLM samples: its share, less weights that both use."""
    return share_bytes(load, rows) - (weight_bytes(load) if is_shared(load) else 0)


def asleep_bytes(load: Load, rows: int) -> int:
    """What of it stays while the policy trains.

    On a GPU the pool is given back, and a second copy of the weights goes to the machine's memory with the adapter's
    buffers. On a CPU vLLM's sleep does nothing.
    """
    if not load.on_cuda:
        return added_bytes(load, rows)
    return _kept_bytes(load) + (adapter_bytes(load) if is_shared(load) else 0)
