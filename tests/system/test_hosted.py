"""Colab, Kaggle, WSL2, the constraints of the install cell, and the command back to the tested versions."""

import shlex
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rloo_kit.errors import SetupError
from rloo_kit.system import hosted, versions
from rloo_kit.system.hosted import find_place, keep_installed
from rloo_kit.system.versions import TESTED, TESTED_EXTRAS, return_command

WSL = "Linux version 6.6.87.2-microsoft-standard-WSL2"
LOCK = "# a comment\nnumpy==2.5.0\ntorch==2.13.0\ntransformers==5.17.0\nezpkg==1.0\ntriton==3.9.0\n"


def machine(root: Path, kernel: str, *files: str) -> Path:
    """A file tree with that `/proc/version` and those files."""
    for name, text in {"proc/version": kernel, **dict.fromkeys(files, "")}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("variable", "name", "words"),
    [("COLAB_RELEASE_TAG", "Colab", "Drive"), ("KAGGLE_KERNEL_RUN_TYPE", "Kaggle", "/kaggle/working")],
)
def test_services_say_where_outputs_survive(tmp_path: Path, variable: str, name: str, words: str) -> None:
    place = find_place({variable: "x"}, tmp_path)
    assert place is not None and place.name == name and words in " ".join(place.follows)


@pytest.mark.parametrize(
    ("files", "name", "words"),
    [
        ((), "WSL", "--set-version"),
        (("dev/dxg",), "WSL2", "driver on Windows"),
        (("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"), "WSL2", ".wslconfig"),
    ],
)
def test_wsl_names_what_is_missing(tmp_path: Path, files: tuple[str, ...], name: str, words: str) -> None:
    place = find_place({}, machine(tmp_path, WSL, *files))
    assert place is not None and place.name == name and words in " ".join(place.follows)


def test_a_plain_linux_is_no_place(tmp_path: Path) -> None:
    assert find_place({}, tmp_path) is None
    assert find_place({}, machine(tmp_path, "Linux version 6.8.0-generic")) is None


def test_the_cell_keeps_the_installed_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constrained to constraints.txt itself, pip would replace a running CUDA build of torch by another."""
    there = {"torch": "2.12.1+cu128", "numpy": "2.0.2", "triton": "3.8.0", "transformers": "5.1.0"}
    monkeypatch.setattr(hosted, "installed_version", there.get)
    lines = keep_installed(LOCK).splitlines()
    assert lines == ["torch==2.12.1+cu128", "triton==3.8.0", "transformers==5.17.0", "ezpkg==1.0"]


@pytest.mark.parametrize("torch", ["2.9.0+cu126", None])
def test_a_torch_outside_the_range_stops_the_cell(monkeypatch: pytest.MonkeyPatch, torch: str | None) -> None:
    monkeypatch.setattr(hosted, "installed_version", {"torch": torch}.get)
    with pytest.raises(SetupError, match=TESTED["torch"]):
        keep_installed(LOCK)


def test_a_wheel_names_the_ranges(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wheel carries no constraints.txt, so the clone's command cannot run there."""
    monkeypatch.setattr(versions, "__file__", str(tmp_path / "site/rloo_kit/system/versions.py"))
    for with_unsloth, expected in ((False, TESTED), (True, TESTED | TESTED_EXTRAS)):
        asked = [Requirement(word) for word in shlex.split(return_command(with_unsloth))[4:]]
        assert [found.name for found in asked] == list(expected)


def test_a_clone_with_unsloth_gets_it_back() -> None:
    assert return_command(True).endswith("[gpu]'") and "constraints.txt" in return_command(True)


def test_on_a_service_the_way_back_keeps_torch() -> None:
    command = return_command(True, keep_torch=True)
    assert "rloo_kit.system.hosted > constraints-here.txt" in command and "-c constraints-here.txt" in command
