"""Access to `benchmarks/`, which is no package."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """`module(name)` imports a file of benchmarks/, which lies last on the path."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).resolve().parents[2] / "benchmarks")])
    return importlib.import_module
