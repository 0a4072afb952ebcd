"""Data as people have it: what pandas, pyarrow, `datasets` and spreadsheets write, read or refused in a line."""

import datetime
import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import datasets
import numpy
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from rloo_kit.checks.starter import open_data, read_table
from rloo_kit.data.load import load_data, prepare_data
from rloo_kit.errors import RlooKitError
from tests.data.conftest import jsonl, rendered

TALK = [{"role": "system", "content": "Add."}, {"role": "user", "content": "What's 1+1?"}]
MAP = pyarrow.map_(pyarrow.string(), pyarrow.string())
SEEN = "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\nWhat's 1+1?<|im_end|>\n<|im_start|>assistant\n<think>\n"
DAY = datetime.datetime(2026, 1, 2)
FEATURES = {"prompt": datasets.Value("string"), "answer": datasets.ClassLabel(names=["A", "B"])}
CLASSES = datasets.Dataset.from_dict({"prompt": ["a", "b"], "answer": [1, -1]}, datasets.Features(FEATURES))
NO_TEXT = "it must be text or a number where a reward compares it"


def parquet(**columns: Any) -> pyarrow.Table:
    return pyarrow.table({"prompt": ["a", "b"]} | columns)


def sheet(columns: dict[str, Any], **options: Any) -> str:
    """A table as pandas writes it to CSV."""
    return str(pandas.DataFrame(columns).to_csv(index=False, **options))


# Name: (content, the first row as rewards of one's own get it or the error, the error of `init` and of a reward that
# compares; "" if they take the answers).
FILES: dict[str, tuple[Any, Any, str]] = {
    "python.csv": (sheet({"prompt": [str(TALK)], "answer": ["2"]}), {"prompt": SEEN, "answer": "2"}, ""),
    "json.csv": (sheet({"prompt": [json.dumps(TALK)], "answer": [2]}), {"prompt": SEEN, "answer": "2"}, ""),
    "numpy.csv": (sheet({"prompt": [numpy.array(TALK)], "answer": [2]}), "neither JSON nor Python", "json.dumps"),
    "human.csv": (
        sheet({"prompt": [str([{"from": "human", "value": "hi"}])], "answer": [2]}), "message 1 of the", "message 1",
    ),
    "braces.csv": (
        sheet({"prompt": ["[{'from': 'EUR', 'value': 3}]"], "answer": ["4"]}),
        {"prompt": rendered("[{'from': 'EUR', 'value': 3}]"), "answer": "4"}, "",
    ),
    "semicolons.csv": (sheet({"prompt": ["a, b"], "answer": [5]}, sep=";"), {"prompt": rendered("a, b")}, ""),
    "decimals.csv": (sheet({"prompt": ["a"], "answer": [7.5]}, sep=";", decimal=","), "7,5 has a dec", "7,5 has a dec"),
    "semicolon in a name.csv": ('prompt,answer,note;x\na,"12,345",b\n', {"answer": "12,345", "note;x": "b"}, ""),
    "blank first.csv": ("\nprompt;answer\na;1,5\n", "line 3: 1,5 has a decimal", "line 3: 1,5 has a decimal"),
    "quoted.csv": (
        'prompt,answer,id\n"a, b\nc",007,1\nd,1.50,\n',
        {"prompt": rendered("a, b\nc"), "answer": "007", "id": "1"}, "",
    ),
    "byte order mark.jsonl": (
        "\ufeff" + jsonl({"prompt": "é", "answer": 2}) + "\n", {"prompt": rendered("é"), "answer": 2}, "",
    ),
    "integers.jsonl": (jsonl({"prompt": "a", "answer": 5}), {"answer": 5}, ""),
    "mixed.jsonl": (jsonl({"prompt": "a", "answer": 0.7}, {"prompt": "b", "answer": "x"}), {"answer": "0.7"}, ""),
    "huge.jsonl": (jsonl({"prompt": "a", "answer": 2**70}), {"answer": str(2**70)}, ""),
    "objects.jsonl": (
        jsonl({"prompt": "a", "answer": {"x": 1}}, {"prompt": "b", "answer": {"y": ""}}),
        {"answer": {"x": 1, "y": None}}, NO_TEXT,
    ),
    "types of a key.jsonl": (
        jsonl(*({"prompt": "a", "answer": "1", "more": {"a": value}} for value in (1, "x"))),
        "types of a key.jsonl: column 'more'", "types of a key.jsonl: column 'more'",
    ),
    "infinite.jsonl": (jsonl({"prompt": "a", "answer": 1e999}), {"answer": 1e999}, "line 1: an answer of type float"),
    "talk.parquet": (parquet(prompt=[TALK], answer=["2"]), {"prompt": SEEN}, ""),
    "pandas.parquet": (
        pandas.DataFrame({"prompt": [numpy.array(TALK)], "answer": [2], "when": [DAY]}),
        {"prompt": SEEN, "answer": 2, "when": DAY}, "",
    ),
    "map.parquet": (
        parquet(answer=["2", "3"], more=pyarrow.array([[("x", "1")]] * 2, MAP)), "Arrow type map", "Arrow type map",
    ),
    "classes.parquet": (CLASSES, {"answer": "B"}, ""),  # MMLU's right letter was 1, which no completion has
    "decimals.parquet": (parquet(answer=[Decimal("1.50"), None]), {"answer": Decimal("1.50")}, ""),
    "single.parquet": (parquet(answer=pyarrow.array([0.1, 2], pyarrow.float32())), {"answer": 0.1}, ""),
}  # fmt: skip


