"""The cache of the built-in models: each is made once, in a folder that appears only when it is complete."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from rloo_kit.errors import SetupError
from rloo_kit.system.environment import CACHE_VARIABLE

RECORD = "embedded.json"  # what was built; its presence marks the folder as complete


def build_once(target: Path, fill: Callable[[Path], None]) -> Path:
    """`target`, made by `fill(workspace)` unless it is complete; `fill` writes RECORD. Raises SetupError if the cache
    cannot be written."""
    if (target / RECORD).is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        workspace = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise SetupError(
            f"the model cannot be cached in {target.parent}: {error}. Set {CACHE_VARIABLE} to a writable folder"
        ) from error
    try:
        fill(workspace)
        workspace.chmod(0o755)
        try:
            workspace.rename(target)
        except OSError as error:  # if another process finished first with the same content, keep its folder
            if not (target / RECORD).is_file():
                raise SetupError(f"the model could not be moved to {target}: {error}; remove that folder") from error
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    return target
