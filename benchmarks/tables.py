"""Writes the figures of `results/` into README, docs, the configs' headers and the memory plan's corrections.

    python benchmarks/tables.py                       # all of them
    make gpu-report                                   # the same
    python benchmarks/tables.py --from DIR            # copies or unpacks the parts of a GPU from DIR there first

A page marks a table with two comments that name it, and a test compares it with the results. A GPU's figures are those
of `results/gpu/part1.jsonl`, `part2.jsonl` and `part3.jsonl` (`first_hour.py`); without a file they read "not
measured", and a rehearsal's files are refused. A ratio compares two figures of one part, so of one GPU.
"""

import argparse
import json
import math
import os
import re
import statistics
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import reporting
from on_gpu.checks import BACKENDS, Part, read_part
from on_gpu.expected import EXPECTED, find
from on_gpu.listing import list_checks
from reporting import ROOT, step_value, table

from rloo_kit import load_config, plan_vram
from rloo_kit.plan.parts import GIB
from rloo_kit.plan.planner import find_machine, read_workload
from rloo_kit.plan.speed import GPUS, find_gpu, run_time, sampling_s, step_completions, token_step_s, training_s

GPU_RESULTS = reporting.RESULTS / "gpu"
CORRECTIONS = ROOT / "rloo_kit" / "plan" / "corrections.json"
CONFIGS = ROOT / "configs"
PAGES = (*(ROOT / "docs" / f"{name}.md" for name in ("benchmarks", "plan")),
         ROOT / "README.md")  # fmt: skip
GPUS_GB = (8, 12, 16, 24)
MISSING = "not measured"
Parts = Mapping[int, Part]


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
            for engine in ("generate", "vllm"):
                plan = plan_vram(load_config(path, f"rollout.engine={engine}"), size * 1e9 / GIB)
                if not plan.fits or plan.step is None:
                    cells += ["does not fit", *[""] * (3 if engine == "generate" else 1)]
                    continue
                if engine == "generate":
                    cells += [str(plan.rows), f"{plan.rollout_gib:.1f}, {plan.training_gib:.1f}"]
                cells += [f"{plan.step.seconds:.0f}", f"{plan.step.hours:.1f}"]
            rows.append(cells)
    return rows


def times_table(_: Any = None) -> list[str]:
    """Each config on its GPU: rows at once, memory, seconds a step, hours; with what `make setup` installs, and hours
    with vLLM. Left out: one that differs by its data."""
    rows = [[config, gpu.partition(",")[0], *cells, with_vllm] for config, gpu, *cells, _, with_vllm in _times()]
    rows = [row for row in rows if "gym" not in row[0]]
    return table(["config", "GPU", "tokens", "rows", "GiB", "s a step", "h", "h, vLLM"], rows)


def hours_table(_: Any = None) -> list[str]:
    """Steps, lengths and hours of the evenings and of Qwen3-4B-Thinking's long runs, for the README."""
    rows = []
    for config, gpu, tokens, _, _, _, hours, _, with_vllm in _times():
        if "thinking_" in config or "evening" in config:
            steps = load_config(CONFIGS / config.strip("`")).rloo.max_steps
            rows.append([gpu, config, tokens, str(steps), hours, with_vllm])
    rows.sort(key=lambda row: "evening" not in row[1])
    return table(["GPU", "config", "tokens, at most", "steps", "hours", "with vLLM"], rows)


def gpus_table(_: Any = None) -> list[str]:
    """The GPUs' specifications, from their manufacturer."""
    rows = [[gpu.name, str(gpu.memory_gb), f"{gpu.bandwidth:g}", f"{gpu.tflops:g}"] for gpu in GPUS]
    return table(["GPU", "GB", "GB/s", "16-bit TFLOPS"], rows)


# ---------------------------------------------------------------------------------------------- measured on a GPU


def read_parts(folder: Path) -> dict[int, Part]:
    """The parts that were measured, by number; part 0 has single checks of all parts, for those without a file."""
    found = {number: read_part(folder / f"part{number}.jsonl") for number in (0, 1, 2, 3)}
    parts = {number: part for number, part in found.items() if part is not None and not part.header.get("rehearsed")}
    if single := parts.pop(0, None):
        for name, check in single.checks.items():
            number = list_checks()[name].part
            if found.get(number) is None:
                parts.setdefault(number, Part(single.header, {}, single.notes)).checks[name] = check
    return dict(sorted(parts.items()))


