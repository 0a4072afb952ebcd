"""Plans of tests see neither models nor settings of this machine."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("RLOO_KIT_BACKEND", "WORLD_SIZE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
