"""Runs a list of cells on a GPU: each a process of its own, within a time limit, its result in a file of its own.

A machine with a GPU is often lent for minutes. So a cell takes eight minutes at most, its JSON is there as soon as a
figure is known, and the same command started again goes on: a cell that passed on the same GPU, with the same sources
and versions, is not run again while its file is there. `tests/on_gpu/run.py` and `rloo_step.py --device cuda` hold the
lists. Whatever ends a cell or the command, nothing that it started stays on the GPU.

A cell's process says what it found by `report(name=value)`, and that it cannot run here by `skip(reason)`. Rehearsing
(`--rehearse`) runs the same code on the CPU with tiny shapes and writes elsewhere: what it finds is no measurement.
Left out: several cells at once, since they would share the GPU that they measure.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import reporting

LIMIT_S = 480
REHEARSAL_FACTOR = 4  # an interpreter on a shared machine takes its time, and nothing is rented
SKIPPED = 77  # exit code of a cell that cannot run here, as of automake's tests
FILE_VARIABLE, REHEARSE_VARIABLE = "RLOO_KIT_CELL_FILE", "RLOO_KIT_CELL_REHEARSAL"
MEASURED_SOURCES = ("rloo_kit/**/*.py", "rewards/**/*.py", "configs/**/*.yaml")
REHEARSED_GPU = "none: rehearsed on the CPU"
STATES = ("passed", "failed", "skipped", "stopped", "running")


@dataclass(frozen=True)
class Cell:
    """One check or one measurement.

    Attributes:
        name: of its result file, `NAME.json`. command: run in the root folder. what: what it shows, in a line.
        limit_s: after this many seconds it is ended; at most LIMIT_S, REHEARSAL_FACTOR times as many when rehearsing.
        sources: globs of its own files, from the root folder; when one changes, the cell runs again.
        least_gib: a GPU with less memory than this skips it.
        rehearsed_by: the program in place of `command` when rehearsing. not_rehearsed: why it does not run then.
    """

    name: str
    command: Sequence[str]
    what: str
    limit_s: int = LIMIT_S
    environment: Mapping[str, str] = field(default_factory=dict)
    sources: Sequence[str] = ()
    least_gib: float = 0.0
    rehearsed_by: Sequence[str] | None = None
    not_rehearsed: str = ""

    def __post_init__(self) -> None:
        if self.limit_s > LIMIT_S:
            raise ValueError(f"{self.name} may take {self.limit_s} s; a cell has {LIMIT_S} at most: cut it in two")


# ------------------------------------------------------------------------------------------- inside a cell's process


def rehearsing() -> bool:
    """Whether this process rehearses: tiny shapes, on the CPU, and nothing that it finds is a measurement."""
    return os.environ.get(REHEARSE_VARIABLE) == "1"


def report(**values: Any) -> None:
    """Write values into the cell's file at once; outside a cell they are printed. Dictionaries are merged, one deep."""
    target = os.environ.get(FILE_VARIABLE)
    if target is None:
        print("measured: " + json.dumps(values), flush=True)
        return
    result = _read(Path(target))
    found = result.setdefault("values", {})
    for name, value in values.items():
        known = found.get(name)
        found[name] = known | value if isinstance(known, dict) and isinstance(value, dict) else value
    _write(result, Path(target))


def note_skip(reason: str) -> None:
    """Say why this cell does not apply here; if its process then ends with 0 or SKIPPED, the cell is skipped."""
    target = os.environ.get(FILE_VARIABLE)
    if target is not None:
        _write(_read(Path(target)) | {"reason": reason}, Path(target))
    print(f"skipped: {reason}", flush=True)


def skip(reason: str) -> NoReturn:
    """End this process: the cell does not apply here."""
    note_skip(reason)
    raise SystemExit(SKIPPED)


# ------------------------------------------------------------------------------------------------------- the command


def add_arguments(parser: ArgumentParser, results: Path) -> None:
    """The options of a command that runs cells; `results` is the folder of its files."""
    parser.add_argument("--list", action="store_true", help="name the cells, with what is known of them, and end")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cells; NAME* takes all that begin so")
    parser.add_argument("--minutes", type=float, help="end after this long, with whatever runs then")
    parser.add_argument("--results", type=Path, default=results, help="folder of the JSON files (%(default)s)")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="every cell's code on the CPU with tiny shapes; no measurement, results under outputs/",
    )


