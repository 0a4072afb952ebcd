"""Reads a run's folder `outputs/<name>/`: its id, status, metrics and checkpoints. It locks and writes nothing."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from rloo_kit.runs.checkpoints import Checkpoint, list_checkpoints
from rloo_kit.runs.files import is_count, is_number, read_object, read_rows

ID_LINE = b"# rloo-kit run "  # the start of config.yaml's first line; the run's id follows
STATES = ("running", "finished", "interrupted", "failed")

_COUNTS = ("step", "max_steps", "saved", "pid", "adapter_step")  # fields of status.json that are integers
_ID = re.compile(rb"[0-9a-f]{12}")


class RunReader:
    """The folder of one run, which may still be written by another process. `id`: the run's; "" before there is one."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.id = read_run_id(folder)

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def status(self) -> dict[str, Any]:
        """`status.json`; empty without a run. If it is lost, the state is "interrupted" at the newest checkpoint."""
        status = self.read_status()
        if status or not self.id:
            return status
        last = self.last_checkpoint()
        return {"run": self.id, "state": "interrupted", "step": last.step if last else 0}

    def read_status(self) -> dict[str, Any]:
        """The valid fields of `status.json`; empty if it is missing or has no state."""
        fields = read_object(self.folder / "status.json")
        if fields.get("state") not in STATES:
            return {}
        return {name: value for name, value in fields.items() if name not in _COUNTS or is_count(value)}

    def last_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint of this run; its files are checked on a resume."""
        return next(iter(list_checkpoints(self.folder / "checkpoints", self.id)), None) if self.id else None

    def read_metrics(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl` that this run wrote, in step order: `step`, and numbers or None."""
        rows = [row for row in self.read_jsonl("metrics.jsonl") if is_count(row.get("step"))]
        mine = [
            {key: value for key, value in row.items() if key == "run" or value is None or is_number(value)}
            for row in rows
            if row.get("run", "") == self.id
        ]
        return sorted(mine, key=lambda row: row["step"])

    def read_jsonl(self, name: str) -> list[dict[str, Any]]:
        """The rows of a JSONL file: every line that is a JSON object."""
        return list(read_rows(self.folder / name))


def read_run_id(folder: Path) -> str:
    """The id of the run in a folder, from its configuration, else from a checkpoint; "" if none has one."""
    return id_in_config(folder) or next(
        filter(None, (point.run for point in list_checkpoints(folder / "checkpoints"))), ""
    )


def id_in_config(folder: Path) -> str:
    """The id in the first line of `config.yaml`; "" without one."""
    path = folder / "config.yaml"
    with suppress(OSError):
        if path.is_file():  # a pipe would block
            with open(path, "rb") as file:
                line = file.readline(100)
            if line.startswith(ID_LINE) and (run := _ID.match(line.removeprefix(ID_LINE))):
                return run[0].decode()
    return ""
