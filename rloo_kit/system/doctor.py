"""`rloo-kit doctor`: checks of the machine and the installation without a run, and what to do about each finding.

Checks that need torch or Jupyter run in a separate process. Nothing that could be a secret is printed.
"""

import json as json_text
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.table import Table
from rich.text import Text

from rloo_kit.errors import ConfigError, SetupError
from rloo_kit.system.console import print_table, render_text
from rloo_kit.system.env_file import huggingface_home
from rloo_kit.system.environment import Environment, cache_folder, prepare_environment
from rloo_kit.system.gpu import GIB, find_holders
from rloo_kit.system.hosted import Place, find_place
from rloo_kit.system.versions import (
    TESTED,
    TESTED_EXTRAS,
    TESTED_PYTHON,
    VLLM_INSTALL,
    VLLM_RANGES,
    in_range,
    is_importable,
    return_command,
)

HUB_TIMEOUT_S = 3.0
PROBE_TIMEOUT_S = 120.0
DISK_LOW_GIB, DISK_FULL_GIB = 10.0, 1.0  # a 4-bit Qwen3-4B takes 2.5 GiB, its checkpoints little
HELD_BY_OTHERS_GIB = 1.0


@dataclass(frozen=True)
class Check:
    """One finding. `status`: ok, warn (a run may still work) or fail (it will not); `todo` is empty when ok."""

    name: str
    status: str
    found: str
    todo: str = ""


@dataclass(frozen=True)
class Report:
    """The environment and all findings."""

    environment: Environment
    checks: list[Check]

    @property
    def exit_code(self) -> int:
        """1 when a check failed, else 0; warnings do not count."""
        return int(any(check.status == "fail" for check in self.checks))

    def to_dict(self) -> dict[str, Any]:
        checks = [asdict(check) for check in self.checks]
        return {"exit_code": self.exit_code, "environment": self.environment.to_dict(), "checks": checks}

    def __str__(self) -> str:
        return f"{self.environment}\n{render_text(self._table())}"

    __repr__ = __str__

    def _table(self) -> Table:
        table = Table(title="rloo-kit doctor", title_justify="left")
        for name, is_short in (("check", True), ("status", True), ("found", False), ("what to do", False)):
            table.add_column(name, no_wrap=is_short, overflow="fold")
        colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
        for check in self.checks:
            status = Text(check.status, style=colours[check.status])
            table.add_row(Text(check.name), status, Text(check.found), Text(check.todo))
        return table


def check_installation(root: Path | None = None) -> Report:
    """Check this machine and installation. Takes seconds; up to a minute with a GPU and a cold disk.

    Args:
        root: folder that contains `.env`; None finds the project's root.
    Returns:
        The Report: print it for two tables, `.to_dict()` for JSON, `.exit_code` for a script.
    """
    settled, checks = _settle(root)
    place = find_place()
    checks += [_python(settled), *_packages(settled, place), _gpu(settled), *_place(settled, place)]
    if settled.gpu is not None:
        checks += [_bitsandbytes(), _gpu_memory(settled)]
    checks += [*_disk(), _kernel_spec(), _hub(), *_keys(settled)]
    return Report(settled, checks)


def _settle(root: Path | None) -> tuple[Environment, list[Check]]:
    """The environment; if set-up refuses, what is known of it, with the refusal as a finding."""
    try:
        return prepare_environment(root=root), []
    except (ConfigError, SetupError) as error:
        refused = [Check("set-up", "fail", "setup_environment() refuses", str(error))]
    try:
        return prepare_environment("transformers", root), refused  # the backend was the obstacle
    except (ConfigError, SetupError):
        os.environ.pop("TQDM_NOTEBOOK", None)
        with tempfile.TemporaryDirectory() as nowhere:  # .env was the obstacle, or a value in it
            settled = prepare_environment("transformers", Path(nowhere))
        settled.root, settled.env_file = None, "left out, see set-up below"
        return settled, refused


