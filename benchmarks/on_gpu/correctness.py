"""Part 1, smoke and correctness on Qwen3-0.6B: does the stack load, are its numbers right, does a run learn and resume?

Every layout is compared with single sequences of the same model: log-probabilities and LoRA gradients, forward and
backward, checkpointing on. The transformers worker reads what Unsloth's leaves behind (adapter, merged model).

Shapes: N scored tokens of all completions.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from on_gpu import memory
from on_gpu.bench import Bench, Skipped, check

# Tokens of a prompt, and of its completions; in a rehearsal, a two-hundredth.
LENGTHS = ((301, (3700, 650, 31, 2000)), (40, (5, 400)), (7, (90,)))
MEAN_NATS, MAX_NATS = 0.03, 0.5  # bf16 vs. bf16 in another order; a dropped mask is off by one nat or more
GRADIENT = 0.1  # of the gradient's norm, the same; a dropped mask is off by half
LAYOUTS = {  # name: layout of the scorer, and whether torch's attention for varying lengths may be used
    "unsloth": {"flex, prompt shared": ("shared", None), "packed, prompt repeated": ("repeated", None)},
    "transformers": {
        "varlen, prompt shared": ("shared", True),
        "varlen, prompt repeated": ("repeated", True),
        "buckets, prompt shared": ("shared", False),
        "buckets, prompt repeated": ("repeated", False),
    },
}
STEPS_BEFORE, STEPS = 3, 5  # of the run that is interrupted and resumed; 1 and 2 in a rehearsal
EMBEDDED_RATE = 5e-3
FALL = 0.6  # upper bound: the last two steps' mean length over the first step's (20 -> 7 tokens on a CPU, 4 seeds)
KEPT_GIB = 0.5  # Unsloth's buffers for dequantised weights and checkpoints stay


@check(1, 20, either=True)
def knows_the_machine(bench: Bench) -> None:
    """Versions, memory, the context's share of it, bandwidth and the rate of matrix products: floors rest on them."""
    import torch

    from rloo_kit.system import environment

    device = "cpu" if bench.rehearsed else "cuda"
    dtype = getattr(torch, environment.current().dtype_name)
    side, size = (64, 2**16) if bench.rehearsed else (8192, 2**31)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product_s = median_seconds(bench, lambda: left @ right)
    copy_s = median_seconds(bench, lambda: target.copy_(source))
    bench.report(tflops=2 * side**3 / product_s / 1e12, gb_per_s=2 * size / copy_s / 1e9, dtype=str(dtype))
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        bench.report(
            total_gib=round(total / memory.GIB, 2), free_gib=round(free / memory.GIB, 2),
            context_gib=round(memory.context_gib(torch.cuda), 3),
        )  # fmt: skip


def median_seconds(bench: Bench, work: Callable[[], Any], batches: int = 5, times: int = 10) -> float:
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


@check(1, 60)
def loads_4bit(bench: Bench) -> None:
    """Qwen3-0.6B in 4-bit with an adapter: every matrix quantised, the adapter in float32."""
    from bitsandbytes.nn import Linear4bit

    started = time.monotonic()
    policy = bench.policy("0.6b")
    bench.report(seconds=round(time.monotonic() - started, 1), policy=policy.describe())
    layers = policy.model.config.num_hidden_layers
    found = sum(isinstance(module, Linear4bit) for module in policy.model.modules())
    dtypes = {str(value.dtype) for value in adapter_weights(policy).values()}
    bench.report(linear_4bit=found, adapter_dtypes=sorted(dtypes))
    if bench.cuda.is_available():
        bench.report(held_gib=round(memory.held_gib(bench.cuda), 3))
    assert found == (0 if bench.interpreted else 7 * layers), f"{found} of {7 * layers} matrices are in 4-bit"
    assert dtypes == {"torch.float32"} and len(adapter_weights(policy)) == 2 * 7 * layers


def adapter_weights(policy: Any) -> dict[str, Any]:
    """Copies of the adapter's matrices by name."""
    named = policy.model.named_parameters()
    return {name: value.detach().clone() for name, value in named if ".default.weight" in name}


# ------------------------------------------------------------------------------------- log-probabilities and gradients


