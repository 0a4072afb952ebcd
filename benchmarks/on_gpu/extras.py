"""Checks outside the hour (part 0), run by `first_hour.py --only NAME`: float32 vs. 16 bits, the embedded model's
run, the claim in fp16, longer completions, and where the time goes by kind of kernel.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import reporting

from on_gpu import figures, memory
from on_gpu.bench import Bench, Skipped, check
from on_gpu.checks import BACKENDS
from on_gpu.claim import train_on
from on_gpu.correctness import Scored, is_close, make_groups, move_adapter, one_by_one, synchronize
from on_gpu.figures import ENGINES, built_side, make_workload, measure_stock, measure_training, measure_whole

LAYOUTS = ("padded", "repeated")  # in addition to the scorer's choice
FP16 = ("rloo.fp16=true", "rloo.bf16=false", "model.dtype=float16")
FLOAT32 = "16 bits are float32 there: it is trains_on_8gb"
SMALL = (
    "rloo.max_steps=1", "data.num_prompts=60", "data.test_size=4", "rloo.per_device_train_batch_size=4",
    "rloo.num_generations=2", "rloo.max_completion_length=8", "eval.max_completion_length=8", "model.dtype=float32",
)  # fmt: skip
GROUPS = {  # of kernels and operators, by their names; the first that matches
    "unpacking 4-bit weights": r"dequant|4bit|nf4",
    "attention": r"flash|fmha|attention|sdpa|flex",
    "log-probabilities": r"logprob|logsumexp|log_softmax|cross_entropy|_chunked",
    "matrix products": r"gemm|gemv|cutlass|xmma|matmul|::mm|addmm|::bmm|linear|nvjet",
    "optimizer": r"adam|multi_tensor|_foreach",
    "copies": r"memcpy|memset|copy_|::cat|index_copy",
    "norms, rotary, activations": r"norm|rope|rotary|silu|swiglu|geglu",
}


# -------------------------------------------------------------------------------------------------------- correctness


@check(0, 120)
def leaves_gradients(bench: Bench) -> None:
    """16-bit log-probabilities and LoRA gradients of a moved adapter, for `gradients_against_float32` to compare."""
    import torch

    from rloo_kit import save_adapter
    from rloo_kit.gradient.scorer import Scorer

    policy = bench.policy("0.6b", four_bit=False)
    move_adapter(policy)
    save_adapter(policy, bench.scratch / f"moved-{bench.backend}")
    chosen = Scorer(policy.model, 1.0, policy.tokenizer.pad_token_id).layout
    groups = make_groups(bench, policy.model.device)
    found = {layout: Scored.compute(policy, [groups], layout) for layout in dict.fromkeys((*LAYOUTS, chosen))}
    values = {layout: (scored.logps.cpu(), scored.gradient) for layout, scored in found.items()}
    torch.save(values, bench.scratch / f"gradients-{bench.backend}.pt")
    bench.report(chosen_layout=chosen, dtype=str(policy.model.dtype))
    bench.release()


@check(0, 150, backends=("transformers",))
def gradients_against_float32(bench: Bench) -> None:
    """What each backend left, vs. single sequences in float32 on the same GPU: 16 bits cost a few per cent of the
    gradient's norm, and not its direction."""
    import torch

    files = {name: bench.scratch / f"gradients-{name}.pt" for name in BACKENDS}
    left = {name: torch.load(file) for name, file in files.items() if file.is_file()}
    if not left:
        raise Skipped("no gradients are here: leaves_gradients has not run")
    bad = {}
    for name, layouts in left.items():
        files[name].unlink()  # the next run compares its own
        words = ("model.dtype=float32", f"model.adapter={bench.scratch / f'moved-{name}'}")
        policy = bench.policy("0.6b", four_bit=False, overrides=words)
        groups = make_groups(bench, policy.model.device)
        expected = Scored.compute(policy, [[one] for one in one_by_one(groups)], "padded")
        for layout, (logps, gradient) in layouts.items():
            cosine = torch.nn.functional.cosine_similarity(gradient, expected.gradient, dim=0).item()
            off = Scored(logps, gradient).off(expected) | {"cosine": round(cosine, 6)}
            bench.report(**{name: {layout: off}})
            if not is_close(off) or cosine < 0.99:
                bad[f"{name}, {layout}"] = off
    assert not bad, f"off float32: {bad}"


@check(0, 420, either=True)
def embedded_learns(bench: Bench) -> None:
    """The embedded model learns under the shipped config as it does on the CPU, by the demo's bar: its sizes were
    chosen to suit Unsloth's kernels."""
    import rloo_kit

    bench.release()
    words = [f"run.output_dir={bench.scratch / f'embedded-{bench.backend}'}"]
    if bench.rehearsed:
        words += [*SMALL, f"model.name={build_quickly(bench)}"]
    run = rloo_kit.load_config(reporting.ROOT / "configs" / "arithmetic_thinking.yaml", *words)
    policy = bench.load(run)
    data = rloo_kit.load_data(run, policy.tokenizer)
    before = rloo_kit.evaluate(run, policy, data.test)
    bench.report(accuracy={"before": before.value("accuracy")}, greedy={"before": before.value("greedy_accuracy")})
    rewards = rloo_kit.build_rewards(run, policy.tokenizer)
    steps = [row for row in rloo_kit.train(run, policy, data, rewards, overwrite=True).metrics if "grad_norm" in row]
    bench.report(steps=len(steps), training_s=round(sum(row["step_time"] for row in steps), 1))
    assert len(steps) == run.rloo.max_steps and all(row["val/ratio"] == 1.0 for row in steps)
    after = rloo_kit.evaluate(run, policy, data.test)
    bench.report(accuracy={"after": after.value("accuracy")}, greedy={"after": after.value("greedy_accuracy")})
    if not bench.rehearsed:
        changes = rloo_kit.compare(before, after).changes
        rises = [changes[name].difference.value for name in ("accuracy", "greedy_accuracy")]
        assert rises[0] >= 0.5 and rises[1] >= 0.45, f"accuracy {changes['accuracy']}"
        assert after.mean_thinking_tokens > before.mean_thinking_tokens


