"""Writes the figures of `results/` into README, docs and the configs' headers.

    python benchmarks/tables.py                       # all of them
    make gpu-report                                   # the same
    python benchmarks/tables.py --from DIR            # copies a GPU's files from DIR there first

A page marks a table with two comments that name it, and a test compares it with the results. A GPU's figures are those
of `results/gpu/NAME/call0.jsonl` to `call2.jsonl` (`first_hour.py`), and the first GPU's those of `part0.jsonl` and
`part1.jsonl` in `results/gpu`, some of whose checks are gone. What no file has reads "not measured"; a rehearsal's
files are refused.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import reporting
from first_hour import folder_of
from on_gpu.checks import BACKENDS, Part, read_part
from reporting import ROOT, step_value, table

from rloo_kit import load_config, plan_vram
from rloo_kit.plan.planner import find_machine, read_workload
from rloo_kit.plan.speed import GPUS, find_gpu, sampling_s, step_completions, token_step_s, training_s
from rloo_kit.system.gpu import GIB

GPU_RESULTS = reporting.RESULTS / "gpu"
CONFIGS = ROOT / "configs"
PAGES = (*(ROOT / "docs" / f"{name}.md" for name in ("benchmarks", "plan")),
         ROOT / "README.md")  # fmt: skip
GPUS_GB = (8, 12, 16, 24)
MISSING = "not measured"
# Checks that compare something, in the first hour of either form
CORRECT = (
    r"knows_the_machine|loads_4bit|scores_\w+|trains|resumes|keeps_the_ratio|merges|reads_what_was_merged|runs_the_\w+"
)


# ----------------------------------------------------------------------------------------------- measured on a CPU


def step_table(result: dict[str, Any]) -> list[str]:
    """rloo_step.json: every comparison, with the error of its gradient where that was measured."""
    errors = {
        (row["workload"], row["side"]): row["relative_error"] for row in result["rows"] if "relative_error" in row
    }
    rows = []
    for row in (row for row in result["rows"] if "relative_error" not in row):
        amounts = []
        for side in ("stock", "ours"):
            name, unit, digits = ("mib", "MiB", 0) if f"{side}_mib" in row else ("cpu_s", "s", 2)
            amounts.append(f"{statistics.median(row[f'{side}_{name}']):.{digits}f} {unit}")
        error = errors.get((row["workload"], row["side"])) if row["what"] == "training part" else None
        cells = [*amounts, step_value(row), "" if error is None else f"{error:.1e}"]
        rows.append([row["what"], row["workload"], f"`{row['side']}`", *cells])
    return table(["part", "workload", "`memory`", "stock", "ours", "result", "gradient"], rows)


def shorter_table(result: dict[str, Any]) -> list[str]:
    """shorter_thinking.json: each recipe, the range over its seeds with the outermost ends of their intervals."""

    def spread(found: list[list[float]], digits: int = 2) -> str:
        """Of values with their low and high."""
        values, low, high = [one[0] for one in found], min(one[1] for one in found), max(one[2] for one in found)
        words = " to ".join(dict.fromkeys(f"{value:.{digits}f}" for value in (min(values), max(values))))
        return f"{words} [{low:.{digits}f}, {high:.{digits}f}]"

    sets: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in result["runs"]:
        sets.setdefault((run["model"], run["recipe"]), []).append(run)
    rows = []
    for (model, recipe), runs in sets.items():
        at = {int(tokens): [run["budgets"][tokens] for run in runs] for tokens in runs[0]["budgets"]}
        forced = [one["forced"] for one in at[32]]
        others = [
            f"{n}: {statistics.fmean(one['accuracy'][0] for one in found):.2f}" for n, found in at.items() if n != 32
        ]
        learnt = sum(run["verdict"][0] == "learnt" for run in runs if "verdict" in run)
        cells = [model, recipe, "" if recipe == "before" else str(len(runs))]
        cells += [spread([one["accuracy"] for one in at[32]]), spread([run["accuracy"] for run in runs])]
        cells += [spread([run["thinking_tokens"] for run in runs], 0), f"{statistics.fmean(forced):.0%}"]
        rows.append([*cells, ", ".join(others), f"{learnt} of {len(runs)}" if "verdict" in runs[0] else ""])
    head = ["model", "recipe", "seeds", "accuracy at 32 tokens", "without a budget", "thinking tokens without"]
    return table([*head, "closed at 32", "accuracy at", "learnt"], rows)


# ------------------------------------------------------------------------------------------ computed by the plan


def _times() -> list[list[str]]:
    """Cells of `times_table`, a row for each config for a GPU; the smallest GPU first."""
    found = []
    for path in sorted(CONFIGS.glob("*.yaml")):
        if needs := re.search(r"one NVIDIA GPU with (\d+) GB", path.read_text(encoding="utf-8")):
            found.append((int(needs[1]), path.stem, path))
    rows = []
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, {"HF_HUB_CACHE": cache}):
        for name in ("RLOO_KIT_BACKEND", "WORLD_SIZE"):  # nor another choice of this machine
            os.environ.pop(name, None)
        for size, _, path in sorted(found):
            gpu = next(gpu for gpu in GPUS if gpu.memory_gb == size)
            cells = [f"`{path.name}`", f"{gpu.name}, {size} GB", f"{load_config(path).rloo.max_completion_length:,}"]
            for engine in ("native", "generate", "vllm"):
                plan = plan_vram(load_config(path, f"rollout.engine={engine}"), size * 1e9 / GIB)
                if not plan.fits or plan.step is None:
                    cells += ["does not fit", *[""] * (3 if engine == "native" else 1)]
                    continue
                if engine == "native":
                    cells += [str(plan.rows), f"{plan.rollout_gib:.1f}, {plan.training_gib:.1f}"]
                cells += [f"{plan.step.step_s:.0f}", f"{plan.step.hours:.1f}"]
            rows.append(cells)
    return rows


def times_table(_: Any = None) -> list[str]:
    """Each config on its GPU: rows at once, memory, seconds a step, hours; with what `make setup` installs, and hours
    with the other engines. Left out: one that differs by its data, and with images, which one engine samples."""
    rows = [
        [config, gpu.partition(",")[0], *cells, by_generate, with_vllm]
        for config, gpu, *cells, _, by_generate, _, with_vllm in _times()
        if "gym" not in config and "_vl_" not in config
    ]
    return table(["config", "GPU", "tokens", "rows", "GiB", "s a step", "h", "h, `generate`", "h, vLLM"], rows)


def hours_table(_: Any = None) -> list[str]:
    """Steps, lengths and hours of the evenings and of Qwen3-4B-Thinking's long runs, for the README."""
    rows = []
    for config, gpu, tokens, _, _, _, hours, _, by_generate, _, with_vllm in _times():
        if "thinking_" in config or "evening" in config:
            steps = load_config(CONFIGS / config.strip("`")).rloo.max_steps
            rows.append([gpu, config, tokens, str(steps), hours, by_generate, with_vllm])
    rows.sort(key=lambda row: "evening" not in row[1])
    return table(["GPU", "config", "tokens, at most", "steps", "hours", "by `generate`", "with vLLM"], rows)


