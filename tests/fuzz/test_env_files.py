"""Environment files: `.env` of a project."""

import os
from pathlib import Path

from hypothesis import strategies as st

from rloo_kit.system.env_file import load_env_file
from tests.fuzz.harness import Surface, check
from tests.fuzz.nasty import texts

LINES = [
    "HF_TOKEN=x", "HF_TOKEN=", "HF_TOKEN", "export HF_TOKEN=x", "=x", "==", "A=B=C", "A='x", 'A="x', "A='\n'", "A=${A}",
    "A=${B}\nB=${A}", "A=${" * 50, "A=$(ls)", "A=\0", "A\0=1", "A=\ud83d", "\ud83d=1", "é=é", "A=\\", "A=\\x",
    "A=\\ud83d", 'A="\\ud83d"', 'A="\\N{x}"', 'A="\\x"', 'A="\\U99999999"', 'A="\\0"', "A=" + "x" * 200_000,
    "A" * 20_000 + "=1", "#", "A =1", "A= 1", "'A'=1", "''=1", "A B=1", "A\t=1", "A:1", "PATH=", "A=\x1b[2J",
    "A=\u2028B=2", "A=1\rB=2", "\ufeffA=1",
]  # fmt: skip
lines = st.lists(st.one_of(st.sampled_from(LINES), texts(), st.builds("{}={}".format, texts(), texts())), max_size=4)
cases = st.one_of(
    lines.map(lambda found: "\n".join(found).encode("utf-8", "surrogatepass")),
    lines.map(lambda found: "\n".join(found).encode("utf-16", "surrogatepass")),
    st.binary(max_size=40),
)


def attack(case: bytes, folder: Path) -> None:
    (folder / ".env").write_bytes(case)
    before = dict(os.environ)
    try:
        report = load_env_file(folder)
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert not any(name == "" for name in report.keys)


SURFACE = Surface("environment files", cases, attack)


def test_an_environment_file_is_read_or_refused_in_words() -> None:
    """A process's environment cannot contain a NUL: os.environ raised ValueError."""
    check(SURFACE)