def run_doctor(json: bool = False) -> int:
    """The command: print the report, as tables or as JSON. Returns: the exit code."""
    report = check_installation()
    if json:
        print(json_text.dumps(report.to_dict(), indent=2))
    else:
        print(report.environment)
        print_table(report._table())
    return report.exit_code


def _python(settled: Environment) -> Check:
    version = settled.versions["python"] or ""
    if in_range(version, TESTED_PYTHON):
        return Check("python", "ok", f"{version}, tested {TESTED_PYTHON}")
    return Check(
        "python",
        "warn",
        f"{version} is outside the tested range {TESTED_PYTHON}",
        "make a new environment with a tested Python",
    )


def _packages(settled: Environment, place: Place | None) -> list[Check]:
    checks = []
    keeps_torch = place is not None and place.name in ("Colab", "Kaggle")  # preinstalled
    back = return_command(
        TESTED_EXTRAS.keys() <= {name for name, version in settled.versions.items() if version}, keeps_torch
    )
    for name, tested in (TESTED | TESTED_EXTRAS).items():
        version = settled.versions[name]
        if version is None and name in TESTED_EXTRAS:
            if settled.gpu is not None:
                todo = "pip install -e '.[gpu]' for the faster backend"
                checks.append(Check(name, "warn", f"not installed, tested {tested}", todo))
        elif version is None:
            checks.append(Check(name, "fail", f"not installed, tested {tested}", back))
        elif in_range(version, tested):
            checks.append(Check(name, "ok", f"{version}, tested {tested}"))
        else:
            checks.append(Check(name, "warn", f"{version} is outside the tested range {tested}", back))
    return checks + _vllm(settled)


def _vllm(settled: Environment) -> list[Check]:
    """vLLM and its plugin, if installed: another version brings another torch."""
    checks = []
    for name, fitting in VLLM_RANGES.items():
        version = settled.versions.get(name)
        if version is None:
            continue
        if in_range(version, fitting):
            checks.append(Check(name, "ok", f"{version}, fits {fitting}"))
        else:
            checks.append(Check(name, "warn", f"{version} does not fit {fitting}", VLLM_INSTALL))
    return checks


def _gpu(settled: Environment) -> Check:
    gpu = settled.gpu
    if gpu is not None:
        return Check("GPU", "ok", f"{gpu.name}, {settled.precision}, backend {settled.backend}")
    if "CPU build" in settled.gpu_reason:
        return Check("GPU", "warn", settled.gpu_reason, "set TORCH_INDEX to a CUDA index of torch and run make setup")
    return Check("GPU", "ok", f"none ({settled.gpu_reason}); the embedded model runs on the CPU in fp32")


def _place(settled: Environment, place: Place | None) -> list[Check]:
    """What Colab, Kaggle or WSL2 imply for a run."""
    if place is None:
        return []
    follows = list(place.follows)
    if settled.precision == "fp16":
        follows.append(f"{settled.gpu.name if settled.gpu else 'this GPU'} has no bf16: runs use fp16, not measured")
    return [Check(place.name, "ok", found) for found in follows]


def _probe(code: str, timeout_s: float = PROBE_TIMEOUT_S) -> tuple[bool, str]:
    """Run Python code in a separate process. Returns: whether it succeeded, and the last line that it wrote."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return False, f"no answer within {timeout_s:.0f} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else f"ended with exit code {done.returncode}"


_BITSANDBYTES = """
from bitsandbytes.cextension import lib
if not getattr(lib, "compiled_with_cuda", False):
    raise SystemExit(vars(lib).get("error_msg", "only its CPU library loads"))  # getattr invents what is missing
