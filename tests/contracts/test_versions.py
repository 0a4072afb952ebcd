"""The versions: what is installed, what constraints.txt locks, what pyproject.toml allows and what was tested agree."""

import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rloo_kit.errors import ConfigError
from rloo_kit.system.versions import check_trackers

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def locked_versions(name: str) -> dict[str, str]:
    lines = (line for line in (ROOT / name).read_text().splitlines() if line and line[0] != "#")
    return {canonicalize_name(found): version for found, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize(
    ("lock", "further"), [("constraints.txt", PROJECT["optional-dependencies"]["gpu"]), ("constraints-vllm.txt", [])]
)
def test_the_lock_holds_every_dependency_within_its_range(lock: str, further: list[str]) -> None:
    """A dependency without a lock is whatever the registry offers on the day."""
    locked = locked_versions(lock)
    for requirement in map(Requirement, [*PROJECT["dependencies"], *further]):
        name = canonicalize_name(requirement.name)
        assert name in locked, f"{name} is missing from {lock}"
        assert locked[name] in requirement.specifier, f"{lock} has {name} {locked[name]}, not {requirement}"


def test_a_missing_tracker_is_refused_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came as a traceback out of transformers, after the model had been loaded and evaluated."""
    monkeypatch.setitem(sys.modules, "wandb", None)  # blocks the import, installed or not
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setattr("rloo_kit.system.versions.installed_version", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_trackers(["wandb", "kubeflow", "mlflow", "azure_ml"])
    assert "report_to names trackers that are not installed (wandb, mlflow, azure_ml)" in str(caught.value)
    assert "run pip install wandb mlflow azureml-core, or leave out" in str(caught.value)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", ModuleType("tensorboardX"))
    check_trackers(["tensorboard"])
