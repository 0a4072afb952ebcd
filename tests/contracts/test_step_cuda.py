"""The cells of `rloo_step.py --device cuda`: what they are, what becomes of their figures, and that each can run."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
END = 9


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`module(name)` imports a file of the folder, which lies last on the path: its rewards.py is not the package."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    return importlib.import_module


def cell(gpu: str = "H", state: str = "passed", **values: Any) -> dict[str, Any]:
    machine, versions = {"gpu": gpu}, {"torch": "2.13.0"}
    return {"machine": machine, "versions": versions, "revision": "abc" * 9, "state": state, "values": values}


def steps(*seconds: float, gib: float = 1.0) -> dict[str, Any]:
    found = [
        {"whole_s": 2 * s, "generation_s": s, "training_s": s, "held_gib": 3.0, "peak_gib": 3 + gib} for s in seconds
    ]
    return {"steps": found, "tokens": 100, "settings": {"rows": 4}}


def test_cells_are_what_the_issue_of_the_tables_needs(module: Any) -> None:
    """An aim whose cell was renamed stays "not measured" for ever, however often the GPU is rented."""
    cuda, tables = module("step_cuda"), module("step_cuda_tables")
    jobs = {job.name: job for job in cuda.list_jobs()}
    assert len(jobs) == len(cuda.list_jobs()) == len(cuda.list_cells())
    for _, base, ours, *_ in tables.AIMS:
        assert jobs[base].part == jobs[ours].part and jobs[base].length == jobs[ours].length
    assert {f"profile-{name}" for name in tables.PROFILES} | set(cuda.LONG) | set(cuda.FIRST) <= jobs.keys()
    assert list(jobs)[: len(cuda.FIRST)] == list(cuda.FIRST)
    assert tables.NAMES.keys() >= cuda.TRAINED.keys() | cuda.SAMPLED.keys()
    engines = {kind.engine for kind in cuda.SAMPLED.values()}
    assert engines == {"native", "generate", "continuous", "vllm", "server"}
    for one in cuda.list_cells():
        assert one.limit_s <= 480 and one.command[-1] == one.name and one.sources


def test_every_side_is_rehearsed_once(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that no rehearsal reaches runs for the first time on a rented GPU."""
    cuda = module("step_cuda")
    monkeypatch.setenv("RLOO_KIT_UNSLOTH_PYTHON", sys.executable)
    found = {one.name: one for one in cuda.list_cells()}
    skipped = {name for name, one in found.items() if one.not_rehearsed}
    for job in cuda.list_jobs():
        same = {other.name for other in cuda.list_jobs() if (other.part, other.kind) == (job.part, job.kind)}
        assert job.kind.engine == "vllm" or not same <= skipped, job.name
    for name in ("training-4k-stock-unsloth", "whole-2k-generate-unsloth", "long-12gb-chunked"):
        assert found[name].rehearsed_by[0] == sys.executable and not found[name].not_rehearsed
    monkeypatch.setenv("RLOO_KIT_UNSLOTH_PYTHON", "/nowhere/python")
    assert "make test-unsloth" in {one.name: one for one in cuda.list_cells()}["long-12gb-chunked"].not_rehearsed


def test_examples_hold(module: Any) -> None:
    """The folder's rewards.py hides the package from pytest's collection of doctests, so these are asked for."""
    import doctest

    for name in ("imposed_lengths", "step_cuda_cells", "step_cuda_floor", "rloo_step"):
        failed, tried = doctest.testmod(module(name))
        assert tried > 0 and failed == 0, name