def run_cells(cells: Sequence[Cell], options: Namespace, command: str) -> int:
    """Run what has not passed yet. The exit code is 1 where a cell failed or was stopped.

    Args:
        cells: names differ.
        options: of `add_arguments`.
        command: what a user types, for the results ("make test-gpu").
    """
    chosen = _choose(cells, options.only)
    folder = results_folder(options)
    common = _common(command, options.rehearse)
    if options.list:
        _list(chosen, folder, common)
        return 0
    gpu = common["machine"]["gpu"]
    if gpu is None:
        print(f"no CUDA GPU: {common['no_gpu']}. {len(chosen)} cells skipped: nothing was run, nothing is measured.")
        return 0
    print(f"GPU: {gpu}. {len(chosen)} cells, at most {LIMIT_S // 60} minutes each; results in {folder}", flush=True)
    ends = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    states = {}
    for place, cell in enumerate(chosen, start=1):
        kept = _kept(cell, folder, common)
        if kept:
            result, verdict = kept, "passed before"
        elif ends is not None and time.monotonic() >= ends:
            result, verdict = {"state": "stopped", "reason": "no time left"}, "not started: no time left"
        else:
            result = _run(cell, folder, common, ends)
            verdict = result["state"] + (f": {result['reason']}" if result["reason"] else "")
        states[cell.name] = result["state"]
        print(f"[{place}/{len(chosen)}] {cell.name}: {verdict} ({result.get('seconds', 0):.0f} s)", flush=True)
    counts = {state: list(states.values()).count(state) for state in STATES if state in states.values()}
    print(", ".join(f"{count} {state}" for state, count in counts.items()) + f"; figures: {folder}", flush=True)
    return 1 if counts.keys() & {"failed", "stopped"} else 0


def results_folder(options: Namespace) -> Path:
    """Where the results go: `options.results`, but a rehearsal's never among what was measured."""
    folder: Path = options.results
    if options.rehearse and folder.resolve().is_relative_to(reporting.RESULTS):
        return reporting.ROOT / "outputs" / "rehearsal" / folder.name
    return folder


def _choose(cells: Sequence[Cell], names: Sequence[str] | None) -> list[Cell]:
    """The cells of these names, in the list's order."""
    if names is None:
        return list(cells)
    known = [cell.name for cell in cells]
    for name in names:
        if name not in known and not (name.endswith("*") and any(one.startswith(name[:-1]) for one in known)):
            raise SystemExit(f"no cell is called {name}; there are: {', '.join(known)}")
    starts = tuple(name[:-1] for name in names if name.endswith("*"))
    return [cell for cell in cells if cell.name in names or (starts and cell.name.startswith(starts))]


def _common(command: str, rehearse: bool) -> dict[str, Any]:
    """What all results of this command hold: machine, GPU, versions, revision."""
    from rloo_kit.system.environment import prepare_environment

    settled = prepare_environment()
    head = reporting.header("cells") | {"command": command, "no_gpu": settled.gpu_reason}
    gpu = settled.gpu
    found: dict[str, Any] = {"gpu": None}
    if gpu is not None:
        found = {"gpu": gpu.name, "driver": gpu.driver, "capability": gpu.compute_capability}
        found |= {"gpu_gib": round(gpu.memory_gib, 1)}
    if rehearse:
        found = {"gpu": REHEARSED_GPU}
    return head | {"machine": head["machine"] | found, "rehearsed": rehearse}


def _list(cells: Sequence[Cell], folder: Path, common: Mapping[str, Any]) -> None:
    for cell in cells:
        result = _read(folder / f"{cell.name}.json")
        known = result.get("state", "not run")
        if known == "passed" and not _kept(cell, folder, common):
            known = "passed on another GPU, with other sources or versions"
        print(f"{cell.name:34} {known:10} {cell.limit_s:4d} s  {cell.what}")


# -------------------------------------------------------------------------------------------------------- one cell


