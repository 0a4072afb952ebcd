"""The environment of a run, settled once, before torch loads: `.env`, GPU, precision, backend, progress bars, caches.

`_stack.setup_environment()` is the public call; modules that need the outcome call `current()`.
"""

import ipaddress
import os
import platform
import re
import stat
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dotenv import dotenv_values
from rich.table import Table
from rich.text import Text

from rloo_kit.errors import ConfigError, SetupError
from rloo_kit.system.console import render_text, set_up_progress
from rloo_kit.system.gpu import Gpu, find_gpus
from rloo_kit.system.input_files import working_folder
from rloo_kit.system.processes import count_processes, is_distributed
from rloo_kit.system.versions import installed_version, installed_versions, is_cpu_torch, is_importable

BACKENDS = ("unsloth", "transformers")
CACHE_VARIABLE = "RLOO_KIT_CACHE"
BACKEND_VARIABLE = "RLOO_KIT_BACKEND"
EXPECTED_KEYS = ("HF_TOKEN",)
TELEMETRY = "HF_HUB_DISABLE_TELEMETRY"  # of the Hugging Face libraries; the others follow it
TELEMETRY_OF_OTHERS = ("UNSLOTH_DISABLE_STATISTICS", "VLLM_NO_USAGE_STATS")
STANDBY_VARIABLE = "UNSLOTH_VLLM_STANDBY"  # Unsloth reads it when it is imported: its vLLM can sleep
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch's, since 2.10 and before
BF16_CAPABILITY = (8, 0)  # Ampere and later do bf16 in hardware; Turing and Volta only emulate it
PRECISIONS = {  # name: (torch's dtype, ACCELERATE_MIXED_PRECISION)
    "bf16": ("bfloat16", "bf16"),
    "fp16": ("float16", "fp16"),
    "fp32": ("float32", "no"),
}
_PLAIN_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


@dataclass(repr=False)
class Environment:
    """What set-up found and chose; prints as a table. It contains names of keys, never their values.

    `gpu`: of this process (None: see `gpu_reason`). `precision`: bf16, fp16 or fp32.
    """

    backend: str
    backend_reason: str
    precision: str
    precision_reason: str
    gpu: Gpu | None
    gpu_reason: str
    num_gpus: int
    versions: dict[str, str | None]
    root: str | None
    env_file: str | None
    keys: dict[str, str]
    token: str
    progress: str
    telemetry: str
    unsloth_cache: str
    notes: list[str] = field(default_factory=list)

    @property
    def dtype_name(self) -> str:
        """Name of torch's dtype for the precision: bfloat16, float16 or float32."""
        return PRECISIONS[self.precision][0]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        gpu, rows = self.gpu, [("backend", f"{self.backend}: {self.backend_reason}")]
        if gpu is None:
            rows.append(("GPU", f"none: {self.gpu_reason}"))
        else:
            rows.append(("GPU", f"{gpu.name}, compute capability {gpu.compute_capability}, driver {gpu.driver}"))
            rows.append(("GPU memory", f"{gpu.free_gib:.1f} of {gpu.memory_gib:.1f} GiB free"))
        if self.num_gpus > 1:
            others = "" if is_distributed() else "; for all: accelerate launch, see docs/several-gpus.md"
            rows.append(("GPUs", f"{self.num_gpus} visible; this process uses the one above{others}"))
        if is_distributed():
            rows.append(("processes", f"{count_processes()}; this table is of the first"))
        return [
            *rows,
            ("precision", f"{self.precision}: {self.precision_reason}"),
            ("versions", ", ".join(f"{name} {version}" for name, version in self.versions.items() if version)),
            (".env", self.env_file or f"none in {self.root or 'the working folder or above it'}"),
            ("keys", ", ".join(f"{name} {state}" for name, state in self.keys.items()) or "none requested"),
            ("Hugging Face token", self.token),
            ("progress bars", self.progress),
            ("telemetry", self.telemetry),
            *(("note", note) for note in self.notes),
        ]

    def describe(self) -> str:
        """GPU and precision on one line, then a line for each note; `str` gives the whole table."""
        gpu = "no GPU" if self.gpu is None else f"{self.gpu.name}, {self.gpu.free_gib:.1f} GiB free"
        return "\n".join([f"machine: {gpu}, {self.precision}", *(f"note: {note}" for note in self.notes)])

    def __rich__(self) -> Table:
        table = Table(title="rloo-kit environment", show_header=False, title_justify="left")
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self.rows():
            table.add_row(Text(name), Text(value))
        return table

    def __str__(self) -> str:
        return render_text(self)

    __repr__ = __str__


