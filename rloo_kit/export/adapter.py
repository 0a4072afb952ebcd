"""The adapter in a form that PEFT loads anywhere: without local paths, and with the embedded base included."""

import hashlib
import json
import shutil
from pathlib import Path

from rloo_kit.errors import ExportError
from rloo_kit.export.card import hub_id
from rloo_kit.models.adapters import follow_umask
from rloo_kit.runs.find import ADAPTER_CONFIG, MODEL_CONFIG
from rloo_kit.system.environment import cache_folder

WEIGHTS = "adapter_model.safetensors"


def name_base(base: str) -> tuple[str, str | None]:
    """(name of the base in a published adapter, folder of the base in the export or None if it is not included).

    A hub id stays, even if the model came from the hub's cache. The embedded model is not on the hub, so its folder
    (2 MB, or 83 MB with Qwen3's vocabulary) is included. Any other folder is named by the last part of its path.
    """
    if (found := hub_id(base)) is not None:
        return found, None
    folder = Path(base)
    return folder.name, folder.name if folder.resolve().parent == cache_folder().resolve() else None


def check_adapter(saved: Path) -> None:
    """Raise ExportError if the run's `adapter/` contains no adapter."""
    if (saved / ADAPTER_CONFIG).is_file():
        return
    if (saved / MODEL_CONFIG).is_file():
        raise ExportError(f"{saved} contains a whole model, not an adapter (model.lora is null): use --to merged")
    raise ExportError(f"{saved} has no {ADAPTER_CONFIG}, so there is no adapter to export")


def write_adapter(saved: Path, base: str, folder: Path) -> None:
    """Copy the run's `adapter/` into `folder`, with its base under a name that is valid on other machines."""
    for file in sorted(saved.iterdir()):
        if file.is_file() and file.name != "README.md":  # PEFT's empty template; the card replaces it
            shutil.copyfile(file, folder / file.name)
    name, included = name_base(base)
    settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    settings["base_model_name_or_path"] = name
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if included is not None:
        shutil.copytree(base, folder / included)
    follow_umask(folder)


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
