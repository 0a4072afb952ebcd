"""Milliseconds a token: cuDNN's plans, Unsloth's `generate` with and without its graphs, the native engine, padding,
and Unsloth's two variables for 4-bit products.

Qwen3-4B in 4-bit with LoRA after 1,024 tokens, greedy, unless a check says otherwise; tokens are timed within one call.
"""

import json
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from on_gpu import memory
from on_gpu.bench import Bench, Skipped
from on_gpu.checks import check
from on_gpu.small_model import train

BEHIND, DECODED, WARM = 1024, 48, 6  # cached tokens, decoded ones, and those of them before the clock starts: captures
TINY_BEHIND, TINY_DECODED, TINY_WARM = 12, 6, 1
PROFILED = 5  # tokens
ROWS = (1, 4, 8, 16, 32)  # of the comparison of the engines
GRAPHS = "UNSLOTH_DECODE_CUDA_GRAPHS"  # read at each token
DEPRIORITIZED = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
GROUPS = {  # of kernels and operators, by their names; the first that matches
    "unpacking 4-bit weights": r"dequant|4bit|nf4",
    "attention": r"flash|fmha|attention|sdpa|flex",
    "matrix products": r"gemm|gemv|cutlass|xmma|matmul|::mm|addmm|::bmm|linear|nvjet",
    "copies": r"memcpy|memset|copy_|::cat|index_copy",
    "norms, rotary, activations": r"norm|rope|rotary|silu|swiglu|geglu",
}


@check(1, 20, "transformers")
def knows_the_machine(bench: Bench) -> None:
    """Memory, the context's share of it, bandwidth and the rate of matrix products: floors rest on them."""
    import torch

    from rloo_kit.system import environment

    device = "cpu" if bench.rehearsed else "cuda"
    dtype = getattr(torch, environment.current().dtype_name)
    side, size = (64, 2**16) if bench.rehearsed else (8192, 2**31)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product_s, copy_s = median_s(bench, lambda: left @ right), median_s(bench, lambda: target.copy_(source))
    bench.report(tflops=2 * side**3 / product_s / 1e12, gb_per_s=2 * size / copy_s / 1e9, dtype=str(dtype))
    if bench.cuda.is_available():
        free, total = (round(one / memory.GIB, 2) for one in bench.cuda.mem_get_info())
        bench.report(total_gib=total, free_gib=free, context_gib=round(memory.context_gib(bench.cuda), 3))


