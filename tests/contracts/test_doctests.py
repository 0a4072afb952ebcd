"""Examples in docstrings are run: an example that no longer holds misleads more than none."""

import doctest
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__").removeprefix("benchmarks.")
    for folder in ("rewards", "rloo_kit", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name: str, module: Any) -> None:
    """Each `>>>` of a docstring gives what is written below it."""
    failed, tried = doctest.testmod(module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried and not failed
