"""Rows of data, in Python and in files, through `load_data`; and the paths of all files."""

import contextlib
import functools
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from rloo_kit.batch.batch_file import load_batch
from rloo_kit.config.run import RunConfig, load_config
from tests.conftest import make_tiny_tokenizer
from tests.fuzz.harness import Surface, check
from tests.fuzz.nasty import (
    CYCLIC_LIST,
    OBJECT,
    PATHS,
    DictSubclass,
    Rude,
    TextSubclass,
    json_values,
    nested,
    texts,
    values,
)
from tests.fuzz.test_files import SMALL


@functools.cache
def prepare() -> Any:
    """Load torch and TRL silently, so that nothing appears in the table of counts; returns a tiny tokenizer."""
    from rloo_kit._stack import load_stack

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        load_stack().datasets.disable_progress_bars()
        return make_tiny_tokenizer()


def load(
    source: str, folder: Path, rows: Any = None, rewards: Sequence[str] = ("length_reward",), sources: Any = None,
    **data: Any,
) -> None:  # fmt: skip
    """`load_data` of a run with these keys of `data:`."""
    from rloo_kit.data.load import load_data

    run = RunConfig(
        model={"name": "my-model"},
        data={"test_size": 0} | ({"sources": sources} if sources else {"source": "unused"}),
        rewards=[{"name": name} for name in rewards],
        rloo={"max_steps": 1},
        run={"evaluate": False},
    )
    for key, value in (data if sources else {"source": source, **data}).items():
        setattr(run.data, key, value)  # as from a file: ConfigError where a key does not take it
    run._source = folder / "run.yaml"
    with contextlib.redirect_stdout(io.StringIO()):  # its notes
        found = load_data(run, prepare(), rows=rows)
    assert len(found.train) and all(isinstance(row["prompt"], str) for row in found.train)


ROLES = ["system", "user", "assistant", "tool", "human", "", None, 1, ["user"], TextSubclass("user")]
CONTENTS = [
    "a</think>b", "<think>a</think>b", "<think>", "a<|im_end|>", None, "", [{"type": "text", "text": "a"}], 1, b"x",
    CYCLIC_LIST, "x" * 50_000,
]  # fmt: skip
message = st.one_of(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(ROLES[:4] * 3 + ROLES),
            "content": st.one_of(st.just("hi"), st.sampled_from(CONTENTS)),
        },
        optional={"reasoning_content": values(), "name": values(), "tool_calls": values(), 1: values()},
        # type: ignore[dict-item]
    ),
    values(),
)
prompt = st.one_of(st.just("1+1="), st.lists(message, max_size=3), values(), texts())
key = st.one_of(
    st.sampled_from(["level", "prompts", "image", "question", "", "\ud83d", 1, None, 2.5, b"x", (1,)]), texts()
)
row = st.one_of(
    st.builds(
        lambda first, extra: {**first, **extra},
        st.fixed_dictionaries({"prompt": prompt}, optional={"answer": st.one_of(st.just("2"), values())}),
        st.dictionaries(key, values(), max_size=2),
    ),
    st.builds(DictSubclass, st.fixed_dictionaries({"prompt": st.just("1+1="), "x": values()})),
    prompt,
    values(),
    st.sampled_from([OBJECT, Rude(), nested(2_000), {}]),
)
rows = st.one_of(
    st.lists(row, max_size=3),
    st.lists(row, min_size=1, max_size=2).map(tuple),
    values().map(lambda given: [] if isinstance(given, Rude) else given),  # an iterator's error is its author's
    st.builds(iter, st.lists(row)),
)
rewards = st.sampled_from([["length_reward"], ["answer_reward"], ["length_reward", "answer_reward"]])


def load_rows(case: tuple[Any, list[str]], folder: Path) -> None:
    load("unused.jsonl", folder, rows=case[0], rewards=case[1])


