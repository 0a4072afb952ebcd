"""`rloo-kit doctor`: checks of the machine and the installation without a run, and what to do about each finding.

Checks that need torch or Jupyter run in a separate process. Nothing that could be a secret is printed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rloo_kit.errors import ConfigError, SetupError
from rloo_kit.system.console import render_text
from rloo_kit.system.environment import Environment, cache_folder, huggingface_home, prepare_environment
from rloo_kit.system.gpu import GIB, find_holders
from rloo_kit.system.problems import Problem, errors_of
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
STATUS = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "error": ("fail", "bold red")}  # words, colours


@dataclass(frozen=True)
class Report:
    """The environment and what each check found, faultless ones included."""

    environment: Environment
    checks: list[Problem]

    @property
    def exit_code(self) -> int:
        """1 when a check failed, else 0; warnings do not count."""
        return int(bool(errors_of(self.checks)))

    def to_dict(self) -> dict[str, Any]:
        checks = [
            {"name": check.name, "status": STATUS[check.level][0], "found": check.found, "todo": check.fix}
            for check in self.checks
        ]
        return {"exit_code": self.exit_code, "environment": self.environment.to_dict(), "checks": checks}

    def __rich__(self) -> Group:
        table = Table(title="rloo-kit doctor", title_justify="left")
        for name, is_short in (("check", True), ("status", True), ("found", False), ("what to do", False)):
            table.add_column(name, no_wrap=is_short, overflow="fold")
        for check in self.checks:
            status, colour = STATUS[check.level]
            table.add_row(Text(check.name), Text(status, style=colour), Text(check.found), Text(check.fix))
        return Group(self.environment, table)

    def __str__(self) -> str:
        return render_text(self)

    __repr__ = __str__


def check_installation(root: Path | None = None) -> Report:
    """Check this machine and installation, the `.env` in `root` (None: the project's) included. Takes seconds; up to a
    minute with a GPU and a cold disk. Print the Report for two tables."""
    settled, checks = _settle(root)
    place, follows = find_place()
    checks += [*_check_versions(settled, keep_torch=place in ("Colab", "Kaggle")), *_check_gpu(settled)]
    if place and settled.gpu is not None and settled.precision == "fp16":
        follows.append(f"{settled.gpu.name} has no bf16: runs use fp16, not measured")
    checks += [_ok(place, found) for found in follows]
    checks += [*_check_disks(), _check_kernel_spec(), _check_hub()]
    for name, state in settled.keys.items():
        todo = f"write {name}=... into {settled.env_file or '.env in the project root'}, or remove the empty one"
        checks.append(_warn(name, state, todo) if state == "empty" else _ok(name, state))
    return Report(settled, [*checks, _ok("token", settled.token)])


def find_place(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> tuple[str, list[str]]:
    """Colab, Kaggle, WSL or WSL2, and what follows for a run, one line each; ("", []) elsewhere. `root` has `/proc`."""
    if environ.get("KAGGLE_KERNEL_RUN_TYPE"):
        survives = "only /kaggle/working survives, in a saved version: run from there"
        return "Kaggle", [survives, "packages and models need the notebook's Internet switch"]
    if environ.get("COLAB_RELEASE_TAG"):
        return "Colab", ["the disk is erased with the runtime: copy outputs/ to a mounted Drive"]
    kernel = root / "proc/version"
    if not kernel.is_file() or "microsoft" not in kernel.read_text(encoding="utf-8", errors="replace").lower():
        return "", []
    if not (root / "dev/dxg").exists():
        return "WSL", ["no /dev/dxg, so no GPU: it takes WSL2 (wsl --set-version) and the Windows driver"]
    driver = "the driver is the Windows one: install none in Linux"
    if not (root / "usr/lib/wsl/lib/libcuda.so.1").exists():
        driver = "no libcuda in /usr/lib/wsl/lib: install the NVIDIA driver on Windows, none in Linux"
    return "WSL2", ["the VM's memory limit is memory= in .wslconfig on Windows, then wsl --shutdown", driver]


def _ok(name: str, found: str) -> Problem:
    return Problem(name, found, level="ok")


def _warn(name: str, found: str, todo: str) -> Problem:
    return Problem(name, found, todo, level="warning")


def _settle(root: Path | None) -> tuple[Environment, list[Problem]]:
    """The environment; if set-up refuses, what is known without `.env` and Unsloth, with the refusal as a problem."""
    try:
        return prepare_environment(root=root), []
    except (ConfigError, SetupError) as error:
        refused = Problem("set-up", "setup_environment() refuses", str(error))
    os.environ.pop("TQDM_NOTEBOOK", None)
    with tempfile.TemporaryDirectory() as nowhere:
        settled = prepare_environment("transformers", Path(nowhere))
    settled.root, settled.env_file = None, "left out, see set-up below"
    return settled, [refused]


def _check_versions(settled: Environment, keep_torch: bool) -> Iterator[Problem]:
    """Python and each library against its tested range, and vLLM with its plugin, which may bring another torch."""
    back = return_command(all(settled.versions.get(name) for name in TESTED_EXTRAS), keep_torch)
    rows = [("python", TESTED_PYTHON, "make a new environment with a tested Python")]
    rows += [(name, tested, back) for name, tested in (TESTED | TESTED_EXTRAS).items()]
    rows += [(name, fitting, VLLM_INSTALL) for name, fitting in VLLM_RANGES.items()]
    for name, wanted, fix in rows:
        version = settled.versions.get(name)
        fits, fits_not = ("fits", "does not fit") if name in VLLM_RANGES else ("tested", "is outside the tested range")
        if version is not None and in_range(version, wanted):
            yield _ok(name, f"{version}, {fits} {wanted}")
        elif version is not None:
            yield _warn(name, f"{version} {fits_not} {wanted}", fix)
        elif name in TESTED:
            yield Problem(name, f"not installed, tested {wanted}", fix)
        elif name in TESTED_EXTRAS and settled.gpu is not None:
            yield _warn(name, f"not installed, tested {wanted}", "pip install -e '.[gpu]' for the faster backend")


def _check_gpu(settled: Environment) -> Iterator[Problem]:
    """The GPU, the library of 4-bit weights, and who holds the GPU's memory."""
    gpu = settled.gpu
    if gpu is None:
        found = f"none ({settled.gpu_reason}); the embedded model runs on the CPU in fp32"
        is_cpu_build = "CPU build" in settled.gpu_reason
        todo = "set TORCH_INDEX to a CUDA index of torch and run make setup"
        yield _warn("GPU", settled.gpu_reason, todo) if is_cpu_build else _ok("GPU", found)
        return
    yield _ok("GPU", f"{gpu.name}, {settled.precision}, backend {settled.backend}")
    name, (loads, found) = "bitsandbytes CUDA library", _probe(_BITSANDBYTES)
    todo = "see python -m bitsandbytes; until then model.load_in_4bit=false"
    yield _ok(name, found) if loads else Problem(name, found, todo)
    own, holders = os.getpid(), find_holders(gpu)
    named = [
        f"{'this process' if holder.pid == own else holder.name} (pid {holder.pid}"
        + (")" if holder.memory_gib is None else f", {holder.memory_gib:.1f} GiB)")
        for holder in holders
    ]
    found = f"{gpu.free_gib:.1f} of {gpu.memory_gib:.1f} GiB free; held by {', '.join(named) or 'no process'}"
    held_by_others = gpu.memory_gib - gpu.free_gib - sum(h.memory_gib or 0.0 for h in holders if h.pid == own)
    todo = "stop what you do not need, such as other notebooks' kernels"
    yield _warn("GPU memory", found, todo) if held_by_others > HELD_BY_OTHERS_GIB else _ok("GPU memory", found)


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


def _check_disks() -> Iterator[Problem]:
    """Free space where runs are written and where models are cached; one check for each disk."""
    hub = os.environ.get("HF_HUB_CACHE") or huggingface_home()
    folders = {"runs": Path.cwd(), "kit's cache": cache_folder(), "hub's cache": Path(hub).expanduser()}
    disks: dict[int, tuple[Path, list[str]]] = {}
    for use, folder in folders.items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        disks.setdefault(there.stat().st_dev, (there, []))[1].append(use)
    for there, uses in disks.values():
        free = shutil.disk_usage(there).free / GIB
        found = f"{free:.1f} GiB free at {there} ({', '.join(uses)})"
        todo = f"free some: a 4-bit model and a run take up to {DISK_LOW_GIB:.0f} GiB"
        level = "warning" if free >= DISK_FULL_GIB else "error"
        yield _ok("disk", found) if free >= DISK_LOW_GIB else Problem("disk", found, todo, level=level)


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


def _check_kernel_spec() -> Problem:
    if not is_importable("jupyter_client"):
        return _ok("kernel spec", "Jupyter is not installed; notebooks need pip install -e '.[notebook]'")
    good, found = _probe(_KERNEL_SPEC)
    todo = "python -m ipykernel install --sys-prefix --name python3"
    return _ok("kernel spec", found) if good else _warn("kernel spec", found, todo)


def _check_hub() -> Problem:
    """Whether the model hub answers; being offline is no failure, because the embedded model needs no network."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return _ok("hub", f"offline by choice ({name}); models come from the cache or a folder")
    address = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    host = "the address in HF_ENDPOINT"
    try:
        host = urlsplit(address).hostname or host  # the host alone: an endpoint can carry a password
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=HUB_TIMEOUT_S):
            return _ok("hub", f"{host} is reachable")
    except urllib.error.HTTPError as answer:  # the hub did answer
        return _ok("hub", f"{host} is reachable (status {answer.code})")
    except (OSError, ValueError, HTTPException) as error:
        found = f"{host} is not reachable ({type(error).__name__})"
        return _warn("hub", found, "HF_HUB_OFFLINE=1 saves the wait; embedded and cached models still work")
