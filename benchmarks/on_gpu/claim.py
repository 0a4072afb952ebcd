"""Part 3, the claim: Qwen3-4B in 4-bit trains on 8, 12, 16 and 24 GB, simulated by a cap on torch's memory.

A shipped config runs as is except for its checkpoint (all layers in 4-bit; Unsloth's copies keep some in 16): two steps
with rollouts that have reached their full length (`measure_steps`), compared with the plan. The seconds a step are
those of a step in which every completion reaches its limit, so an upper bound, from the decoding time at the beginning,
middle and end of a row. A cap cannot show a small GPU's speed and shared memory: those stay not measured.
"""

import statistics
from typing import Any

import reporting

from on_gpu import memory
from on_gpu.bench import Bench, Skipped, check
from on_gpu.figures import measure_decoding

GPUS_GB = (8, 12, 16, 24)
TAIL, TINY_TAIL = 64, 4  # tokens decoded after full caches
TINY = (
    "data.max_prompt_length=8", "rloo.max_completion_length=20", "rloo.thinking_budget=10", "rloo.answer_budget=6",
    "model.max_seq_length=128", "model.dtype=float32", "rloo.optim=adamw_torch",
)  # fmt: skip
SHIPPED_STEPS = 200
LONG = ("model.max_seq_length=40960",)  # one load serves every config
MOST_TOKENS = 40960 - 512  # of a completion: the model's positions less those of the prompt
SAME = "tiny, it is the check of 8 GB"


@check(3, 40, either=True)
def loads_on_8gb(bench: Bench) -> None:
    """The 4B model is loaded under the cap of 8 GB."""
    with memory.capped(bench.cuda, GPUS_GB[0]) as limit:
        load_policy(bench)
        if bench.cuda.is_available():
            bench.report(limit_gib=round(limit, 2), peak_gib=round(bench.cuda.max_memory_allocated() / memory.GIB, 2))


def train_on(bench: Bench, gpu_gb: int, *overrides: str) -> None:
    """The shipped config of a GPU: two steps at full length under its cap, and what a step takes."""
    from on_gpu.full_rows import measure_steps
    from rloo_kit.preflight.trial_steps import load_of, rows_of_a_pass

    with memory.capped(bench.cuda, gpu_gb) as limit:
        policy = load_policy(bench, *overrides)
        run, _ = load_shipped(bench, gpu_gb, *overrides)
        load = load_of(run, policy)  # whole rows: as many as fit the tokens of one pass
        words = [*overrides, f"rloo.tokens_per_pass={rows_of_a_pass(load)[1] * load.row_tokens}"]
        run, plan = load_shipped(bench, gpu_gb, *words)
        counted = [part for part in plan.parts if part.name not in ("context", "correction")]  # as torch counts
        computed = {
            name: round(sum(getattr(part, name) for part in counted), 3) for name in ("rollout_gib", "training_gib")
        }
        bench.report(limit_gib=round(limit, 3), computed=computed, rows=plan.rows, tokens_per_pass=plan.tokens_per_pass)
        rollout, training = measure_steps(policy, run, plan.rows, TINY_TAIL if bench.rehearsed else TAIL)
        outside = gpu_gb * memory.GB / memory.GIB - limit
        bench.report(
            context_gib=round(outside, 3), rollout_gib=round(rollout.gib, 3), training_gib=round(training.gib, 3),
            reserved_gib=round(max(rollout.reserved_gib, training.reserved_gib), 3),
        )  # fmt: skip
        bench.report(**time_step(bench, policy, run, plan, training.seconds))


def load_policy(bench: Bench, *overrides: str) -> Any:
    """The policy that all configs share, with room for the longest rows."""
    return bench.policy("4b", overrides=(*(() if bench.rehearsed else LONG), *overrides))


def load_shipped(bench: Bench, gpu_gb: int, *overrides: str) -> tuple[Any, Any]:
    """The shipped config of that GPU on the random checkpoint, with the rows and passes from the plan."""
    from rloo_kit import load_config, plan_vram

    file = reporting.ROOT / "configs" / f"qwen3_4b_thinking_{gpu_gb}gb.yaml"
    words = [f"model.name={bench.checkpoint('4b')}", f"model.backend={bench.backend}", "rloo.report_to=[]"]
    words += ["rloo.thinking_close=tag"]  # the sentence has four times as many tokens in a byte tokenizer
    words += [*(TINY if bench.rehearsed else ()), *(["model.load_in_4bit=false"] if bench.interpreted else [])]
    words += ["rloo.num_generations=2", "rloo.per_device_train_batch_size=1",
              "rloo.gradient_accumulation_steps=2"] * bench.rehearsed  # fmt: skip
    plan = plan_vram(load_config(file, *words, *overrides), gpu_gb * memory.GB / memory.GIB)
    words += [f"rollout.rows={plan.rows}", f"rloo.tokens_per_pass={plan.tokens_per_pass}"]
    return load_config(file, *words, *overrides), plan


