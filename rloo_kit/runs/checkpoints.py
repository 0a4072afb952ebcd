"""Verified checkpoints: published atomically, with the size and hash of every file.

A checkpoint is written to `UNFINISHED`, sealed with a manifest and renamed. So a folder `checkpoint-N` is complete, or
was damaged later, which its manifest shows.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from rloo_kit.runs.files import read_object, write_json

MANIFEST = "manifest.json"
UNFINISHED = "unfinished"  # folder of a save that is in progress or was killed
DAMAGED = "damaged"  # name prefix of a damaged checkpoint
STEM = "checkpoint-"


@dataclass(frozen=True)
class Checkpoint:
    """A sealed checkpoint as its manifest describes it; `find_damage` checks its files.

    Attributes:
        folder: `checkpoints/checkpoint-N`. step: N, optimizer steps done. run: id of the run that wrote it, and config:
            its resolved configuration as YAML; both "" for a trainer without a run.
        processes: of the training. files: size in bytes and SHA-256 of every file, by its path inside the folder.
    """

    folder: Path
    step: int
    run: str
    config: str
    processes: int
    files: Mapping[str, tuple[int, str]] = field(repr=False)

    def find_damage(self) -> str:
        """What is wrong with the first file that has changed since it was written; "" if none has."""
        for name, (size, digest) in self.files.items():
            path = self.folder / name
            try:
                now = path.stat().st_size
                if now != size:
                    return f"{name} has {now} bytes, {size} were written"
                if _digest(path) != digest:
                    return f"{name} is not what was written (its hash differs)"
            except FileNotFoundError:
                return f"{name} is missing"
            except OSError as error:
                return f"{name} cannot be read ({error.strerror or error})"
        return ""


def seal(folder: Path, step: int, run: str = "", config: str = "", processes: int = 1) -> None:
    """Sync the files in `folder` to disk, then write their manifest; arguments as in `Checkpoint`."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    record = {"run": run, "step": step, "config": config, "processes": processes, "files": files}
    write_json(folder / MANIFEST, record | {"sha256": _digest_of(record)})


def publish(folder: Path, target: Path) -> None:
    """Rename `folder`, which is complete, to `target`; an older `target`, and its own parent, are deleted then."""
    replaced = folder.with_name(f"replaced-{target.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    folder.rename(target)
    with suppress(OSError):  # a file system without it
        handle = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    shutil.rmtree(folder.parent)


def list_checkpoints(folder: Path, run: str | None = None) -> list[Checkpoint]:
    """The sealed checkpoints in `folder`, newest first; if `run` is given, only those of the run with that id."""
    sealed = [read_checkpoint(path) for path in folder.glob(f"{STEM}*")] if os.path.isdir(folder) else []
    mine = [checkpoint for checkpoint in sealed if checkpoint is not None and run in (None, checkpoint.run)]
    return sorted(mine, key=lambda checkpoint: -checkpoint.step)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint in `folder` by its manifest; None without one that `seal` wrote for the folder."""
    manifest = read_object(folder / MANIFEST)
    if manifest.pop("sha256", None) != _digest_of(manifest) or folder.name != f"{STEM}{manifest['step']}":
        return None
    files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest.pop("files").items()}
    return Checkpoint(folder, **manifest, files=files)


def prune(folder: Path, keep: int | None, run: str, needed: Container[int | None]) -> None:
    """Delete all but the newest `keep` checkpoints of a run (None, 0: none), except the steps in `needed`. Without a
    run, the newest is the last one written, because step numbers start over."""
    mine = list_checkpoints(folder, run)
    if not run:
        mine.sort(key=lambda checkpoint: -(checkpoint.folder / MANIFEST).stat().st_mtime_ns)
    for old in mine[keep:] if keep and keep > 0 else []:
        if old.step not in needed:
            shutil.rmtree(old.folder, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Rename a damaged `checkpoint-N` to `damaged-N`, so that step N can be saved again; returns the new path."""
    stem = f"{DAMAGED}-{folder.name.removeprefix(STEM)}"
    names = (f"{stem}-{number}" if number > 1 else stem for number in count(1))
    return folder.rename(next(place for name in names if not (place := folder.with_name(name)).exists()))


def find_whole(folder: Path, run: str) -> tuple[Checkpoint | None, dict[Path, str]]:
    """The newest intact checkpoint of a run, and the damage of newer folders and of those that are not its own."""
    mine = list_checkpoints(folder, run)
    named = {path for path in folder.glob(f"{STEM}*") if path.is_dir()} - {checkpoint.folder for checkpoint in mine}
    damaged = dict.fromkeys(sorted(named), f"it has no {MANIFEST} of this run")
    for checkpoint in mine:
        damage = checkpoint.find_damage()
        if not damage:
            return checkpoint, damaged
        damaged[checkpoint.folder] = damage
    return None, damaged


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
