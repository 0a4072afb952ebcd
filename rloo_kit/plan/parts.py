"""Memory by part, in bytes, from a model's shape and a few settings; the two peaks, and what fits below a limit.

Weights, adapter, gradients and cache are exact; a layer's saved activations are within a few percent; transients of a
backward pass, Unsloth's kernels and vLLM's buffers are estimates.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rloo_kit import sizes
from rloo_kit.plan.shapes import ModelShape
from rloo_kit.plan.tower import Tower
from rloo_kit.system.gpu import GIB

CONTEXT_GIB = 0.7  # CUDA's context, and the work spaces of its libraries; without a GPU: Python with torch and trl
BLOCK = 64  # weights per 8-bit absmax (bitsandbytes)
QUANT_STATE_BYTES = 4 * (16 + 256 + 1)  # per matrix: the tables of both quantisations, and an offset
NATIVE_GRAPHS_GIB = 0.1  # of the native engine's graphs and their libraries' work space; assumed, not measured
FLOAT = 4
BLOCK_TOKENS = 16  # per page of vLLM
OUTSIDE_GIB = 0.13  # of vLLM outside torch's allocator: the column of unsloth_zoo's table in `load_vllm`
LOGITS_BYTES = 40  # per row and token of the vocabulary, in vLLM's profiling run: the slope of the same table
# vLLM's CUDA graphs: fixed, and by row. Assumed, not measured: 1.7 and 2.4 GiB of models with an adapter and 256 rows
# in its pull requests 40044 and 25914, 0.3 and 0.4 without an adapter in logs that users posted.
GRAPHS_GIB, GRAPHS_ROW_MIB = 0.4, 8
# (largest pool in GiB, tokens per forward pass that Unsloth sets for it): `load_vllm` of unsloth_zoo.
UNSLOTH_BATCHED_TOKENS = ((4, 2048), (12, 4096), (24, 6144), (float("inf"), 8192))
# Of Qwen3.5, 0.8B to 27B: a state takes as much as so many tokens' keys and values in all layers, and transformers' own
# delta nets save so many times what gated attention does.
HYBRID_TOKENS, HYBRID_SAVED = 800, 3.25
# Bytes for a patch and an element of the tower's width, by bytes per activation, counted on a CPU: of a pass without
# gradient (Qwen3-VL 40, Qwen2-VL 62), and saved by a block with an adapter (Qwen2.5-VL 51, Qwen2-VL 93).
IMAGE_BYTES, TOWER_SAVED = {2: 40, 4: 62}, {2: 51, 4: 93}
# The most by which a measured peak exceeded its computed one in benchmarks/results/plan_calibration.json: the possible
# error of a plan.
UNMEASURED = 0.1


@dataclass(frozen=True)
class Workload:
    """The inputs of the arithmetic, from a run and the machine that it has to fit (`planner.read_workload`).

    Attributes:
        four_bit: layers in NF4. weight_bytes: per unquantised weight and cache element. compute_bytes: per activation.
        lora_rank: None trains every parameter. lora_targets: names of matrices.
        checkpointing: "off", "on" (recomputed) or "offloaded" (recomputed, checkpoints in host memory).
        fused: Unsloth's kernels, which save less, and its packing, which repeats the prompt for each completion.
        tokens_per_pass: limit of a training pass, which has at least one row, or one group (whole_groups).
        reference: what beta needs in addition to the policy: "none", "adapter" (a frozen copy) or "model".
        completions: per call of the engine in this process. max_length: longest row that vLLM must support.
        vllm_bytes: vLLM's share of the GPU if the file sets it. unknown_bytes: of layers that Unsloth's dynamic 4-bit
            copies keep in 16 bit, at most. keeps_gradients: a step has several rollouts.
        max_pixels: of an image. trains_tower: its linear layers have an adapter too.
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
    unknown_bytes: int = 0
    max_pixels: int = 262144
    trains_tower: bool = False

    @property
    def row_tokens(self) -> int:
        """Tokens of a prompt and its completion together."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def cache_tokens(self) -> int:
        """Tokens per row that the cache allocates, in whole blocks."""
        block = sizes.GRAPH_CACHE_BLOCK if self.has_graphs else sizes.CACHE_BLOCK
        tokens = max(self.row_tokens, HYBRID_TOKENS) if self.shape.is_hybrid else self.row_tokens
        return -(-tokens // block) * block

    @property
    def has_graphs(self) -> bool:
        """Whether the kit's own CUDA graphs sample: not other layers, nor float32 weights in mixed precision."""
        is_walked = self.shape.has_kernels and self.weight_bytes == self.compute_bytes
        return self.engine == "native" and self.on_cuda and is_walked

    @property
    def pass_tokens(self) -> int:
        """Tokens of the largest training pass."""
        prompts = self.num_generations if self.fused or self.shape.is_hybrid else 1
        group = prompts * self.prompt_tokens + self.num_generations * self.completion_tokens
        least = group if self.whole_groups else self.row_tokens
        return min(max(self.tokens_per_pass, least), self.completions * self.row_tokens)


