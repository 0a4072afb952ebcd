"""A quarter of an hour on a GPU, in two calls: does all of it run there, how fast is a token, how fast is a step?

    python benchmarks/first_hour.py --call 1           # lanes side by side, then one check at a time (9 minutes)
    python benchmarks/first_hour.py --call 2           # what call 1 did not pass; 4B under a cap of 12 GB (3 minutes)
    python benchmarks/first_hour.py --list             # every check, its budget and its state
    python benchmarks/first_hour.py --rehearse         # both calls on the CPU, tiny: no measurement
    make gpu-report                                    # results into README, docs, config headers, memory plan

For a machine without a network: models have random weights in their true shapes and are built there, and the embedded
model comes with the bundle. The lanes: the whole command line through transformers and through Unsloth, the random
checkpoints, Qwen3-0.6B through Unsloth. Then nothing disturbs what is timed. A call ends by itself. A figure is a line
of JSON in OUT/callN.jsonl as soon as it is known; OUT/callN.log has what the processes print. `--only NAME` runs single
checks and adds their lines to OUT/call0.jsonl.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import reporting
from on_gpu import checks
from on_gpu.checks import CALLS, Check, append, read_part

RESULTS = reporting.RESULTS / "gpu"
REHEARSALS = reporting.ROOT / "outputs" / "rehearsal"
WORKER = reporting.ROOT / "benchmarks" / "on_gpu" / "worker.py"
SECONDS = {1: 560.0, 2: 190.0, 0: 560.0}  # of a call, everything included; one command there may last 600 s
CLOSING_S = 5.0
GRACE_S = 20.0  # after a check's budget; then its process counts as hung and is ended
ENOUGH = 0.3  # of a budget: with less time left, a check does not start
REHEARSAL_FACTOR = 4  # of budgets: an interpreter on a shared machine is slow
POLL_S = 0.1
MAKER = "transformers/makes_checkpoints"
STANDARD = {"HF_HUB_OFFLINE": "1", "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}  # cuDNN would plan for every length


class Worker:
    """A process of `on_gpu/worker.py` and everything that it starts."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path, log: Any) -> None:
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, name: str, budget_s: float) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([name, budget_s]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; the caller notices

    def end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            waited = time.monotonic() + 3
            while self.alive and time.monotonic() < waited:
                time.sleep(0.05)
        self.process.wait()


class CallRun:
    """One call from its start to its last line.

    Args:
        call: 1 or 2, or 0 for checks by name. names: of the checks, in order. out: folder of the results. seconds: of
            the call. scratch: folder for checkpoints and runs. adds: to the file that is there.
    """

    def __init__(
        self, call: int, names: list[str], out: Path, seconds: float, rehearsed: bool, scratch: Path, adds: bool = False
    ) -> None:
        known = checks.list_checks()
        self.call, self.rehearsed, self.scratch, self._adds = call, rehearsed, scratch, adds
        self.checks = [known[name] for name in names]
        self.lines, self.log = out / f"call{call}.jsonl", out / f"call{call}.log"
        self.started = time.time()
        self.ends = self.started + seconds - CLOSING_S
        self._ended = states(out)
        self._now: dict[str, str] = {}  # states of this call
        self._ready: set[str] = set()  # names of processes
        self._broken: dict[str, str] = {}  # processes that cannot start, and why
        self._workers: dict[str, Worker] = {}
        self._due = Counter(check.process for check in self.checks)
        self._lock, self._read = threading.Lock(), 0

    def run(self, header: dict[str, Any]) -> int:
        """Run the call; the exit code is 1 if a check failed."""
        self.lines.parent.mkdir(parents=True, exist_ok=True)
        if self._adds and self.lines.exists():
            with self.lines.open("a", encoding="utf-8") as file:
                file.write("\n")  # after a line that was cut off
            self._read = self.lines.stat().st_size
        else:
            self.lines.unlink(missing_ok=True)
        append(self.lines, "header", call=self.call, **header)
        lanes: dict[str, list[Check]] = {}
        for check in self.checks:
            lanes.setdefault(check.lane, []).append(check)
        alone = lanes.pop("", [])
        try:
            with self.log.open("a" if self._adds else "w", encoding="utf-8") as self._output:
                threads = [threading.Thread(target=self._run_lane, args=(lane,)) for lane in lanes.values()]
                for thread in threads:
                    thread.start()
                for check in () if self.rehearsed else alone:  # they import meanwhile
                    self._worker(check)
                for thread in threads:
                    thread.join()
                self._run_lane(alone)
        finally:  # Ctrl-C too
            self.ends = 0.0
            for worker in self._workers.values():
                worker.end()
            self._poll()
            seconds = round(time.time() - self.started, 1)
            append(self.lines, "closed", seconds=seconds)
        print(f"call {self.call}: {seconds:.0f} s, {self.lines}", flush=True)
        found = {self._now.get(check.name, "not run") for check in self.checks}
        return 1 if found & {"failed", "out of memory", "over budget", "not run"} else 0

    def _run_lane(self, lane: Iterable[Check]) -> None:
        """Run checks one after another."""
        for check in lane:
            state, reason = self._carry_out(check)
            if state:  # no process has reported it
                append(self.lines, "end", check=check.name, state=state, reason=reason, seconds=0.0)
                self._poll()
            self._due[check.process] -= 1
            if not self._due[check.process] and check.process in self._workers:
                self._workers[check.process].end()  # its memory would count as the context's under a cap

    def _carry_out(self, check: Check) -> tuple[str, str]:
        """Run one check in its process. Returns its state and the reason where the process has not reported them."""
        budget = check.budget_s * (REHEARSAL_FACTOR if self.rehearsed else 1)
        if check.needs and self._ended.get(check.needs) != "passed":
            return "not run", f"{check.needs} has not passed"
        if self.ends - time.time() < ENOUGH * budget:
            return "not run", "no time left"
        if self.rehearsed and check.backend == "unsloth" and unsloth_python() is None:
            return "skipped", "Unsloth is not here: make test-unsloth, or RLOO_KIT_UNSLOTH_PYTHON names its Python"
        worker = self._worker(check)
        while worker.alive and check.process not in self._ready and time.time() < self.ends:
            self._wait()
        self._poll()
        if check.process not in self._ready:
            worker.end()
            return "failed", self._broken.setdefault(check.process, f"{check.process} could not start, see the log")
        left = self.ends - time.time()
        worker.ask(check.name, min(budget, left))
        deadline = time.time() + min(budget, left) + GRACE_S
        while worker.alive and check.name not in self._now and time.time() < deadline:
            self._wait()
        self._poll()
        if check.name in self._now:
            return "", ""
        worker.end()
        self._poll()
        return "failed", f"its process ended or hung, exit code {worker.process.returncode}"

    def _worker(self, check: Check) -> Worker:
        """The check's process; a new one if there is none or it has ended."""
        found = self._workers.get(check.process)
        if found is not None and (found.alive or check.process in self._broken):
            return found
        self._ready.discard(check.process)
        python = unsloth_python() if self.rehearsed and check.backend == "unsloth" else sys.executable
        command = [str(python), "-u", str(WORKER), "--process", check.process, "--backend", check.backend]
        command += ["--lines", str(self.lines), "--scratch", str(self.scratch)]
        command += ["--imports"] * check.imports + ["--rehearse"] * self.rehearsed
        variables: dict[str, str | None] = {**STANDARD, **dict(check.environment)}
        path = [str(reporting.ROOT), os.environ.get("PYTHONPATH", ""), str(reporting.ROOT / "benchmarks")]
        variables |= {"PYTHONPATH": os.pathsep.join(filter(None, path))}
        variables |= {"CUDA_VISIBLE_DEVICES": ""} if self.rehearsed else {}
        environment = {name: value for name, value in (os.environ | variables).items() if value is not None}
        self._workers[check.process] = Worker(command, environment, self.scratch, self._output)
        return self._workers[check.process]

    def _wait(self) -> None:
        time.sleep(POLL_S)
        self._poll()

    def _poll(self) -> None:
        """Read what the processes have written since, and print each check that has ended."""
        with self._lock, self.lines.open(encoding="utf-8") as file:
            file.seek(self._read)
            while (text := file.readline()).endswith("\n"):
                self._read = file.tell()
                line = json.loads(text)
                kind, at = line["kind"], f"[{line['time'] - self.started:4.0f} s]"
                if kind == "ready":
                    self._ready.add(line["process"])
                elif kind == "end":
                    self._ended[line["check"]] = self._now[line["check"]] = line["state"]
                    reason = f": {line['reason'][:200]}" if line["reason"] else ""
                    print(f"{at} {line['check']}: {line['state']} in {line['seconds']:.0f} s{reason}", flush=True)
                elif kind == "figure":
                    print(f"{at}   {line['check']}: {json.dumps(line['values'])[:300]}", flush=True)
                elif kind == "note":
                    print(f"{at} {line['text']}", flush=True)


# ------------------------------------------------------------------------------------------------------- the command


def states(out: Path) -> dict[str, str]:
    """The latest state of every check in a folder of results."""
    parts = [part for call in CALLS if (part := read_part(out / f"call{call}.jsonl")) is not None]
    parts.sort(key=lambda part: float(part.header.get("time", 0)))
    return {name: found.state for part in parts for name, found in part.checks.items()}


def unsloth_python() -> str | None:
    """The interpreter that rehearses Unsloth: this one if Unsloth is installed, else that of `make test-unsloth`."""
    chosen = os.environ.get("RLOO_KIT_UNSLOTH_PYTHON") or str(reporting.ROOT / ".venv-unsloth" / "bin" / "python")
    if find_spec("unsloth") is not None:
        return sys.executable
    return chosen if Path(chosen).is_file() else None


def describe_gpu() -> dict[str, Any]:
    """The GPU as NVML describes it; empty without one."""
    from rloo_kit.system.gpu import find_gpus

    gpu = find_gpus().gpu
    if gpu is None:
        return {}
    found = {"gpu": gpu.name, "driver": gpu.driver, "capability": gpu.compute_capability}
    return found | {"gpu_gib": round(gpu.memory_gib, 1)}


def folder_of(gpu: str) -> Path:
    """Where a GPU's results lie.

    >>> folder_of("NVIDIA H200").name
    'nvidia-h200'
    """
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def choose(call: int, only: Sequence[str], out: Path) -> list[str]:
    """The names of the checks to run, in order; call 2 begins with those of call 1 that did not pass."""
    known, before = checks.list_checks(), states(out)
    for name in only:
        if name not in known:
            raise SystemExit(f"no check is called {name}; there are: {', '.join(known)}")
    names = list(only) or [name for name, check in known.items() if check.call == call]
    if call == 2 and not only and (out / "call1.jsonl").is_file():
        first = [name for name, check in known.items() if check.call == 1]
        names = [name for name in first if before.get(name) not in ("passed", "skipped")] + names
    return names if MAKER in names else [MAKER, *names]


def list_all(out: Path) -> None:
    """Print every check with its state and budget."""
    found = states(out)
    for call, title in CALLS.items():
        print(f"call {call}: {title}")
        for check in checks.list_checks().values():
            if check.call == call:
                state, lane = found.get(check.name, "not run"), f"lane {check.lane}" if check.lane else "alone"
                print(f"  {check.name:40} {state:12} {check.budget_s:4d} s  {lane:20} {check.what}")


def refuse_another_gpu(out: Path, gpu: str) -> None:
    """Exit if the folder has another GPU's measurements."""
    for call in CALLS:
        part = read_part(out / f"call{call}.jsonl")
        if part is not None and part.header.get("machine", {}).get("gpu") != gpu:
            was = part.header["machine"]["gpu"]
            raise SystemExit(f"{out} has results of {was} and this is {gpu}: name another folder (--out)")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--call", type=int, choices=(1, 2))
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these checks, as --list names them")
    parser.add_argument("--out", type=Path, help="folder of the results (benchmarks/results/gpu/NAME-OF-THE-GPU)")
    parser.add_argument("--seconds", type=float, help="of a call, everything included (560, then 190)")
    parser.add_argument("--list", action="store_true", help="name the checks and end")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, tiny; results under outputs/rehearsal")
    return parser.parse_args(arguments)


def main() -> int:
    """The exit code is 1 if a check failed, 2 without a GPU."""
    reporting.settle()
    options, machine = parse(), describe_gpu()
    gpu = "none: rehearsed on the CPU" if options.rehearse else machine.get("gpu", "none")
    out = (options.out or (REHEARSALS if options.rehearse else folder_of(gpu))).resolve()
    if options.list:
        list_all(out)
        return 0
    if options.rehearse and out.is_relative_to(reporting.RESULTS):
        raise SystemExit(f"{out} is for what a GPU measured; a rehearsal writes elsewhere (--out)")
    if not (options.call or options.only or options.rehearse):
        raise SystemExit("name a call: --call 1, then --call 2 (--list shows what is in them)")
    if not machine and not options.rehearse:
        from rloo_kit.system.gpu import find_gpus

        print(f"no CUDA GPU: {find_gpus().reason}. Nothing was run. --rehearse runs the same code on the CPU.")
        return 2
    refuse_another_gpu(out, gpu)
    header = reporting.header("benchmarks/first_hour.py") | {"rehearsed": options.rehearse}
    header["machine"] |= machine | {"gpu": gpu}
    print(f"GPU: {gpu}; revision {header['revision'][:12]}; results in {out}", flush=True)
    scratch = Path(tempfile.gettempdir()) / f"rloo-kit-first-hour-{os.getuid()}{'-tiny' * options.rehearse}"
    scratch.mkdir(parents=True, exist_ok=True)
    codes = []
    for call in [0] if options.only else [options.call] if options.call else [1, 2]:
        seconds = options.seconds or SECONDS[call] * (REHEARSAL_FACTOR if options.rehearse else 1)
        names = choose(call, options.only, out)
        run = CallRun(call, names, out, seconds, options.rehearse, scratch, adds=bool(options.only))
        codes.append(run.run(header))
        print_expected(out / f"call{call}.jsonl")
    return max(codes)


def print_expected(path: Path) -> None:
    """The figures of a call next to the expected ones, as a text table."""
    from on_gpu.expected import EXPECTED

    part = read_part(path)
    if part is None or part.header.get("rehearsed"):
        return  # no measurement
    for one in EXPECTED:
        value = part.value(one.check, *one.keys)
        if isinstance(value, int | float):
            expected = f"expected {one.low:g} to {one.high:g}{'' if one.low <= value <= one.high else '  <--'}"
            print(f"  {one.what:58} {value:>10.4g} {one.unit:8} {expected}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