@check(1, 150, needs="loads_4bit")
def scores_4bit(bench: Bench) -> None:
    """Packed rows against single sequences in 4-bit, forward and backward, up to 4k tokens, with checkpointing."""
    compare_layouts(bench, bench.policy("0.6b"))


@check(1, 60, needs="loads_4bit", not_rehearsed="tiny, it is the 4-bit check in float32 once more")
def scores_bf16(bench: Bench) -> None:
    """The same in 16 bit."""
    compare_layouts(bench, bench.policy("0.6b", four_bit=False))


def compare_layouts(bench: Bench, policy: Any) -> None:
    """Every layout vs. single sequences. Stock's left-padded rows are reported alongside: Unsloth's training forward
    may silently drop their mask."""
    import torch

    from rloo_kit.gradient import packing
    from rloo_kit.gradient.scorer import Scorer

    move_adapter(policy)
    policy.model.train()
    groups = make_groups(bench, policy.model.device)
    expected = Scored.compute(policy, [[one] for one in one_by_one(groups)], "padded")
    bench.report(tokens=len(expected.logps), mean_logp=round(expected.logps.mean().item(), 3))
    bad = {}
    for name, (layout, in_one_call) in LAYOUTS[bench.backend].items():
        if in_one_call and bench.rehearsed:
            bench.report(**{name: "not here: torch's attention for varying lengths takes a GPU"})
            continue
        if layout == "shared" and bench.interpreted:
            bench.report(**{name: "not here: its backward pass takes a GPU"})
            continue
        using: AbstractContextManager[Any] = nullcontext()
        if in_one_call is not None:
            asked: list[bool] = []
            allowed = packing._takes_one_call

            def may(*arguments: Any, wanted: bool = in_one_call, seen: Any = asked, plain: Any = allowed) -> bool:
                seen.append(wanted and plain(*arguments))
                return seen[-1]

            using = mock.patch.object(packing, "_takes_one_call", may)
        try:
            with using:
                off = Scored.compute(policy, [groups], layout).off(expected)
        except (RuntimeError, ValueError) as error:  # a kernel that does not run here is a finding; the others continue
            off = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
            bad[name] = off
        if in_one_call and not any(asked):
            off = "not here: this torch or this GPU has no attention for varying lengths"
        bench.report(**{name: off})
        if isinstance(off, dict) and "error" not in off and not is_close(off):
            bad[name] = off
    with torch.no_grad():
        for name, forgets in (("left-padded", False), ("left-padded, as stock", True)):
            bench.report(**{name: nats(left_padded(policy, groups, forgets), expected.logps)})
    chosen = Scorer(policy.model, 1.0, policy.tokenizer.pad_token_id)
    bench.report(chosen_layout=chosen.layout, reason=chosen.reason)
    assert not bad, f"off single sequences: {bad}"


