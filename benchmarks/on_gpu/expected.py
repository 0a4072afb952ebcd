"""The expected range of each figure, written before any was measured (2026-11-22), and lower bounds of some.

For an H200 (about 790 TFLOP/s in bf16 and 4.3 TB/s). Decoding is launch-bound: 36 layers x 7 4-bit matrices with their
adapters are about 3,500 kernels a step. Floors follow from the rate and the bandwidth that part 1 measures.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import step_workload

from on_gpu.checks import Part
from on_gpu.correctness import GRADIENT, LAYOUTS, MAX_NATS, MEAN_NATS
from on_gpu.listing import list_checks
from rloo_kit.plan.parts import nf4_bytes
from rloo_kit.plan.shapes import PUBLISHED, ModelShape


@dataclass(frozen=True)
class Expected:
    """A figure of a check, by its keys, and its expected range; `why` if it is not just a guess."""

    what: str
    check: str
    keys: tuple[str, ...]
    low: float
    high: float
    unit: str = ""
    why: str = ""

    @property
    def part(self) -> int:
        return list_checks()[self.check].part

    @property
    def range(self) -> str:
        """The range as text."""
        return f"{self.low:g} to {self.high:g} {self.unit}".strip()


@dataclass(frozen=True)
class Row:
    """An expectation and the measured value."""

    what: str
    expected: str
    found: str
    inside: bool


def _correctness() -> Iterator[Expected]:
    machine = "unsloth/knows_the_machine"
    yield Expected("matrix products, bf16", machine, ("tflops",), 700, 850, "TFLOP/s")
    yield Expected("copies within the GPU, read and written", machine, ("gb_per_s",), 4000, 4500, "GB/s")
    for backend, layouts in LAYOUTS.items():
        yield Expected(f"{backend}: 0.6B loads in", f"{backend}/loads_4bit", ("seconds",), 3, 20, "s")
        for kind in ("4bit", "bf16"):
            for name in layouts:
                check = f"{backend}/scores_{kind}"
                what = f"{backend}, {kind}, {name}"
                yield Expected(
                    f"{what}: mean", check, (name, "mean"), 0, MEAN_NATS, "nats", "rounding in another order"
                )
                yield Expected(f"{what}: largest", check, (name, "max"), 0, MAX_NATS, "nats")
                yield Expected(f"{what}: gradient off by", check, (name, "gradient"), 0, GRADIENT, "of its size")
    stock = ("left-padded, as stock", "mean")
    yield Expected(
        "left-padded rows as stock, Unsloth", "unsloth/scores_bf16", stock, 0.1, 10, "nats", "its mask is dropped"
    )
    yield Expected("left-padded rows as stock, transformers", "transformers/scores_bf16", stock, 0, MEAN_NATS, "nats")
    for backend in LAYOUTS:
        nats = ("nats_after_loading", "max")
        yield Expected(f"{backend}: adapter loaded again, largest", f"{backend}/generates", nats, 0, 0.02, "nats")
        merged = (backend, "merged", "max")
        yield Expected(
            f"{backend}: merged model, largest", "transformers/reads_what_was_merged", merged, 0, MAX_NATS, "nats"
        )


def _figures() -> Iterator[Expected]:
    decoding = {"unsloth": ((25, 35), (25, 40), (30, 60)), "transformers": ((40, 60), (45, 75), (70, 150))}
    whys = {"unsloth": "launches", "transformers": "launches; at 128 rows the cache is expanded to all query heads"}
    for backend, ranges in decoding.items():
        for rows, (low, high) in zip((8, 32, 128), ranges, strict=True):
            what = f"decode step, 4B in 4-bit, {rows} rows, {'Unsloth' if backend == 'unsloth' else 'native'}"
            yield Expected(what, f"{backend}/decodes", (f"rows {rows}", "ms_per_step"), low, high, "ms", whys[backend])
    training = (
        ("ours, Unsloth, fast", "unsloth/trains_4k", "fast", 2, 5),
        ("ours, Unsloth, low", "unsloth/trains_4k_otherwise", "low", 2.5, 7),
        ("ours, Unsloth, fast, prompts shared", "unsloth/trains_4k_otherwise", "shared", 2, 6),
        ("ours, Unsloth, fast, prompts repeated", "unsloth/trains_4k_otherwise", "repeated", 2, 5),
        ("TRL under Unsloth", "unsloth/stock_trains_4k", "", 8, 20),
        ("GRPO of Unsloth", "unsloth/grpo_trains_4k", "", 3, 8),
        ("ours, transformers, fast", "transformers/trains_4k", "fast", 2.5, 6),
        ("ours, transformers, low", "transformers/trains_4k_otherwise", "low", 3, 8),
        ("TRL, transformers", "transformers/stock_trains_4k", "", 8, 25),
    )
    for name, check, key, low, high in training:
        keys = (*filter(None, [key]), "training_s")
        yield Expected(
            f"training part, 4k: {name}", check, keys, low, high, "s", "3 to 7 times the floor" if key else ""
        )
    for name, check, low, high in (
        ("ours, Unsloth", "unsloth/whole_step_512", 14, 24),
        ("ours, native", "transformers/whole_step_512", 22, 38),
        ("TRL under Unsloth", "unsloth/stock_whole_step_512", 15, 35),
        ("TRL, transformers", "transformers/stock_whole_step_512", 25, 50),
    ):
        yield Expected(f"whole step, 512: {name}", check, ("whole_s",), low, high, "s", "512 decode steps")


def _claim() -> Iterator[Expected]:
    for gpu_gb, low, high in ((8, 400, 680), (12, 420, 700), (16, 640, 1050), (24, 1400, 2400)):
        check = f"unsloth/trains_on_{gpu_gb}gb"
        yield Expected(f"{gpu_gb} GB: seconds a step, all to their limit", check, ("step_s",), low, high, "s",
                       "its rollouts' decode steps x 30 ms")  # fmt: skip


EXPECTED = (*_correctness(), *_figures(), *_claim())

RATIOS = (  # title, the reference figure, the kit's, the least ratio
    ("training part, 4k, vs. TRL under Unsloth", "unsloth/stock_trains_4k", "unsloth/trains_4k", ("training_s",), 4.0),
    ("training part, 4k, vs. GRPO of Unsloth", "unsloth/grpo_trains_4k", "unsloth/trains_4k", ("training_s",), 1.0),
    ("training part, 4k, vs. TRL, transformers", "transformers/stock_trains_4k", "transformers/trains_4k",
     ("training_s",), 4.0),
    ("its memory, vs. TRL under Unsloth", "unsloth/stock_trains_4k", "unsloth/trains_4k", ("above_held_gib",), 2.0),
    ("whole step, 512, vs. TRL under Unsloth", "unsloth/stock_whole_step_512", "unsloth/whole_step_512",
     ("whole_s",), 1.0),
    ("whole step, 512, native vs. TRL, transformers", "transformers/stock_whole_step_512",
     "transformers/whole_step_512", ("whole_s",), 1.0),
)  # fmt: skip


def compare(part: Part) -> Iterator[Row]:
    """The expectations for a part's measured figures; a stand-in's figure counts for Unsloth's check."""
    for one in EXPECTED:
        value = find(part, one.check, *one.keys)
        if isinstance(value, int | float):
            yield Row(one.what, one.range, f"{value:.4g} {one.unit}", one.low <= value <= one.high)