def find_root(start: Path | None = None) -> Path | None:
    """The nearest folder with pyproject.toml, .git, configs/ or .env, at or above `start` (None: the working folder,
    then the process's own), else above the package; None without one."""
    for origin in (*([start] if start else [working_folder(), Path()]), Path(__file__).parents[2]):
        for folder in (origin.resolve(), *origin.resolve().parents):
            # A `.env` folder is a virtual environment, and a file named configs is none of ours.
            if any((folder / name).is_file() for name in ("pyproject.toml", ".env")):
                return folder
            if (folder / ".git").exists() or (folder / "configs").is_dir():
                return folder
    return None


def load_env_file(path: Path, expected: Sequence[str] = EXPECTED_KEYS) -> tuple[dict[str, str], list[str]]:
    """Load a `.env`, which may be missing, into `os.environ`; a variable that is set and not empty stays, and so does
    an empty CUDA_VISIBLE_DEVICES, which means no GPU.

    Returns the state of each `expected` name and of empty ones, and notes; no values. Raises SetupError if the file
    cannot be read as UTF-8 text, or has a value that no environment takes.
    """
    try:
        values = dict(dotenv_values(path, encoding="utf-8-sig")) if path.is_file() else {}
    except UnicodeDecodeError:  # `from None`: the original error carries the file's bytes
        raise SetupError(f"{path} is not UTF-8 text: save it as UTF-8, one NAME=value a line") from None
    except OSError as error:
        raise SetupError(f"{path} cannot be read ({error.strerror}): fix its permissions (chmod 600 .env)") from None
    before = {name for name, value in os.environ.items() if value}
    for name, value in values.items():
        if value and not os.environ.get(name) and not (name == "CUDA_VISIBLE_DEVICES" and name in os.environ):
            try:
                os.environ[name] = value
            except ValueError:  # by name only if it looks like one, see below
                what = name if _PLAIN_NAME.fullmatch(name) else "a variable"
                raise SetupError(
                    f"{path}: {what} contains a NUL or half a character, which no environment takes: rewrite it"
                ) from None
    # Only what looks like a name is reported: a broken multi-line secret leaves scraps of itself as names.
    empty = [name for name, value in values.items() if value == "" and _PLAIN_NAME.fullmatch(name)]
    states = {}
    for name in dict.fromkeys([*([expected] if isinstance(expected, str) else expected), *empty]):
        if name in before and values.get(name) != os.environ[name]:
            states[name] = "found in the environment"
        elif values.get(name):
            states[name] = "found in .env"
        else:
            states[name] = "empty" if name in values or name in os.environ else "missing"
    # Not by name: a token pasted on a separate line ends up here.
    notes = [f"{path}: a line without '=' is ignored; write NAME=value"] if None in values.values() else []
    return states, notes


def huggingface_home() -> Path:
    """The folder of huggingface_hub's caches and its login: HF_HOME, or its place in XDG_CACHE_HOME or ~/.cache."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("HF_HOME") or caches / "huggingface").expanduser()


def find_token() -> str:
    """Where a Hugging Face token was found: in the environment, in the login's file, or nowhere; never the token."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name, "").strip():
            return f"found ({name})"
    path = Path(os.environ.get("HF_TOKEN_PATH") or huggingface_home() / "token").expanduser()
    with suppress(OSError):
        if path.read_bytes().strip():
            return "found (the file that the login wrote)"
    return "not found (gated and private models need one: HF_TOKEN in .env)"


def choose_precision(gpu: Gpu | None) -> tuple[str, str]:
    """Precision and the reason: bf16 if the GPU has it in hardware, fp16 on older GPUs, fp32 without one."""
    if gpu is None:
        return "fp32", "no NVIDIA GPU is used"
    if gpu.capability >= BF16_CAPABILITY:
        return "bf16", f"compute capability {gpu.compute_capability} has it in hardware"
    needed = ".".join(map(str, BF16_CAPABILITY))
    return "fp16", f"compute capability {gpu.compute_capability}; bf16 in hardware needs {needed}"


