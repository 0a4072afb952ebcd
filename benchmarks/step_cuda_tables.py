"""The tables of docs/benchmarks.md about a GPU, from the files in `results/step_cuda`; "not measured" without one.

A ratio is of medians, and only between cells of the same GPU. Memory is the peak of a step above what was held before
it. A side that had to take smaller micro-batches to fit says how many rows they had.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import reporting
import step_cuda_floor as floors
import step_workload
from step_cuda import LONG, SAMPLED, TRAINED
from step_cuda_models import LENGTHS
from step_workload import Workload

Results = Mapping[str, Mapping[str, Any]]
MISSING = "not measured"
BASE = "stock-unsloth"
NAMES = {
    "stock": "TRL, transformers",
    "stock-unsloth": "TRL, Unsloth",
    "grpo-unsloth": "GRPO of Unsloth",
    "fast": "ours, transformers, `fast`",
    "balanced": "ours, transformers, `balanced`",
    "low": "ours, transformers, `low`",
    "fast-unsloth": "ours, Unsloth, `fast`",
    "balanced-unsloth": "ours, Unsloth, `balanced`",
    "low-unsloth": "ours, Unsloth, `low`",
    "native": "ours, engine `native`",
    "native-int8": "ours, engine `native`, 8-bit cache",
    "generate": "ours, engine `generate`, transformers",
    "generate-unsloth": "ours, engine `generate`, Unsloth",
    "server": "ours, engine `server`",
    "vllm": "ours, engine `vllm`",
}
ORDER = ("stock", "stock-unsloth", "grpo-unsloth")  # the others behind, ours


def training_table(results: Results) -> list[str]:
    """Training part and its memory: a row a side, a column a length."""
    return _sides_table(results, "training", TRAINED, ("1k", "4k", "8k"), _training_cell)


def whole_table(results: Results) -> list[str]:
    """Whole steps: a row a side, a column a length."""
    return _sides_table(results, "whole", SAMPLED, ("1k", "2k"), _whole_cell)


def _sides_table(results: Results, part: str, sides: Mapping[str, Any], lengths: Sequence[str], cell: Any) -> list[str]:
    names = sorted(sides, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), NAMES[name]))
    rows = [[NAMES[name], *(cell(results, f"{part}-{length}", name) for length in lengths)] for name in names]
    return reporting.table(["side", *(f"up to {length} tokens" for length in lengths)], rows)


def _training_cell(results: Results, group: str, name: str) -> str:
    cell = results.get(f"{group}-{name}")
    if (reason := _why_missing(cell)) is not None:
        return reason
    seconds, taken = median(cell, "training_s"), step_memory(cell)
    found = f"{seconds:.2f} s, {cell['values']['tokens'] / seconds:.0f} tokens/s, {taken:.1f} GiB{_rows_note(cell)}"
    ratio = compare(results, f"{group}-{BASE}", f"{group}-{name}", "training_s")
    return found + ("" if ratio is None or name == BASE else f"; {ratio:.2f}x")


def _whole_cell(results: Results, group: str, name: str) -> str:
    cell = results.get(f"{group}-{name}")
    if (reason := _why_missing(cell)) is not None:
        return reason
    whole, sampling = median(cell, "whole_s"), median(cell, "generation_s")
    speed = cell["values"]["tokens"] / whole
    found = f"{whole:.1f} s (rollout {sampling:.1f} s), {speed:.0f} tokens/s, {step_memory(cell):.1f} GiB"
    ratio = compare(results, f"{group}-{BASE}", f"{group}-{name}", "whole_s")
    return found + _rows_note(cell) + ("" if ratio is None or name == BASE else f"; {ratio:.2f}x")


def _why_missing(cell: Mapping[str, Any] | None) -> str | None:
    """What stands where a figure would; None where there is one."""
    if cell is None or cell.get("rehearsed"):
        return MISSING
    values = cell["values"]
    if values.get("steps"):
        return None
    if values.get("ran_out"):
        return "does not fit" + (", one row a micro-batch either" if values.get("out_of_memory_rows") else "")
    reason = (cell.get("reason") or cell["state"]).splitlines()[0]
    return f"{MISSING}: {reason[:80]}"


def _rows_note(cell: Mapping[str, Any]) -> str:
    too_large = cell["values"].get("out_of_memory_rows")
    return f" ({cell['values']['settings']['rows']} rows a micro-batch: more did not fit)" if too_large else ""


def median(cell: Mapping[str, Any], name: str) -> float:
    """The median of a figure over the steps of a cell."""
    return statistics.median(step[name] for step in cell["values"]["steps"])


def step_memory(cell: Mapping[str, Any]) -> float:
    """GiB that a step took above what was held before it: the largest of the steps."""
    return max(step["peak_gib"] - step["held_gib"] for step in cell["values"]["steps"])


def compare(results: Results, base: str, other: str, figure: str) -> float | None:
    """How many times less time (or, for "memory", of the memory) `other` takes than `base`; None without both."""
    cells = [results.get(name) for name in (base, other)]
    if any(_why_missing(cell) is not None for cell in cells):
        return None
    first, second = cells
    if first["machine"]["gpu"] != second["machine"]["gpu"]:
        return None
    if figure == "memory":
        return step_memory(first) / step_memory(second)
    return median(first, figure) / median(second, figure)


# ------------------------------------------------------------------------------------------------------------ aims

AIMS = (  # what, the cell to compare with, ours, the figure, at least this many times
    ("whole step vs. TRL under Unsloth", "whole-2k-stock-unsloth", "whole-2k-generate-unsloth", "whole_s", 3.0),
    ("the same, engine `native`", "whole-2k-stock-unsloth", "whole-2k-native", "whole_s", 3.0),
    ("training part, 4k", "training-4k-stock-unsloth", "training-4k-fast-unsloth", "training_s", 4.0),
    ("training part, 8k", "training-8k-stock-unsloth", "training-8k-fast-unsloth", "training_s", 4.0),
    ("Unsloth's GRPO, training part, 4k", "training-4k-grpo-unsloth", "training-4k-fast-unsloth", "training_s", 1.0),
    ("Unsloth's GRPO, whole step", "whole-2k-grpo-unsloth", "whole-2k-generate-unsloth", "whole_s", 1.0),
    ("memory of the training part, 4k", "training-4k-stock-unsloth", "training-4k-fast-unsloth", "memory", 2.0),
)


def aims_table(results: Results) -> list[str]:
    """What was aimed at, and what was found."""
    rows = []
    for what, base, ours, figure, least in AIMS:
        found = compare(results, base, ours, figure)
        value = MISSING if found is None else f"{found:.2f}x"
        aim = f"{least:g}x {'less' if figure == 'memory' else ''}".strip()
        rows.append([what, f"`{ours}`", aim, value, _held(found, least)])
    for name, (gpu_gb, generations, kind) in LONG.items():
        what = f"16k tokens of thinking, K {generations}, on {gpu_gb} GB, {kind.cache} cache"
        rows.append([what, f"`{name}`", "trains", *_long_verdict(results.get(name))])
    return reporting.table(["aim", "cell", "at least", "found", ""], rows)


def _held(found: float | None, least: float) -> str:
    return "" if found is None else "reached" if found >= least else "**missed**"


def _long_verdict(cell: Mapping[str, Any] | None) -> tuple[str, str]:
    """What was found, and whether the aim is reached; a cell that broke has found nothing."""
    if cell is None or cell.get("rehearsed"):
        return MISSING, ""
    if cell["state"] == "passed":
        return f"{cell['values']['left_gib']:.1f} GiB left", "reached"
    if cell["values"].get("ran_out"):
        return "does not fit", "**missed**"
    return f"{MISSING}: {(cell.get('reason') or cell['state']).splitlines()[0][:80]}", ""


# ----------------------------------------------------------------------------------------------- where the time goes


PROFILES = (
    "training-stock-unsloth", "training-fast-unsloth", "training-fast", "decoding-generate-unsloth", "decoding-native"
)  # fmt: skip


def profile_table(results: Results) -> list[str]:
    """Shares of the GPU's busy time by kind of work, one column a profile."""
    from step_cuda_cells import GROUPS

    found = {}
    for name in PROFILES:
        cell = results.get(f"profile-{name}")
        is_there = cell is not None and not cell.get("rehearsed") and "busy_s" in cell["values"]
        found[name] = cell["values"] if is_there else None
    rows = [["seconds", *("not measured" if one is None else f"{one['plain_s']:.2f}" for one in found.values())]]
    rows.append(["GPU idle", *("" if one is None else f"{one['idle_share']:.0%}" for one in found.values())])
    for kind in (*GROUPS, "everything else"):
        shares = (one and one["seconds_by_kind"].get(kind, 0.0) / one["busy_s"] for one in found.values())
        rows.append([kind, *("" if share is None else f"{share:.0%}" for share in shares)])
    return reporting.table(["", *(f"`{name}`" for name in PROFILES)], rows)


