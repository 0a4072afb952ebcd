"""Rows of data in files: .jsonl, .csv and .parquet, by `load_data`."""

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz import tiny
from tests.fuzz.harness import Surface, check
from tests.fuzz.nasty import json_values, texts

PARTS = [
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
csv_row = st.lists(texts(), max_size=3).map(",".join)
line = st.one_of(st.sampled_from(PARTS[:2] * 4 + PARTS), json_row, csv_row)
encodings = st.sampled_from(["utf-8"] * 8 + ["utf-8-sig", "utf-16", "latin-1"])
content = st.builds(
    lambda lines, end, encoding: end.join(lines).encode(encoding, "surrogatepass" if "utf" in encoding else "replace"),
    st.lists(line, max_size=4),
    st.sampled_from(["\n", "\n", "\r\n", "\r"]),
    encodings,
)
csv_content = st.builds(
    lambda head, rest: head.encode() + rest, st.sampled_from(["", "prompt,answer\n", "prompt\n"]), content
)
odd_bytes = st.sampled_from([b"", b"PAR1", b"PAR1" * 4, b"\0" * 50, b"PAR1\0\0\0\0\xff\xff\xff\x7fPAR1", b"\xff" * 9])
settings = st.fixed_dictionaries(
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
rewards = st.sampled_from([["length_reward"], ["answer_reward"], ["length_reward", "answer_reward"]])
cases = st.tuples(files, settings, st.one_of(st.none(), st.none(), files), st.sampled_from(["mix", "test"]), rewards)

Case = tuple[tuple[str, bytes], dict[str, Any], tuple[str, bytes] | None, str, list[str]]


def attack(case: Case, folder: Path) -> None:
    """One file, or a second one that is mixed in or is the test source."""
    (name, given), options, second, use, names = case
    (folder / name).write_bytes(given)
    source = str(folder / name)
    if second is None:
        tiny.load(source, folder, rewards=names, **options)
        return
    other = folder / f"other_{second[0]}"
    other.write_bytes(second[1])
    if use == "test":
        tiny.load(source, folder, rewards=names, test_source=str(other), **options)
    else:
        mix = [{"source": source, "weight": 2}, {"source": str(other), "prompt_column": "x"}]
        tiny.load("", folder, rewards=names, sources=mix, **options)


SURFACE = Surface("row files", cases, attack, tiny.prepare)


def test_files_of_rows_are_read_or_refused_in_words() -> None:
    """Real files have truncated lines, columns that change their type, and bytes in another encoding."""
    check(SURFACE)