def gpu_line(parts: Parts) -> list[str]:
    """Which GPU and versions the figures are from."""
    if not parts:
        return ["Not measured: no GPU was at hand."]
    lines = []
    for number, part in sorted(parts.items()):
        versions = part.header["versions"]
        names = ", ".join(f"{name} {versions[name]}" for name in ("torch", "trl", "unsloth") if versions.get(name))
        lines.append(
            f"Part {number}: {part.header['machine']['gpu']}, {part.header['measured']}, revision "
            f"`{part.header['revision'][:7]}`; {names}."
        )
        lines += [f"{note}." for note in part.notes]
    return lines


def decoding_table(parts: Parts) -> list[str]:
    """Decoding: milliseconds a step and tokens a second, by rows."""
    from on_gpu.figures import ROWS

    rows = []
    for backend, name in (("unsloth", "Unsloth's `generate`"), ("transformers", "`native`, transformers")):
        cells = []
        for count in ROWS:
            found = parts[2].value(f"{backend}/decodes", f"rows {count}") if 2 in parts else None
            if found is None:
                cells.append(MISSING)
            elif not found.get("ms_per_step"):
                cells.append("does not fit")
            else:
                cells.append(f"{found['ms_per_step']:.1f} ms, {found['tokens_per_s']} tokens/s")
        rows.append([name, *cells])
    return table(["engine", *(f"{count} rows" for count in ROWS)], rows)


def claim_of(parts: Parts, gpu_gb: int) -> dict[str, Any] | None:
    """The figures of a shipped config, and the backend that ran it; None if it did not train."""
    for backend in BACKENDS:
        found = parts[3].checks.get(f"{backend}/trains_on_{gpu_gb}gb") if 3 in parts else None
        if found is not None and "rollout_gib" in found.values:
            return found.values | {"backend": backend, "after": found.after}
    return None


def short_table(parts: Parts) -> list[str]:
    """For the README: a line each for correctness, speed and memory."""
    rows = []
    for backend, name in (("unsloth", "Unsloth"), ("transformers", "transformers")):
        names = [one for one, check in list_checks().items() if check.part == 1 and check.backend == backend]
        known = [parts[1].checks[one].state for one in names if one in parts[1].checks] if 1 in parts else []
        known = [state for state in known if state not in ("not run", "skipped")]
        passed = f"{known.count('passed')} of {len(known)} checks passed" if known else MISSING
        rows.append([f"Qwen3-0.6B through {name}: loads, scores, trains, resumes, merges", passed])
    for one in EXPECTED:
        if "8 rows" in one.what and "128" not in one.what:
            value = find(parts[one.part], one.check, *one.keys) if one.part in parts else None
            rows.append([one.what, MISSING if value is None else f"{value:.0f} ms"])
    part = parts.get(2, Part({}, {}, []))
    for what, stock, ours in (
        ("TRL under Unsloth", "unsloth/stock", "unsloth"), ("GRPO of Unsloth", "unsloth/grpo", "unsloth"),
        ("TRL, transformers", "transformers/stock", "transformers"),
    ):  # fmt: skip
        theirs = part.value(f"{stock}_trains_4k", "training_s")
        mine = part.value(f"{ours}/trains_4k", "fast", "training_s")
        ratio = f"{theirs / mine:.2f}x" if theirs and mine else MISSING
        rows.append([f"Qwen3-4B: training part, 4k, vs. {what}", ratio])
    for gpu_gb in GPUS_GB:
        found = claim_of(parts, gpu_gb)
        text = MISSING
        if found is not None:
            peak = max(found["rollout_gib"], found["training_gib"])
            text = f"trains, {'at most ' if found['after'] else ''}{peak:.1f} GiB"
            text += f", {found['step_s']:.0f} s a step at most" if "step_s" in found else ""
        rows.append([f"Qwen3-4B in 4-bit on {gpu_gb} GB, simulated by a cap", text])
    return table(["on a GPU", "found"], rows)


