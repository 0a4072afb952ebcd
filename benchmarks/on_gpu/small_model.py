"""Qwen3-0.6B through Unsloth, in a lane: it trains, resumes, merges, and transformers reads what was merged.

Shapes: N scored tokens of all completions.
"""

import time
from typing import Any

from on_gpu import memory
from on_gpu.bench import Bench, make_checkpoint
from on_gpu.checks import check

# Tokens of a prompt, and of its completions; in a rehearsal, a fortieth.
LENGTHS = ((301, (650, 31)), (40, (5, 400)), (7, (90,)))
MEAN_NATS, MAX_NATS = 0.03, 0.5  # bf16 vs. bf16 in another order
STEPS_BEFORE, STEPS = 3, 5  # of the run that is interrupted and resumed; 1 and 2 in a rehearsal


@check(1, 120, "transformers", lane="checkpoints")
def makes_checkpoints(bench: Bench) -> None:
    """Random Qwen3-0.6B and 4B in their true shapes; the other checks wait for them."""
    for size in ("0.6b", "4b"):
        started = time.monotonic()
        folder = make_checkpoint(bench, size)
        gib = sum(path.stat().st_size for path in folder.iterdir()) / memory.GIB
        bench.report(**{size: {"seconds": round(time.monotonic() - started, 1), "gib": round(gib, 3)}})


@check(0, 90, "transformers")
@check(1, 90, lane="0.6B")
def trains(bench: Bench) -> None:
    """Three steps of random weights in 4-bit, and a checkpoint; every matrix is quantised, the adapter is float32, and
    on-policy the ratio is exactly 1."""
    from bitsandbytes.nn import Linear4bit

    started = time.monotonic()
    policy = bench.policy("0.6b")
    before, layers = adapter_weights(policy), policy.model.config.num_hidden_layers
    four_bit = sum(isinstance(module, Linear4bit) for module in policy.model.modules())
    dtypes = sorted({str(value.dtype) for value in before.values()})
    bench.report(load_s=round(time.monotonic() - started, 1), linear_4bit=four_bit, adapter_dtypes=dtypes)
    assert four_bit == (0 if bench.interpreted else 7 * layers), f"{four_bit} of {7 * layers} matrices are in 4-bit"
    assert dtypes == ["torch.float32"] and len(before) == 2 * 7 * layers
    steps = 1 if bench.rehearsed else STEPS_BEFORE
    train(bench, policy, f"rloo.max_steps={steps}", f"rloo.save_steps={steps}", "run.name=small", overwrite=True)
    after = adapter_weights(policy)
    assert any((after[name] != before[name]).any() for name in after), "the adapter did not change"
    bench.release()


@check(0, 70, "transformers", needs="transformers/trains")
@check(1, 70, needs="unsloth/trains", lane="0.6B")
def resumes(bench: Bench) -> None:
    """Two more steps from the checkpoint, in a model that was loaded again."""
    policy = bench.policy("0.6b")
    steps = 2 if bench.rehearsed else STEPS
    result = train(bench, policy, f"rloo.max_steps={steps}", "rloo.save_steps=100", "run.name=small", resume=True)
    lengths = [row["completions/mean_length"] for row in result.metrics if "grad_norm" in row]
    bench.report(lengths=[round(length, 1) for length in lengths])
    assert len(lengths) == steps, f"{len(lengths)} steps are on record"


@check(1, 60, needs="unsloth/trains", lane="0.6B")
def merges(bench: Bench) -> None:
    """A moved adapter and its base as one model in 16 bit, by Unsloth's own call."""
    import torch

    from rloo_kit import save_adapter

    policy = bench.policy("0.6b")
    move_adapter(policy)
    save_adapter(policy, bench.scratch / "adapter")
    torch.save(logps_of(bench, policy), bench.scratch / "logps.pt")
    merged = bench.scratch / "merged"
    policy.model.save_pretrained_merged(str(merged), policy.tokenizer, save_method="merged_16bit")
    bench.report(files=sorted(path.name for path in merged.iterdir()))
    bench.release()


@check(1, 90, "transformers", needs="unsloth/merges", lane="0.6B")
def reads_what_was_merged(bench: Bench) -> None:
    """The merged model, in plain transformers, is the base in 16 bit with its adapter."""
    import torch

    words: dict[str, dict[str, Any]] = {"plain": {}, "merged": {"name": str(bench.scratch / "merged")}, "adapter": {}}
    found = {}
    for name, more in words.items():
        adapter = [f"model.adapter={bench.scratch / 'adapter'}"] if name == "adapter" else []
        found[name] = logps_of(bench, bench.load(bench.make_run("0.6b", *adapter, four_bit=False, **more)))
        memory.settle(bench.cuda)
    off, moved = nats(found["merged"], found["adapter"]), nats(found["adapter"], found["plain"])
    in_4bit = nats(torch.load(bench.scratch / "logps.pt"), found["adapter"])
    bench.report(merged=off, what_the_adapter_moves=moved, what_4_bits_move=in_4bit)
    assert is_close(off) and not is_close(moved), f"the merged model is off base and adapter: {off}"


# ---------------------------------------------------------------------------------------------------------- its parts


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
             "step_time", "time/rollout_s", "time/gradient_s")  # fmt: skip
    bench.report(steps=[{name: round(row[name], 5) for name in names if name in row} for row in rows])
    assert rows and all(row["val/ratio"] == 1.0 and row["clip_ratio/region_mean"] == 0.0 for row in rows), "ratio off 1"
    assert all(row["grad_norm"] > 0 for row in rows), "a step without a gradient"
    return result


def adapter_weights(policy: Any) -> dict[str, Any]:
    """Copies of the adapter's matrices by name."""
    named = policy.model.named_parameters()
    return {name: value.detach().clone() for name, value in named if ".default.weight" in name}


def move_adapter(policy: Any, scale: float = 0.02) -> None:
    """Random values in the B matrices: a fresh adapter is the identity, which would hide a kernel that ignores it."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in policy.model.named_parameters():
            if "lora_B" in name:
                value.copy_(scale * torch.randn(value.shape, generator=generator))


def logps_of(bench: Bench, policy: Any) -> Any:
    """(N,) in nats, in evaluation mode, each sequence by itself, on the host."""
    import torch

    from rloo_kit.gradient.packing import Group
    from rloo_kit.gradient.scorer import Scorer

    generator, share = torch.Generator().manual_seed(7), 40 if bench.rehearsed else 1

    def draw(length: int) -> Any:
        return torch.randint(0, 250, (max(1, length // share),), generator=generator).to(policy.model.device)

    groups = [Group(draw(prompt), [draw(length)]) for prompt, lengths in LENGTHS for length in lengths]
    with policy.inference_mode(), torch.no_grad(), policy.autocast():
        scorer = Scorer(policy.model, 1.0, policy.tokenizer.pad_token_id, "padded")
        return torch.cat([scorer.score(policy.model, [one], need_entropy=False).logps for one in groups]).cpu()


def nats(found: Any, expected: Any) -> dict[str, float]:
    """The mean and the largest difference."""
    off = (found.float() - expected.float()).abs()
    return {"mean": round(off.mean().item(), 7), "max": round(off.max().item(), 7)}


def is_close(off: dict[str, float]) -> bool:
    """Whether rounding explains the difference."""
    return off["mean"] < MEAN_NATS and off["max"] < MAX_NATS