# ---------------------------------------------------------------------------------------------- measured on a GPU


def read_gpus(folder: Path) -> list[Part]:
    """What each GPU measured, all of its files together; the newest first."""
    gpus = []
    for home in (folder, *sorted(path for path in folder.glob("*") if path.is_dir())):
        files = [
            read_part(path) for path in sorted(home.glob("part[0-3].jsonl" if home == folder else "call[0-2].jsonl"))
        ]
        found = [part for part in files if part is not None and not part.header.get("rehearsed")]
        if found:
            found.sort(key=lambda part: float(part.header["time"]))
            gpu = Part(found[-1].header, {}, [note for part in found for note in part.notes])
            for part in found:
                known = {name: one for name, one in part.checks.items() if one.values or name not in gpu.checks}
                gpu.checks.update(known)
            gpus.append(gpu)
    return sorted(gpus, key=lambda gpu: str(gpu.header["measured"]), reverse=True)


def name_of(gpu: Part) -> str:
    return str(gpu.header["machine"]["gpu"])


def gpu_line(gpus: list[Part]) -> list[str]:
    """Which GPUs and versions the figures are from."""
    lines = []
    for gpu in gpus:
        versions = gpu.header["versions"]
        names = ", ".join(f"{name} {versions[name]}" for name in ("torch", "trl", "unsloth") if versions.get(name))
        lines.append(f"{name_of(gpu)}, {gpu.header['measured']}, revision `{gpu.header['revision'][:7]}`; {names}.")
        lines += [f"{note}." for note in gpu.notes]
    return lines or ["Not measured: no GPU was at hand."]


