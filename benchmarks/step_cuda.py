"""`rloo_step.py --device cuda`: our step against stock TRL's and Unsloth's on one CUDA GPU, cell by cell.

    python benchmarks/rloo_step.py --device cuda                    # every cell that has no result from this GPU yet
    python benchmarks/rloo_step.py --device cuda --only 'training-4k*' whole-1k-native
    python benchmarks/rloo_step.py --device cuda --list             # what there is, and what is known of it
    python benchmarks/rloo_step.py --device cuda --rehearse         # the same code on the CPU, tiny; no measurement

Qwen3-4B with random weights in 4-bit, K 8, 16 completions, their lengths lognormal up to 1k, 4k and 8k tokens (2k for
whole steps), beta 0.05. A cell is one side at one length in a process of its own: Unsloth changes TRL and transformers
when it is imported, and peaks of memory would mix. It takes eight minutes at most and writes
benchmarks/results/step_cuda/NAME.json as soon as a figure is known (`cells.py`); `rloo_step.py --write-table` puts what
is there into docs/benchmarks.md.

Sides: TRL's RLOO trainer with transformers (stock) and with Unsloth (stock-unsloth), Unsloth's GRPO trainer on the same
completions (grpo-unsloth), and the kit with each setting of `memory`, each backend and each rollout engine. What a
machine cannot install (vLLM) is skipped with the reason. Left out: several GPUs, trained weights.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import cells
import reporting
from cells import Cell
from step_cuda_models import Kind

RESULTS = reporting.RESULTS / "step_cuda"
SOURCES = tuple(f"benchmarks/{name}.py" for name in ("step_*", "imposed_lengths", "checkpoints"))
SOURCES += ("tests/on_gpu/[ef]*.py",)
REPEATS = 3
STOCK = Kind("stock", "transformers")
STOCK_UNSLOTH, GRPO_UNSLOTH = Kind("stock", "unsloth"), Kind("grpo", "unsloth")
TRAINED = {
    "fast-unsloth": Kind("fast", "unsloth"),
    "stock-unsloth": STOCK_UNSLOTH,
    "grpo-unsloth": GRPO_UNSLOTH,
    "fast": Kind("fast", "transformers", "native"),
    "stock": STOCK,
    "low-unsloth": Kind("low", "unsloth"),
    "low": Kind("low", "transformers", "native"),
    "balanced-unsloth": Kind("balanced", "unsloth"),
    "balanced": Kind("balanced", "transformers", "native"),
}
SAMPLED = {
    "native": Kind("fast", "transformers", "native"),
    "generate-unsloth": Kind("fast", "unsloth", "generate"),
    "stock-unsloth": STOCK_UNSLOTH,
    "grpo-unsloth": GRPO_UNSLOTH,
    "generate": Kind("fast", "transformers", "generate"),
    "stock": STOCK,
    "native-int8": Kind("fast", "transformers", "native", "int8"),
    "server": Kind("fast", "transformers", "server"),
    "vllm": Kind("fast", "transformers", "vllm"),
}
LONG = {  # GPU in GB, K, and how 16k tokens of thinking are sampled on it
    "long-12gb-chunked": (12, 4, Kind("fast", "unsloth")),
    "long-12gb-int8": (12, 4, Kind("fast", "transformers", "native", "int8")),
    "long-24gb-chunked": (24, 8, Kind("fast", "unsloth")),
    "long-24gb-int8": (24, 8, Kind("fast", "transformers", "native", "int8")),
}

FIRST = (  # what the aims are about: if the time is short, these
    "ceilings", "training-4k-fast-unsloth", "training-4k-stock-unsloth", "training-4k-grpo-unsloth",
    "whole-2k-generate-unsloth", "whole-2k-stock-unsloth", "whole-2k-native", "whole-2k-grpo-unsloth",
    "long-12gb-chunked", "long-24gb-chunked", "long-12gb-int8", "long-24gb-int8", "profile-training-fast-unsloth",
    "profile-decoding-native",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What a cell's process does.

    Attributes:
        part: "training", "whole", "profile-training", "profile-decoding", "ceilings" or "long".
        length: a key of LENGTHS. beta: of the KL penalty.
    """

    name: str
    what: str
    part: str
    kind: Kind = STOCK
    length: str = ""
    beta: float = 0.05

    @property
    def halves(self) -> bool:
        """Whether the side's memory depends on the micro-batch, so that smaller ones are tried where it is full."""
        return self.part in ("training", "whole", "profile-training") and self.kind.name in ("stock", "grpo")


