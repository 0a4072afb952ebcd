"""The project's root and its `.env`: found by a marker, loaded by path, reported by name and never by value.

Unlike python-dotenv, an empty variable counts as missing, so `HF_TOKEN=` in the shell does not hide `.env`'s.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dotenv import dotenv_values

from rloo_kit.errors import SetupError
from rloo_kit.system.input_files import working_folder

EXPECTED_KEYS = ("HF_TOKEN",)
KEEP_EMPTY = frozenset({"CUDA_VISIBLE_DEVICES"})  # empty: no GPU
_PLAIN_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


@dataclass
class EnvFile:
    """The outcome; `keys` maps a name to "found in .env", "found in the environment", "empty" or "missing"."""

    root: Path | None
    path: Path | None
    keys: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def find_root(start: Path | None = None) -> Path | None:
    """The nearest folder at or above `start` (None: the working folder, then the process's own), else above the
    package, that contains pyproject.toml, .git, configs/ or .env; None if there is none."""
    for origin in (*([start] if start else [working_folder(), Path()]), Path(__file__).parents[2]):
        for folder in (origin.resolve(), *origin.resolve().parents):
            # A `.env` folder is a virtual environment, and a file named configs is none of ours.
            if any((folder / name).is_file() for name in ("pyproject.toml", ".env")):
                return folder
            if (folder / ".git").exists() or (folder / "configs").is_dir():
                return folder
    return None


def load_env_file(root: Path | None = None, expected: Sequence[str] = EXPECTED_KEYS) -> EnvFile:
    """Load `.env` of the project's root into `os.environ`; a variable that is already set and not empty stays.

    Args:
        root: the folder that contains `.env`; None finds it (`find_root`).
        expected: names to report as found, empty or missing.
    Raises:
        SetupError: `root` is no folder, or the file cannot be read as UTF-8 text.
    """
    if root is not None and not Path(root).is_dir():
        raise SetupError(f"root={str(root)!r} is not a folder: give the folder that contains .env, or leave root out")
    root = find_root() if root is None else Path(root).resolve()
    path = root / ".env" if root is not None else None
    report = EnvFile(root, path if path is not None and path.is_file() else None)
    values = _read(report.path) if report.path is not None else {}
    if None in values.values():  # not by name: a token pasted on a separate line ends up here
        report.notes.append(f"{report.path}: a line without '=' is ignored; write NAME=value")
    before = {name for name, value in os.environ.items() if value}
    for name, value in values.items():
        if value and not os.environ.get(name) and not (name in KEEP_EMPTY and name in os.environ):
            try:
                os.environ[name] = value
            except ValueError:  # by name only if it looks like one, see below
                what = name if _PLAIN_NAME.fullmatch(name) else "a variable"
                raise SetupError(
                    f"{report.path}: {what} contains a NUL or half a character, which no environment takes: rewrite it"
                ) from None
    # Only what looks like a name is reported: a broken multi-line secret leaves scraps of itself as names.
    empty = [name for name, value in values.items() if value == "" and _PLAIN_NAME.fullmatch(name)]
    asked = [expected] if isinstance(expected, str) else expected
    for name in dict.fromkeys([*asked, *empty]):
        if name in before and values.get(name) != os.environ[name]:
            report.keys[name] = "found in the environment"
        elif values.get(name):
            report.keys[name] = "found in .env"
        else:
            report.keys[name] = "empty" if name in values or name in os.environ else "missing"
    return report


def _read(path: Path) -> dict[str, str | None]:
    try:
        return dict(dotenv_values(path, encoding="utf-8-sig"))
    except UnicodeDecodeError:  # `from None`: the original error carries the file's bytes
        raise SetupError(f"{path} is not UTF-8 text: save it as UTF-8, one NAME=value a line") from None
    except OSError as error:
        raise SetupError(f"{path} cannot be read ({error.strerror}): fix its permissions (chmod 600 .env)") from None


def huggingface_home() -> Path:
    """The folder of huggingface_hub's caches and its login: HF_HOME, or its place in XDG_CACHE_HOME or ~/.cache."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("HF_HOME") or caches / "huggingface").expanduser()


def find_token() -> str:
    """Where a Hugging Face token was found: in the environment, in the login's file, or nowhere; never the token."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name, "").strip():
            return f"found ({name})"
    path = Path(os.environ.get("HF_TOKEN_PATH") or huggingface_home() / "token").expanduser()
    with suppress(OSError):
        if path.read_bytes().strip():
            return "found (the file that the login wrote)"
    return "not found (gated and private models need one: HF_TOKEN in .env)"