def decoding_table(gpus: list[Part]) -> list[str]:
    """Decoding: milliseconds a step and tokens a second, by engine and rows."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for gpu in gpus:
        for engine, backend, key in (
            ("Unsloth's `generate`", "unsloth", "generate"), ("`native` under Unsloth", "unsloth", "native"),
            ("`native`, transformers", "transformers", "native"),
        ):  # fmt: skip
            for count in (1, 4, 8, 16, 32, 128):
                if (cell := decoding_cell(gpu, backend, key, count)) is not None:
                    found.setdefault((name_of(gpu), engine), {})[count] = cell
    counts = sorted({count for cells in found.values() for count in cells})
    if not any("native" in engine for _, engine in found):
        found["", "`native` in CUDA graphs"] = dict.fromkeys(counts, MISSING)
    rows = [[*both, *(cells.get(count, "") for count in counts)] for both, cells in found.items()]
    return table(["GPU", "engine", *(f"{count} rows" for count in counts)], rows)


def decoding_cell(gpu: Part, backend: str, engine: str, rows: int) -> str | None:
    """Milliseconds of a token and tokens a second; None if it was not measured."""
    found = gpu.value(f"{backend}/decodes_natively", f"rows {rows}", engine)
    if found is None and engine == "generate":  # the first GPU's
        found = gpu.value("unsloth/decodes", f"rows {rows}")
    if not found or not found.keys() & {"ms", "ms_per_step", "fits"}:
        return None
    ms = found.get("ms", found.get("ms_per_step"))
    return f"{ms:.1f} ms, {found['tokens_per_s']} tokens/s" if ms else "does not fit"


def claim_of(gpus: list[Part], gpu_gb: int) -> dict[str, Any] | None:
    """The figures of a shipped config, the backend that ran it and its GPU; None if it did not train."""
    for gpu in gpus:
        for backend in BACKENDS:
            found = gpu.checks.get(f"{backend}/trains_on_{gpu_gb}gb")
            if found is not None and "rollout_gib" in found.values:
                more = {"backend": backend, "after": found.after, "gpu": name_of(gpu)}
                return found.values | more | {"measured": gpu.header["measured"]}
    return None


def short_table(gpus: list[Part]) -> list[str]:
    """A line each for correctness, speed and memory, a column each for a GPU."""

    def correctness(gpu: Part, backend: str) -> str:
        known = [check.state for name, check in gpu.checks.items() if re.fullmatch(f"{backend}/({CORRECT})", name)]
        known = [state for state in known if state not in ("not run", "skipped")]
        return f"{known.count('passed')} of {len(known)} checks passed" if known else ""

    def step(gpu: Part) -> str:
        sides = ("ours, native", "ours, generate", "TRL")
        times = [gpu.value("unsloth/takes_a_step_of_1k", side, "best_s") for side in sides]
        shown = [f"{name} {one:.1f} s" for name, one in zip(("native", "generate", "TRL"), times, strict=True) if one]
        ours = [one for one in times[:2] if one]
        return ", ".join(shown) + (f" ({times[2] / min(ours):.2f}x)" if times[2] and ours else "")

    def evening(gpu: Part) -> str:
        steps = gpu.value("unsloth/takes_an_evening_s_steps", "steps")
        peak = gpu.value("unsloth/takes_an_evening_s_steps", "peak_gib")
        return f"{steps[-1]['step_time']:.0f} s a step, {peak:.1f} GiB" if steps else ""

    def claim(gpu: Part, gpu_gb: int) -> str:
        found = claim_of([gpu], gpu_gb)
        if found is None:
            return ""
        peak = max(found["rollout_gib"], found["training_gib"])
        text = f"trains, {'at most ' if found['after'] else ''}{peak:.1f} GiB"
        return text + (f", {found['step_s']:.0f} s a step at most" if "step_s" in found else "")

    lines: list[tuple[str, Callable[[Part], str]]] = [
        ("Unsloth: loads, scores, trains, resumes, merges (0.6B)", lambda gpu: correctness(gpu, "unsloth")),
        ("the same, transformers", lambda gpu: correctness(gpu, "transformers")),
        (
            "a token of 8 rows, 4B in 4-bit, Unsloth's `generate`",
            lambda gpu: decoding_cell(gpu, "unsloth", "generate", 8) or "",
        ),
        ("the same, `native` in CUDA graphs", lambda gpu: decoding_cell(gpu, "unsloth", "native", 8) or ""),
        ("a step of 16 completions up to 1k, 4B, under Unsloth", step),
        *((f"4B on {gb} GB, by a cap, full length", lambda gpu, gb=gb: claim(gpu, gb)) for gb in GPUS_GB),
        ("`evening_12gb`, by a cap of 12 GB", evening),
    ]
    rows = [[what, *(find(gpu) or MISSING for gpu in gpus or [Part({}, {}, [])])] for what, find in lines]
    return table(["on a GPU", *([name_of(gpu) for gpu in gpus] or ["found"])], rows)


def list_speeds(gpus: list[Part]) -> Iterator[tuple[str, list[float], list[float]]]:
    """Speeds that were measured, and what the plan computes for the same rows and lengths on the same GPU. Left out:
    the H100's steps of 0.6B, sampled by a native engine that had no CUDA graphs."""
    for measured_on in gpus:
        machine = measured_on.header["machine"]
        gpu = find_gpu(machine["gpu"], machine.get("gpu_gib", 0))
        if gpu is None:
            continue
        here = find_machine(machine["gpu_gib"])
        run = load_config(CONFIGS / "qwen3_4b_thinking_8gb.yaml")
        work = read_workload(run, here, engine="generate")

        def at(tokens: int, rows: int, work: Any = work, gpu: Any = gpu) -> float:
            """Milliseconds of a token after so many in the cache."""
            return 1e3 * token_step_s(replace(work, prompt_tokens=0, completion_tokens=2 * tokens), rows, 1.0, gpu)

        found = measured_on.value("unsloth/decodes") or {}
        if times := {
            int(name.split()[1]): one["ms_per_step"]
            for name, one in found.items()
            if isinstance(one, dict) and "ms_per_step" in one
        }:
            yield "4B: ms a token, 8, 32, 128 rows", [*times.values()], [at(1024, rows) for rows in times]
        for gpu_gb in GPUS_GB:
            claim = claim_of([measured_on], gpu_gb)
            if claim is None or "decode_ms" not in claim:
                continue
            run, rows = load_config(CONFIGS / f"qwen3_4b_thinking_{gpu_gb}gb.yaml"), claim["rows"]
            work, count = read_workload(run, here, engine="generate"), step_completions(run)
            prompt, length = run.data.max_prompt_length, run.rloo.max_completion_length
            places = [prompt + int(share * (length - 64)) for share in (0, 0.5, 1)]
            yield f"{gpu_gb} GB: ms a token, {rows} rows", claim["decode_ms"], [at(one, rows) for one in places]
            parts_s = [sampling_s(work, count, rows, 1.0, gpu), training_s(work, count * work.row_tokens, gpu)]
            measured = [claim[name] for name in ("rollout_s", "gradient_s", "step_s")]
            yield f"{gpu_gb} GB: rollout, training, step, s", measured, [*parts_s, sum(parts_s)]


