"""Files that users write: what no regular file is, what is no text, and YAML that would never end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rloo_kit.config.yaml_files import read_value, read_yaml
from rloo_kit.errors import ConfigError
from rloo_kit.system.input_files import MOST_BYTES, MOST_NODES, parse_yaml, read_text
from tests.fuzz.nasty import bomb


def test_a_pipe_that_the_shell_opened_is_read() -> None:
    """`rloo-kit config <(sed ... base.yaml)` is how configs are made on the way."""
    code = "import sys, pathlib, rloo_kit.system.input_files as f; print(f.read_text(pathlib.Path(sys.argv[1])))"
    done = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" <(echo from a pipe); echo from stdin | "$0" -c "$1" /dev/stdin', sys.executable,
        code], capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split("\n")[0] == "from a pipe" and "from stdin" in done.stdout, done.stderr


def test_what_is_no_text_of_a_config(tmp_path: Path) -> None:
    """A pipe without a writer waited for ever, /dev/zero until the memory was full; the others were tracebacks."""
    os.mkfifo(tmp_path / "pipe")
    os.symlink("loop", tmp_path / "loop")
    (tmp_path / "latin.yaml").write_bytes(b"a: 1\nb: \xff\n")
    (tmp_path / "long.yaml").write_bytes(b"#" * (MOST_BYTES + 1))
    for path, found in (
        (tmp_path / "pipe", "is a pipe; a regular file is needed"),
        (Path("/dev/zero"), "is a device"),
        (tmp_path, "is a folder; name a file in it"),
        (tmp_path / "loop", "symbolic links"),
        (tmp_path / "latin.yaml", "latin.yaml:2: cannot be read as UTF-8 text"),
        (tmp_path / "long.yaml", "more than 1,000,000 bytes"),
        (Path("a\0b"), "a NUL character"),
        (Path("\ud83d"), "half a character"),
        (Path("/proc/self/mem"), "Input/output error"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_text(path)
        assert found in str(caught.value)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "nowhere")


@pytest.mark.parametrize("text", [bomb(), bomb(30, 2), bomb(merge=True), bomb(5, 12)])
def test_aliases_are_bounded(text: str) -> None:
    """Nine levels of nine aliases, 316 bytes, stood for 3.9e8 values: reading them did not end in 40 s."""
    assert read_value(text) == text, "no number, list or mapping, so it is a text"
    for read in (read_yaml, lambda text: parse_yaml(text, "x", version=(1, 1))):
        with pytest.raises(ConfigError) as caught:
            read(text)
        assert f"more than {MOST_NODES:,} values" in str(caught.value) and "aliases" in str(caught.value)


def test_aliases_work_and_what_yaml_holds_stays() -> None:
    """A block that two sections share is why YAML has them. The limits leave everything alone that a run may have."""
    values, lines = read_yaml("a: &a {x: 1, y: [1, 2]}\nb: *a\nc: [*a, *a]\n")
    assert values["a"] == values["b"] == values["c"][1] == {"x": 1, "y": [1, 2]}
    assert lines[("b",)] == 2
    big = "a: &a [" + "x, " * 1000 + "x]\nb: [" + "*a, " * 90 + "*a]\n"
    assert len(read_yaml(big)[0]["b"]) == 91
    text = "a: !!str 5\nb: !!float 3\nc: !!timestamp 2026-11-23\nd: 2026-11-23\ne: 18446744073709551615\nf: !!null x\n"
    wanted = {"a": "5", "b": 3.0, "c": "2026-11-23", "d": "2026-11-23", "e": 2**64 - 1, "f": None}
    assert read_yaml(text)[0] == wanted


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a: !!bool x", "a.yaml:2: not readable as YAML: the value does not fit tag:yaml.org,2002:bool"),
        ("a: !!set {b}", "tag:yaml.org,2002:set"),
        ("a: !!python/object:os.system {}", "python/object:os.system"),
        ("a: 0x" + "f" * 5000, "more than 64 bits"),
        ('a: "\\ud83d"', "half a character (\\ud83d)"),
        ('a: "\\0"', "a NUL character"),
        ('a: "\\U00110000"', "an escape"),
        ("%YAML 1.0\n---\na: 1", "%YAML"),
        ("? [a]\n: b", "a list or a mapping as a key"),
        ("rloo:\n  beta: 1\n  beta: 2", 'a.yaml:4: not readable as YAML: found duplicate key "beta"'),
        ("rloo: [1", "a.yaml:3:"),
        ("- a\n- b", "a.yaml: contains a list; it needs a mapping of sections"),
        ("a: 1\n\tb: 2", "a.yaml:3:"),
        ("a: 1\n---\nb: 2", "a.yaml:3: not readable as YAML: but found another document"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("a:\n  b: " + "9" * 5000, "5000 digits"),
    ],
)
def test_a_value_that_no_config_holds_has_its_line(text: str, found: str) -> None:
    """Tracebacks of ruamel's or Python's. And PyYAML keeps the last of two equal keys: the run used another beta."""
    with pytest.raises(ConfigError) as caught:
        read_yaml(f"# header\n{text}\n", "a.yaml")
    assert found in str(caught.value)