def choose_backend(requested: str, gpu: Gpu | None, gpu_reason: str) -> tuple[str, str]:
    """Backend and the reason. `requested` overrides RLOO_KIT_BACKEND unless "auto"; both override what is found. Raises
    ConfigError if one names no backend, SetupError if Unsloth is requested and cannot be used, or is imported in a run
    with several processes."""
    variable = os.environ.get(BACKEND_VARIABLE, "").strip().lower() or "auto"
    choice, source = (requested, "backend=") if requested != "auto" else (variable, f"{BACKEND_VARIABLE}=")
    if choice not in ("auto", *BACKENDS):
        raise ConfigError(f"{source}{choice!r} is not a backend: use {', '.join(('auto', *BACKENDS))}")
    if choice == "transformers":
        return "transformers", f"requested by {source}transformers"
    imported, installed = sys.modules.get("unsloth") is not None, is_importable("unsloth")
    if is_distributed():
        if not imported and choice == "auto":
            return "transformers", many_processes()
        what, fix = f"{source}unsloth", "leave it out"
        if choice == "auto":
            what, fix = "Unsloth is imported in this process", "do not import it"
        raise SetupError(
            f"{what}, but the run has {many_processes()}: {fix}, and the transformers backend trains on all of them; "
            "or start one process (rloo-kit train without a launcher)"
        )
    if imported:
        return "unsloth", "imported in this process already"
    if gpu is not None and installed:
        found = "an NVIDIA GPU and Unsloth are there"
        return "unsloth", found if choice == "auto" else f"requested by {source}unsloth"
    if choice == "unsloth":
        missing = gpu_reason if installed else "Unsloth is not installed"
        fix = "run rloo-kit doctor on the machine with the GPU" if installed else "pip install -e '.[gpu]'"
        raise SetupError(f"{source}unsloth: {missing}. {fix}; or do without it: {BACKEND_VARIABLE}=transformers")
    return "transformers", gpu_reason if gpu is None else "Unsloth is not installed"


def many_processes() -> str:
    """Why Unsloth is not the backend of a run with several processes."""
    return f"{count_processes()} processes, and Unsloth trains on one GPU"