@check(1, 60, "transformers", environment=((DEPRIORITIZED, None),))
def plans_cudnn_attention(bench: Bench) -> None:
    """Does cuDNN's attention, torch's first choice on this GPU, make a plan for every new number of keys? SDPA alone;
    0.6B with 32 rows through its modules, by the kit's decoder and in graphs; five tokens profiled; two steps."""
    import torch

    from rloo_kit.rollout.decoders import ModuleDecoder

    def new_lengths(cudnn: bool, first: int) -> float:
        """Milliseconds of a call of SDPA, with one key more each time."""
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        synchronize(bench)
        started = time.perf_counter()
        for keys in range(first, first + decoded):
            torch.nn.functional.scaled_dot_product_attention(query, *(one[:, :, :keys] for one in cache))
        synchronize(bench)
        return round(1e3 * (time.perf_counter() - started) / decoded, 4)

    rows, decoded = (2, 4) if bench.rehearsed else (32, DECODED // 2)
    options: dict[str, Any] = {"device": "cpu"} if bench.rehearsed else {"device": "cuda", "dtype": torch.bfloat16}
    query, cache = torch.randn(rows, 16, 1, 128, **options), torch.randn(2, rows, 16, 512, 128, **options)
    places = {"off": (False, 100), "on": (True, 200), "on, the same lengths": (True, 200)}
    new_lengths(False, 20)
    bench.report(sdpa_ms={name: new_lengths(*place) for name, place in places.items()})

    policy = bench.policy("0.6b")
    for decoder in ("modules", "no graphs", "graphs"):
        engine = make_engine(policy, "native", rows, temperature=1.0)
        engine.uses_graphs = engine.uses_graphs and decoder == "graphs"
        if decoder == "modules":
            engine.decoder = ModuleDecoder
        with mock.patch.dict("os.environ", {DEPRIORITIZED: "0"}):  # torch has read it; the kit would leave cuDNN out
            for name, (cudnn, first) in {"": (False, 20), **places}.items():  # the first is discarded
                torch.backends.cuda.enable_cudnn_sdp(cudnn)
                prompts = [[row + 1] * ((first // 10 if bench.rehearsed else first) + row % 3) for row in range(rows)]
                _, found = decode(bench, engine, prompts, decoded)
                if name:
                    bench.report(tokens_ms={decoder: {name: found["ms"]}})
            bench.report(
                profile={decoder: profile_tokens(bench, engine, prompts) | {"decoder": engine.decoder.__name__}}
            )
    train(bench, policy, "rloo.max_steps=2", "rollout.engine=native", "run.name=parts", overwrite=True)
    bench.release()


@check(1, 75)
def decodes(bench: Bench) -> None:
    """Unsloth's `generate` at 4, 8 and 32 rows with its CUDA graphs off and on; five tokens of 128 rows profiled."""
    started = time.monotonic()
    policy = bench.policy("4b")
    bench.report(load_s=round(time.monotonic() - started, 1), held_gib=held_gib(bench))
    greedy = {}
    for rows in (2,) if bench.rehearsed else (4, 8, 32):
        with mock.patch.dict("os.environ", {GRAPHS: "0"}):
            without, found = try_decode(bench, policy, "generate", rows)
        bench.report(**{f"rows {rows}": {"graphs off": found}})
        ids, found = try_decode(bench, policy, "generate", rows)
        bench.report(**{f"rows {rows}": {"graphs on": found | ({"equal": compare(ids, without)} if ids else {})}})
        greedy[str(rows)] = {"ids": ids, "ms": found.get("ms")}
    (bench.scratch / "greedy.json").write_text(json.dumps(greedy), encoding="utf-8")
    rows = 2 if bench.rehearsed else 128
    engine = make_engine(policy, "generate", rows)
    bench.report(**{f"rows {rows}": {"profile": profile_tokens(bench, engine, make_prompts(bench, rows))}})


@check(1, 70, "unsloth", "transformers")
def decodes_natively(bench: Bench) -> None:
    """The native engine, in CUDA graphs and without, vs. `generate` at 1 to 32 rows: milliseconds, equal tokens."""
    from rloo_kit.errors import BackendError

    policy, refused = bench.policy("4b"), ""
    for rows in (1, 2) if bench.rehearsed else ROWS:
        expected, found = try_decode(bench, policy, "generate", rows)
        bench.report(**{f"rows {rows}": {"generate": found}})
        for graphs in (True, False) if not refused else ():
            try:
                ids, found = try_decode(bench, policy, "native", rows, graphs)
            except BackendError as error:
                refused = str(error)
                break
            found |= {"equal": compare(ids, expected)} if ids and expected else {}
            bench.report(**{f"rows {rows}": {"native" if graphs else "native, no graphs": found}})
    if refused:
        raise Skipped(refused)
    rows = 2 if bench.rehearsed else 8
    engine = make_engine(policy, "native", rows)
    bench.report(profile=profile_tokens(bench, engine, make_prompts(bench, rows)))


@check(1, 30)
def decodes_padded(bench: Bench) -> None:
    """32 rows of equal and of different length: what padding costs `generate`, and what the native engine takes."""
    from rloo_kit.errors import BackendError

    rows = 3 if bench.rehearsed else 32
    for name in ("generate", "native"):
        for kind, spread in (("even", 0), ("uneven", 3)):
            try:
                _, found = try_decode(bench, bench.policy("4b"), name, rows, spread=spread)
            except BackendError as error:
                found = {"refused": str(error)}
            bench.report(**{name: {kind: found}})


@check(1, 40, environment=(("UNSLOTH_GEMV_MAX_ROWS", "4"),), needs="unsloth/decodes")
def decodes_4_rows_fused(bench: Bench) -> None:
    """UNSLOTH_GEMV_MAX_ROWS=4, which Unsloth reads when it is imported: 4 rows by its fused kernel on any GPU."""
    decode_with_variable(bench, 4)


@check(1, 40, environment=(("UNSLOTH_BNB_GEMM_4BIT", "1"),), needs="unsloth/decodes")
def decodes_8_rows_fused(bench: Bench) -> None:
    """UNSLOTH_BNB_GEMM_4BIT=1, which Unsloth reads at its first product: 8 rows by bitsandbytes' fused product."""
    decode_with_variable(bench, 8)


def decode_with_variable(bench: Bench, rows: int) -> None:
    """Milliseconds and greedy tokens next to those that `decodes` left; do captures survive, and is it engaged?"""
    from unsloth.kernels import utils

    rows = 2 if bench.rehearsed else rows
    ids, found = try_decode(bench, bench.policy("4b"), "generate", rows)
    default = json.loads((bench.scratch / "greedy.json").read_text(encoding="utf-8"))[str(rows)]
    names = "_GEMV_MAX_ROWS", "_GEMV_ROWS_CAP", "_BNB_GEMM_4BIT"
    engaged = {name.lstrip("_").lower(): str(getattr(utils, name, None)) for name in names}
    bench.report(rows=rows, **found, default_ms=default["ms"], equal=compare(ids, default["ids"]), engaged=engaged)
    bench.release()


# ----------------------------------------------------------------------------------------------------- time of a token


class TokenClock:
    """When the tokens of one call of an engine came: CUDA events, and the clock without a GPU.

    `at`: called at that token's number. `stats`: what Unsloth counts of its graphs, after the call.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda if cuda.is_available() else None
        self._marks: list[Any] = []
        self.at: dict[int, Callable[[], Any]] = {}
        self.stats: dict[str, Any] = {}

    def begin(self) -> None:
        self._marks.clear()  # the engine's check of padding came before

    def mark(self) -> None:
        if self._cuda is None:
            self._marks.append(time.perf_counter())
        else:
            self._marks.append(self._cuda.Event(enable_timing=True))
            self._marks[-1].record()
        self.at.get(len(self._marks), lambda: None)()

    def token_ms(self, warm: int) -> float:
        """Mean milliseconds of a token after the first `warm` ones."""
        first, last, count = self._marks[warm - 1], self._marks[-1], len(self._marks) - warm
        if self._cuda is None:
            return round(1e3 * (last - first) / count, 3)
        self._cuda.synchronize()
        return round(first.elapsed_time(last) / count, 3)


@contextmanager
def clocked(bench: Bench, engine: Any) -> Iterator[TokenClock]:
    """Inside the block, the clock marks each token that the engine draws."""
    from rloo_kit.rollout import engine as engines

    clock, original = TokenClock(bench.cuda), engine._model.generate

    def generate(*arguments: Any, logits_processor: Any = (), **keywords: Any) -> Any:
        def note(_ids: Any, scores: Any) -> Any:
            clock.mark()
            return scores

        clock.begin()
        output = original(*arguments, logits_processor=[*(logits_processor or ()), note], **keywords)
        clock.stats = unsloth_stats(engine._model)
        return output

    class Timed(engines.CompletionState):  # type: ignore[misc]
        def take(self, *arguments: Any) -> None:
            super().take(*arguments)
            if self.number == 0:
                clock.mark()

    if engine.name == "generate":
        with mock.patch.object(engine._model, "generate", generate):
            yield clock
    else:
        with mock.patch.object(engines, "CompletionState", Timed):
            yield clock


def unsloth_stats(model: Any) -> dict[str, Any]:
    """What Unsloth counts of its graphs since the model was loaded; empty without it."""
    import sys

    graphs = sys.modules.get("unsloth.models._decode_graphs")
    return graphs.stats(model.get_base_model()) if graphs is not None else {}


def make_engine(policy: Any, name: str, rows: int, temperature: float = 0.0) -> Any:
    """An engine whose rows never end and which does not halve them; raises BackendError if it refuses the policy."""
    import torch

    from rloo_kit.rollout.choice import build_engine

    never = policy.model.get_input_embeddings().weight.shape[0] + 1
    engine: Any = build_engine(
        policy.model, name, backend=policy.backend, temperature=temperature, end_ids=[never],
        pad_id=policy.tokenizer.pad_token_id, rows=rows, say=lambda line: None,
    )  # fmt: skip

    def refuse(tried: int, _left: Any) -> None:
        raise torch.OutOfMemoryError(f"out of memory with {tried} completions at once")

    engine._halve, engine.autocast = refuse, policy.autocast  # as in training
    return engine


def make_prompts(bench: Bench, rows: int, spread: int = 0) -> list[list[int]]:
    """Different random bytes for each row; lengths differ by up to `spread` - 1 tokens."""
    behind = TINY_BEHIND if bench.rehearsed else BEHIND
    draw = random.Random(rows)
    return [[draw.randrange(1, 250) for _ in range(behind - row % max(spread, 1))] for row in range(rows)]


def decode(bench: Bench, engine: Any, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Completions of that many tokens, and milliseconds of each, with what the engine counts of its graphs."""
    from rloo_kit.rollout.types import Limits

    memory.settle(bench.cuda)
    with clocked(bench, engine) as clock, engine.autocast():
        ids = engine.sample(prompts, Limits(tokens)).completion_ids
    ms = clock.token_ms(min(TINY_WARM if bench.rehearsed else WARM, tokens - 1))
    found = {"ms": ms, "tokens_per_s": round(len(prompts) / ms * 1e3)}
    decoder, counts = getattr(engine, "decoder", None), getattr(engine, "counts", None)
    more = {"decoder": decoder and decoder.__name__, "counts": counts, "graphs": clock.stats}
    return ids, found | {name: value for name, value in more.items() if value}


def try_decode(
    bench: Bench, policy: Any, name: str, rows: int, graphs: bool = True, spread: int = 0
) -> tuple[list[list[int]], dict[str, Any]]:
    """The same with a new engine, `graphs`: the native one's as they are or off; no completions if memory runs out."""
    from rloo_kit.system.memory import is_out_of_memory

    engine = make_engine(policy, name, rows)
    if name == "native" and not graphs:
        engine.uses_graphs = False
    try:
        return decode(bench, engine, make_prompts(bench, rows, spread), TINY_DECODED if bench.rehearsed else DECODED)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        memory.settle(bench.cuda)
        return [], {"fits": False}


def compare(found: list[list[int]], expected: list[list[int]]) -> dict[str, Any]:
    """The share of tokens that are equal, and row and place of the first that is not: bf16 has ties, and after one the
    rows continue other texts.

    >>> compare([[1, 2], [3, 4]], [[1, 2], [3, 5]])
    {'share': 0.75, 'rows': 0.5, 'first': [1, 1]}
    """
    pairs = [(row, place, one == other) for row, both in enumerate(zip(found, expected, strict=True))
             for place, (one, other) in enumerate(zip(*both, strict=True))]  # fmt: skip
    off = sorted((place, row) for row, place, equal in pairs if not equal)
    rows = statistics.fmean(one == other for one, other in zip(found, expected, strict=True))
    share = 1 - len(off) / len(pairs)
    return {"share": round(share, 4), "rows": round(rows, 4), "first": [off[0][1], off[0][0]] if off else None}


def median_s(bench: Bench, work: Callable[[], Any], batches: int = 5, times: int = 10) -> float:
    """Seconds of one call, after three discarded ones."""
    found = []
    for batch in range(batches + 1):
        synchronize(bench)
        started = time.perf_counter()
        for _ in range(times if batch else 3):
            work()
        synchronize(bench)
        found.append((time.perf_counter() - started) / times)
    return statistics.median(found[1:])


def synchronize(bench: Bench) -> None:
    if bench.cuda.is_available():
        bench.cuda.synchronize()


def held_gib(bench: Bench) -> float:
    """Memory of tensors; 0 without a GPU."""
    return round(memory.held_gib(bench.cuda), 3) if bench.cuda.is_available() else 0.0


# --------------------------------------------------------------------------------------------------- where it goes


def profile_tokens(bench: Bench, engine: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Five tokens under torch's profiler: milliseconds, launches, the GPU's idle share, seconds by kind of kernel, the
    dearest kernels, and whether cuDNN's attention is among the operators."""
    from torch.profiler import ProfilerActivity, profile

    from rloo_kit.rollout.types import Limits

    on_gpu = bench.cuda.is_available()
    record = profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu)
    times: list[float] = []

    def note_time() -> None:
        synchronize(bench)
        times.append(time.perf_counter())

    def begin() -> None:
        record.start()
        note_time()

    def end() -> None:
        note_time()
        record.stop()

    warm, profiled = (1, 2) if bench.rehearsed else (WARM, PROFILED)
    with clocked(bench, engine) as clock, engine.autocast():
        clock.at = {warm: begin, warm + profiled: end}
        engine.sample(prompts, Limits(warm + profiled + 1))
    wall_s, events = times[1] - times[0], record.key_averages()
    launches = sum(event.count for event in events if re.search("LaunchKernel|GraphLaunch", event.key))
    kernels = sorted(kernels_of(events, on_gpu), key=lambda kernel: -kernel[1])
    busy: dict[str, float] = {}
    for name, seconds, _ in kernels:
        kind = next((kind for kind, pattern in GROUPS.items() if re.search(pattern, name, re.I)), "everything else")
        busy[kind] = busy.get(kind, 0.0) + seconds
    return {
        "tokens": profiled, "ms": round(1e3 * wall_s / profiled, 2), "launches": launches,
        "kernels": sum(count for *_, count in kernels),
        "idle_share": round(max(0.0, 1 - sum(busy.values()) / wall_s), 3),
        "cudnn_attention": sum(event.count for event in events if "cudnn_attention" in event.key),
        "ms_by_kind": {kind: round(1e3 * seconds / profiled, 3) for kind, seconds in busy.items()},
        "top": [[name[:100], round(1e3 * seconds / profiled, 3), count] for name, seconds, count in kernels[:8]],
    }  # fmt: skip


def kernels_of(events: Any, on_gpu: bool) -> Iterator[tuple[str, float, int]]:
    """Name, seconds and calls of what ran on the GPU; in a rehearsal, of the operators on the CPU."""
    for event in events:
        if on_gpu and ("CUDA" not in str(event.device_type) or event.is_user_annotation):
            continue  # an operator or a named region repeats the time of its kernels
        seconds = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        if seconds > 0:
            yield event.key, seconds, event.count
