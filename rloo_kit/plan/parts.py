"""Memory by part, in bytes, from a model's shape and a few settings.

Weights, adapter, gradients and cache are exact; a layer's saved activations are within a few percent; transients of a
backward pass and Unsloth's kernels are estimates.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from rloo_kit.plan.shapes import ModelShape
from rloo_kit.system.gpu import GIB

# Tokens and vocabulary rows of one tile of logits, on an accelerator and on the CPU (`[is_cpu]`): 32 MiB and 2 MiB of
# float32. On one thread, tiles of a whole vocabulary of 151936 rows exceed the cache and take three times as long.
TILE_TOKENS, TILE_VOCABULARY = (1024, 512), (8192, 1024)
CONTEXT_GIB = 0.7  # CUDA's context, and the work spaces of its libraries
PROCESS_GIB = 0.7  # without a GPU: Python with torch, transformers and trl
BLOCK, NESTED_BLOCK = 64, 256  # weights per 8-bit absmax, and those per 32-bit absmax (bitsandbytes)
QUANT_STATE_BYTES = 4 * (16 + 256 + 1)  # per matrix: the tables of both quantisations, and an offset
CACHE_BLOCK = 64  # tokens by which the KV cache grows: short rollouts take little, long ones copy often but cheaply
JOINED_LIMIT_BYTES = 2**30  # largest copy of the layers for decoding
FLOAT = 4


@dataclass(frozen=True)
class Load:
    """The inputs of the arithmetic.

    Attributes:
        four_bit: the matrices of the layers are in NF4. weight_bytes: per unquantised weight and cache element.
        compute_bytes: per activation. lora_rank: None trains every parameter. lora_targets: names of matrices.
        checkpointing: "off", "on" (recomputed) or "offloaded" (recomputed, checkpoints in host memory).
        fused: Unsloth's kernels, which save less, and its packing, which repeats the prompt for each completion, as do
            the padded rows of delta nets.
        tokens_per_pass: limit of a training pass, which has at least one row, or one group (whole_groups).
        reference: what beta needs in addition to the policy: "none", "adapter" (a frozen copy) or "model".
        completions: per call of the engine in this process. engine: as in `rollout.engine`.
        float8_cache: vLLM's KV cache is in 8 bits. max_length: longest row in tokens that vLLM must support.
        enforce_eager: vLLM without CUDA graphs. vllm_bytes: vLLM's share of the GPU if the file sets it.
        keeps_gradients: a step has several rollouts, so gradients exist in the later ones; otherwise the optimizer
            step before a rollout frees them.
        factors: of the computed peaks, rollout and training (`corrections.find_factors`).
        unmeasured: share of a peak by which a measurement may exceed it. unknown_bytes: of layers that a dynamic 4-bit
            copy may keep in 16 bit.
    """

    shape: ModelShape
    four_bit: bool
    weight_bytes: int
    compute_bytes: int
    lora_rank: int | None
    lora_targets: tuple[str, ...]
    optim: str
    checkpointing: str
    fused: bool
    tokens_per_pass: int
    whole_groups: bool
    reference: str
    prompt_tokens: int
    completion_tokens: int
    num_generations: int
    completions: int
    on_cuda: bool
    engine: str = "generate"
    float8_cache: bool = False
    max_length: int = 0
    enforce_eager: bool = False
    vllm_bytes: int | None = None
    keeps_gradients: bool = True
    factors: tuple[float, float] = (1.0, 1.0)
    unmeasured: float = 0.0
    unknown_bytes: int = 0

    @property
    def row_tokens(self) -> int:
        """Tokens of a prompt and its completion together."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def cache_tokens(self) -> int:
        """Tokens per row that the cache allocates, in whole blocks."""
        return -(-self.row_tokens // CACHE_BLOCK) * CACHE_BLOCK

    @property
    def pass_tokens(self) -> int:
        """Tokens of the largest training pass."""
        prompts = self.num_generations if self.fused or self.shape.delta else 1
        group = prompts * self.prompt_tokens + self.num_generations * self.completion_tokens
        least = group if self.whole_groups else self.row_tokens
        return min(max(self.tokens_per_pass, least), self.completions * self.row_tokens)


def nf4_bytes(weights: int) -> int:
    """Bytes of a matrix in NF4 with double quantisation, its tables included.

    >>> round(nf4_bytes(2560 * 9728) / (2560 * 9728), 4)  # bytes a weight
    0.5159
    """
    blocks = -(-weights // BLOCK)
    return -(-weights // 2) + blocks + FLOAT * -(-blocks // NESTED_BLOCK) + QUANT_STATE_BYTES


def body_bytes(load: Load) -> int:
    """The matrices of the layers."""
    shape, total = load.shape, 0
    for layers, matrices in shape.matrices:
        for layer, (name, (rows, columns)) in product(layers, matrices.items()):
            is_packed = load.four_bit and not shape.is_kept(f"model.layers.{layer}.{name}")
            total += nf4_bytes(rows * columns) if is_packed else rows * columns * load.weight_bytes
    return total


def table_bytes(load: Load) -> int:
    """Embedding, head and norms, which are never quantised."""
    return (load.shape.table_weights + load.shape.vector_weights) * load.weight_bytes


def _trained_matrices(load: Load) -> Iterator[tuple[int, int, int]]:
    """(rows, columns, count) of the trained matrices; norms and biases as one row."""
    shape = load.shape
    if load.lora_rank is None:
        for layers, matrices in shape.matrices:
            yield from ((rows, columns, len(layers)) for rows, columns in matrices.values())
        yield shape.vocab_size, shape.hidden_size, 1 if shape.tied else 2
        yield 1, shape.vector_weights, 1
        return
    for layers, matrices in shape.matrices:
        for name, (rows, columns) in matrices.items():
            if name.rpartition(".")[2] in load.lora_targets:
                yield rows, load.lora_rank, len(layers)
                yield load.lora_rank, columns, len(layers)
    for _ in {"lm_head", "embed_tokens"} & set(load.lora_targets):
        yield shape.vocab_size, load.lora_rank, 1
        yield load.lora_rank, shape.hidden_size, 1


def trained_weights(load: Load) -> int:
    """Weights that an optimizer step changes."""
    return sum(rows * columns * times for rows, columns, times in _trained_matrices(load))


def optimizer_bytes(load: Load) -> int:
    """The optimizer's state: two moments in 32 bit, or in 8 bit with a 32-bit scale per 256 values."""
    weights = trained_weights(load)
    if load.optim == "sgd":
        return 0
    if load.optim == "adafactor":  # one row and one column of each matrix
        return FLOAT * sum((rows + columns) * times for rows, columns, times in _trained_matrices(load))
    if "8bit" in load.optim:
        return 2 * weights + 2 * FLOAT * (weights // NESTED_BLOCK)
    return 2 * FLOAT * weights


def gradient_bytes(load: Load) -> int:
    """Gradients in float32, including the sums of streaming."""
    return FLOAT * trained_weights(load)


def reference_bytes(load: Load) -> int:
    """A copy of the adapter or of the model; nothing if the adapter is switched off instead."""
    if load.reference == "model":
        return body_bytes(load) + table_bytes(load)
    return FLOAT * trained_weights(load) if load.reference == "adapter" else 0


def cache_bytes_per_token(load: Load) -> int:
    """Keys and values of one token in all layers."""
    return load.shape.cache_elements * (1 if load.float8_cache else load.weight_bytes)


def state_bytes(load: Load) -> int:
    """One row's states of the layers without a KV cache, in float32, and the last inputs of their convolutions."""
    if (net := load.shape.delta) is None:
        return 0
    state = FLOAT * net.value_heads * net.key_dim * net.value_dim
    return len(net.layers) * (state + load.weight_bytes * net.conv_size * net.kernel)


def cache_bytes(load: Load, rows: int) -> int:
    """The rollout's cache of `rows` completions at full length, in whole blocks."""
    return rows * (load.cache_tokens * cache_bytes_per_token(load) + state_bytes(load))


def decoding_bytes(load: Load, rows: int) -> int:
    """Keys and values of one layer while it attends, copied for each query head by attention with a mask.

    With as many key heads as query heads, the memory to grow one layer's keys. At least three states of a delta net.
    """
    shape = load.shape
    width = 2 * shape.query_size if shape.num_heads > shape.num_kv_heads else shape.kv_size
    state = state_bytes(load) // max(shape.num_layers - shape.num_attention, 1)
    return rows * max(load.cache_tokens * width * load.weight_bytes, 3 * state)


def joined_bytes(load: Load) -> int:
    """The native loop's copy of the layers with the adapter added; only for small models in float32."""
    is_plain = load.engine == "native" and not load.four_bit and load.weight_bytes == load.compute_bytes == FLOAT
    size = body_bytes(load) if is_plain else 0
    return size if size <= JOINED_LIMIT_BYTES else 0


def saved_bytes_per_token(load: Load, kind: int = 0) -> int:
    """Bytes per token that one layer saves for its backward pass; a test counts them in a real model.

    The inputs of the norms in float32 (Qwen3 has norms of q and k too); q, k, v and the attention's output; gate, its
    activation and up; and the inputs of the matrices, which a float32 adapter on a 16-bit model casts once per
    matrix. Unsloth's kernels save the inputs of norms and blocks, q, k, v and the output, gate and up (estimated).
    A gate of attention adds three queries. A delta net (`kind` 1 of `shape.matrices`) is estimated from above, for
    transformers' own code with its chunks of 64 tokens; the kernels of flash-linear-attention save less.
    """
    shape, size, matrices = load.shape, load.compute_bytes, load.shape.matrices[kind][1]
    qk_norm = shape.query_size + shape.kv_size if shape.qk_norm else 0
    attention = (2 if shape.delta is None else 5) * shape.query_size + 2 * shape.kv_size
    if load.fused and shape.has_kernels:
        return (4 * shape.hidden_size + qk_norm + attention + 2 * shape.intermediate_size) * size
    inputs = {name.rpartition(".")[2]: columns for name, (_, columns) in matrices.items()}
    trained = [name for name in inputs if name in load.lora_targets] if load.lora_rank is not None else []
    if trained and size < FLOAT:
        copied = sum(inputs[name] + 2 * (load.lora_rank or 0) for name in trained)
    else:
        copied = 2 * shape.hidden_size + sum(inputs.get(name, 0) for name in ("o_proj", "out_proj", "down_proj"))
        copied += len(trained) * (load.lora_rank or 0)
    mixer = qk_norm * FLOAT + attention * size
    if kind and (net := shape.delta) is not None:
        keys, values, chunks = (net.value_heads * width for width in (net.key_dim, net.value_dim, 64))
        mixer = (6 * keys + 5 * values + 4 * chunks + 2 * keys * net.value_dim // 64) * FLOAT
        mixer += (7 * keys + 3 * values + 3 * net.conv_size) * size
    return 2 * shape.hidden_size * FLOAT + mixer + (3 * shape.intermediate_size + copied) * size


def activation_bytes(load: Load) -> int:
    """Of the largest training pass: activations saved for the backward pass, and its transients."""
    shape, size = load.shape, load.compute_bytes
    layers = [saved_bytes_per_token(load, kind) for kind in range(len(shape.matrices))]
    on_the_way = 3 * shape.intermediate_size * size  # gradients of gate, up and their product
    checkpoint = shape.hidden_size * size
    ends = shape.hidden_size * (2 * size + FLOAT)  # the embedding's output, the last norm's input and output
    if load.checkpointing == "off":
        body = sum(len(places) * layer for (places, _), layer in zip(shape.matrices, layers, strict=True))
    else:  # offloaded: the checkpoint in use, and the next one in transfer
        body = max(layers) + checkpoint * (2 if load.checkpointing == "offloaded" else shape.num_layers)
    return load.pass_tokens * (body + on_the_way + ends)


def head_bytes(load: Load) -> int:
    """Scored states with their gradients, one tile of logits, and the gradient of a trained head."""
    shape, size, is_cpu = load.shape, load.compute_bytes, not load.on_cuda
    tokens = min(TILE_TOKENS[is_cpu], load.pass_tokens)
    tile = tokens * (min(TILE_VOCABULARY[is_cpu], shape.vocab_size) * 2 + 3 * shape.hidden_size) * (size + FLOAT)
    table = shape.vocab_size * shape.hidden_size * FLOAT if load.lora_rank is None else 0
    return load.pass_tokens * shape.hidden_size * (2 * size + FLOAT) + tile + table


def sampling_bytes(load: Load, rows: int) -> int:
    """Logits of one token per row and what is computed from them, and the prefill of the rows' prompts."""
    shape = load.shape
    logits = rows * shape.vocab_size * (load.compute_bytes + 3 * FLOAT)
    width = 4 * shape.hidden_size + 2 * shape.query_size + 4 * shape.kv_size + 3 * shape.intermediate_size
    prompts = -(-rows // load.num_generations)
    return logits + prompts * load.prompt_tokens * width * load.compute_bytes


def work_bytes(load: Load) -> int:
    """The largest matrix, unpacked: 4-bit weights are unpacked for every multiplication."""
    largest = max(rows * columns for _, matrices in load.shape.matrices for rows, columns in matrices.values())
    return largest * load.compute_bytes if load.four_bit else 0


def context_bytes(load: Load) -> int:
    """Memory before any weight is loaded."""
    return int((CONTEXT_GIB if load.on_cuda else PROCESS_GIB) * GIB)
