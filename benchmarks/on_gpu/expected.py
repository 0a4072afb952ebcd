"""The expected range of each figure on an H200, written before any was measured (2026-11-29): computed from bytes,
bandwidth and launches as in docs/plan, or from an H100's figures."""

from collections.abc import Iterator
from dataclasses import dataclass

from on_gpu.decoding import ROWS
from on_gpu.small_model import MAX_NATS


@dataclass(frozen=True)
class Expected:
    """A figure of a check, by its keys, and its expected range."""

    what: str
    check: str
    keys: tuple[str, ...]
    low: float
    high: float
    unit: str = ""


def _list() -> Iterator[Expected]:
    machine, cudnn, command = (
        f"transformers/{name}" for name in ("knows_the_machine", "plans_cudnn_attention", "runs_the_command_line")
    )
    yield Expected("matrix products, bf16", machine, ("tflops",), 700, 850, "TFLOP/s")
    yield Expected("copies within the GPU, read and written", machine, ("gb_per_s",), 4000, 4500, "GB/s")
    yield Expected("the demo: accuracy before", command, ("train", "accuracy", "before"), 0.12, 0.16)
    yield Expected("the demo: accuracy after 50 steps", command, ("train", "accuracy", "after"), 0.8, 0.95)
    for what, key, low, high in (
        ("without cuDNN", "off", 40, 60), ("with cuDNN, new lengths", "on", 70, 120),
        ("with cuDNN, lengths seen before", "on, the same lengths", 40, 60),
    ):  # fmt: skip
        yield Expected(f"0.6B through its modules, {what}", cudnn, ("tokens_ms", "modules", key), low, high, "ms")
    yield Expected("0.6B, native in graphs, without cuDNN", cudnn, ("tokens_ms", "graphs", "off"), 3, 8, "ms")
    for rows, off, on in ((4, (14, 20), (8, 13)), (8, (14, 20), (12, 16)), (32, (18, 26), (18, 25))):
        for graphs, (low, high) in (("off", off), ("on", on)):
            keys = (f"rows {rows}", f"graphs {graphs}", "ms")
            yield Expected(f"4B, generate, {rows} rows, graphs {graphs}", "unsloth/decodes", keys, low, high, "ms")
    for rows, low, high in zip(ROWS, (4, 4, 5, 5, 7), (9, 10, 10, 11, 14), strict=True):
        for backend in ("unsloth", "transformers"):
            what = f"4B, native in graphs, {rows} rows, {backend}"
            yield Expected(what, f"{backend}/decodes_natively", (f"rows {rows}", "native", "ms"), low, high, "ms")
    for kind, low, high in (("even", 18, 25), ("uneven", 30, 65)):
        yield Expected(f"4B, generate, 32 rows, {kind}", "unsloth/decodes_padded", ("generate", kind, "ms"), low, high,
                       "ms")  # fmt: skip
    yield Expected("4B, 4 rows, UNSLOTH_GEMV_MAX_ROWS=4", "unsloth/decodes_4_rows_fused", ("ms",), 6, 14, "ms")
    yield Expected("4B, 8 rows, UNSLOTH_BNB_GEMM_4BIT=1", "unsloth/decodes_8_rows_fused", ("ms",), 6, 18, "ms")
    for side, low, high in (("ours, generate", 14, 30), ("ours, native", 8, 22), ("TRL", 16, 60)):
        yield Expected(f"step up to 1k: {side}", "unsloth/takes_a_step_of_1k", (side, "best_s"), low, high, "s")
    yield Expected("merged 0.6B, largest", "transformers/reads_what_was_merged", ("merged", "max"), 0, MAX_NATS, "nats")
    yield Expected("12 GB: a step, all to their limit", "unsloth/trains_on_12gb", ("step_s",), 250, 500, "s")
    yield Expected("12 GB evening: peak", "unsloth/takes_an_evening_s_steps", ("peak_gib",), 6, 10, "GiB")


EXPECTED = tuple(_list())