def token_table(found: Any) -> list[str]:
    """Seconds of a rollout by engine and decoder, over the kit's own decoder, and operations of a token step."""
    names = {"DirectDecoder": "kit's decoder", "ModuleDecoder": "through the modules"}
    rows = []
    for case in found["cases"]:
        for side, one in case["sides"].items():
            spread = f"{one['ratio']:.2f}x ({one['ratio_low']:.2f} to {one['ratio_high']:.2f})"
            what = f"{case['model']}, {case['weights']}, {case['rows']} rows"
            operations = str(case["operations"].get(side, ""))
            rows.append([what, names.get(side, "`generate`"), f"{one['seconds']:.2f} s", spread, operations])
    return table(["model", "side", "rollout", "over the kit's decoder", "operations a token"], rows)


def speeds_table(gpus: list[Part]) -> list[str]:
    """For the page of the plan: speeds as measured, and as computed before and after the constants were corrected."""
    before = json.loads((GPU_RESULTS / "plan_before.json").read_text(encoding="utf-8"))["computed"]
    rows = []
    for what, *both in list_speeds(gpus):
        measured, computed = (
            ", ".join(f"{one:.3g}" for one in sorted(set(figures), key=figures.index)) for figures in both
        )
        ratios = [one / real for real, one in zip(*both, strict=True)]
        rows.append([what, measured, before.get(what, ""), computed, f"{min(ratios):.2f}-{max(ratios):.2f}"])
    return table(["H100", "measured", "plan before", "plan", "over measured"], rows)