print("loads " + lib._lib._name.rsplit("/", 1)[-1])
"""


def _bitsandbytes() -> Check:
    loads, found = _probe(_BITSANDBYTES)
    todo = "" if loads else "see python -m bitsandbytes; until then model.load_in_4bit=false"
    return Check("bitsandbytes CUDA library", "ok" if loads else "fail", found, todo)


def _gpu_memory(settled: Environment) -> Check:
    gpu = settled.gpu
    assert gpu is not None  # only called with a GPU
    own = os.getpid()
    holders = find_holders(gpu)
    named = [
        f"{'this process' if holder.pid == own else holder.name} (pid {holder.pid}"
        + (")" if holder.memory_gib is None else f", {holder.memory_gib:.1f} GiB)")
        for holder in holders
    ]
    found = f"{gpu.free_gib:.1f} of {gpu.memory_gib:.1f} GiB free; held by {', '.join(named) or 'no process'}"
    held_by_others = gpu.memory_gib - gpu.free_gib - sum(h.memory_gib or 0.0 for h in holders if h.pid == own)
    if held_by_others > HELD_BY_OTHERS_GIB:
        return Check("GPU memory", "warn", found, "stop what you do not need, such as other notebooks' kernels")
    return Check("GPU memory", "ok", found)


def _disk() -> list[Check]:
    """Free space where runs are written and where models are cached; one check for each disk."""
    hub = os.environ.get("HF_HUB_CACHE") or huggingface_home()
    folders = {"runs": Path.cwd(), "kit's cache": cache_folder(), "hub's cache": Path(hub).expanduser()}
    disks: dict[int, tuple[Path, list[str]]] = {}
    for use, folder in folders.items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        disks.setdefault(there.stat().st_dev, (there, []))[1].append(use)
    checks = []
    for there, uses in disks.values():
        free = shutil.disk_usage(there).free / GIB
        status = "ok" if free >= DISK_LOW_GIB else "warn" if free >= DISK_FULL_GIB else "fail"
        found = f"{free:.1f} GiB free at {there} ({', '.join(uses)})"
        todo = f"free some: a 4-bit model and a run take up to {DISK_LOW_GIB:.0f} GiB" if status != "ok" else ""
        checks.append(Check("disk", status, found, todo))
    return checks


_KERNEL_SPEC = """
import importlib.util, os, sys
from jupyter_client.kernelspec import KernelSpecManager
if importlib.util.find_spec("ipykernel") is None:
    raise SystemExit("ipykernel is not installed next to jupyter_client")
program = KernelSpecManager().get_kernel_spec("python3").argv[0]
names = ("python", "python3", "python%d.%d" % sys.version_info[:2])  # these mean the server's own Python
if program not in names and os.path.realpath(program) != os.path.realpath(sys.executable):
    raise SystemExit(f"the kernel spec python3 starts {program}, not {sys.executable}")
print("python3 starts this Python")
"""


def _kernel_spec() -> Check:
    if not is_importable("jupyter_client"):
        return Check("kernel spec", "ok", "Jupyter is not installed; notebooks need pip install -e '.[notebook]'")
    good, found = _probe(_KERNEL_SPEC)
    todo = "" if good else "python -m ipykernel install --sys-prefix --name python3"
    return Check("kernel spec", "ok" if good else "warn", found, todo)


def _hub() -> Check:
    """Whether the model hub answers; being offline is no failure, because the embedded model needs no network."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return Check("hub", "ok", f"offline by choice ({name}); models come from the cache or a folder")
    address = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    host = "the address in HF_ENDPOINT"
    try:
        host = urlsplit(address).hostname or host  # the host alone: an endpoint can carry a password
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=HUB_TIMEOUT_S):
            return Check("hub", "ok", f"{host} is reachable")
    except urllib.error.HTTPError as answer:  # the hub did answer
        return Check("hub", "ok", f"{host} is reachable (status {answer.code})")
    except (OSError, ValueError, HTTPException) as error:
        found = f"{host} is not reachable ({type(error).__name__})"
        return Check("hub", "warn", found, "HF_HUB_OFFLINE=1 saves the wait; embedded and cached models still work")


def _keys(settled: Environment) -> list[Check]:
    checks = []
    for name, state in settled.keys.items():
        todo = f"write {name}=... into {settled.env_file or '.env in the project root'}, or remove the empty one"
        checks.append(Check(name, "warn", state, todo) if state == "empty" else Check(name, "ok", state))
    return checks + [Check("token", "ok", settled.token)]