def find(part: Part, check: str, *keys: str) -> Any:
    """A figure; for a check that runs once, it may come from either backend."""
    twin = list_checks().get(check.replace("unsloth/", "transformers/"))
    value = part.value(check, *keys)
    return part.value(twin.name, *keys) if value is None and twin is not None and twin.stand_in else value


# ---------------------------------------------------------------------------------------------------------- floors

Step = tuple[list[int], list[list[int]]]  # tokens of each group's prompt, computed once, and of its completions


def training_flops(shape: ModelShape, step: Step) -> float:
    """Floating-point operations of a step's training part: every real token once forward, once backward, and once more
    forward for the reference.

    The backward pass computes only the gradients of activations: as much as the forward pass for a matrix, twice as
    much for attention, whose two products have two gradients each. Not counted, so that it stays a lower bound:
    padding, recomputing, unpacking 4-bit weights, the adapter (1 %), norms, the optimizer, launches, the host.

    >>> from rloo_kit.plan.shapes import PUBLISHED
    >>> round(training_flops(PUBLISHED["4b"], ([0], [[1]])) / 3e9, 1)  # twice 4.02e9 weights, three times
    8.0
    """
    prompts, completions = step
    scored, pairs = sum(map(sum, completions)), 0.0  # pairs of tokens that attend
    for prompt, lengths in zip(prompts, completions, strict=True):
        pairs += prompt * (prompt + 1) / 2 + sum(length * prompt + length * (length + 1) / 2 for length in lengths)
    matrices = 2.0 * shape.body_weights * (sum(prompts) + scored) + 2.0 * shape.vocab_size * shape.hidden_size * scored
    return 3 * matrices + 4 * (4.0 * shape.query_size * shape.num_attention * pairs)


def rollout_bytes(shape: ModelShape, step: Step) -> float:
    """The fewest bytes that a rollout with 4-bit weights and a 16-bit cache reads, all rows at once: every weight once
    for each token of the longest completion, keys and values of the unfinished rows.

    >>> from rloo_kit.plan.shapes import PUBLISHED
    >>> round(rollout_bytes(PUBLISHED["4b"], ([0], [[1]])) / 2**30, 2)  # one token reads the weights once
    2.47
    """
    prompts, completions = step
    body = sum(len(layers) * sum(nf4_bytes(r * c) for r, c in one.values()) for layers, one in shape.matrices)
    total = float(max(map(max, completions)) * (body + 2 * shape.vocab_size * shape.hidden_size))
    for prompt, lengths in zip(prompts, completions, strict=True):
        total += sum(length * prompt + length * (length + 1) / 2 for length in lengths) * 2 * shape.cache_elements
    return total


def floors(tflops: float, gb_per_s: float) -> dict[str, float]:
    """Lower bounds in seconds on a GPU of that rate and bandwidth, by the figure's name."""
    shape, rate, bandwidth = PUBLISHED["4b"], tflops * 1e12, gb_per_s * 1e9

    def step(longest: int) -> Step:
        workload = step_workload.Workload(8, 151936, longest=longest)
        lengths, size = step_workload.completion_lengths(workload), workload.num_generations
        prompts = [len(row["prompt"]) for row in step_workload.prompt_rows(workload)]
        return prompts, [lengths[size * group : size * (group + 1)] for group in range(workload.groups)]

    found = {"training part, 4k": training_flops(shape, step(4096)) / rate}
    found["whole step, 512"] = rollout_bytes(shape, step(512)) / bandwidth + training_flops(shape, step(512)) / rate
    for rows in (8, 32, 128):
        read = rollout_bytes(shape, ([1056] * rows, [[1]] * rows))
        found[f"decode step, 4B in 4-bit, {rows} rows"] = read / bandwidth
    return found