def floor_table(results: Results) -> list[str]:
    """The least arithmetic and the fewest bytes of each workload, what they take on the GPU, and what ours took."""
    from rloo_kit.plan.shapes import PUBLISHED

    ceilings = results.get("ceilings")
    known = ceilings is not None and not ceilings.get("rehearsed") and "tflops" in ceilings["values"]
    rows = []
    for length in ("1k", "4k", "8k"):
        flops = floors.training_flops(PUBLISHED["4b"], *_tokens(length), beta=0.05)
        least = flops / (ceilings["values"]["tflops"] * 1e12) if known else None
        rows.append([f"training part, {length}", f"{flops / 1e12:.0f} TFLOP",
                     *_beside(results, least, f"training-{length}-fast-unsloth", "training_s")])  # fmt: skip
    for length in ("1k", "2k"):
        read = floors.rollout_bytes(PUBLISHED["4b"], *_tokens(length))
        least = read / (ceilings["values"]["gb_per_s"] * 1e9) if known else None
        rows.append([f"rollout, {length}", f"{read / 1e9:.0f} GB",
                     *_beside(results, least, f"whole-{length}-native", "generation_s")])  # fmt: skip
    return reporting.table(["part", "at least", "floor on this GPU", "cell", "took", "times the floor"], rows)