def fails(text: str, call: Any, *arguments: Any, **named: Any) -> None:
    with pytest.raises(RlooKitError) as caught:
        call(*arguments, **named)
    assert text in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_or_refused_in_a_line(make_run, tmp_path: Path, tiny_tokenizer, name: str) -> None:
    """Conversations and integers became text, 12,345 was refused, and `init` accepted what `train` refused."""
    content, expected, comparing = FILES[name]
    path = tmp_path / name
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    elif isinstance(content, pandas.DataFrame | datasets.Dataset):
        content.to_parquet(path)
    else:
        pyarrow.parquet.write_table(content, path)
    own, compared = make_run(path), make_run(path, reward=("answer_reward", "length_reward"))
    assert list(open_data(str(path)))[:2] == ["prompt", "answer"]
    if comparing:
        fails(comparing, read_table, str(path), "prompt", "answer")
        fails(comparing, load_data, compared, tiny_tokenizer)
    else:
        read_table(str(path), "prompt", "answer")
        load_data(compared, tiny_tokenizer)
    if isinstance(expected, str):
        fails(expected, load_data, own, tiny_tokenizer)
        return
    prepared, found = prepare_data(own, tiny_tokenizer), load_data(own, tiny_tokenizer).train
    assert {key: found[0][key] for key in expected} == expected
    assert repr({key: found[0][key] for key in expected}) == repr(expected)
    assert [prepared.train.row(index) for index in range(len(found))] == found.to_list()


FRAME = pandas.DataFrame(
    {
        "prompt": [numpy.array(TALK), TALK], "answer": pandas.array([5, None], "Int64"), "note": ["x", None],
        "when": [pandas.Timestamp(DAY), pandas.NaT], "tags": [numpy.array([1, 2]), numpy.array([])],
    }
)  # fmt: skip
RECORD = {"prompt": SEEN, "answer": 5, "note": "x", "when": DAY, "tags": [1, 2]}
SINGLE = numpy.array([0.1], "float32")
ROWS: dict[str, tuple[Any, Any]] = {
    "pandas": (FRAME.to_dict("records"), RECORD),
    "pyarrow": (datasets.Dataset(pyarrow.Table.from_pandas(FRAME)), RECORD),
    "datasets as numpy": (
        datasets.Dataset.from_dict({"prompt": [TALK], "answer": [[1, 2]]}).with_format("numpy"),
        {"prompt": SEEN, "answer": [1, 2]},
    ),
    "a streamed dataset": (
        datasets.Dataset.from_dict({"prompt": [TALK], "answer": [1]}).to_iterable_dataset(), {"prompt": SEEN},
    ),
    "texts": (["a", "b"], {"prompt": rendered("a")}),
    "a series": (pandas.Series(["a"]), {"prompt": rendered("a")}),
    "numpy": ([{"prompt": numpy.str_("a"), "answer": numpy.int64(5), "x": numpy.float32(0.5), "y": numpy.array([[1]])}],
              {"prompt": rendered("a"), "answer": 5, "x": 0.5, "y": [[1]]}),
    "decimals": ([{"prompt": "a", "answer": Decimal("1.50")}], {"answer": Decimal("1.50")}),
    "fractions": ([{"prompt": "a", "answer": Fraction(1, 3)}], {"answer": "1/3"}),
    "pairs": ([{"prompt": "a", "tests": [("in", "1"), ("in", "2")]}], {"tests": [["in", "1"], ["in", "2"]]}),
    "single of pandas": (datasets.Dataset.from_pandas(pandas.DataFrame({"prompt": ["a"], "answer": SINGLE})),
                         {"answer": 0.1}),
    "keys that are numbers": ([{"prompt": "a", "more": [{1: 2}]}, {"prompt": "b", "more": ["x"]}], "column 'more'"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_in_python_are_what_the_libraries_hand_over(make_run, tiny_tokenizer, name: str) -> None:
    """Messages from Parquet were a traceback; `Decimal`, `Fraction` and numpy's numbers were refused."""
    rows, expected = ROWS[name]
    if isinstance(expected, str):
        fails(expected, load_data, make_run(), tiny_tokenizer, rows=rows)
        return
    found = load_data(make_run(), tiny_tokenizer, rows=rows).train
    assert {key: found[0][key] for key in expected} == expected
    if name in ("decimals", "fractions", "numpy"):
        load_data(make_run(reward="answer_reward"), tiny_tokenizer, rows=rows)


def test_answers_of_a_mix_have_one_type(make_run, tmp_path: Path, tiny_tokenizer) -> None:
    """Numbers of one source and text of another were text before each source was read as it is."""
    (tmp_path / "a.jsonl").write_text(jsonl({"prompt": "a", "answer": 5}))
    pyarrow.parquet.write_table(parquet(answer=["x", "x"]), tmp_path / "b.parquet")
    sources = [{"source": str(tmp_path / name)} for name in ("a.jsonl", "b.parquet")]
    found = load_data(make_run(sources=sources), tiny_tokenizer)
    assert sorted(found.train["answer"]) == ["5", "x"]
    assert any("not of one type" in note for note in found.notes)
