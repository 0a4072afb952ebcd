"""The expected range of each figure, written before any was measured (2026-11-22).

For an H200 (about 790 TFLOP/s in bf16 and 4.3 TB/s). Decoding is launch-bound: 36 layers x 7 4-bit matrices with their
adapters are about 3,500 kernels a step, and at 128 rows the native engine expands the cache to all query heads. The
training part takes 3 to 7 times its floor; a step of the claim, its rollouts' decode steps x 30 ms.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from on_gpu.checks import Part
from on_gpu.correctness import GRADIENT, LAYOUTS, MAX_NATS, MEAN_NATS
from on_gpu.listing import list_checks


@dataclass(frozen=True)
class Expected:
    """A figure of a check, by its keys, and its expected range."""

    what: str
    check: str
    keys: tuple[str, ...]
    low: float
    high: float
    unit: str = ""

    @property
    def part(self) -> int:
        return list_checks()[self.check].part


def _correctness() -> Iterator[Expected]:
    machine = "unsloth/knows_the_machine"
    yield Expected("matrix products, bf16", machine, ("tflops",), 700, 850, "TFLOP/s")
    yield Expected("copies within the GPU, read and written", machine, ("gb_per_s",), 4000, 4500, "GB/s")
    limits = {"mean": (MEAN_NATS, "nats"), "max": (MAX_NATS, "nats"), "gradient": (GRADIENT, "of its size")}
    for backend, layouts in LAYOUTS.items():
        yield Expected(f"{backend}: 0.6B loads in", f"{backend}/loads_4bit", ("seconds",), 3, 20, "s")
        for kind in ("4bit", "bf16"):
            for name in layouts:
                for key, (limit, unit) in limits.items():
                    what = f"{backend}, {kind}, {name}: {key}"
                    yield Expected(what, f"{backend}/scores_{kind}", (name, key), 0, limit, unit)
        # Unsloth drops the mask of left-padded rows
        low, high = (0.1, 10) if backend == "unsloth" else (0, MEAN_NATS)
        stock = ("left-padded, as stock", "mean")
        yield Expected(f"left-padded rows as stock, {backend}", f"{backend}/scores_bf16", stock, low, high, "nats")
        nats = ("nats_after_loading", "max")
        yield Expected(f"{backend}: adapter loaded again, largest", f"{backend}/generates", nats, 0, 0.02, "nats")
        check, keys = "transformers/reads_what_was_merged", (backend, "merged", "max")
        yield Expected(f"{backend}: merged model, largest", check, keys, 0, MAX_NATS, "nats")


def _figures() -> Iterator[Expected]:
    decoding = {"unsloth": ((25, 35), (25, 40), (30, 60)), "transformers": ((40, 60), (45, 75), (70, 150))}
    for backend, ranges in decoding.items():
        for rows, (low, high) in zip((8, 32, 128), ranges, strict=True):
            what = f"decode step, 4B in 4-bit, {rows} rows, {'Unsloth' if backend == 'unsloth' else 'native'}"
            yield Expected(what, f"{backend}/decodes", (f"rows {rows}", "ms_per_step"), low, high, "ms")
    for name, check, key, low, high in (
        ("ours, Unsloth, fast", "unsloth/trains_4k", "fast", 2, 5),
        ("ours, Unsloth, low", "unsloth/trains_4k_otherwise", "low", 2.5, 7),
        ("ours, Unsloth, fast, prompts shared", "unsloth/trains_4k_otherwise", "shared", 2, 6),
        ("ours, Unsloth, fast, prompts repeated", "unsloth/trains_4k_otherwise", "repeated", 2, 5),
        ("TRL under Unsloth", "unsloth/stock_trains_4k", "", 8, 20),
        ("GRPO of Unsloth", "unsloth/grpo_trains_4k", "", 3, 8),
        ("ours, transformers, fast", "transformers/trains_4k", "fast", 2.5, 6),
        ("ours, transformers, low", "transformers/trains_4k_otherwise", "low", 3, 8),
        ("TRL, transformers", "transformers/stock_trains_4k", "", 8, 25),
    ):
        keys = (*filter(None, [key]), "training_s")
        yield Expected(f"training part, 4k: {name}", check, keys, low, high, "s")
    for name, check, low, high in (
        ("ours, Unsloth", "unsloth/whole_step_512", 14, 24),
        ("ours, native", "transformers/whole_step_512", 22, 38),
        ("TRL under Unsloth", "unsloth/stock_whole_step_512", 15, 35),
        ("TRL, transformers", "transformers/stock_whole_step_512", 25, 50),
    ):
        yield Expected(f"whole step, 512: {name}", check, ("whole_s",), low, high, "s")


def _claim() -> Iterator[Expected]:
    for gpu_gb, low, high in ((8, 400, 680), (12, 420, 700), (16, 640, 1050), (24, 1400, 2400)):
        what, check = f"{gpu_gb} GB: seconds a step, all to their limit", f"unsloth/trains_on_{gpu_gb}gb"
        yield Expected(what, check, ("step_s",), low, high, "s")


EXPECTED = (*_correctness(), *_figures(), *_claim())


def find(part: Part, check: str, *keys: str) -> float | None:
    """A figure; for a check that runs once, it may come from either backend."""
    twin = list_checks().get(check.replace("unsloth/", "transformers/"))
    value: Any = part.value(check, *keys)
    value = part.value(twin.name, *keys) if value is None and twin is not None and twin.stand_in else value
    return value if isinstance(value, int | float) else None