def nf4_bytes(weights: int) -> int:
    """Bytes of a matrix in NF4 with double quantisation, its tables included.

    >>> round(nf4_bytes(2560 * 9728) / (2560 * 9728), 4)  # bytes a weight
    0.5159
    """
    blocks = -(-weights // BLOCK)
    return -(-weights // 2) + blocks + FLOAT * -(-blocks // sizes.NESTED_BLOCK) + QUANT_STATE_BYTES


def body_bytes(work: Workload) -> int:
    """The matrices of the layers."""
    shape = work.shape
    if not work.four_bit:
        return shape.body_weights * work.weight_bytes
    return shape.num_layers * sum(nf4_bytes(rows * columns) for rows, columns in shape.matrices.values())


def table_bytes(work: Workload) -> int:
    """Embedding, head and norms, which are never quantised."""
    return (work.shape.table_weights + work.shape.vector_weights) * work.weight_bytes


def tower_bytes(work: Workload) -> int:
    """The vision tower, in the base's dtype; 0 without one."""
    return 0 if work.shape.tower is None else work.shape.tower.num_weights * work.weight_bytes


def _trained_matrices(work: Workload) -> Iterator[tuple[int, int, int]]:
    """(rows, columns, count) of the trained matrices; norms and biases as one row."""
    shape, rank = work.shape, work.lora_rank
    tables = {"lm_head": (shape.vocab_size, shape.hidden_size), "embed_tokens": (shape.vocab_size, shape.hidden_size)}
    if rank is None:
        yield from ((rows, columns, shape.num_layers) for rows, columns in shape.matrices.values())
        yield shape.vocab_size, shape.hidden_size, 1 if shape.tied else 2
        yield 1, shape.vector_weights, 1
        return
    for rows, columns, count in shape.tower.matrices if shape.tower is not None and work.trains_tower else ():
        yield rows, rank, count
        yield rank, columns, count
    for name, (rows, columns) in (shape.matrices | tables).items():
        if name.rpartition(".")[2] in work.lora_targets:
            count = 1 if name in tables else shape.num_layers
            yield rows, rank, count
            yield rank, columns, count


def trained_weights(work: Workload) -> int:
    """Weights that an optimizer step changes."""
    return sum(rows * columns * times for rows, columns, times in _trained_matrices(work))


def optimizer_bytes(work: Workload) -> int:
    """The optimizer's state: two moments in 32 bit, or in 8 bit with a 32-bit scale per 256 values."""
    weights = trained_weights(work)
    if work.optim == "sgd":
        return 0
    if work.optim == "adafactor":  # one row and one column of each matrix
        return FLOAT * sum((rows + columns) * times for rows, columns, times in _trained_matrices(work))
    if "8bit" in work.optim:
        return 2 * weights + 2 * FLOAT * (weights // sizes.NESTED_BLOCK)
    return 2 * FLOAT * weights


def own_bytes(work: Workload) -> int:
    """The adapter in float32; 0 without one, since the model itself is trained."""
    return 0 if work.lora_rank is None else FLOAT * trained_weights(work)


def cache_bytes_per_token(work: Workload) -> int:
    """Keys and values of one token in all layers."""
    return work.shape.cache_elements * (1 if work.float8_cache else work.weight_bytes)


def cache_bytes(work: Workload, rows: int) -> int:
    """The rollout's cache of `rows` completions at full length, in whole blocks."""
    return rows * work.cache_tokens * cache_bytes_per_token(work)


def saved_bytes_per_token(work: Workload) -> int:
    """Bytes per token that one layer saves for its backward pass; a test counts them in a real model.

    The inputs of the norms in float32 (Qwen3 has norms of q and k too); q, k, v and the attention's output; gate, its
    activation and up; and the inputs of the matrices, which a float32 adapter on a 16-bit model casts once per
    matrix. Unsloth's kernels save the inputs of norms and blocks, q, k, v and the output, gate and up (estimated).
    """
    shape, size, rank = work.shape, work.compute_bytes, work.lora_rank or 0
    qk_norm = shape.query_size + shape.kv_size if shape.qk_norm else 0
    attention = (5 if shape.is_hybrid else 2) * shape.query_size + 2 * shape.kv_size
    if work.fused and shape.has_kernels:
        return (4 * shape.hidden_size + qk_norm + attention + 2 * shape.intermediate_size) * size
    inputs = {name.rpartition(".")[2]: columns for name, (_, columns) in shape.matrices.items()}
    trained = [name for name in inputs if rank and name in work.lora_targets]
    if trained and size < FLOAT:
        copied = sum(inputs[name] + 2 * rank for name in trained)
    else:
        copied = 2 * shape.hidden_size + inputs["o_proj"] + inputs["down_proj"] + len(trained) * rank
    norms = (shape.num_norms * shape.hidden_size + qk_norm) * FLOAT
    saved = norms + (attention + 3 * shape.intermediate_size + copied) * size
    return int(HYBRID_SAVED * saved) if shape.is_hybrid else saved


def activation_bytes(work: Workload) -> int:
    """Of the largest training pass: activations saved for the backward pass, and its transients."""
    shape, size = work.shape, work.compute_bytes
    layer = saved_bytes_per_token(work)
    on_the_way = 3 * shape.intermediate_size * size  # gradients of gate, up and their product
    checkpoint = shape.hidden_size * size
    ends = shape.hidden_size * (2 * size + FLOAT)  # the embedding's output, the last norm's input and output
    if work.checkpointing == "off":
        body = shape.num_layers * layer
    else:  # offloaded: the checkpoint in use, and the next one in transfer
        body = layer + checkpoint * (2 if work.checkpointing == "offloaded" else shape.num_layers)
    return work.pass_tokens * (body + on_the_way + ends)


def head_bytes(work: Workload) -> int:
    """Scored states with their gradients, one tile of logits, and the gradient of a trained head."""
    shape, size, is_cpu = work.shape, work.compute_bytes, not work.on_cuda
    tokens = min(sizes.TILE_TOKENS[is_cpu], work.pass_tokens)
    tile = tokens * (min(sizes.TILE_VOCABULARY[is_cpu], shape.vocab_size) * 2 + 3 * shape.hidden_size) * (size + FLOAT)
    table = shape.vocab_size * shape.hidden_size * FLOAT if work.lora_rank is None else 0
    return work.pass_tokens * shape.hidden_size * (2 * size + FLOAT) + tile + table


def decoder_bytes(work: Workload) -> tuple[int, str]:
    """What the native engine's decoder keeps in a rollout, and what it is."""
    if not work.four_bit and work.weight_bytes == FLOAT and (size := body_bytes(work)) <= sizes.MERGED_LIMIT_BYTES:
        return size, "a copy of the layers with the adapter merged"
    together = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # joined, so with scales in float32
    joined = sum(rows * columns for name, (rows, columns) in work.shape.matrices.items() if name.endswith(together))
    scales = FLOAT * work.shape.num_layers * joined // BLOCK if work.four_bit else 0
    # An adapter's second matrices are a block-diagonal one for the projections of one input.
    adapter = 1.6 * work.compute_bytes * (trained_weights(work) if work.lora_rank is not None else 0)
    return scales + int(adapter), "the adapter in the model's precision, scales of 4-bit weights in float32"


def sampling_bytes(work: Workload, rows: int) -> int:
    """Logits of one token per row and what is computed from them, and the prefill of the rows' prompts."""
    shape = work.shape
    logits = rows * shape.vocab_size * (work.compute_bytes + 3 * FLOAT)
    width = 4 * shape.hidden_size + 2 * shape.query_size + 4 * shape.kv_size + 3 * shape.intermediate_size
    prompts = -(-rows // work.num_generations)
    return logits + prompts * work.prompt_tokens * width * work.compute_bytes


def feature_bytes(tower: Tower, work: Workload) -> int:
    """Features of images: those that are kept, or, of a trained tower, at most all tokens of a rollout's prompts."""
    if not work.trains_tower:
        return sizes.FEATURE_CACHE_BYTES
    prompts = -(-work.completions // work.num_generations)
    return prompts * work.prompt_tokens * tower.out_size * tower.levels * work.weight_bytes


def image_bytes(tower: Tower, work: Workload) -> int:
    """A pass of the tower without gradient, one image at a time."""
    tokens = min(tower.image_tokens(work.max_pixels), work.prompt_tokens)
    return tokens * tower.merge**2 * tower.width * IMAGE_BYTES[work.compute_bytes]


def tower_activation_bytes(tower: Tower, work: Workload) -> int:
    """Activations of the tower that a training pass saves, if all tokens of its prompts are of images."""
    prompts = -(-work.completions // work.num_generations)
    patches = min(prompts * work.prompt_tokens, work.pass_tokens) * tower.merge**2
    layer, checkpoint = tower.width * TOWER_SAVED[work.compute_bytes], tower.width * work.compute_bytes
    if work.checkpointing == "off":
        return patches * layer * (tower.depth + tower.levels)  # a merger saves less than a block
    return patches * (layer * (1 + tower.levels) + checkpoint * tower.depth)


def vllm_weight_bytes(work: Workload) -> int:
    """vLLM's weights, which it shares with Unsloth, and else has a second time: in 4 bit if the policy's are, else in
    its compute type."""
    own = replace(work, weight_bytes=work.compute_bytes)
    return body_bytes(own) + table_bytes(own) + tower_bytes(own)


def adapter_bytes(work: Workload) -> int:
    """vLLM's buffers for one adapter, at the next supported rank."""
    rank = next((rank for rank in sizes.VLLM_RANKS if rank >= (work.lora_rank or 0)), work.lora_rank)
    return 0 if work.lora_rank is None else trained_weights(replace(work, lora_rank=rank)) * work.compute_bytes


def row_bytes(work: Workload) -> int:
    """Keys and values of a full-length completion with its prompt, in whole pages."""
    return -(-work.row_tokens // BLOCK_TOKENS) * BLOCK_TOKENS * cache_bytes_per_token(work)


def pool_bytes(work: Workload, rows: int) -> int:
    """The KV cache pool: for `rows` full completions, or what is left of a share set in the file.

    It has room for at least one row of `work.max_length`, without which vLLM does not start.
    """
    if work.vllm_bytes is not None:
        return max(work.vllm_bytes - vllm_weight_bytes(work) - buffer_bytes(work, rows), 0)
    return max(rows * row_bytes(work), least_pool_bytes(work))


def least_pool_bytes(work: Workload) -> int:
    """The pool below which vLLM does not start."""
    return max(work.max_length, work.row_tokens) * cache_bytes_per_token(work)


def buffer_bytes(work: Workload, rows: int) -> int:
    """Everything but weights and pool: the adapter's buffers, one forward pass, CUDA graphs, libraries."""
    shape, tokens = work.shape, sizes.BATCHED_TOKENS
    if work.fused:
        pool = rows * row_bytes(work) / GIB
        tokens = next(tokens for gib, tokens in UNSLOTH_BATCHED_TOKENS if pool <= gib)
    # The slope of unsloth_zoo's table over tokens, checked by a test: gate and up, their product, the residual stream.
    states = tokens * (3 * shape.intermediate_size + 4 * shape.hidden_size) * work.compute_bytes
    logits = rows * shape.vocab_size * LOGITS_BYTES
    return adapter_bytes(work) + max(states, logits) + _kept_bytes(work, rows)


def _kept_bytes(work: Workload, rows: int) -> int:
    """Graphs and libraries, which stay while vLLM is asleep; on a CPU it has none."""
    if not work.on_cuda:
        return 0
    graphs = 0 if work.enforce_eager else GRAPHS_GIB * GIB + rows * GRAPHS_ROW_MIB * 2**20
    return int(OUTSIDE_GIB * GIB + graphs)


def share_bytes(work: Workload, rows: int) -> int:
    """vLLM's memory while it samples, shared weights included; `gpu_memory_utilization` has to allow it."""
    return vllm_weight_bytes(work) + buffer_bytes(work, rows) + pool_bytes(work, rows)


def asleep_bytes(work: Workload, rows: int) -> int:
    """What stays of vLLM's memory, shared weights apart, while the policy trains: the pool is freed, and a second copy
    of the weights moves to host memory with the adapter's buffers."""
    return _kept_bytes(work, rows) + (adapter_bytes(work) if work.fused else 0)


# ------------------------------------------------------------------------------------------ parts and peaks


@dataclass(frozen=True)
class MemoryPart:
    """One line of the table: GiB in the rollout and in a training pass, with details."""

    name: str
    rollout_gib: float
    training_gib: float
    detail: str


def list_parts(work: Workload, rows: int) -> list[MemoryPart]:
    """The parts, which add up to the two peaks, with `rows` completions of a rollout at once at full length."""
    sampling = {"server": _list_server, "vllm": _list_vllm}.get(work.engine, _list_sampling)
    table = [*_list_lasting(work), *_list_images(work), *sampling(work, rows), *_list_passes(work)]
    return [MemoryPart(name, rollout / GIB, training / GIB, detail) for name, rollout, training, detail in table]


Row = tuple[str, int, int, str]  # of the table: name, bytes in the rollout, bytes in a training pass, details


def _list_lasting(work: Workload) -> Iterator[Row]:
    """What stays in memory: weights, what training adds to them, and the context."""
    shape, trained = work.shape, FLOAT * trained_weights(work)
    kind = "NF4, double quantisation" if work.four_bit else f"{8 * work.weight_bytes} bits"
    tables = "embedding, tied with the head" if shape.tied else "embedding and head"
    tables += f", {shape.vocab_size} x {shape.hidden_size}; norms; {8 * work.weight_bytes} bits"
    model = body_bytes(work) + table_bytes(work) + tower_bytes(work)
    copied = {"none": 0, "adapter": trained, "model": model}[work.reference]
    largest_matrix = max(rows * columns for rows, columns in shape.matrices.values())
    lasting = (
        ("weights: layers", body_bytes(work), f"{shape.body_weights / 1e6:,.4g} M in {kind}"),
        ("weights: tables", table_bytes(work), tables),
        ("adapter", own_bytes(work), f"{trained_weights(work) / 1e6:,.4g} M in float32, r = {work.lora_rank}"),
        ("optimizer", optimizer_bytes(work), work.optim),
        ("reference", copied, f"a copy of the {work.reference}"),
        ("unpacking", largest_matrix * work.compute_bytes * work.four_bit, "the largest matrix, unpacked"),
        ("context", int(CONTEXT_GIB * GIB), "CUDA" if work.on_cuda else "Python and its libraries"),
    )
    yield from ((name, size, size, detail) for name, size, detail in lasting if size)
    yield "gradients", trained * work.keeps_gradients, trained, "float32"  # with the sums of streaming


def _list_images(work: Workload) -> Iterator[Row]:
    """The vision tower, and what images need."""
    if (tower := work.shape.tower) is None:
        return
    weights = tower_bytes(work)
    tokens, kept = tower.image_tokens(work.max_pixels), feature_bytes(tower, work)
    training = tower_activation_bytes(tower, work) if work.trains_tower else 0
    yield "weights: tower", weights, weights, f"{tower.num_weights / 1e6:,.4g} M in {8 * work.weight_bytes} bits"
    yield "image features", kept, kept, "of the images of a rollout" if work.trains_tower else "kept, at most"
    yield "images", image_bytes(tower, work), training, f"at most {tokens} tokens each; one at a time in a rollout"


def _list_passes(work: Workload) -> Iterator[Row]:
    """What a training pass adds."""
    detail = f"{work.pass_tokens} tokens in a pass, checkpointing {work.checkpointing}"
    yield "activations", 0, activation_bytes(work), detail
    yield "head", 0, head_bytes(work), "scored states, one tile of logits"


def _list_server(work: Workload, rows: int) -> Iterator[Row]:
    yield "cache", 0, 0, "on the server"


def _list_vllm(work: Workload, rows: int) -> Iterator[Row]:
    """vLLM's; what stays of it while the policy trains also counts in training."""
    awake = not work.on_cuda  # on a CPU its sleep does nothing
    if not work.fused:
        size, host = vllm_weight_bytes(work), "" if awake else ", in host memory while it sleeps"
        yield "vLLM: weights", size, size * awake, f"vLLM's own copy{host}"
    pool, buffers, kib = pool_bytes(work, rows), buffer_bytes(work, rows), cache_bytes_per_token(work) / 1024
    detail = f"{rows} x {work.row_tokens} tokens x {kib:.4g} KiB{', in 8 bits' if work.float8_cache else ''}"
    yield "vLLM: pool", pool, pool * awake, detail
    detail = f"adapter, one forward pass{'' if awake else ', CUDA graphs'}; assumed, not measured"
    yield "vLLM: buffers", buffers, buffers if awake else asleep_bytes(work, rows), detail


def _list_sampling(work: Workload, rows: int) -> Iterator[Row]:
    """What the kit's own engines need for a rollout."""
    shape, kib = work.shape, cache_bytes_per_token(work) / 1024
    yield "cache", cache_bytes(work, rows), 0, f"{rows} x {work.cache_tokens} tokens x {kib:.4g} KiB"
    if work.has_graphs:
        yield "graphs", int(NATIVE_GRAPHS_GIB * GIB), 0, "CUDA graphs of a token step; assumed, not measured"
    else:
        width = 2 * shape.query_size if shape.num_heads > shape.num_kv_heads else shape.kv_size
        decoding = rows * work.cache_tokens * width * work.weight_bytes
        yield "decoding", decoding, 0, "one layer's keys and values, once per query head"
    if work.engine == "native":
        size, detail = decoder_bytes(work)
        yield "decoder", size, 0, detail
    yield "sampling", sampling_bytes(work, rows), 0, "logits of the rows, prefill of the prompts"


def rollout_gib(work: Workload, rows: int) -> float:
    """Peak of a rollout in GiB, with `rows` completions at once at full length."""
    return sum(part.rollout_gib for part in list_parts(work, rows))


def training_gib(work: Workload, rows: int = 1) -> float:
    """Peak of the largest training pass in GiB; `rows` are those of vLLM's rollout, which sleeps meanwhile."""
    return sum(part.training_gib for part in list_parts(work, rows))


def unmeasured_gib(work: Workload, peak_gib: float, part: str) -> float:
    """By how much a measurement may exceed this peak; for vLLM's rollout only outside its share."""
    if part == "rollout" and work.engine == "vllm":
        peak_gib = rollout_gib(replace(work, engine="server"), 1)
    return UNMEASURED * (peak_gib - CONTEXT_GIB)


def comfortable_gib(work: Workload, limit_gib: float, part: str) -> float:
    """The largest peak that leaves the margin free below a limit; rows and passes are chosen by it."""
    limit_gib -= work.unknown_bytes / GIB
    if part == "rollout" and work.engine == "vllm":
        return limit_gib - unmeasured_gib(work, limit_gib, part)
    return (limit_gib + UNMEASURED * CONTEXT_GIB) / (1 + UNMEASURED)


def rows_at_once(work: Workload, limit_gib: float, wanted: int | None = None) -> int:
    """Completions of a rollout at once: `wanted`, else as many as fit at full length and leave the margin free.

    `generate` samples in batches: rows that do not save a batch are left out, so that batches have equal size.
    """
    if wanted is not None:
        return min(wanted, work.completions)
    if work.engine == "vllm" and work.vllm_bytes is not None:
        held = pool_bytes(work, work.completions) // row_bytes(work)
        return min(max(held, 1), work.completions)
    most = comfortable_gib(work, limit_gib, "rollout")
    rows = largest(1, work.completions, lambda rows: rollout_gib(work, rows) <= most)
    if work.engine != "generate":
        return rows
    batches = -(-work.completions // rows)
    return -(-work.completions // batches)


def largest_pass(work: Workload, limit_gib: float, rows: int = 1) -> int:
    """Tokens of a training pass that fit, up to those of `work`; a pass always has one row or group."""
    most = comfortable_gib(work, limit_gib, "training")
    return largest(1, work.tokens_per_pass, lambda n: training_gib(replace(work, tokens_per_pass=n), rows) <= most)


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number from low to high that fits; low if none does."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