def time_step(bench: Bench, policy: Any, run: Any, plan: Any, training_s: float) -> dict[str, Any]:
    """Seconds of an optimizer step in which every completion reaches its limit, and hours of the config's 200 steps.

    Args:
        training_s: of a step of `measure_steps`, whose completions are those of the run's largest pass.
    """
    from rloo_kit.preflight.trial_steps import load_of, rows_of_a_pass

    rloo, prompt = run.rloo, run.data.max_prompt_length
    length = rloo.max_completion_length
    shares = (1,) if bench.rehearsed else (0, 0.5, 1)
    places = [prompt + int(share * (length - TAIL)) for share in shares]
    steps_ms = [measure_decoding(bench, policy, run, plan.rows, place)["ms_per_step"] for place in places]
    completions = rloo.per_device_train_batch_size * rloo.gradient_accumulation_steps
    rollout_s = statistics.mean(steps_ms) / 1e3 * length * -(-completions // plan.rows)
    gradient_s = training_s * completions / rows_of_a_pass(load_of(run, policy))[1]
    return {
        "decode_ms": steps_ms, "rollout_s": round(rollout_s, 1), "gradient_s": round(gradient_s, 1),
        "step_s": round(rollout_s + gradient_s, 1),
        "hours_for_200_steps": round((rollout_s + gradient_s) * SHIPPED_STEPS / 3600, 1),
    }  # fmt: skip


@check(3, 140, either=True)
def trains_on_8gb(bench: Bench) -> None:
    """configs/qwen3_4b_thinking_8gb.yaml under a cap of 8 GB: two steps at full length, and seconds a step."""
    train_on(bench, 8)


@check(3, 70, either=True, not_rehearsed=SAME)
def trains_on_12gb(bench: Bench) -> None:
    """configs/qwen3_4b_thinking_12gb.yaml under a cap of 12 GB."""
    train_on(bench, 12)


@check(3, 70, either=True, not_rehearsed=SAME)
def trains_on_16gb(bench: Bench) -> None:
    """configs/qwen3_4b_thinking_16gb.yaml under a cap of 16 GB."""
    train_on(bench, 16)


@check(3, 90, either=True, not_rehearsed=SAME)
def trains_on_24gb(bench: Bench) -> None:
    """configs/qwen3_4b_thinking_24gb.yaml under a cap of 24 GB."""
    train_on(bench, 24)


@check(3, 150, either=True)
def longest_thinking(bench: Bench) -> None:
    """The longest completions that fit each GPU, one row at a time: the plan's length, then a quarter more."""
    from on_gpu.full_rows import measure_steps
    from rloo_kit.system.memory import is_out_of_memory

    if bench.interpreted:
        raise Skipped("rehearsed through transformers: here it takes the lines of trains_on_8gb")
    fitted = 0  # on a smaller GPU
    for gpu_gb in GPUS_GB[:1] if bench.rehearsed else GPUS_GB:
        with memory.capped(bench.cuda, gpu_gb):
            policy = load_policy(bench)
            planned = longest_planned(bench, gpu_gb)
            tried: dict[str, bool] = {}
            for share in (1.0,) if bench.rehearsed else (1.0, 1.25):
                tokens = int(planned * share) // 64 * 64
                if tokens > MOST_TOKENS or not tried.get(str(planned), True):
                    continue
                run, _ = load_shipped(bench, gpu_gb, *lengths_of(bench, tokens), "rollout.rows=1")
                try:
                    if tokens > fitted:
                        measure_steps(policy, run, 1, TINY_TAIL if bench.rehearsed else TAIL)
                    fitted = max(fitted, tokens)
                    tried[str(tokens)] = True
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    tried[str(tokens)] = False
                finally:
                    memory.settle(bench.cuda)
                    bench.report(**{f"{gpu_gb} GB": {"planned": planned, "tried": tried}})


def longest_planned(bench: Bench, gpu_gb: int) -> int:
    """Tokens of the longest completion that fits according to the plan, one row at a time; at most what the
    model allows."""
    low, high = 1, 4 if bench.rehearsed else MOST_TOKENS // 512
    while low < high:
        middle = (low + high + 1) // 2
        _, plan = load_shipped(bench, gpu_gb, *lengths_of(bench, middle * 512), "rollout.rows=1")
        low, high = (middle, high) if plan.fits else (low, middle - 1)
    return 20 if bench.rehearsed else low * 512


def lengths_of(bench: Bench, tokens: int) -> list[str]:
    """Overrides for completions of that length."""
    if bench.rehearsed:
        return []
    return [
        f"rloo.max_completion_length={tokens}", f"rloo.thinking_budget={tokens - 544}",
        f"model.max_seq_length={tokens + 512}",
    ]  # fmt: skip