def build_quickly(bench: Bench) -> Any:
    """The embedded model after two steps of its cold start; it cannot add."""
    from rloo_kit.models.embedded import build
    from rloo_kit.system.environment import CACHE_VARIABLE

    with mock.patch.dict("os.environ", {CACHE_VARIABLE: str(bench.scratch / "embedded")}):
        return build("thinking", steps=2)


# ---------------------------------------------------------------------------------------------- the claim, and figures


@check(0, 120, either=True, not_rehearsed=FLOAT32)
def trains_on_8gb_fp16(bench: Bench) -> None:
    """configs/qwen3_4b_thinking_8gb.yaml under a cap of 8 GB in float16, as on a GPU without bfloat16."""
    train_on(bench, 8, *FP16)


@check(0, 120, either=True, not_rehearsed=FLOAT32)
def trains_on_24gb_fp16(bench: Bench) -> None:
    """configs/qwen3_4b_thinking_24gb.yaml under a cap of 24 GB in float16."""
    train_on(bench, 24, *FP16)


@check(0, 300)
def trains_8k(bench: Bench) -> None:
    """The training part with completions up to 8k tokens: ours, then TRL's."""
    with built_side(bench, "fast", make_workload(bench, "8k")) as side:
        bench.report(fast=measure_training(bench, side))
    measure_stock(bench, "stock", "8k")


@check(0, 300)
def trains_4k_without_kl(bench: Bench) -> None:
    """The training part up to 4k tokens with beta 0: ours, then TRL's."""
    for name in ("fast", "stock"):
        with built_side(bench, name, replace(make_workload(bench, "4k"), beta=0.0)) as side:
            bench.report(**{name: measure_training(bench, side)})


@check(0, 400)
def whole_step_2k(bench: Bench) -> None:
    """Whole steps with completions up to 2k tokens: ours, then TRL's."""
    for name in ("fast", "stock"):
        with built_side(bench, name, make_workload(bench, "2k")) as side:
            bench.report(**{name: measure_whole(bench, side)})


# ------------------------------------------------------------------------------------------------ where the time goes


@check(0, 300)
def profile_training(bench: Bench) -> None:
    """Where the training part up to 4k tokens spends its time, by kind of kernel: ours, then TRL's."""
    for name in ("fast", "stock"):
        with built_side(bench, name, make_workload(bench, "4k")) as side:
            figures.roll_out_briefly(side)
            side.step(canned=True)
            bench.report(**{name: profile(bench, lambda side=side: side.step(canned=True))})


@check(0, 120)
def profile_decoding(bench: Bench) -> None:
    """Where decoding spends its time: 48 tokens of 32 rows after 1,024 tokens."""
    from on_gpu.full_rows import measure_rollout

    run = bench.make_run("4b", f"rollout.engine={ENGINES[bench.backend]}")
    rows, decoded, behind = (2, 4, figures.TINY_BEHIND) if bench.rehearsed else (32, 48, figures.BEHIND)
    policy = bench.policy("4b")
    decode: Callable[[], Any] = lambda: measure_rollout(policy, run, rows, behind + decoded, decoded)  # noqa: E731
    decode()
    bench.report(rows=rows, decoded=decoded, **profile(bench, decode))


def profile(bench: Bench, work: Callable[[], Any]) -> dict[str, Any]:
    """Seconds of one call without and with the profiler, of GPU work by kind, and the 20 most expensive kernels."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    memory.settle(bench.cuda)
    found: dict[str, Any] = {}
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * bench.cuda.is_available()
    for name in ("plain_s", "profiled_s"):
        with profiled(activities=activities) if name == "profiled_s" else nullcontext() as record:
            started = time.perf_counter()
            work()
            synchronize(bench)
            found[name] = round(time.perf_counter() - started, 4)
    kernels = sorted(kernels_of(record, bench.cuda.is_available()), key=lambda kernel: -kernel[1])
    shares: dict[str, float] = {}
    for name, seconds, _ in kernels:
        shares[group_of(name)] = shares.get(group_of(name), 0.0) + seconds
    return found | {
        "busy_s": sum(shares.values()), "idle_share": max(0.0, 1 - sum(shares.values()) / found["profiled_s"]),
        "launches": sum(calls for *_, calls in kernels),
        "seconds_by_kind": {kind: round(seconds, 5) for kind, seconds in shares.items()},
        "top": [{"name": name[:120], "seconds": round(seconds, 5), "calls": calls}
                for name, seconds, calls in kernels[:20]],
    }  # fmt: skip


def kernels_of(record: Any, on_gpu: bool) -> Iterator[tuple[str, float, int]]:
    """Name, seconds and calls of what ran on the GPU; in a rehearsal, of the operators on the CPU."""
    for event in record.key_averages():
        if on_gpu and ("CUDA" not in str(event.device_type) or event.is_user_annotation):
            continue  # an operator or a named region repeats the time of its kernels
        seconds = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        if seconds > 0:
            yield event.key, seconds, event.count


def group_of(name: str) -> str:
    """The kind of work that a kernel's name indicates.

    >>> group_of("void cutlass::Kernel2<cutlass_80_tensorop_bf16>"), group_of("kDequantizeBlockwise<bf16>")
    ('matrix products', 'unpacking 4-bit weights')
    """
    return next((kind for kind, pattern in GROUPS.items() if re.search(pattern, name, re.I)), "everything else")