def cache_folder() -> Path:
    """The kit's cache: RLOO_KIT_CACHE, else `rloo-kit` in XDG_CACHE_HOME or `~/.cache`; in /tmp if that is
    read-only."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "rloo-kit"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    folder = Path(tempfile.gettempdir()) / f"rloo-kit-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:  # it contains code
        raise SetupError(f"{folder} is not a folder of this user alone; set {CACHE_VARIABLE} to one that is")
    return folder


def prepare_standby(engine: str, backend: str) -> None:
    """Before Unsloth is imported: if the run may use vLLM, let Unsloth's vLLM sleep while the model is trained. A value
    that is already set, including "0", stays."""
    is_possible = engine == "vllm" or (engine == "auto" and is_importable("vllm") and not is_cpu_torch())
    if is_possible and backend != "transformers" and "unsloth" not in sys.modules:
        os.environ.setdefault(STANDBY_VARIABLE, "1")


def _let_segments_grow() -> None:
    """Before torch is imported: let its memory on the GPU grow in place, so that a growing KV cache leaves no holes.
    Not if the user has chosen (an empty variable counts), in WSL or on a Jetson, where it fails, nor with vLLM, which
    cannot sleep then."""
    unfit = any(system in platform.release().lower() for system in ("microsoft", "tegra"))
    if not unfit and not is_importable("vllm") and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


_current: Environment | None = None
_requested = "auto"  # the backend that an earlier call named; a later call without one keeps it


def prepare_environment(
    backend: str = "auto", root: Path | None = None, keys: Sequence[str] = EXPECTED_KEYS
) -> Environment:
    """The part of set-up that needs no heavy library; see `rloo_kit.setup_environment` for arguments and errors."""
    global _current, _requested
    if root is not None and not Path(root).is_dir():
        raise SetupError(f"root={str(root)!r} is not a folder: give the folder that contains .env, or leave root out")
    root = find_root() if root is None else Path(root).resolve()
    env_file = (root or Path()) / ".env"
    states, notes = load_env_file(env_file, keys)  # first: it may set any of the variables below
    gpus = find_gpus()
    if gpus.count > 1:
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # CUDA counts the GPUs as NVML does
    gpu, gpu_reason = gpus.gpu, gpus.reason
    if gpu is not None and is_cpu_torch():
        version = installed_version("torch")
        gpu_reason = f"{gpu.name} is there, but torch {version} is a CPU build; install a CUDA build of torch"
        gpu = None
    requested = _requested if backend == "auto" else backend
    chosen, backend_reason = choose_backend(requested, gpu, gpu_reason)
    if backend == "auto" and _current is not None and _current.backend == chosen:
        backend_reason = _current.backend_reason  # the first one: by now Unsloth is imported
    precision, precision_reason = choose_precision(gpu)
    progress, mixed = set_up_progress(), PRECISIONS[precision][1]
    if (before := os.environ.get("ACCELERATE_MIXED_PRECISION")) not in (None, "", mixed):
        notes.append(f"ACCELERATE_MIXED_PRECISION was {before!r}; set to {mixed!r} to agree with the precision")
    os.environ["ACCELERATE_MIXED_PRECISION"] = mixed  # accelerate reads it unchecked, and it overrides `bf16=False`
    if chosen == "transformers" and gpu is not None:  # Unsloth does so itself
        _let_segments_grow()
    if chosen == "transformers" and sys.modules.get("unsloth") is not None:
        notes.append("Unsloth is imported in this process, and its patches stay: restart the kernel to run without it")
    if not os.environ.get("UNSLOTH_COMPILE_LOCATION"):  # by default Unsloth writes into the working folder
        # One folder for each set of versions: its files are generated from the sources of TRL and transformers.
        versions = [installed_version(name) or "none" for name in ("unsloth", "trl", "transformers", "torch")]
        os.environ["UNSLOTH_COMPILE_LOCATION"] = str(cache_folder() / "unsloth_compiled_cache" / "-".join(versions))
    _requested = requested
    _current = Environment(
        backend=chosen,
        backend_reason=backend_reason,
        precision=precision,
        precision_reason=precision_reason,
        gpu=gpu,
        gpu_reason=gpu_reason,
        num_gpus=gpus.count if gpu else 0,
        versions=installed_versions(),
        root=None if root is None else str(root),
        env_file=str(env_file) if env_file.is_file() else None,
        keys=states,
        token=find_token(),
        progress=progress,
        telemetry=_switch_telemetry_off(),
        unsloth_cache=os.environ["UNSLOTH_COMPILE_LOCATION"],
        notes=notes,
    )
    return _current


def current() -> Environment:
    """The environment that set-up settled; before set-up, one prepared now with the defaults."""
    return _current if _current is not None else prepare_environment()


def mixed_precision(dtype: str) -> str:
    """What a run with this `model.dtype` is trained in: the machine's, but float16 for float16 weights, and float32 for
    float32 weights without bfloat16, because some models overflow float16."""
    machine = PRECISIONS[current().precision][1]
    if dtype == "float16" and machine != "no":
        return "fp16"
    return "no" if (dtype, machine) == ("float32", "fp16") else machine


def _switch_telemetry_off() -> str:
    """Turn the libraries' telemetry off unless HF_HUB_DISABLE_TELEMETRY=0. Returns: the outcome in words."""
    chosen = os.environ.get(TELEMETRY, "").strip().lower()
    if chosen in ("0", "false", "no", "off"):
        return f"as the libraries have it ({TELEMETRY}={chosen})"
    for name in (TELEMETRY, *TELEMETRY_OF_OTHERS):
        os.environ[name] = os.environ.get(name) or "1"
    hub = sys.modules.get("huggingface_hub.constants")
    if hub is not None and not hub.HF_HUB_DISABLE_TELEMETRY:
        return "on: huggingface_hub was imported before set-up; restart the kernel and run set-up first"
    return f"off ({TELEMETRY}=0 leaves it to the libraries)"


def is_sendable(key: str) -> bool:
    """Whether an API key fits an HTTP header; of another one, an HTTP library's error would print it."""
    return key.isascii() and key.isprintable() and key == key.strip()


def is_loopback(url: str) -> bool:
    """Whether `url` is of this machine, for which no proxy is asked.

    >>> [is_loopback(f"http://{host}:8000") for host in ("localhost", "127.0.0.2", "[::1]", "0.0.0.0", "10.0.0.7")]
    [True, True, True, True, False]
    """
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def is_exposed(url: str) -> bool:
    """Whether others on the network could read requests to `url`: plain http to an address that is not private.

    >>> [is_exposed(f"http://{host}:8000") for host in ("localhost", "node1", "[::1]", "10.0.0.7", "8.8.8.8", "a.org")]
    [False, False, False, False, True, True]
    >>> is_exposed("https://a.org")
    False
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "http":
        return False
    try:
        return not ipaddress.ip_address(host).is_private
    except ValueError:  # a name; one without a dot is in this network
        return "." in host and not host.endswith((".local", ".internal", ".localhost"))