def _tokens(length: str) -> tuple[list[int], list[list[int]]]:
    """Tokens of the prompts and of the completions, by group."""
    workload = Workload(8, 151936, longest=LENGTHS[length])
    lengths, size = step_workload.completion_lengths(workload), workload.num_generations
    prompts = [len(row["prompt"]) for row in step_workload.prompt_rows(workload)]
    return prompts, [lengths[size * group : size * (group + 1)] for group in range(workload.groups)]


def _beside(results: Results, least: float | None, name: str, figure: str) -> list[str]:
    cell, floor = results.get(name), MISSING if least is None else f"{least:.2f} s"
    if _why_missing(cell) is not None:
        return [floor, f"`{name}`", MISSING, ""]
    took = median(cell, figure)
    return [floor, f"`{name}`", f"{took:.2f} s", "" if least is None else f"{took / least:.1f}"]


def gpu_line(results: Results) -> list[str]:
    """Which GPUs and versions the figures are from."""
    found: dict[str, set[str]] = {}
    for cell in results.values():
        if not cell.get("rehearsed"):
            gpu = f"{cell['machine']['gpu']}, torch {cell['versions'].get('torch')}"
            found.setdefault(gpu, set()).add(cell["revision"][:7])
    gpus = [f"{gpu} (revision {', '.join(sorted(revisions))})" for gpu, revisions in sorted(found.items())]
    return [f"Measured on: {'; '.join(gpus)}." if gpus else "Not measured: no GPU was at hand."]
