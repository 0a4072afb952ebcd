"""Run folders to damage, and the fault table."""

import json
import os
from pathlib import Path

import pytest

from tests.faults.place import Place, mask

TABLE_VARIABLE = "RLOO_KIT_FAULT_TABLE"  # a file that gets a row for each fault; see table.py


@pytest.fixture
def place(tmp_path, tiny_folder):
    return Place(tmp_path / "work", tiny_folder)


@pytest.fixture
def record():
    """`record(fault, place, code, seen, kept)`: adds a row to the fault table, if one is being made."""

    def write(fault: str, place: Place, code: int, seen: str, kept: str) -> None:
        if name := os.environ.get(TABLE_VARIABLE):
            with open(Path(name), "a", encoding="utf-8") as file:
                file.write(json.dumps({"fault": fault, "code": code, "seen": mask(seen, place), "kept": kept}) + "\n")

    return write