def test_tables_compare_what_can_be_compared(module: Any) -> None:
    """A ratio across two GPUs, a rehearsal taken for a measurement, a side that did not fit shown as fast."""
    tables = module("step_cuda_tables")
    results = {
        "training-4k-stock-unsloth": cell(**steps(8.0, 10.0, 9.0, gib=4.0), out_of_memory_rows=[8]),
        "training-4k-fast-unsloth": cell(**steps(2.0, 2.5, 2.25, gib=1.0)),
        "training-4k-low": cell("T4", **steps(1.0)),
        "training-4k-stock": cell(ran_out=["full"], out_of_memory_rows=[8, 4, 2, 1]),
        "training-4k-balanced": cell(**steps(1.0)) | {"rehearsed": True},
        "whole-2k-vllm": cell(state="skipped") | {"reason": "vLLM is not installed"},
        "long-12gb-int8": cell(left_gib=0.5),
        "long-24gb-int8": cell(state="failed", ran_out=["rollout"]) | {"reason": "exit code 1"},
        "long-24gb-chunked": cell(state="failed") | {"reason": "exit code 1; NameError\nmore"},
    }
    training = {line.split(" | ")[0]: line for line in tables.training_table(results)}
    assert "2.25 s, 44 tokens/s, 1.0 GiB; 4.00x" in training["| ours, Unsloth, `fast`"]
    assert (
        "9.00 s" in training["| TRL, Unsloth"]
        and "4 rows a micro-batch: more did not fit" in training["| TRL, Unsloth"]
    )
    assert training["| TRL, transformers"].count("does not fit, one row a micro-batch either") == 1
    low = training["| ours, transformers, `low`"]
    assert "1.00 s" in low and "x" not in low.partition("GiB")[2], "another GPU's figure is no base for a ratio"
    assert training["| ours, transformers, `balanced`"].count("not measured") == 3
    assert any("not measured: vLLM is not installed" in line for line in tables.whole_table(results))
    aims = "\n".join(tables.aims_table(results))
    assert "| 4x | 4.00x | reached |" in aims and "| 2x less | 4.00x | reached |" in aims
    assert "0.5 GiB left | reached" in aims and "does not fit | **missed**" in aims
    assert "not measured: exit code 1; NameError |  |" in aims
    assert "T4" in tables.gpu_line(results)[0]


def test_floor_and_profile_tables(module: Any) -> None:
    """The floor is arithmetic over what the GPU was measured to do; a share is of the GPU's busy time."""
    tables = module("step_cuda_tables")
    results = {
        "ceilings": cell(tflops=500.0, gb_per_s=2000.0),
        "training-4k-fast-unsloth": cell(**steps(5.0)),
        "profile-training-fast": cell(
            plain_s=4.0, busy_s=2.0, idle_share=0.5, seconds_by_kind={"attention": 0.5, "everything else": 1.5}
        ),
    }
    line = next(line for line in tables.floor_table(results) if line.startswith("| training part, 4k"))
    tflop, floor, times = (
        float(re.findall(pattern, line)[0]) for pattern in (r"(\d+) TFLOP", r"([\d.]+) s", r"([\d.]+) \|$")
    )
    assert floor == pytest.approx(tflop / 500, abs=0.01) and times == pytest.approx(5 / floor, abs=0.1)
    shares = {line.split(" | ")[0]: line for line in tables.profile_table(results)}
    assert "25%" in shares["| attention"] and "75%" in shares["| everything else"] and "50%" in shares["| GPU idle"]
    assert shares["| seconds"].count("not measured") == 4


