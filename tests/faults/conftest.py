"""Run folders to damage."""

import pytest

from tests.faults.place import Place


@pytest.fixture
def place(tmp_path, tiny_folder):
    return Place(tmp_path / "work", tiny_folder)
