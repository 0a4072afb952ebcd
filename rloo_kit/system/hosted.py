"""Colab, Kaggle and WSL2: how to recognise them, what follows for a run, and constraints that keep the installed torch.

`python -m rloo_kit.system.hosted` in a clone prints the constraints; the install cell of docs/colab.md uses them.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rloo_kit.errors import SetupError
from rloo_kit.system.versions import TESTED, TESTED_EXTRAS, TESTED_PYTHON, in_range, installed_version

PREINSTALLED_STAYS = ("torch", "torchvision", "torchaudio", "triton")  # one CUDA build: all change or none


@dataclass(frozen=True)
class Place:
    """A hosted service or WSL: its name and what follows for a run, one line each."""

    name: str
    follows: tuple[str, ...]


def find_place(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Place | None:
    """Colab, Kaggle or WSL2, recognised by their variables and files; else None.

    Args:
        environ: the environment's variables.
        root: the folder with `/proc`, `/dev` and `/usr`.
    """
    if environ.get("KAGGLE_KERNEL_RUN_TYPE"):
        return Place(
            "Kaggle",
            (
                "only /kaggle/working survives, in a saved version: run from there",
                "packages and models need the notebook's Internet switch",
            ),
        )
    if environ.get("COLAB_RELEASE_TAG"):
        return Place("Colab", ("the disk is erased with the runtime: copy outputs/ to a mounted Drive",))
    try:
        kernel = (root / "proc/version").read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return None
    if "microsoft" not in kernel:
        return None
    if not (root / "dev/dxg").exists():
        return Place("WSL", ("no /dev/dxg, so no GPU: it takes WSL2 (wsl --set-version) and the Windows driver",))
    follows = ["the VM's memory limit is memory= in .wslconfig on Windows, then wsl --shutdown"]
    if not (root / "usr/lib/wsl/lib/libcuda.so.1").exists():
        follows.append("no libcuda in /usr/lib/wsl/lib: install the NVIDIA driver on Windows, none in Linux")
    else:
        follows.append("the driver is the Windows one: install none in Linux")
    return Place("WSL2", tuple(follows))


def keep_installed(constraints: str) -> str:
    """Constraints that leave installed packages alone, apart from the libraries with a tested range.

    torch and what is built with it are pinned to the installed version, so pip cannot replace a CUDA build.

    Args:
        constraints: text of `constraints.txt`.
    Raises:
        SetupError: Python or torch is outside the tested range, or torch is not installed.
    """
    python = ".".join(str(part) for part in sys.version_info[:3])
    torch = installed_version("torch")
    for name, version, tested in (("Python", python, TESTED_PYTHON), ("torch", torch, TESTED["torch"])):
        if version is None or not in_range(version, tested):
            raise SetupError(
                f"{name} {version or 'is not installed'}: the tested range is {tested}. This cell replaces neither; "
                "use a separate environment: docs/colab.md, 'When the preinstalled torch does not fit'"
            )
    lines = [f"{name}=={version}" for name in PREINSTALLED_STAYS if (version := installed_version(name))]
    for line in constraints.splitlines():
        name = line.partition("==")[0].strip()
        is_requirement = bool(name) and not name.startswith("#") and name not in PREINSTALLED_STAYS
        if is_requirement and (name in (TESTED | TESTED_EXTRAS) or installed_version(name) is None):
            lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the constraints for this Python; 1 with the reason on stderr if the kit does not fit here."""
    try:
        print(keep_installed(Path("constraints.txt").read_text(encoding="utf-8")), end="")
    except (OSError, SetupError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
