"""The versions: what is installed, what constraints.txt locks, what pyproject.toml allows and what was tested agree."""

import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from rloo_kit.errors import ConfigError
from rloo_kit.system.versions import check_trackers

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def lock_lines(name: str) -> list[str]:
    return [line for line in (ROOT / name).read_text().splitlines() if line and line[0] != "#"]


def locked_versions(name: str) -> dict[str, str]:
    return dict(line.split("==") for line in lock_lines(name))


LOCKS = ("constraints.txt", "constraints-vllm.txt")
LOCKED = locked_versions("constraints.txt")
BASE = {canonicalize_name(found.name): found for found in map(Requirement, PROJECT["dependencies"])}


def installed(name: str) -> Version | None:
    try:
        return Version(Version(metadata.version(name)).public)  # 2.13.0+cpu is 2.13.0
    except metadata.PackageNotFoundError:
        return None


def test_the_locked_packages_accept_the_oldest_supported_python() -> None:
    """A lock made with Python 3.11.7 had a soupsieve for 3.11.5 and newer: Debian 12 has 3.11.2, and pip gave up."""
    (oldest,) = [one.version for one in SpecifierSet(PROJECT["requires-python"]) if one.operator == ">="]
    found = {name: metadata.metadata(name)["Requires-Python"] for name in LOCKED if installed(name) is not None}
    refused = {name: asked for name, asked in found.items() if not SpecifierSet(asked or "").contains(oldest)}
    assert not refused, f"not for Python {oldest}: {refused}; lock an older version"


@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_holds_every_base_dependency_within_its_range(lock: str) -> None:
    """A dependency without a lock is whatever the registry offers on the day."""
    locked = {canonicalize_name(name): version for name, version in locked_versions(lock).items()}
    for name, requirement in BASE.items():
        assert name in locked, f"{name} is missing from {lock}"
        assert locked[name] in requirement.specifier, f"{lock} has {name} {locked[name]}, not {requirement}"


def test_a_missing_tracker_is_refused_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came as a traceback out of transformers, after the model had been loaded and evaluated."""
    monkeypatch.setitem(sys.modules, "wandb", None)  # blocks the import, installed or not
    with pytest.raises(ConfigError, match=r"rloo.report_to names wandb, which is not installed: run pip install wandb"):
        check_trackers(["wandb"])
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", ModuleType("tensorboardX"))
    check_trackers(["tensorboard"])
