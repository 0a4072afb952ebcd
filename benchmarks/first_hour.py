"""The first hour on a GPU: correctness, figures and the claim on small GPUs, in three parts of eight minutes.

    python benchmarks/first_hour.py --part 1           # smoke and correctness, on Qwen3-0.6B
    python benchmarks/first_hour.py --part 2           # figures: decoding, the training part, whole steps, on Qwen3-4B
    python benchmarks/first_hour.py --part 3           # the shipped configs on simulated GPUs of 8 to 24 GB
    python benchmarks/first_hour.py --list             # every check, its budget and its state
    python benchmarks/first_hour.py --rehearse         # all parts on the CPU with a tiny model: no measurement
    make gpu-report                                    # results into README, docs, config headers, memory plan

Each part is one command for a machine without a network: models have random weights in their true shapes and are built
there. A part has one process per backend, ends by itself, and appends a line of JSON to OUT/partN.jsonl as soon as a
figure is known; OUT/partN.tar.gz contains that file and the logs. If Unsloth does not work, transformers continues.
`--only NAME` runs single checks, also those outside the hour (part 0), and adds their lines to the part's.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import reporting

RESULTS = reporting.RESULTS / "gpu"
REHEARSALS = reporting.ROOT / "outputs" / "rehearsal"
WORKER = reporting.ROOT / "benchmarks" / "on_gpu" / "worker.py"
MINUTES, CLOSING_S = 8.0, 12.0  # of a part; of these, reserved for the archive
GRACE_S = 20.0  # after a check's budget; then its process counts as hung and is ended
BETWEEN_S = 60.0  # the same between two checks
POLL_S = 0.2
SIZES = {1: ("0.6b",), 2: ("4b",), 3: ("4b",)}
KEPT_S = {1: 150.0, 2: 150.0}  # of a part's eight minutes, reserved for the transformers worker


@dataclass
class Worker:
    """A process of `on_gpu/worker.py`, the time at which it must end, and its checks."""

    backend: str
    process: "subprocess.Popen[str]"
    ends: float
    names: list[str] = field(default_factory=list)

    def go(self, names: Sequence[str]) -> None:
        self.names = list(names)
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(self.names) + "\n")
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended; the caller notices

    def end(self) -> None:
        """End it and everything it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            waited = time.monotonic() + 3
            while self.process.poll() is None and time.monotonic() < waited:
                time.sleep(0.05)
        self.process.wait()