def list_speeds(parts: Parts) -> Iterator[tuple[str, list[float], list[float]]]:
    """Every speed that was measured, and what the plan computes for the same rows and lengths on the same GPU."""
    for number, part in parts.items():
        machine = part.header["machine"]
        gpu = find_gpu(machine["gpu"], machine.get("gpu_gib", 0))
        if gpu is None:
            continue
        here = find_machine(machine["gpu_gib"])
        run = load_config(CONFIGS / "qwen3_4b_thinking_8gb.yaml")
        work = read_workload(run, here, engine="generate")

        def at(tokens: int, rows: int, work: Any = work, gpu: Any = gpu) -> float:
            """Milliseconds of a token after so many in the cache."""
            return 1e3 * token_step_s(replace(work, prompt_tokens=0, completion_tokens=2 * tokens), rows, gpu)

        found = part.checks["unsloth/decodes"].values if "unsloth/decodes" in part.checks else {}
        if times := {
            int(name.split()[1]): one["ms_per_step"] for name, one in found.items() if name.startswith("rows")
        }:
            yield "4B: ms a token, 8, 32, 128 rows", [*times.values()], [at(1024, rows) for rows in times]
        for gpu_gb in GPUS_GB if number == 3 else ():
            claim = claim_of(parts, gpu_gb)
            if claim is None or "decode_ms" not in claim:
                continue
            run, rows = load_config(CONFIGS / f"qwen3_4b_thinking_{gpu_gb}gb.yaml"), claim["rows"]
            work, count = read_workload(run, here, engine="generate"), step_completions(run)
            prompt, length = run.data.max_prompt_length, run.rloo.max_completion_length
            places = [prompt + int(share * (length - 64)) for share in (0, 0.5, 1)]
            yield f"{gpu_gb} GB: ms a token, {rows} rows", claim["decode_ms"], [at(one, rows) for one in places]
            parts_s = [sampling_s(work, count, rows, rows, gpu), training_s(work, count * work.row_tokens, gpu)]
            measured = [claim[name] for name in ("rollout_s", "gradient_s", "step_s")]
            yield f"{gpu_gb} GB: rollout, training, step, s", measured, [*parts_s, sum(parts_s)]
        checks = [part.checks.get(f"transformers/{name}") for name in ("resumes", "keeps_the_ratio")]
        if steps := [row["step_time"] for check in checks if check for row in check.values.get("steps", ())]:
            words = "rloo.thinking_budget=null", "rloo.max_completion_length=64", "data.max_prompt_length=128"
            run = load_config(CONFIGS / "qwen3_0_6b.yaml", *words, "rloo.answer_budget=null")
            step = run_time(run, read_workload(run, here, engine="native"), step_completions(run), gpu)
            yield "0.6B, `native`: step, s", steps, [step.seconds] * len(steps)


def speeds_table(parts: Parts) -> list[str]:
    """For the page of the plan: speeds as measured, and as computed before and after the constants were corrected."""
    before = json.loads((GPU_RESULTS / "plan_before.json").read_text(encoding="utf-8"))["computed"]
    rows = []
    for what, *both in list_speeds(parts):
        measured, computed = (
            ", ".join(f"{one:.3g}" for one in sorted(set(figures), key=figures.index)) for figures in both
        )
        ratios = [one / real for real, one in zip(*both, strict=True)]
        rows.append([what, measured, before.get(what, ""), computed, f"{min(ratios):.2f}-{max(ratios):.2f}"])
    return table(["H100", "measured", "plan before", "plan", "over measured"], rows)


def plan_table(parts: Parts) -> list[str]:
    """For the page of the memory plan: measured over computed, and the corrections that follow."""
    rows = []
    for gpu_gb in GPUS_GB:
        found = claim_of(parts, gpu_gb)
        cells = [MISSING] * 2
        if found is not None:
            most = "at most " if found["after"] else ""
            cells = [f"{most}{found[name]:.2f} / {computed:.2f} = {found[name] / computed:.2f}"
                     for name, computed in found["computed"].items()]  # fmt: skip
        rows.append([f"`qwen3_4b_thinking_{gpu_gb}gb.yaml`", *cells])
    known = json.loads(CORRECTIONS.read_text(encoding="utf-8"))
    factors = ", ".join(f"{name} {value:g}" for name, value in known["factors"].items())
    source = f"From {known['source']}: {factors}." if known["source"] else "No correction yet: nothing was measured."
    return [*table(["config", "rollout, GiB measured / computed", "training"], rows), "", source]


# ------------------------------------------------------------------------------------- corrections and headers