def test_a_side_that_does_not_fit_takes_smaller_micro_batches(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock's users halve their batch until it fits: "out of memory" against our figure would be no comparison."""
    cuda, cells, work = module("step_cuda"), module("cells"), module("step_cuda_cells")
    target = tmp_path / "cell.json"
    monkeypatch.setenv(cells.FILE_VARIABLE, str(target))
    monkeypatch.setenv(work.START_VARIABLE, "0")
    asked = []

    def run(command: list[str], cwd: Path, check: bool) -> Any:
        asked.append(int(command[command.index("--rows") + 1]))
        return SimpleNamespace(returncode=work.FULL_MEMORY if asked[-1] > 2 else 0)

    monkeypatch.setattr(cuda.subprocess, "run", run)
    assert cuda.run_cell("training-8k-stock", None, 3) == 0 and asked == [8, 4, 2]
    assert json.loads(target.read_text(encoding="utf-8"))["values"]["out_of_memory_rows"] == [8, 4]


def test_memory_that_runs_out_is_told_by_the_exit_code(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other error must stay one: a typing mistake is no GPU that is too small."""
    cuda, cells, work = module("step_cuda"), module("cells"), module("step_cuda_cells")
    models, torch = module("step_cuda_models"), importlib.import_module("torch")
    monkeypatch.setenv(cells.FILE_VARIABLE, str(tmp_path / "cell.json"))
    monkeypatch.setenv(work.START_VARIABLE, "0")
    monkeypatch.setattr(models, "start_backend", lambda *names: None)
    errors = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("size mismatch")]

    def fail() -> None:
        raise errors.pop(0)

    monkeypatch.setattr(work, "measure_ceilings", fail)
    assert cuda.run_cell("ceilings", None, 1) == work.FULL_MEMORY
    values = json.loads((tmp_path / "cell.json").read_text(encoding="utf-8"))["values"]
    assert values["ran_out"] == ["CUDA out of memory"]
    with pytest.raises(RuntimeError, match="size mismatch"):
        cuda.run_cell("ceilings", None, 1)


def test_without_a_gpu_nothing_is_run_or_written(tmp_path: Path) -> None:
    """A run that finds no GPU must neither fail a build nor leave a file that reads like a measurement."""
    command = [sys.executable, str(FOLDER / "rloo_step.py"), "--device", "cuda", "--results", str(tmp_path / "found")]
    environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "no CUDA GPU" in done.stdout and "nothing is measured" in done.stdout and not (tmp_path / "found").exists()


def test_a_profile_counts_each_kernel_once(module: Any) -> None:
    """On a GPU the operator that launched a kernel, and the region around it, carry its time too."""
    found = [
        SimpleNamespace(
            key="aten::mm", device_type="DeviceType.CPU", self_device_time_total=5e6, self_cpu_time_total=2e6
        ),
        SimpleNamespace(key="sm90_gemm", device_type="DeviceType.CUDA", self_device_time_total=5e6, count=3),
        SimpleNamespace(key="Optimizer.step", device_type="DeviceType.CUDA", self_device_time_total=6e6, count=1),
    ]
    for event, is_region in zip(found, (False, False, True), strict=True):
        event.is_user_annotation, event.count = is_region, getattr(event, "count", 1)
    profile = SimpleNamespace(key_averages=lambda: found)
    cells_module = module("step_cuda_cells")
    assert list(cells_module._kernels(profile, on_gpu=True)) == [("sm90_gemm", 5.0, 3)]
    assert list(cells_module._kernels(SimpleNamespace(key_averages=lambda: found[:1]), on_gpu=False)) == [
        ("aten::mm", 2.0, 1)
    ]


# ------------------------------------------------------------------------------------------------- imposed lengths


def test_rows_keep_their_lengths_whatever_order_an_engine_takes(module: Any) -> None:
    """The generate engine sorts prompts by length: targets dealt by place would go to other groups than stock's."""
    torch, imposed = importlib.import_module("torch"), module("imposed_lengths")
    seen = []

    class Model:
        def generate(self, input_ids: Any, attention_mask: Any, logits_processor: Any) -> None:
            seen.append(logits_processor[0].targets.tolist())

    trainer = SimpleNamespace(model=Model())
    with imposed.impose_lengths(trainer, [[1], [1], [2, 3], [2, 3]], [4, 5, 6, 7], END):
        for _ in range(2):  # once more after memory ran out
            trainer.model.generate(
                input_ids=torch.tensor([[2, 3], [2, 3], [0, 1], [0, 1]]),
                attention_mask=torch.tensor([[1, 1], [1, 1], [0, 1], [0, 1]]),
                logits_processor=[],
            )
    assert seen == [[6, 7, 4, 5]] * 2 and "generate" not in vars(trainer.model)


def test_vllm_is_given_a_limit_for_each_prompt(module: Any) -> None:
    """TRL gives one set of parameters to all prompts; vLLM itself cannot be installed without CUDA."""
    imposed = module("imposed_lengths")

    class Parameters(SimpleNamespace):
        def clone(self) -> "Parameters":
            return Parameters(**vars(self))

    class Engine:
        def generate(self, prompts: Any, sampling_params: Any, use_tqdm: bool) -> list[Any]:
            assert all(one.ignore_eos and one.min_tokens == one.max_tokens for one in sampling_params)
            rows = [[5, END] + [5] * (one.max_tokens - 2) for one in sampling_params]
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=row)]) for row in rows]

    class Model:
        def generate(self) -> None: ...

    trainer = SimpleNamespace(model=Model(), vllm_generation=SimpleNamespace(llm=Engine()))
    shared = Parameters(max_tokens=99, min_tokens=0, ignore_eos=False)
    with imposed.impose_lengths(trainer, [[1], [1], [2]], [3, 4, 5], END):
        prompts = [{"prompt_token_ids": ids} for ids in ([1], [1], [2])]
        outputs = trainer.vllm_generation.llm.generate(prompts, sampling_params=shared, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [[5, 0, END], [5, 0, 5, END], [5, 0, 5, 5, END]]
    assert shared.max_tokens == 99 and "generate" not in vars(trainer.vllm_generation.llm)


# ------------------------------------------------------------------------------------------------------- rehearsal

TRAINED = ("training-4k-stock", "training-4k-fast", "training-4k-low", "training-4k-balanced")
SAMPLED = ("whole-1k-stock", "whole-1k-native", "whole-1k-generate", "whole-1k-continuous", "whole-1k-native-int8")
SERVED = ("whole-1k-server",)
OTHERS = ("profile-training-fast", "profile-decoding-native", "long-12gb-int8", "long-24gb-int8")
PROGRAM = """
import sys
sys.path[:0] = [{root!r}]
sys.path.append({folder!r})
import cells, step_cuda
for name in {names!r}:
    print("cell: " + name, flush=True)
    assert step_cuda.run_cell(name, None, 1) == 0, name
"""


@pytest.mark.slow
def test_the_cells_of_transformers_run() -> None:
    """All of it runs here as on a GPU, but for its sizes; a typing mistake found on a rented GPU costs an hour."""
    names = (*TRAINED, *SAMPLED, *SERVED, *OTHERS)
    program = PROGRAM.format(root=str(ROOT), folder=str(FOLDER), names=names)
    environment = os.environ | {"RLOO_KIT_CELL_REHEARSAL": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    values: dict[str, dict[str, Any]] = {}
    for line in done.stdout.splitlines():  # one process for all cells: each reports to the screen
        kind, _, rest = line.partition(": ")
        if kind == "cell":
            found = values.setdefault(rest, {})
        elif kind == "measured":
            found |= json.loads(rest)
    assert values.keys() == set(names)
    for name in (*TRAINED, *SAMPLED, *SERVED):
        (step,) = values[name]["steps"]
        assert 0 < step["training_s"] <= step["whole_s"] and "peak_gib" in step
        assert (step["generation_s"] > 0.001) == name.startswith("whole")
    for engine in ("native", "generate", "continuous", "server"):
        assert values[f"whole-1k-{engine}"]["engine"] == engine
    assert values["training-4k-stock"]["settings"]["rows"] == 2
    assert values["profile-training-fast"]["busy_s"] > 0 and values["profile-decoding-native"]["rows"] == 4
    for name in ("long-12gb-int8", "long-24gb-int8"):
        assert values[name]["cache"] == "int8" and not values[name]["ran_out"]
        assert values[name]["peaks_gib"].keys() == {"rollout", "training"} and values[name]["left_gib"] > 0


@pytest.mark.slow
def test_a_rehearsal_goes_through_the_runner_and_measures_nothing(tmp_path: Path) -> None:
    """A rehearsed figure that landed beside measured ones would end up in the table."""
    command = [sys.executable, str(FOLDER / "rloo_step.py"), "--device", "cuda", "--rehearse"]
    command += ["--results", str(tmp_path), "--only", "ceilings", "training-4k-fast", "whole-2k-vllm"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    found = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in tmp_path.glob("*.json")}
    assert found["ceilings"]["state"] == "passed" and found["ceilings"]["rehearsed"] is True
    assert found["ceilings"]["values"]["tflops"] > 0
    assert len(found["training-4k-fast"]["values"]["steps"]) == 1, "--repeats does not reach the cell"
    assert found["whole-2k-vllm"]["state"] == "skipped"
    assert "CUDA" in found["whole-2k-vllm"]["reason"] or "same lines" in found["whole-2k-vllm"]["reason"]
