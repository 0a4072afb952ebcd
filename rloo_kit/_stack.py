"""The required import order (Unsloth, then torch, transformers and TRL) and the set-up that enforces it.

Libraries loaded before Unsloth keep their unpatched code, and a run then silently trains slower, or not at all.
"""

import logging
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from rloo_kit.errors import ImportOrderError, SetupError
from rloo_kit.system import environment
from rloo_kit.system.environment import BACKEND_VARIABLE, EXPECTED_KEYS, Environment
from rloo_kit.system.processes import is_main_process

PATCHED = ("trl", "transformers", "peft")  # what Unsloth patches, the loudest symptom first
QUIET_S = 1.0  # seconds of importing after which a line says what is being loaded

_in_time = False  # `setup_environment` has run, so a TRL that is loaded by now came after it


@dataclass(frozen=True)
class Stack:
    """The heavy libraries as modules; `peft` and `datasets`, half of the time, are imported on first use."""

    torch: Any
    transformers: Any
    trl: Any
    unsloth: Any | None  # None if it is not the backend

    @cached_property
    def peft(self) -> Any:
        with _progress("peft"):
            return _import("peft")

    @cached_property
    def datasets(self) -> Any:
        with _progress("datasets"):
            return _import("datasets")


_stack: Stack | None = None


def setup_environment(
    backend: str = "auto", *, root: Path | None = None, keys: Sequence[str] = EXPECTED_KEYS
) -> Environment:
    """Set up and return a run's environment; call it before torch, transformers, TRL or PEFT is imported.

    Loads the project's `.env`, chooses precision and backend, sets text progress bars, moves Unsloth's compiled cache
    out of the working folder and, if Unsloth is the backend, imports it at once. A second call is harmless.

    Args:
        backend: "auto" takes Unsloth if it is installed and there is an NVIDIA GPU; "unsloth" or "transformers" forces
            one, as does the variable RLOO_KIT_BACKEND.
        root: folder that contains `.env`; None finds the project's root from the working directory, then the package.
        keys: names of variables to report as found, empty or missing.
    Raises:
        ImportOrderError: Unsloth is the backend, but a library that it patches, or an Accelerator, came before it.
        ConfigError: an unknown value of `backend`, RLOO_KIT_BACKEND or TQDM_NOTEBOOK.
        SetupError: Unsloth is forced but cannot be used, or `.env` or Unsloth cannot be read or imported.
    """
    settled = environment.prepare_environment(backend, root, keys)
    was_in_time = _in_time
    _import_backend(settled)
    if not was_in_time and "trl" in sys.modules and sys.modules.get("unsloth") is None:
        warnings.warn(
            "trl was imported before rloo_kit.setup_environment(). Without Unsloth that is harmless, but on a machine "
            "where Unsloth is the backend it is an error: call setup_environment() first.",
            stacklevel=2,
        )
    return settled


def load_stack() -> Stack:
    """The heavy libraries, imported in the required order; cached. Sets up the environment if needed, raises as
    `setup_environment`."""
    global _stack
    if _stack is None:
        # without a GPU, bitsandbytes logs that a faster 4-bit kernel for the CPU could be downloaded
        logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
        # transformers warns at the first decoding of a BPE tokenizer of an option that it then ignores
        logger = logging.getLogger("transformers.tokenization_utils_tokenizers")
        logger.addFilter(lambda record: "clean_up_tokenization_spaces" not in record.getMessage())
        # TRL warns about vLLM versions that fit this torch, for its own vLLM path, which the kit does not use
        warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")
        settled = environment.current()
        with _progress("Unsloth, torch and TRL" if settled.backend == "unsloth" else "torch and TRL"):
            _import_backend(settled)
            modules = {name: _import(name) for name in ("torch", "transformers", "trl")}
        _stack = Stack(**modules, unsloth=sys.modules.get("unsloth"))
    return _stack


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Print what is being loaded if it takes long: in a kernel to stdout (notebooks show stderr as errors), else to
    stderr (`--json` uses stdout)."""
    stream = sys.stdout if "ipykernel" in sys.modules else sys.stderr
    line = threading.Timer(QUIET_S, lambda: print(f"loading {what} ...", file=stream, flush=True))
    line.daemon = True
    if is_main_process():
        line.start()
    try:
        yield
    finally:
        line.cancel()


def _import_backend(settled: Environment) -> None:
    """Import Unsloth if it is the backend; raise if that comes too late."""
    global _in_time
    if settled.backend == "unsloth" or sys.modules.get("unsloth") is not None:
        _refuse_if_late()
        try:
            import_module("unsloth")
        except Exception as error:  # many types: a missing GPU, an operator that does not load, its own checks
            raise SetupError(
                f"Unsloth is installed but its import failed: {type(error).__name__}: {error}. Restart the kernel, and "
                f"see what `rloo-kit doctor` says; to go without Unsloth: {BACKEND_VARIABLE}=transformers"
            ) from error
    _in_time = True


def _refuse_if_late() -> None:
    # The index of each package's first module in `sys.modules`, which follows the order in which imports ended: Unsloth
    # itself comes after what it imports, but its first submodule comes before.
    order: dict[str, int] = {}
    for place, (name, module) in enumerate(list(sys.modules.items())):
        if module is not None:
            order.setdefault(name.split(".")[0], place)
    unsloth = order.get("unsloth", sys.maxsize)
    early = [name for name in PATCHED if order.get(name, unsloth) < unsloth]
    accelerate = sys.modules.get("accelerate.state")
    if early:
        what = f"{' and '.join(early)} {'was' if len(early) == 1 else 'were'} imported"
    elif "unsloth" not in order and accelerate is not None and accelerate.AcceleratorState._shared_state:
        what = "torch and an Accelerator (accelerate) were set up"  # which fixes precision and device
    else:
        return
    raise ImportOrderError(
        f"{what} before Unsloth. Unsloth has to be imported before {', '.join(PATCHED)} and before an Accelerator is "
        "made: it patches them, and what was loaded earlier stays unpatched. In a notebook: restart the kernel and run "
        "the set-up cell (import rloo_kit; rloo_kit.setup_environment()) first. In a script: put these lines above all "
        f"other imports. To go without Unsloth: {BACKEND_VARIABLE}=transformers"
    )


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise SetupError(f"{name} is not installed, and the kit needs it: pip install -e .") from error
