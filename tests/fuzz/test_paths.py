"""Paths: what should be a file is a folder, a pipe, a device, locked, too long, or not a valid file name."""

import os
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st

from rloo_kit.batch.file import load_batch
from rloo_kit.config.run import load_config
from rloo_kit.system.processes import read_launch_file
from tests.fuzz import tiny
from tests.fuzz.harness import Surface, check
from tests.fuzz.nasty import PATHS, texts
from tests.fuzz.test_yaml import SMALL


def prepare(folder: Path) -> None:
    """One of each kind in the working folder."""
    (folder / "good.yaml").write_text(SMALL)
    for ending in ("", ".yaml", ".jsonl", ".ipynb"):
        os.mkfifo(folder / f"fifo{ending}")
    for ending in (".yaml", ".jsonl", ".csv", ".ipynb"):
        (folder / f"folder{ending}").mkdir()
        (folder / f"empty{ending}").touch()
    for ending in (".yaml", ".jsonl", ".parquet"):
        (folder / f"binary{ending}").write_bytes(bytes(range(256)) * 20)
    for ending in (".yaml", ".jsonl"):
        (folder / f"locked{ending}").touch(mode=0)
        os.symlink(f"loop{ending}", folder / f"loop{ending}")
    os.symlink("nowhere", folder / "gone.yaml")
    os.chdir(folder)


def _batch(path: str) -> None:
    load_batch(path)


def _notebook(path: str) -> None:
    name = path.encode("utf-8", "replace").decode().replace("'", "''")
    Path("names.yaml").write_text(f"notebook: '{name}'\nruns: [{{}}]\n")
    load_batch("names.yaml")


def _config(path: str) -> None:
    load_config(path)


def _launch(path: str) -> None:
    read_launch_file(Path(path))


def _data(path: str) -> None:
    tiny.load(path or " ", Path.cwd())


READERS: dict[str, Callable[[str], None]] = {
    "config": _config, "batch": _batch, "notebook": _notebook, "launch": _launch, "data": _data,
}  # fmt: skip
paths = st.one_of(
    st.sampled_from(PATHS), st.builds("{}/{}".format, st.sampled_from(PATHS), st.sampled_from(PATHS)), texts()
)
cases = st.tuples(st.sampled_from(sorted(READERS)), paths)


def attack(case: tuple[str, str], folder: Path) -> None:
    prepare(folder)
    READERS[case[0]](case[1])


SURFACE = Surface("paths", cases, attack, tiny.prepare)


def test_a_path_leads_to_a_file_or_is_refused_in_words() -> None:
    """A name of 300 characters raised OSError, one with a NUL ValueError, and a pipe without a writer blocked
    forever."""
    check(SURFACE)