# ------------------------------------------------------------------------------------- the configs' headers


def with_header(text: str, run: Any, gpu_gb: float, found: Mapping[str, Any] | None) -> str:
    """A config's text with the plan's figures and, if it was measured, a line with the measurement."""
    plan = plan_vram(run, gpu_gb * 1e9 / 2**30)
    state = "computed" if found else "computed, not measured"
    memory = f"# Memory:  {plan.rollout_gib:.1f} GiB in a rollout, {plan.training_gib:.1f} GiB in training, of "
    text = re.sub(r"# Memory: .*", f"{memory}{plan.machine.total_gib:.1f} GiB ({state}).", text)
    text = re.sub(r"(# Rollout: .*= \d+ completions, )\d+ of them", rf"\g<1>{plan.rows} of them", text)
    if (step := plan.step) is not None and step.hours is not None:
        long = "a weekend or longer: " if step.hours > 12 else ""
        hours = f"{long}{run.rloo.max_steps} steps and {step.evaluation_s / 3600:.1f} h of evaluations take "
        hours += f"{step.hours:.{0 if long else 1}f} h on an {step.gpu} (computed, not measured)."
        text = re.sub(r"# Hours: .*", f"# Hours:   {hours}", text)
    text = re.sub(r"# Measured: .*\n", "", text)
    if found:
        lasts = f"; {found['step_s']:.0f} s a step" if "step_s" in found else ""
        line = (
            f"# Measured: {'at most ' if found['after'] else ''}{found['rollout_gib']:.1f} and "
            f"{found['training_gib']:.1f} GiB without CUDA's context, on an {found['gpu']} capped to {gpu_gb:g} GB"
            f"{lasts}.\n"
        )
        text = re.sub(r"(#          Another GPU\?.*\n)", lambda match: match.group(1) + line, text)
    return text


def write_headers(gpus: list[Part]) -> None:
    """Every config for a GPU: the plan's figures, and what was measured."""
    for path in sorted(CONFIGS.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        if (needs := re.search(r"one NVIDIA GPU with (\d+) GB", text)) is None:
            continue
        named = re.search(r"thinking_(\d+)gb$", path.stem)
        found = claim_of(gpus, int(named[1])) if named else None
        new = with_header(text, load_config(path), float(needs[1]), found)
        if new != text:
            path.write_text(new, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: header written")


def collect(source: Path, results: Path = GPU_RESULTS) -> None:
    """Copy the calls of a folder to where the report reads them, by the name of their GPU.

    Raises:
        SystemExit: the folder has no calls, or a rehearsal's.
    """
    lines = sorted(source.glob("call[012].jsonl"))
    if not lines:
        raise SystemExit(f"{source} has no call1.jsonl, call2.jsonl or call0.jsonl")
    for path in lines:
        header = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
        if header.get("rehearsed"):
            raise SystemExit(f"{path} is a rehearsal's: nothing in it was measured")
        target = results / folder_of(header["machine"]["gpu"]).name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        print(f"{target}: copied")


def main() -> int:
    """Collect, and write everything that follows."""
    reporting.settle()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, help="folder of a GPU's call1.jsonl and call2.jsonl")
    options = parser.parse_args()
    if options.source is not None and not options.source.resolve().is_relative_to(GPU_RESULTS):
        collect(options.source.resolve())
    gpus = read_gpus(GPU_RESULTS)
    write_headers(gpus)
    reporting.write_tables(TABLES, PAGES)
    print(f"GPUs that were measured: {', '.join(map(name_of, gpus)) or 'none'}")
    return 0


GPU_TABLES = {
    "gpu-line": gpu_line, "gpu-short": short_table, "gpu-decoding": decoding_table, "gpu-speeds": speeds_table,
}  # fmt: skip
TABLES: reporting.Tables = {
    "token": (token_table, "decoding.json"),
    "step": (step_table, "rloo_step.json"),
    "shorter": (shorter_table, "shorter_thinking.json"),
    "step-times": (times_table, ""),
    "step-hours": (hours_table, ""),
} | {name: ((lambda folder, make=make: make(read_gpus(folder))), "gpu") for name, make in GPU_TABLES.items()}


if __name__ == "__main__":
    sys.exit(main())