LINES = [
    '{"prompt": "1+1=", "answer": "2"}', '{"prompt": "2+1=", "answer": 3, "level": 1}', "", " ", "{", "}", "[]", "null",
    "1", '"x"', "NaN", '{"prompt": NaN}', '{"prompt": "a", "answer": NaN}', '{"prompt": "a", "answer": Infinity}',
    "\ufeff", '{"prompt": "a", "answer": ' + "9" * 4000 + "}", '{"prompt": "a", "x": ' + "9" * 400 + "}",
    '{"prompt": "a", "x": 1e999}', '{"prompt": "a", "answer": ' + "9" * 6000 + "}", '{"prompt": "a", "prompt": "b"}',
    '{"prompt": "\\ud83d"}', "[" * 20_000, '{"prompt": "a", "\\ud83d": 1}', '{"prompt": "\\u0000"}',
    '{"prompt": "a</think>"}', '{"prompt": "' + "x" * 50_000 + '"}',
    '{"prompt": "a", "x": ' + "[" * 500 + "]" * 500 + "}", '{"prompt": [{"role": "user", "content": "hi"}]}',
    "prompt,answer", '{"prompt": "a", "x": ' + '{"a":' * 300 + "1" + "}" * 300 + "}", "1+1=,2", "a,b,c", '"a\nb",1',
    '"unclosed', 'a"b,1', "\0,\0", "prompt,prompt", "prompt,", ",answer", "\udcff", "x" * 200_000, "\r", "\u2028",
    '{"prompt": "a"}{"prompt": "b"}', "'a',1",
]  # fmt: skip
json_row = st.builds(
    lambda given, ascii: json.dumps(given, ensure_ascii=ascii),
    st.dictionaries(st.sampled_from(["prompt", "answer", "x", "y", "prompts", "image"]), json_values(), max_size=3),
    st.booleans(),
)
line = st.one_of(st.sampled_from(LINES[:2] * 4 + LINES), json_row, st.lists(texts(), max_size=3).map(",".join))
content = st.builds(
    lambda lines, end, encoding: end.join(lines).encode(encoding, "surrogatepass" if "utf" in encoding else "replace"),
    st.lists(line, max_size=4),
    st.sampled_from(["\n", "\n", "\r\n", "\r"]),
    st.sampled_from(["utf-8"] * 8 + ["utf-8-sig", "utf-16", "latin-1"]),
)
csv_content = st.builds(bytes.__add__, st.sampled_from([b"", b"prompt,answer\n", b"prompt\n"]), content)
odd_bytes = st.sampled_from([b"", b"PAR1", b"PAR1" * 4, b"\0" * 50, b"PAR1\0\0\0\0\xff\xff\xff\x7fPAR1", b"\xff" * 9])
options = st.fixed_dictionaries(
    {},
    optional={
        "num_prompts": st.just(1),
        "prompt_column": st.sampled_from(["question", "x", "answer", " "]),
        "answer_column": st.sampled_from(["x", "prompt", "level"]),
        "answer_after": st.sampled_from(["####", "x", " "]),
        "system_prompt": st.sampled_from(["Be brief.", "<think>", "<|im_end|>", "\ud83d"]),
        "too_long": st.just("refuse"),
    },
)
files = st.one_of(
    st.tuples(st.just("rows.jsonl"), content),
    st.tuples(st.just("rows.csv"), csv_content),
    st.tuples(st.just("rows.parquet"), st.one_of(odd_bytes, content)),
)
Case = tuple[tuple[str, bytes], dict[str, Any], tuple[str, bytes] | None, str, list[str]]


def load_file(case: Case, folder: Path) -> None:
    """One file, or a second one that is mixed in or is the test source."""
    (name, given), keys, second, use, names = case
    (folder / name).write_bytes(given)
    source = str(folder / name)
    if second is None:
        load(source, folder, rewards=names, **keys)
        return
    other = folder / f"other_{second[0]}"
    other.write_bytes(second[1])
    if use == "test":
        load(source, folder, rewards=names, test_source=str(other), **keys)
    else:
        mix = [{"source": source, "weight": 2}, {"source": str(other), "prompt_column": "x"}]
        load("", folder, rewards=names, sources=mix, **keys)


def read_named_notebook(path: str) -> None:
    name = path.encode("utf-8", "replace").decode().replace("'", "''")
    Path("names.yaml").write_text(f"notebook: '{name}'\nruns: [{{}}]\n")
    load_batch("names.yaml")


READERS: dict[str, Callable[[str], Any]] = {
    "config": load_config,
    "batch": load_batch,
    "notebook": read_named_notebook,
    "data": lambda path: load(path or " ", Path.cwd()),
}
paths = st.one_of(
    st.sampled_from(PATHS), st.builds("{}/{}".format, st.sampled_from(PATHS), st.sampled_from(PATHS)), texts()
)


def read_path(case: tuple[str, str], folder: Path) -> None:
    """A folder, a pipe, a device, a locked or an empty file, a link to itself, or a name that none can have."""
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
    READERS[case[0]](case[1])


SURFACES = [
    Surface("rows", st.tuples(rows, rewards), load_rows, prepare),
    Surface(
        "row files",
        st.tuples(files, options, st.one_of(st.none(), st.none(), files), st.sampled_from(["mix", "test"]), rewards),
        load_file,
        prepare,
    ),
    Surface("paths", st.tuples(st.sampled_from(sorted(READERS)), paths), read_path, prepare),
]


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.name)
def test_data_is_read_or_refused_in_words(surface: Surface) -> None:
    """A key that is not text and a number of 400 digits ended in tracebacks, a name of 300 characters in OSError, and a
    pipe without a writer blocked for ever. Real files have cut lines, columns that change their type, and bytes in
    another encoding."""
    check(surface)