def make_groups(bench: Bench, device: Any) -> list[Any]:
    """Three prompts with their completions, single bytes."""
    import torch

    from rloo_kit.gradient.packing import Group

    generator = torch.Generator().manual_seed(7)

    def draw(length: int) -> Any:
        length = max(1, length // 200) if bench.rehearsed else length
        return torch.randint(0, 250, (length,), generator=generator).to(device)

    return [Group(draw(prompt), [draw(length) for length in lengths]) for prompt, lengths in LENGTHS]


def one_by_one(groups: Iterable[Any]) -> list[Any]:
    """Each completion in its own group."""
    from rloo_kit.gradient.packing import Group

    return [Group(group.prompt, [one]) for group in groups for one in group.completions]


class Scored:
    """Log-probabilities (N,) in nats, and the LoRA gradient of a weighted mean of them, float32, flat, on the host."""

    def __init__(self, logps: Any, gradient: Any) -> None:
        self.logps, self.gradient = logps, gradient

    @classmethod
    def compute(cls, policy: Any, passes: list[list[Any]], layout: str) -> "Scored":
        """In training mode, pass by pass, each followed by a backward pass."""
        import torch

        from rloo_kit.gradient.scorer import Scorer

        policy.model.train()
        policy.model.zero_grad(set_to_none=True)
        scorer = Scorer(policy.model, 1.0, policy.tokenizer.pad_token_id, layout)
        total = sum(len(one) for groups in passes for group in groups for one in group.completions)
        weights = torch.linspace(-1.0, 2.0, total, device=policy.model.device) / total
        found, start = [], 0
        for groups in passes:
            with autocast(policy.model.device):
                logps = scorer.score(policy.model, groups, need_entropy=False).logps
                (logps * weights[start : start + len(logps)]).sum().backward()
            start += len(logps)
            found.append(logps.detach())
        trained = [value for value in policy.model.parameters() if value.requires_grad]
        gradient = torch.cat([value.grad.detach().float().flatten().cpu() for value in trained])
        policy.model.zero_grad(set_to_none=True)
        return cls(torch.cat(found), gradient)

    def off(self, expected: "Scored") -> dict[str, float]:
        """The difference from the expected one."""
        error = ((self.gradient - expected.gradient).norm() / expected.gradient.norm()).item()
        return nats(self.logps, expected.logps) | {"gradient": round(error, 6)}


def nats(found: Any, expected: Any) -> dict[str, float]:
    """The mean and the largest difference."""
    off = (found.float() - expected.float().to(found.device)).abs()
    return {"mean": round(off.mean().item(), 7), "max": round(off.max().item(), 7)}


def is_close(off: dict[str, float]) -> bool:
    """Whether rounding explains the difference."""
    return off["mean"] < MEAN_NATS and off["max"] < MAX_NATS and off.get("gradient", 0.0) < GRADIENT


def autocast(device: Any) -> AbstractContextManager[Any]:
    """Autocast as in the trainer: in the GPU's precision."""
    import torch

    from rloo_kit.system import environment

    name = environment.current().dtype_name
    plain = device.type == "cpu" or name == "float32"
    return nullcontext() if plain else torch.autocast(device.type, dtype=getattr(torch, name))


def left_padded(policy: Any, groups: list[Any], forgets: bool) -> Any:
    """(N,) as stock TRL scores: prompts padded on the left, and a call of the backbone with the mask of the padding;
    `forgets`: without what the kit tells Unsloth's backbone about that mask."""
    import torch

    from rloo_kit.gradient.logprobs import score_tokens

    causal = policy.model.get_base_model()
    kept = {name: vars(causal.model).pop(name) for name in ("_unsloth_keep_padding_mask", "_has_no_labels")
            if forgets and name in vars(causal.model)}  # fmt: skip
    rows = [(group.prompt, one) for group in groups for one in group.completions]
    width, room = max(len(prompt) for prompt, _ in rows), max(len(one) for _, one in rows)
    ids = torch.full((len(rows), width + room), policy.tokenizer.pad_token_id, device=causal.device)
    mask = torch.zeros_like(ids)
    for row, (prompt, one) in enumerate(rows):
        ids[row, width - len(prompt) : width + len(one)] = torch.cat([prompt, one])
        mask[row, width - len(prompt) : width + len(one)] = 1
    try:
        with autocast(causal.device):
            states = causal.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            places = [states[row, width - 1 : width - 1 + len(one)] for row, (_, one) in enumerate(rows)]
            targets = torch.cat([one for _, one in rows])
            return score_tokens(torch.cat(places), causal.get_output_embeddings().weight, None, targets, 1.0, False)[0]
    finally:
        vars(causal.model).update(kept)


def move_adapter(policy: Any, scale: float = 0.02) -> None:
    """Random values in the B matrices: a fresh adapter is the identity, which would hide a kernel that ignores it."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in policy.model.named_parameters():
            if "lora_B" in name:
                value.copy_(scale * torch.randn(value.shape, generator=generator))


def logps_of(bench: Bench, policy: Any) -> Any:
    """(N,) in evaluation mode, each sequence by itself, on the host."""
    import torch

    from rloo_kit.gradient.scorer import Scorer

    passes = [[one] for one in one_by_one(make_groups(bench, policy.model.device))]
    with policy.inference_mode(), torch.no_grad(), autocast(policy.model.device):
        scorer = Scorer(policy.model, 1.0, policy.tokenizer.pad_token_id, "padded")
        return torch.cat([scorer.score(policy.model, groups, need_entropy=False).logps for groups in passes]).cpu()


# ------------------------------------------------------------------------------------------------------------ a run


def shortness(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that falls with length."""
    return [-len(ids) / 64 for ids in completion_ids]


def train(bench: Bench, policy: Any, *overrides: str, **keywords: Any) -> Any:
    """`rloo_kit.train` on that policy; each step is reported."""
    import rloo_kit

    run = bench.make_run("0.6b", *overrides)
    data = rloo_kit.load_data(run, policy.tokenizer)
    result = rloo_kit.train(run, policy, data, [shortness], **keywords)
    rows = [row for row in result.metrics if "grad_norm" in row]
    names = ("step", "reward", "completions/mean_length", "val/ratio", "clip_ratio/region_mean", "grad_norm",
             "step_time")  # fmt: skip
    bench.report(steps=[{name: round(row[name], 5) for name in names} for row in rows])
    assert rows and all(row["val/ratio"] == 1.0 and row["clip_ratio/region_mean"] == 0.0 for row in rows), "ratio off 1"
    assert all(row["grad_norm"] > 0 for row in rows), "a step without a gradient"
    return result


@check(1, 60, needs="loads_4bit")
def trains(bench: Bench) -> None:
    """Three steps of random weights in 4-bit, and a checkpoint; on-policy the ratio is exactly 1."""
    bench.release()
    policy = bench.policy("0.6b")
    before = adapter_weights(policy)
    steps = 1 if bench.rehearsed else STEPS_BEFORE
    train(bench, policy, f"rloo.max_steps={steps}", f"rloo.save_steps={steps}", overwrite=True)
    after = adapter_weights(policy)
    assert any((after[name] != before[name]).any() for name in after), "the adapter did not change"
    bench.release()


@check(1, 70, needs="trains")
def resumes(bench: Bench) -> None:
    """Two more steps from the checkpoint, in a model that was loaded again."""
    policy = bench.policy("0.6b")
    steps = 2 if bench.rehearsed else STEPS
    result = train(bench, policy, f"rloo.max_steps={steps}", "rloo.save_steps=100", resume=True)
    bench.trained = result.adapter_folder
    lengths = [row["completions/mean_length"] for row in result.metrics if "grad_norm" in row]
    bench.report(lengths=[round(length, 1) for length in lengths])
    assert len(lengths) == steps, f"{len(lengths)} steps are on record"


@check(1, 60, needs="resumes")
def generates(bench: Bench) -> None:
    """The trained adapter is loaded from its folder with equal log-probabilities; greedy texts are equal twice."""
    from rloo_kit import generate_completions

    if bench.trained is None:
        raise Skipped("the process that trained has ended")
    policy = bench.policy("0.6b")
    expected, trained = logps_of(bench, policy), adapter_weights(policy)
    tokens = 4 if bench.rehearsed else 32
    texts = [
        [
            one.ids
            for one in generate_completions(policy, ["1+2=", "12+345="], max_completion_length=tokens, temperature=0)
        ]
        for _ in range(2)
    ]
    assert texts[0] == texts[1] and all(texts[0]), "greedy texts differ"
    bench.release()
    policy = bench.load(bench.make_run("0.6b", f"model.adapter={bench.trained}"))
    loaded = adapter_weights(policy)
    assert all((loaded[name] == trained[name]).all() for name in trained), "the adapter came back changed"
    off = nats(logps_of(bench, policy), expected)
    bench.report(nats_after_loading=off)
    assert off["max"] < 0.02


@check(1, 50, needs="loads_4bit")
def keeps_the_ratio(bench: Bench) -> None:
    """One step each of `memory: balanced` and `low`: the ratio is exactly 1 there too."""
    policy = bench.policy("0.6b")
    for mode in ("low",) if bench.interpreted else ("balanced", "low"):
        policy.trained.clear()  # a run refuses one that is trained; here any weights will do
        train(bench, policy, f"rloo.memory={mode}", "rloo.max_steps=1", "run.name=ratio", overwrite=True)
    bench.release()


@check(1, 60, needs="loads_4bit")
def merges(bench: Bench) -> None:
    """A moved adapter and its base as one model in 16 bit, by the backend's own call; transformers reads it later."""
    import torch

    from rloo_kit import save_adapter

    policy = bench.policy("0.6b")
    move_adapter(policy)
    adapter = save_adapter(policy, bench.scratch / f"adapter-{bench.backend}")
    torch.save(logps_of(bench, policy), bench.scratch / f"logps-{bench.backend}.pt")
    merged = bench.scratch / f"merged-{bench.backend}"
    if bench.backend == "unsloth":
        policy.model.save_pretrained_merged(str(merged), policy.tokenizer, save_method="merged_16bit")
    else:
        merge_by_peft(bench, bench.checkpoint("0.6b"), adapter, merged)
        policy.tokenizer.save_pretrained(merged)
    bench.report(files=sorted(path.name for path in merged.iterdir()))


def merge_by_peft(bench: Bench, base: Path, adapter: Path, folder: Path) -> None:
    """PEFT's own merge, on the base in 16 bit (a 4-bit base would be quantised again)."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if bench.rehearsed else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(folder)


@check(1, 90, backends=("transformers",))
def reads_what_was_merged(bench: Bench) -> None:
    """Each merged model, in plain transformers, is the base in 16 bit with its adapter; in 4-bit the backends agree."""
    import torch

    files = {name: bench.scratch / f"logps-{name}.pt" for name in ("unsloth", "transformers")}
    left = {name: torch.load(file) for name, file in files.items() if file.is_file()}
    if not left:
        raise Skipped("nothing was merged")
    for name in left:
        files[name].unlink()  # the next run compares its own
    base = bench.checkpoint("0.6b")
    plain = logps_of(bench, bench.load(bench.make_run("0.6b", four_bit=False)))
    bad = {}
    for name in left:
        adapter, merged = bench.scratch / f"adapter-{name}", bench.scratch / f"merged-{name}"
        expected = logps_of(bench, bench.load(bench.make_run("0.6b", f"model.adapter={adapter}", four_bit=False)))
        found = logps_of(bench, bench.load(bench.make_run("0.6b", four_bit=False, name=str(merged))))
        off, moved = nats(found, expected), nats(expected, plain)
        bench.report(**{name: {"merged": off, "what the adapter moves": moved}})
        if not is_close(off) or is_close(moved):
            bad[name] = off
        memory.settle(bench.cuda)
    if len(left) == 2 and not bench.rehearsed:
        bench.report(nats_between_backends_in_4bit=nats(*left.values()), checkpoint=base.name)
    assert not bad, f"merged models are off base and adapter: {bad}"


@check(1, 110, backends=("transformers",))
def gets_shorter(bench: Bench) -> None:
    """Five steps on the embedded model, which has learned to think, under a reward that falls with the length: its
    completions become shorter (random weights are no policy that five steps can move)."""
    import rloo_kit
    from rloo_kit.models.embedded import build
    from rloo_kit.system.environment import CACHE_VARIABLE

    bench.release()
    with mock.patch.dict("os.environ", {CACHE_VARIABLE: str(bench.scratch / "embedded")}):
        folder = build("thinking", steps=2) if bench.rehearsed else build("thinking")
    words = ["data.max_prompt_length=64", "rloo.max_completion_length=48", f"rloo.learning_rate={EMBEDDED_RATE}"]
    words += [] if bench.rehearsed else ["rloo.per_device_train_batch_size=64"]  # 256 completions: little noise
    run = bench.make_run("", *words, "run.name=shorter", "model.dtype=float32", four_bit=False, name=str(folder))
    policy = bench.load(run)
    result = rloo_kit.train(run, policy, rloo_kit.load_data(run, policy.tokenizer), [shortness], overwrite=True)
    lengths = [row["completions/mean_length"] for row in result.metrics if "grad_norm" in row]
    bench.report(lengths=[round(length, 1) for length in lengths])
    if not bench.rehearsed:  # two steps of cold start do not teach the model to end
        assert sum(lengths[-2:]) / 2 < FALL * lengths[0], "completions did not become shorter"


@check(1, 20, needs="loads_4bit")
def releases(bench: Bench) -> None:
    """Memory comes back when the last name is gone."""
    from rloo_kit import release_memory

    bench.release()
    release_memory(verbose=False)
    if bench.cuda.is_available():
        left = memory.held_gib(bench.cuda)
        bench.report(left_gib=round(left, 3))
        assert left < KEPT_GIB