class PartRun:
    """One part from its start to its archive.

    Args:
        part: 1 to 3, or 0 for checks of several. names: of the checks. out: folder of the results.
        minutes: of the part. adds: to existing results, replacing earlier ones of these checks.
    """

    def __init__(
        self,
        part: int,
        names: list[str],
        out: Path,
        minutes: float,
        rehearsed: bool,
        scratch: Path,
        adds: bool = False,
    ) -> None:
        from on_gpu.listing import list_checks

        self.part, self.minutes, self.rehearsed, self.scratch = part, minutes, rehearsed, scratch
        self.checks = {name: list_checks()[name] for name in names}
        self.lines, self.log = out / f"part{part}.jsonl", out / f"part{part}.log"
        self.started = time.time()
        self.ends = self.started + 60 * minutes - CLOSING_S
        self._adds = adds and self.lines.exists()
        self._read = 0
        self._heard = self.started  # when a worker last wrote
        self._ready: set[str] = set()
        self._current: tuple[str, float] | None = None  # the running check, and its deadline
        self._ended: dict[str, str] = {}
        self._workers: list[Worker] = []

    def run(self, header: dict[str, Any], without_unsloth: str) -> int:
        """Run the part; the exit code is 1 if a check failed.

        Args:
            without_unsloth: why its worker is not started; empty if it is.
        """
        from on_gpu.checks import append

        self.lines.parent.mkdir(parents=True, exist_ok=True)
        if self._adds:
            with self.lines.open("a", encoding="utf-8") as file:
                file.write("\n")  # after a line that was cut off
            self._read = self.lines.stat().st_size
        else:
            self.lines.unlink(missing_ok=True)
        append(self.lines, "header", part=self.part, **header)
        try:
            with self.log.open("w", encoding="utf-8") as log:
                self._run_workers(log, without_unsloth)
        finally:  # Ctrl-C too
            for worker in self._workers:
                worker.end()
            self._poll()
            seconds = round(time.time() - self.started, 1)
            append(self.lines, "closed", seconds=seconds)
            archive = self.lines.with_suffix(".tar.gz")
            with tarfile.open(archive, "w:gz") as file:
                for path in (self.lines, self.log):
                    file.add(path, path.name)
        print(f"part {self.part}: {seconds:.0f} s, {self.lines}, {archive.name}", flush=True)
        due = [name for name, check in self.checks.items() if check.backend != "unsloth" or not without_unsloth]
        due = [name for name in due if without_unsloth or not self.checks[name].stand_in]
        states = [self._ended.get(name, "not run") for name in due]
        return 1 if {"failed", "out of memory", "over budget", "not run"} & set(states) else 0

    def _run_workers(self, log: Any, without_unsloth: str) -> None:
        maker = self._start("transformers", log, makes=True)
        stands_in = all(check.stand_in for name, check in self.checks.items() if check.backend == "transformers")
        plain = None if stands_in else self._start("transformers", log)  # it imports while the other works
        unsloth = None
        if without_unsloth:
            self._note(f"Unsloth is left out: {without_unsloth}")
        elif self._names("unsloth"):
            unsloth = self._start("unsloth", log)
        maker.go([])
        while maker.process.poll() is None and time.time() < self.ends:
            time.sleep(POLL_S)
        if maker.process.returncode != 0:
            self._note(f"no checkpoint could be made: {self.log.name} says why")
            return
        by_unsloth = False
        if unsloth is not None:
            if self._wait_ready(unsloth):
                self._carry_through(unsloth, self._names("unsloth"), log)
            by_unsloth = any(name.startswith("unsloth/") and state == "passed" for name, state in self._ended.items())
            if not by_unsloth:
                self._note("Unsloth passed no check: transformers takes its place")
        names = [name for name in self._names("transformers") if not self._is_spared(name)]
        if names:
            plain = plain or self._start("transformers", log)
            if self._wait_ready(plain):
                self._carry_through(plain, names, log)

    def _is_spared(self, name: str) -> bool:
        """Whether a check only stands in for one that Unsloth has passed."""
        done = self._ended.get(name.replace("transformers/", "unsloth/")) == "passed"
        return done and self.checks[name].stand_in and not self.rehearsed

    def _names(self, backend: str) -> list[str]:
        return [name for name, check in self.checks.items() if check.backend == backend]

    def _start(self, backend: str, log: Any, makes: bool = False) -> Worker:
        """A process that imports its libraries and waits; `makes`: it builds the checkpoints first."""
        kept = KEPT_S.get(self.part, 0.0) * self.minutes / MINUTES
        others = [name for name in self._names("transformers") if not self.checks[name].stand_in]
        ends = self.ends - (kept if backend == "unsloth" and others and not self.rehearsed else 0.0)
        python = unsloth_python() if self.rehearsed and backend == "unsloth" else sys.executable
        command = [str(python), "-u", str(WORKER), "--backend", backend]
        command += ["--lines", str(self.lines), "--scratch", str(self.scratch), "--ends", str(ends)]
        sizes = SIZES.get(self.part, ("0.6b", "4b"))
        command += ["--make", *(sizes[:1] if self.rehearsed else sizes)] * makes
        command += ["--grpo"] * any("grpo" in name for name in self.checks) + ["--rehearse"] * self.rehearsed
        path = os.pathsep.join(filter(None, [str(reporting.ROOT), os.environ.get("PYTHONPATH")]))
        path = os.pathsep.join([path, str(reporting.ROOT / "benchmarks")])
        environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        if self.rehearsed:
            environment |= {"CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(
            command, cwd=self.scratch, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip
        self._workers.append(Worker(backend, process, ends))
        return self._workers[-1]

    def _wait_ready(self, worker: Worker) -> bool:
        while worker.backend not in self._ready:
            if worker.process.poll() is not None or time.time() > worker.ends:
                worker.end()
                self._poll()
                return worker.backend in self._ready
            time.sleep(POLL_S)
            self._poll()
        return True

    def _carry_through(self, worker: Worker, names: list[str], log: Any) -> None:
        """Wait until each check has ended; a process that died or hangs is replaced by one for the rest."""
        while True:
            self._heard, known = time.time(), len(self._ended)
            worker.go(names)
            while worker.process.poll() is None and time.time() < worker.ends + 3 and not self._hangs():
                time.sleep(POLL_S)
                self._poll()
            worker.end()
            self._poll()
            if self._current is not None:
                self._note(f"{self._current[0]}: its process ended or hung, exit code {worker.process.returncode}")
                self._close(self._current[0], "failed", f"its process ended with {worker.process.returncode}")
            names = [name for name in names if name not in self._ended]
            if not names or len(self._ended) == known or time.time() > worker.ends - 20:
                return
            self._ready.discard(worker.backend)
            worker = self._start(worker.backend, log)
            if not self._wait_ready(worker):
                return

    def _hangs(self) -> bool:
        return time.time() > (self._heard + BETWEEN_S if self._current is None else self._current[1])

    def _poll(self) -> None:
        """Read what the workers have written since, and print each check that has ended."""
        with self.lines.open(encoding="utf-8") as file:
            file.seek(self._read)
            while (text := file.readline()).endswith("\n"):
                self._read, self._heard = file.tell(), time.time()
                line = json.loads(text)
                if line["kind"] == "ready":
                    self._ready.add(line["backend"])
                    print(f"{line['backend']}: loaded in {line['seconds']:.0f} s", flush=True)
                elif line["kind"] == "begin":
                    self._current = (line["check"], line["time"] + line["budget_s"] + GRACE_S)
                elif line["kind"] == "end":
                    self._current = None
                    self._ended[line["check"]] = line["state"]
                    reason = f": {line['reason'][:200]}" if line["reason"] else ""
                    print(f"[{time.time() - self.started:4.0f} s] {line['check']}: {line['state']}{reason}", flush=True)
                elif line["kind"] == "note":
                    print(line["text"], flush=True)

    def _note(self, text: str) -> None:
        from on_gpu.checks import append

        append(self.lines, "note", text=text)
        self._poll()

    def _close(self, name: str, state: str, reason: str) -> None:
        from on_gpu.checks import append

        append(self.lines, "end", check=name, state=state, reason=reason, seconds=0.0)
        self._poll()


# ------------------------------------------------------------------------------------------------------- the command


def unsloth_python() -> str | None:
    """The interpreter that rehearses Unsloth: this one if Unsloth is installed, else that of `make test-unsloth`."""
    chosen = os.environ.get("RLOO_KIT_UNSLOTH_PYTHON") or str(reporting.ROOT / ".venv-unsloth" / "bin" / "python")
    if find_spec("unsloth") is not None:
        return sys.executable
    return chosen if Path(chosen).is_file() else None


def why_without_unsloth(out: Path, rehearsed: bool) -> str:
    """Why a part leaves Unsloth out; empty if it does not. The outcome of part 1 on the same GPU decides."""
    from on_gpu.checks import read_part

    if rehearsed:
        return (
            "" if unsloth_python() else "it is not here: make test-unsloth, or RLOO_KIT_UNSLOTH_PYTHON names its Python"
        )
    if find_spec("unsloth") is None:
        return "it is not installed: pip install -e '.[gpu]'"
    for folder in (out, RESULTS):
        part = read_part(folder / "part1.jsonl")
        if part is not None and part.header.get("machine", {}).get("gpu") == describe_gpu().get("gpu"):
            found = part.checks.get("unsloth/loads_4bit")
            bad = found is not None and found.state not in ("passed", "not run")
            return f"part 1 could not load a model with it ({found.reason})" if found and bad else ""
    return ""


def describe_gpu() -> dict[str, Any]:
    """The GPU as NVML describes it; empty without one."""
    from rloo_kit.system.gpu import find_gpus

    gpu = find_gpus().gpu
    if gpu is None:
        return {}
    found = {"gpu": gpu.name, "driver": gpu.driver, "capability": gpu.compute_capability}
    return found | {"gpu_gib": round(gpu.memory_gib, 1)}


def list_all(out: Path) -> None:
    """Print every check with its state and budget."""
    from on_gpu.checks import PARTS, read_part
    from on_gpu.listing import list_checks

    parts = {number: read_part(out / f"part{number}.jsonl") for number in PARTS}
    for number, title in PARTS.items():
        print(f"part {number}: {title}")
        for check in list_checks().values():
            if check.part == number:
                part = parts[number]
                state = part.checks[check.name].state if part and check.name in part.checks else "not run"
                print(f"  {check.name:40} {state:12} {check.budget_s:4d} s  {check.what}")


def choose(options: argparse.Namespace) -> list[tuple[int, list[str]]]:
    """The parts to run, with the names of their checks."""
    from on_gpu.listing import list_checks

    known = list_checks()
    if options.only:
        for name in options.only:
            if name not in known:
                raise SystemExit(f"no check is called {name}; there are: {', '.join(known)}")
        parts = {known[name].part for name in options.only}
        return [(parts.pop() if len(parts) == 1 else 0, options.only)]
    if options.part is None and not options.rehearse:
        raise SystemExit("name a part: --part 1, --part 2 or --part 3 (--list shows what is in them)")
    parts = (1, 2, 3) if options.part is None else (options.part,)
    return [(part, [name for name, check in known.items() if check.part == part]) for part in parts]


def refuse_another_gpu(path: Path, gpu: str) -> None:
    """Exit if single checks would be added to another GPU's measurements."""
    from on_gpu.checks import read_part

    part = read_part(path)
    if part is not None and part.header.get("machine", {}).get("gpu") != gpu:
        raise SystemExit(f"{path} is of {part.header['machine']['gpu']} and this is {gpu}: name another folder (--out)")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=(1, 2, 3))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks, as --list names them; added to OUT")
    parser.add_argument("--out", type=Path, help="folder of the results (benchmarks/results/gpu)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of a part, everything included (%(default)g)")
    parser.add_argument("--list", action="store_true", help="name the checks and end")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, tiny; results under outputs/rehearsal")
    return parser.parse_args(arguments)


