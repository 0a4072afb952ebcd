"""Notebooks, read for their parameters before a batch and for their error after it."""

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from rloo_kit.batch.notebooks import find_error, read_notebook
from tests.fuzz.harness import Surface, check
from tests.fuzz.nasty import json_values, texts

ERROR = {"output_type": "error", "ename": "ValueError", "evalue": "x", "traceback": ["a", "b"]}
GOOD: dict[str, Any] = {
    "nbformat": 4,
    "nbformat_minor": 5,
    "metadata": {"kernelspec": {"name": "python3"}},
    "cells": [
        {"cell_type": "markdown", "metadata": {}, "source": ["# Title\n", "text"]},
        {
            "cell_type": "code",
            "execution_count": 1,
            "metadata": {"tags": ["parameters"]},
            "source": ["# Parameters\n", "seed = 0\n"],
            "outputs": [],
        },
        {"cell_type": "code", "execution_count": 2, "metadata": {}, "source": "1/0", "outputs": [ERROR]},
    ],
}
CELLS = [
    "seed = 0", "seed = ", "seed = \0", "seed = (" + "(" * 300 + ")" * 301, "seed = " + "-" * 3000 + "1", "x" * 20_000,
    "seed = 0x" + "f" * 5000, "seed = " + "1" * 5000, "seed = {[]: 1}", "seed = {{1}: 1}", "seed: int", "a.b = 1",
    "seed = b'\\xff'", "%matplotlib inline", "!ls", "seed = 1\n\tx = 2", "seed = '\ud83d'", "seed = 1 + 1j",
    "seed = 1 + 'a'", "é = 1", "seed = '" + "x" * 20_000 + "'", "a = b = c = 1", "[a, b] = 1, 2",
    "seed = [" * 1000 + "]" * 1000, "\ufeffseed = 1", "lambda: (yield)", "return", "# -*- coding: x -*-\nseed = 1",
    "seed = 1 if True else 2", "seed = 1" + "+1" * 5000,
]  # fmt: skip
BROKEN = [
    b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"cells":' * 50_000, b"\0" * 100, b"NaN",
    b'{"nbformat": 4, "cells": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"nbformat": ' + b"4" * 5000 + b', "cells": []}',
    b'{"nbformat": 4, "cells": [{"cell_type": "code", "metadata": ' + b"[" * 900 + b"]" * 900 + b"}]}",
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every position in a JSON value, as the keys that lead to it."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


PLACES = places(GOOD)


@st.composite
def notebooks(draw: st.DrawFn) -> bytes:
    """The bytes of an .ipynb file."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(BROKEN))
    content = json.loads(json.dumps(GOOD))
    for _ in range(draw(st.integers(1, 2))):
        *above, last = draw(st.sampled_from(PLACES))
        place = content
        try:
            for key in above:
                place = place[key]
            if draw(st.integers(0, 4)) == 0:
                del place[last]
            else:
                place[last] = draw(st.one_of(json_values(), st.sampled_from(CELLS), texts()))
        except (TypeError, LookupError):  # an earlier fault took the place away
            continue
    text = json.dumps(content, ensure_ascii=draw(st.booleans()))
    content_bytes = text.encode("utf-8", "surrogatepass")
    cut = draw(st.integers(0, 29)) == 0
    return content_bytes[: draw(st.integers(0, len(content_bytes)))] if cut else content_bytes


def attack(case: bytes, folder: Path) -> None:
    file = folder / "notebook.ipynb"
    file.write_bytes(case)
    error = find_error(file)  # never raises: it is asked when a run has failed already
    assert error is None or (isinstance(error, str) and len(error) < 100_000)
    notebook = read_notebook(file)
    assert all(isinstance(name, str) for name in notebook.declared) and isinstance(notebook.trains, bool)
    json.dumps(notebook.cell)


SURFACE = Surface("notebooks", notebooks(), attack)


def test_a_notebook_is_read_or_refused_in_words() -> None:
    """`metadata: []` in one cell made a batch fail to read the notebook; a truncated executed notebook hid why its run
    had failed."""
    check(SURFACE)