def digest(cell: Cell) -> str:
    """Of the files that a cell measures and of its own: a change in the docs makes no result old."""
    total = hashlib.sha256()
    paths = {path for glob in (*MEASURED_SOURCES, *cell.sources) for path in reporting.ROOT.glob(glob)}
    for path in sorted(paths):
        total.update(path.relative_to(reporting.ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def _kept(cell: Cell, folder: Path, common: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result of a cell that passed here: same GPU, sources, versions; None where it has to run."""
    result = _read(folder / f"{cell.name}.json")
    same = result.get("state") == "passed" and result.get("sources") == digest(cell)
    same = same and result["machine"]["gpu"] == common["machine"]["gpu"]
    return result if same and result["versions"] == common["versions"] else None


def _run(cell: Cell, folder: Path, common: Mapping[str, Any], ends: float | None) -> dict[str, Any]:
    """Run a cell, and write what came of it."""
    target = folder / f"{cell.name}.json"
    log = reporting.ROOT / "outputs" / "cells" / f"{cell.name}.log"
    result = {name: value for name, value in common.items() if name != "no_gpu"}
    result |= {"cell": cell.name, "what": cell.what, "sources": digest(cell), "state": "running", "reason": ""}
    result |= {"seconds": 0.0, "limit_s": cell.limit_s, "values": {}}
    reason = _obstacle(cell, common)
    if reason:
        _write(result | {"state": "skipped", "reason": reason}, target)
        return _read(target)
    _write(result, target)
    log.parent.mkdir(parents=True, exist_ok=True)
    allowed = cell.limit_s * (REHEARSAL_FACTOR if common["rehearsed"] else 1)
    limit = allowed if ends is None else max(1.0, min(allowed, ends - time.monotonic()))
    environment = {**os.environ, **cell.environment, FILE_VARIABLE: str(target), "HF_HUB_OFFLINE": "1"}
    environment[REHEARSE_VARIABLE] = "1" if common["rehearsed"] else "0"
    command = list(cell.command)
    if common["rehearsed"] and cell.rehearsed_by is not None:
        command = list(cell.rehearsed_by)
    started, state, code = time.monotonic(), "stopped", None
    try:
        with log.open("w", encoding="utf-8") as sink:
            code = _run_process(command, environment, sink, limit)
    finally:  # Ctrl-C too: what the cell has reported by then stays
        found = _read(target) or result
        if code is not None:
            state, reason = _judge(code, found, log)
        else:
            reason = f"ended after {time.monotonic() - started:.0f} s"
            if limit == allowed and time.monotonic() - started >= limit:
                state, reason = "failed", f"longer than its limit of {allowed} s"
        seconds = round(time.monotonic() - started, 1)
        _write(found | {"state": state, "reason": reason, "seconds": seconds}, target)
    return _read(target)


def _obstacle(cell: Cell, common: Mapping[str, Any]) -> str:
    """Why a cell is not even started; empty where it is."""
    if common["rehearsed"]:
        return cell.not_rehearsed
    has = common["machine"].get("gpu_gib", 0.0)
    return f"needs a GPU of {cell.least_gib:g} GiB; this one has {has:g}" if has < cell.least_gib else ""


def _judge(code: int, result: Mapping[str, Any], log: Path) -> tuple[str, str]:
    """State and reason by the exit code and what the cell said."""
    said = str(result.get("reason") or "")
    if code == SKIPPED or (code == 0 and said):
        return "skipped", said or "it did not say why"
    if code == 0:
        return "passed", ""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    tail = "\n".join(lines[-25:])[-3000:].replace(f"{reporting.ROOT}/", "")
    return "failed", f"exit code {code}; {log.relative_to(reporting.ROOT)}:\n{tail}"


def _run_process(command: list[str], environment: dict[str, str], sink: Any, limit: float) -> int | None:
    """The exit code; None where the time was over. Whatever the process started ends with it."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a job's end takes the way out of Ctrl-C
    child = subprocess.Popen(
        command, cwd=reporting.ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return child.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(child)
        signal.signal(signal.SIGTERM, before)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End the process group of a child that may have ended by itself: its own children may not have."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        waited = time.monotonic() + 5
        while child.poll() is None and time.monotonic() < waited:
            time.sleep(0.05)
    child.wait()


def scratch_folder() -> Path:
    """Where cells keep what is dear to make and used by several (checkpoints); RLOO_KIT_CELL_SCRATCH moves it."""
    chosen = os.environ.get("RLOO_KIT_CELL_SCRATCH")
    folder = Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"rloo-kit-cells-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def python(*arguments: str) -> tuple[str, ...]:
    """A command of this interpreter, unbuffered."""
    return (sys.executable, "-u", *arguments)


def _read(path: Path) -> dict[str, Any]:
    """A result; empty where there is none, or half of one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _write(result: Mapping[str, Any], path: Path) -> None:
    """Written beside and renamed: whenever the machine goes, the file is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)
