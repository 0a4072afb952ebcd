"""Every check that needs a GPU, each a cell of its own: a pytest test in a process of its own (`benchmarks/cells.py`).

    make test-gpu                                   all; without a GPU it says so and ends with 0
    make test-gpu CELLS="life_0.6b gpu_8gb_*"       some of them (--only)
    make test-gpu MINUTES=9                         as much as fits a lease; the same command goes on (--minutes)
    make test-gpu REHEARSE=1                        the same code on the CPU, tiny; no measurement (--rehearse)
    python tests/on_gpu/run.py --list               what there is and what is known of it

Results: benchmarks/results/gpu/NAME.json, each written while its cell runs. Rehearsing takes Unsloth's own code where
the environment of `make test-unsloth` is there (RLOO_KIT_UNSLOTH_PYTHON names another), else transformers.
Left out: speed beside other trainers (`benchmarks/rloo_step.py --device cuda`), several GPUs.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # last: its rewards.py is not the package

import reporting
from cells import Cell, add_arguments, python, run_cells

ROOT, RESULTS = reporting.ROOT, reporting.RESULTS / "gpu"
SOURCES = ("tests/on_gpu/*.py", "benchmarks/checkpoints.py")
GPU_GB = (8, 12, 16, 24)


def cell(
    name: str, test: str, what: str, backend: str = "unsloth", rehearse: str = "", twin: str = "", **more: object
) -> Cell:
    """A cell that is one pytest test, by `backend`.

    `rehearse` says why it is not rehearsed; `twin` names the cell that is the same test through transformers.
    """
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib -ra")
    target = f"tests/on_gpu/{test}"
    own_python = unsloth_python() if backend == "unsloth" else None
    environment = {"RLOO_KIT_BACKEND": backend}
    rehearsal = python(*arguments, target)
    if own_python is not None:
        rehearsal = (own_python, *rehearsal[1:])
    elif backend == "unsloth":
        rehearsal = ("env", "RLOO_KIT_BACKEND=transformers", *rehearsal)
        if twin and not rehearse:
            rehearse = f"Unsloth is not here (make test-unsloth); through transformers it is the cell {twin}"
    return Cell(
        name,
        python(*arguments, target),
        what,
        environment=environment,
        sources=SOURCES,
        rehearsed_by=rehearsal,
        not_rehearsed=rehearse,
        **more,  # type: ignore[arg-type]
    )


def unsloth_python() -> str | None:
    """The interpreter of the environment in which Unsloth runs without a GPU."""
    chosen = os.environ.get("RLOO_KIT_UNSLOTH_PYTHON") or str(ROOT / ".venv-unsloth" / "bin" / "python")
    return chosen if Path(chosen).is_file() else None


def list_cells() -> Iterator[Cell]:
    """Cheap ones first: whoever has ten minutes learns the most from them."""
    for size in ("0.6b", "4b"):  # the others would make it themselves, on their own time
        program = str(ROOT / "benchmarks" / "checkpoints.py")
        yield Cell(
            f"checkpoint_{size}",
            python(program, size),
            f"Qwen3-{size.upper()} with random weights, made on the machine",
            environment={"RLOO_KIT_BACKEND": "transformers"},
            sources=SOURCES[1:],
            rehearsed_by=python(program, "tiny"),
        )
    layouts = "test_log_probs.py::test_every_layout_scores_as_single_sequences"
    ratio = "test_log_probs.py::test_on_policy_the_ratio_is_exactly_one"
    gradients = "test_log_probs.py::test_gradients_against_float32"
    for name, test, what in (
        ("log_probs", layouts, "every layout against single sequences; stock beside"),
        ("ratio", ratio, "on-policy the ratio is exactly 1, in each memory mode"),
        ("gradients", gradients, "16 bits against float32, in each layout"),
    ):
        yield cell(f"{name}_unsloth", test, what, twin=f"{name}_transformers")
        yield cell(f"{name}_transformers", test, what, "transformers")
    kernel = "test_packed_rows.py::test_varying_lengths_in_one_call_equal_the_buckets"
    yield cell("packed_kernel", kernel, "torch's attention for varying lengths against the buckets", "transformers")
    for size in ("0.6b", "4b"):
        same = "" if size == "0.6b" else "tiny as it is there, it is the cell of 0.6b"
        life, merge = (f"test_life.py::{test}[{size}]" for test in (
            "test_a_run_from_load_to_release", "test_the_adapter_merges"))  # fmt: skip
        yield cell(f"life_{size}", life, "4-bit: load, steps, save, resume, infer, release", rehearse=same)
        room = {"0.6b": 4.0, "4b": 12.0}[size]  # the base in 16 bit
        what = "the adapter in 16 bit, and 4-bit by both backends"
        yield cell(f"merge_{size}", merge, what, rehearse=same, least_gib=room)
    learns = "test_embedded.py::test_it_learns_as_on_the_cpu"
    yield cell("embedded", learns, "the embedded model learns through Unsloth as on the CPU")
    for gpu_gb in GPU_GB:
        for backend, precision in (("unsloth", "bf16"), ("unsloth", "fp16"), ("transformers", "bf16")):
            name = f"gpu_{gpu_gb}gb_{precision}" + ("_transformers" if backend == "transformers" else "")
            test = f"test_simulated_gpus.py::test_a_shipped_config_trains_at_full_length[{gpu_gb}-{precision}]"
            once = "" if precision == "bf16" else "16 bits are float32 there: it is the cell of bf16"
            what = f"qwen3_4b_thinking_{gpu_gb}gb.yaml at full length in {gpu_gb} GB, {precision}, {backend}"
            twin = f"gpu_{gpu_gb}gb_bf16_transformers" if backend == "unsloth" else ""
            yield cell(name, test, what, backend, once, twin, least_gib=gpu_gb * 1e9 / 2**30 + 0.5)


def main() -> int:
    """The exit code is 1 where a cell failed or was stopped."""
    reporting.settle()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, RESULTS)
    options = parser.parse_args()
    return run_cells(list(list_cells()), options, " ".join(["python tests/on_gpu/run.py", *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
