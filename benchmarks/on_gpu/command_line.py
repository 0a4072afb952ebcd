"""The whole command line on the embedded model, in a lane for each backend: what a user does, as they do it."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import reporting

from on_gpu.bench import Bench
from on_gpu.checks import check

MAIN = "from rloo_kit.cli import main; main()"
REHEARSED_MAIN = "from on_gpu.bench import start; start('unsloth', True); " + MAIN  # in Triton's interpreter
FIRST, RESUMED = 20, 25  # steps through Unsloth
SMALL = (
    "data.num_prompts=24", "data.test_size=2", "rloo.per_device_train_batch_size=2", "rloo.num_generations=2",
    "rloo.max_completion_length=4", "rloo.save_steps=1", "eval.max_completion_length=4", "eval.num_samples=1",
    "eval.greedy=false", "model.dtype=float32",
)  # fmt: skip
QUESTION = "47+385="


@check(1, 170, lane="command line 1", imports=False)
@check(1, 150, "transformers", lane="command line 2", imports=False)
def runs_the_command_line(bench: Bench) -> None:
    """`rloo-kit train configs/arithmetic_thinking.yaml` with both evaluations, verdict and report; `export`; `ask`.
    Through Unsloth 20 steps, and 5 more by `--resume`."""
    folder = bench.scratch / "command-line" / bench.backend
    words = ["configs/arithmetic_thinking.yaml", f"model.backend={bench.backend}", f"run.name={folder.name}"]
    words += [f"run.output_dir={folder.parent}", *(SMALL if bench.rehearsed else ())]
    first, resumed = (1, 2) if bench.rehearsed else (FIRST, RESUMED)
    if bench.backend == "unsloth":
        words += [] if bench.rehearsed else ["eval.num_prompts=200"]
        call(bench, "train", *words, f"rloo.max_steps={first}", "--overwrite")
        report_run(bench, "train", folder, first)
        call(bench, "train", *words, f"rloo.max_steps={resumed}", "--resume", named="resume")
        report_run(bench, "resume", folder, resumed)
    else:
        call(bench, "train", *words, *["rloo.max_steps=1"] * bench.rehearsed, "--overwrite")
        kind = report_run(bench, "train", folder, 1 if bench.rehearsed else 50)
        assert bench.rehearsed or kind == "learnt", f"the demo's verdict is {kind}"
    prompts = ["--prompts", "1"] * bench.rehearsed
    exported = call(bench, "export", str(folder), "--to", "merged", "--overwrite", "--json", *prompts)
    certificate = read_json(exported)["certificate"]
    bench.report(export={name: certificate[name] for name in ("kind", "verdict", "checks", "tensors")})
    answered = call(bench, "ask", str(folder), QUESTION, "--temperature", "0", "--json")
    bench.report(ask=read_json(answered))


def call(bench: Bench, *words: str, named: str = "", codes: tuple[int, ...] = (0,)) -> str:
    """What `rloo-kit WORDS` prints; its seconds are reported.

    Raises:
        AssertionError: its exit code is not one of `codes`.
    """
    started = time.monotonic()
    main = REHEARSED_MAIN if bench.interpreted and words[0] != "show" else MAIN
    command = [sys.executable, "-c", main, *words]
    done = subprocess.run(command, cwd=reporting.ROOT, stdout=subprocess.PIPE, text=True)  # stderr: into the log
    print(done.stdout, flush=True)
    bench.report(seconds={named or words[0]: round(time.monotonic() - started, 1)})
    assert done.returncode in codes, f"rloo-kit {words[0]}: exit code {done.returncode}: {done.stdout[-300:]}"
    return done.stdout


def read_json(text: str) -> Any:
    """The last line that is an object; libraries print others."""
    return json.loads([line for line in text.splitlines() if line.startswith("{")][-1])


def report_run(bench: Bench, name: str, folder: Path, steps: int) -> str:
    """Report verdict, accuracies, steps and files of a run. Returns the kind of the verdict."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if "grad_norm" in row]
    overview = json.loads(call(bench, "show", str(folder), "--json", codes=(0, 1)))  # 1: alarming
    found: dict[str, Any] = {"verdict": overview["verdict"]["kind"], "steps": len(rows)}
    found["accuracy"] = {when: overview["accuracy"][when]["accuracy"] for when in ("before", "after")}
    found["step_s"] = round(sum(row["step_time"] for row in rows) / max(len(rows), 1), 3)
    found["report_kib"] = round((folder / "report.html").stat().st_size / 1024)
    bench.report(**{name: found})
    assert len(rows) == steps, f"{len(rows)} of {steps} steps are on record"
    return str(found["verdict"])