def corrections(parts: Parts) -> dict[str, Any]:
    """The largest ratio of measured to computed peaks over all configs, by backend and part; never below 1, because a
    plan that is too high costs rows, and one that is too low costs the run. Left out: a config that ran after an
    interrupted check, whose memory counts in its peaks."""
    factors: dict[str, float] = {}
    for gpu_gb in GPUS_GB:
        found = claim_of(parts, gpu_gb)
        for name in ("rollout", "training") if found and not found["after"] else ():
            ratio = found[f"{name}_gib"] / found["computed"][f"{name}_gib"]
            key = f"{found['backend']} {name}"
            factors[key] = max(factors.get(key, 1.0), math.ceil(100 * ratio) / 100)
    header = parts[3].header if factors else {}
    source = f"{header['machine']['gpu']}, {header['measured']}" if factors else ""
    return {"source": source, "factors": factors}


def with_header(text: str, run: Any, gpu_gb: float, found: Mapping[str, Any] | None, gpu: str) -> str:
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
            f"{found['training_gib']:.1f} GiB without CUDA's context, on an {gpu} capped to {gpu_gb:g} GB{lasts}.\n"
        )
        text = re.sub(r"(#          Another GPU\?.*\n)", lambda match: match.group(1) + line, text)
    return text


def write_headers(parts: Parts) -> None:
    """Every config for a GPU: the plan's figures, and what was measured."""
    for path in sorted(CONFIGS.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        if (needs := re.search(r"one NVIDIA GPU with (\d+) GB", text)) is None:
            continue
        named = re.search(r"thinking_(\d+)gb$", path.stem)
        found = claim_of(parts, int(named[1])) if named else None
        gpu = parts[3].header["machine"]["gpu"] if 3 in parts else ""
        new = with_header(text, load_config(path), float(needs[1]), found, gpu)
        if new != text:
            path.write_text(new, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: header written")


def collect(source: Path, target: Path = GPU_RESULTS) -> None:
    """Copy the parts of a folder, or unpack its archives, to where the report reads them.

    Raises:
        SystemExit: the folder has no parts, or a rehearsal's.
    """
    archives, lines = (sorted(source.glob(f"part[0123].{ending}")) for ending in ("tar.gz", "jsonl"))
    if not archives and not lines:
        raise SystemExit(f"{source} has no part1.jsonl, part2.jsonl or part3.jsonl, nor their archives")
    texts = {path.name: path.read_text(encoding="utf-8") for path in lines}
    for archive in archives:
        name = archive.name.replace(".tar.gz", ".jsonl")
        with tarfile.open(archive) as file:
            member = file.extractfile(name)
            assert member is not None
            texts.setdefault(name, member.read().decode())
    for name, text in texts.items():
        if json.loads(text.splitlines()[0]).get("rehearsed"):
            raise SystemExit(f"{source / name} is a rehearsal's: nothing in it was measured")
    target.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (target / name).write_text(text, encoding="utf-8")
        print(f"{target / name}: copied")


def main() -> int:
    """Collect, and write everything that follows."""
    reporting.settle()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, help="folder of a part's JSON lines or archives")
    options = parser.parse_args()
    if options.source is not None and options.source.resolve() != GPU_RESULTS:
        collect(options.source.resolve())
    parts = read_parts(GPU_RESULTS)
    CORRECTIONS.write_text(json.dumps(corrections(parts), indent=2) + "\n", encoding="utf-8")
    write_headers(parts)
    reporting.write_tables(TABLES, PAGES)
    print(f"parts that were measured: {', '.join(map(str, parts)) or 'none'}")
    return 0


GPU_TABLES = {
    "gpu-line": gpu_line, "gpu-short": short_table, "gpu-decoding": decoding_table, "gpu-plan": plan_table,
    "gpu-speeds": speeds_table,
}  # fmt: skip
TABLES: reporting.Tables = {
    "step": (step_table, "rloo_step.json"),
    "shorter": (shorter_table, "shorter_thinking.json"),
    "step-times": (times_table, ""),
    "step-hours": (hours_table, ""),
    "step-gpus": (gpus_table, ""),
} | {name: ((lambda folder, make=make: make(read_parts(folder))), "gpu") for name, make in GPU_TABLES.items()}


if __name__ == "__main__":
    sys.exit(main())
