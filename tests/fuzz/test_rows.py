"""Rows of data in Python: `load_data(..., rows=...)`."""

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz import tiny
from tests.fuzz.harness import Surface, check
from tests.fuzz.nasty import DictSubclass, Record, Rude, TextSubclass, cyclic_list, nested, texts, values

ROLES = ["system", "user", "assistant", "tool", "human", "", None, 1, ["user"], TextSubclass("user")]
CONTENTS = [
    "a</think>b", "<think>a</think>b", "<think>", "a<|im_end|>", None, "", [{"type": "text", "text": "a"}], 1, b"x",
    cyclic_list(), "x" * 50_000,
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
    st.builds(lambda given: DictSubclass(given), st.fixed_dictionaries({"prompt": st.just("1+1="), "x": values()})),
    prompt,
    values(),
    st.sampled_from([Record(), Rude(), nested(2_000), {}]),
)
rows = st.one_of(
    st.lists(row, max_size=3),
    st.lists(row, min_size=1, max_size=2).map(tuple),
    values().map(lambda given: [] if isinstance(given, Rude) else given),  # an iterator's error is its author's
    st.builds(iter, st.lists(row)),
)
cases = st.tuples(rows, st.sampled_from([["length_reward"], ["answer_reward"], ["length_reward", "answer_reward"]]))


def attack(case: tuple[Any, list[str]], folder: Path) -> None:
    tiny.load("unused.jsonl", folder, rows=case[0], rewards=case[1])


SURFACE = Surface("rows", cases, attack, tiny.prepare)


def test_rows_are_read_or_refused_in_words() -> None:
    """A key that is not text and a number of 400 digits ended in tracebacks."""
    check(SURFACE)
