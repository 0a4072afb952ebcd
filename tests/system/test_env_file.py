"""`.env`: found by the project's root, reported by name, never by value."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.errors import SetupError
from rloo_kit.system.env_file import find_root, find_token, load_env_file

SECRET = "hf_TopSecretValue123"


@pytest.fixture(autouse=True)
def restored_environment() -> Iterator[None]:
    before = dict(os.environ)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HOME"):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)


def write(folder: Path, text: str) -> Path:
    (folder / ".env").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("marker", ["pyproject.toml", ".git", "configs", ".env"])
def test_the_root_is_found_from_a_folder_below(tmp_path: Path, marker: str) -> None:
    """python-dotenv looked up from the working directory only, and a notebook's folder held none: silence."""
    below = tmp_path / "notebooks" / "deep"
    below.mkdir(parents=True)
    if marker == "configs":
        (tmp_path / marker).mkdir()
    else:
        (tmp_path / marker).write_text("")
    assert find_root(below) == tmp_path


def test_a_virtual_environment_called_env_is_no_marker(tmp_path: Path) -> None:
    """`python -m venv .env` is common: a folder of that name is neither a root nor a file of keys."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "work" / ".env").mkdir(parents=True)
    assert find_root(tmp_path / "work") == tmp_path


def test_outside_of_any_project_the_packages_own_root_is_taken(tmp_path: Path, repository: Path) -> None:
    """papermill started from a folder outside the repository has to find the repository's `.env` all the same."""
    assert not any((folder / "pyproject.toml").exists() for folder in tmp_path.parents)
    assert find_root(tmp_path) == repository


def test_keys_are_loaded_by_path_and_reported_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The value never: reports are pasted into issues."""
    monkeypatch.chdir("/")
    report = load_env_file(write(tmp_path, f'export HF_TOKEN="{SECRET}"\nWANDB_API_KEY=\n'), ("HF_TOKEN", "OTHER"))
    assert os.environ["HF_TOKEN"] == SECRET
    assert report.keys == {"HF_TOKEN": "found in .env", "OTHER": "missing", "WANDB_API_KEY": "empty"}
    assert SECRET not in repr(report)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("HF_TOKEN", "", "found in .env"),
        ("HF_TOKEN", "from the shell", "found in the environment"),
        ("CUDA_VISIBLE_DEVICES", "", None),  # empty is how a GPU is hidden
    ],
)
def test_a_variable_that_is_set_wins_unless_it_is_empty(tmp_path: Path, name: str, before: str, after: Any) -> None:
    """With python-dotenv's override=False even an empty variable wins: `HF_TOKEN=` in a job file hid the real one."""
    os.environ[name] = before
    report = load_env_file(write(tmp_path, f"{name}={SECRET}"))
    assert os.environ[name] == (SECRET if after == "found in .env" else before)
    assert after is None or report.keys[name] == after


def test_scraps_of_a_secret_are_not_reported_as_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A token pasted without a name, or a key that was broken into lines, parses as names: they are not repeated."""
    caplog.set_level(logging.DEBUG)
    report = load_env_file(write(tmp_path, f"{SECRET}\nKEY='unclosed\n{SECRET}end=\n"))
    assert SECRET not in repr(report) + caplog.text
    assert any("a line without '='" in note for note in report.notes)


def test_a_byte_order_mark_does_not_hide_the_first_key(tmp_path: Path) -> None:
    """Editors on Windows write one, and the first key was then called '\\ufeffHF_TOKEN'."""
    (tmp_path / ".env").write_text(f"HF_TOKEN={SECRET}", encoding="utf-8-sig")
    assert load_env_file(tmp_path).keys["HF_TOKEN"] == "found in .env"


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """A `.env` of another user was passed over, and a typo in `root` must not fall back to another project's keys.
    UnicodeDecodeError carries the whole file, and a logged traceback would carry it on."""
    with pytest.raises(SetupError, match="is not a folder: give the folder that contains .env"):
        load_env_file(tmp_path / "missing")
    (tmp_path / ".env").write_bytes(f"HF_TOKEN={SECRET}ÿ".encode("utf-16"))
    with pytest.raises(SetupError, match=r"\.env is not UTF-8 text: save it as UTF-8") as caught:
        load_env_file(tmp_path)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    (tmp_path / ".env").unlink()
    (tmp_path / ".env").symlink_to("/proc/self/mem")  # a file whose reading fails, for root too
    with pytest.raises(SetupError, match=r"\.env cannot be read \(Input/output error\).*chmod 600 .env"):
        load_env_file(tmp_path)


def test_a_token_is_found_wherever_the_hub_looks(tmp_path: Path) -> None:
    """Someone who has logged in needs no `.env`; saying `not found` would send them to make a second token."""
    os.environ["HF_HOME"] = str(tmp_path)
    assert find_token().startswith("not found")
    (tmp_path / "token").write_text(SECRET)
    assert find_token() == "found (the file that the login wrote)"
    os.environ["HF_TOKEN"] = SECRET
    assert find_token() == "found (HF_TOKEN)"


def test_one_key_as_text_is_one_key(tmp_path: Path) -> None:
    """`keys="WANDB_API_KEY"` was taken letter by letter: thirteen missing keys called W, A, N, ..."""
    assert list(load_env_file(tmp_path, "WANDB_API_KEY").keys) == ["WANDB_API_KEY"]


def test_a_zero_byte_is_named_and_not_printed(tmp_path: Path) -> None:
    """os.environ refuses it with a ValueError, which ended set-up in a traceback."""
    with pytest.raises(SetupError, match=r"\.env: .* contains a NUL") as caught:
        load_env_file(write(tmp_path, f"HF_TOKEN={SECRET}\0\n"))
    assert SECRET not in str(caught.value)