def main() -> int:
    """The exit code is 1 if a check failed, 2 without a GPU."""
    reporting.settle()
    options = parse()
    out = (options.out or (REHEARSALS if options.rehearse else RESULTS)).resolve()
    if options.list:
        list_all(out)
        return 0
    if options.rehearse and out.is_relative_to(reporting.RESULTS):
        raise SystemExit(f"{out} is for what a GPU measured; a rehearsal writes elsewhere (--out)")
    chosen = choose(options)
    machine = describe_gpu()
    if not machine and not options.rehearse:
        from rloo_kit.system.gpu import find_gpus

        print(f"no CUDA GPU: {find_gpus().reason}. Nothing was run. --rehearse runs the same code on the CPU.")
        return 2
    header = reporting.header("benchmarks/first_hour.py") | {"rehearsed": options.rehearse}
    header["machine"] |= {"gpu": "none: rehearsed on the CPU"} if options.rehearse else machine
    if options.only:
        refuse_another_gpu(out / f"part{chosen[0][0]}.jsonl", header["machine"]["gpu"])
    print(f"GPU: {header['machine']['gpu']}; revision {header['revision'][:12]}; results in {out}", flush=True)
    codes = []
    for part, names in chosen:
        scratch = Path(tempfile.gettempdir()) / f"rloo-kit-first-hour-{os.getuid()}{'-tiny' * options.rehearse}"
        scratch.mkdir(parents=True, exist_ok=True)
        run = PartRun(part, names, out, options.minutes, options.rehearse, scratch, adds=bool(options.only))
        codes.append(run.run(header, why_without_unsloth(out, options.rehearse)))
        print_figures(out / f"part{part}.jsonl")
    return max(codes)


def print_figures(path: Path) -> None:
    """The figures of a part next to the expected ones, as a text table."""
    from on_gpu.checks import read_part
    from on_gpu.expected import EXPECTED, find

    part = read_part(path)
    if part is None or part.header.get("rehearsed"):
        return  # no measurement
    for one in EXPECTED:
        if (value := find(part, one.check, *one.keys)) is not None:
            inside = "" if one.low <= value <= one.high else "  <--"
            expected = f"expected {one.low:g} to {one.high:g}{inside}"
            print(f"  {one.what:58} {value:>10.4g} {one.unit:8} {expected}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