def list_jobs() -> list[Job]:
    """Every job, those that matter most first."""
    jobs = [Job("ceilings", "what the GPU does of matrix products and copies: the floors rest on it", "ceilings")]
    for length in ("4k", "1k", "8k"):
        for name, kind in TRAINED.items():
            jobs.append(Job(f"training-{length}-{name}", f"training part, {length}: {name}", "training", kind, length))
    for length in ("1k", "2k"):
        for name, kind in SAMPLED.items():
            jobs.append(Job(f"whole-{length}-{name}", f"whole steps, {length}: {name}", "whole", kind, length))
    for name in ("fast-unsloth", "stock-unsloth", "fast"):
        what = f"where the training part's time goes, 4k: {name}"
        jobs.append(Job(f"profile-training-{name}", what, "profile-training", TRAINED[name], "4k"))
    for name in ("native", "generate-unsloth"):
        what = f"where the decoding's time goes: {name}"
        jobs.append(Job(f"profile-decoding-{name}", what, "profile-decoding", SAMPLED[name]))
    for name, (gpu_gb, generations, kind) in LONG.items():
        what = f"{gpu_gb} GB, K {generations}, 16k thinking tokens, {kind.cache} cache, through {kind.backend}"
        jobs.append(Job(name, what, "long", kind))
    for name in ("fast-unsloth", "stock-unsloth", "grpo-unsloth"):
        what = f"training part without a KL penalty, 4k: {name}"
        jobs.append(Job(f"training-4k-{name}-beta0", what, "training", TRAINED[name], "4k", beta=0.0))
    return sorted(jobs, key=lambda job: FIRST.index(job.name) if job.name in FIRST else len(FIRST))


def list_cells(repeats: int = REPEATS) -> list[Cell]:
    """The jobs as `cells.py` runs them."""
    unsloth_python = reporting.load_file("tests/on_gpu/run.py").unsloth_python()  # what rehearses Unsloth's sides
    found, through = [], {}
    for job in list_jobs():
        arguments = ("-u", "benchmarks/rloo_step.py", "--device", "cuda", "--repeats", str(repeats), "--cell", job.name)
        lines = (job.part, job.kind, job.beta == 0, job.name if job.part == "long" else "")
        twin = through.setdefault(lines, job.name)
        reason = "" if twin == job.name else f"{twin} goes through the same lines"
        other = None
        if job.kind.backend == "unsloth":
            other = unsloth_python
            if other is None and not reason:
                reason = "Unsloth is not here: make test-unsloth, or RLOO_KIT_UNSLOTH_PYTHON names its Python"
        if job.kind.engine == "vllm":
            reason = "vLLM needs CUDA; how lengths are imposed on it is tested with a stand-in"
        command, rehearsal = (sys.executable, *arguments), None if other is None else (other, *arguments)
        found.append(Cell(job.name, command, job.what, sources=SOURCES, rehearsed_by=rehearsal, not_rehearsed=reason))
    return found


def run_cell(name: str, rows: int | None, repeats: int) -> int:
    """The process of one cell: its work, or, where a micro-batch may be too large, processes that try smaller ones."""
    from step_cuda_cells import START_VARIABLE

    os.environ.setdefault(START_VARIABLE, str(time.time()))
    job = {job.name: job for job in list_jobs()}[name]
    if job.halves and rows is None:
        return _try_rows(job, repeats)
    import step_cuda_models

    if job.kind.engine in ("vllm", "server") and not cells.rehearsing() and find_spec("vllm") is None:
        cells.skip("vLLM is not installed")
    step_cuda_models.start_backend(job.kind.backend, job.kind.name)
    import step_cuda_cells as work

    try:
        if job.part in ("training", "whole"):
            measure = work.measure_training if job.part == "training" else work.measure_whole
            measure(job.kind, job.length, job.beta, rows, repeats)
        elif job.part == "profile-training":
            work.profile_training(job.kind, job.length, rows)
        elif job.part == "profile-decoding":
            work.profile_decoding(job.kind)
        elif job.part == "ceilings":
            work.measure_ceilings()
        else:
            import step_cuda_long

            gpu_gb, generations, kind = LONG[job.name]
            step_cuda_long.measure_long(kind, gpu_gb, generations)
    except RuntimeError as error:
        from rloo_kit.system.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        print(f"out of memory: {error}", flush=True)
        cells.report(ran_out=[str(error)[:300]])
        return work.FULL_MEMORY
    return 0


def _try_rows(job: Job, repeats: int) -> int:
    """The cell with a group a micro-batch, or with half, a quarter .. of it: a user would do the same."""
    from step_cuda_cells import FULL_MEMORY

    too_large = []
    for rows in (8, 4, 2, 1):
        command = [sys.executable, "-u", "benchmarks/rloo_step.py", "--device", "cuda", "--cell", job.name]
        command += ["--rows", str(rows), "--repeats", str(repeats)]
        code = subprocess.run(command, cwd=reporting.ROOT, check=False).returncode
        if code != FULL_MEMORY:
            return code
        too_large.append(rows)
        cells.report(out_of_memory_rows=too_large)
    return 0  # a finding: it does not fit this GPU


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options behind `--device cuda`."""
    parser = argparse.ArgumentParser(
        prog="rloo_step.py --device cuda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cells.add_arguments(parser, RESULTS)
    text = f"steps behind the one that is discarded ({REPEATS}; rehearsed 1)"
    parser.add_argument("--repeats", type=int, help=text)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run what was not measured yet; the exit code is 1 where a cell failed."""
    options = parse(arguments)
    repeats = options.repeats or (1 if options.rehearse else REPEATS)
    if options.cell:
        return run_cell(options.cell, options.rows, repeats)
    return cells.run_cells(list_cells(repeats), options, "python benchmarks/rloo_step.py --device cuda")


if __name__ == "__main__":
    reporting.settle()
    sys.exit(main(sys.argv[1:]))
