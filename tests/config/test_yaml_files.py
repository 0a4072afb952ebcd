"""YAML as people write it, overrides, and values that survive being written and read."""

from typing import Any

import pytest

from rloo_kit.config.run import RunConfig
from rloo_kit.config.section import apply_override
from rloo_kit.config.yaml_files import dump_yaml, read_yaml, write_value
from rloo_kit.errors import ConfigError


def test_numbers_are_numbers_and_words_stay_text() -> None:
    """PyYAML reads a learning rate of `5e-6` as text; in YAML 1.1 `no` is false, `12:30` is 750 and a day a date."""
    values, _ = read_yaml("a: 5e-6\nb: 1E3\nc: -2.5e+10\nd: .5\ne: 1_000\nf: 5e-6x\ng: 1.\nh: 0x1F")
    assert list(values.values()) == [5e-6, 1000.0, -2.5e10, 0.5, 1000, "5e-6x", 1.0, 31]
    assert isinstance(values["b"], float) and isinstance(values["e"], int)
    values, _ = read_yaml("a: no\nb: on\nc: 12:30\nd: 2026-11-21\ne: 'true'\nf: ~\ng:\nh: 010")
    assert list(values.values()) == ["no", "on", "12:30", "2026-11-21", "true", None, None, 10]


def test_merge_keys() -> None:
    """`<<: *base` is how people share settings; an own key over a merged one is not that key given twice."""
    values, _ = read_yaml("base: &base {a: 1, b: 2}\nmore: &more {<<: *base, b: 3}\nmost: {<<: *more, a: 4}")
    assert (values["more"], values["most"]) == ({"a": 1, "b": 3}, {"a": 4, "b": 3})
    with pytest.raises(ConfigError, match="mapping"):
        read_yaml("a: {<<: 3}")


TEXTS = [
    "####", "Be brief # no filler", "007", "Answer:", "yes", "1e3", "[a]", "{x}", "*a", "&b", "!tag", "2024-01-01", "~",
    " x ", "a\nb", "key: value", "- a", "| x", "true", "1_000", "a = b", '"a" and "b"', "\\boxed{}", "# x", "don't",
    "a: b: c", "http://x/y=z", "[1",
]  # fmt: skip
UNTYPED = {"1e3": 1000.0, "[a]": ["a"], "true": True, "~": None}  # of `params`, whose types the reward knows


@pytest.mark.parametrize("key", ["data.answer_after", "rloo.tools.0", "rewards.0.name", "rewards.0.params.rubric"])
def test_text_stays_text(key: str) -> None:
    """`answer_after=####` was a comment in YAML, so null; a system prompt lost its end, and a rubric was a mapping."""
    for text in TEXTS:
        quoted, wanted = write_value(text), UNTYPED.get(text, text) if "params" in key else text
        for written, meant in ((text, wanted), (quoted, text), ("null", None), ("", None), ('"####"', "####")):
            values: dict[str, Any] = {"rewards": [{"name": "a", "params": {}}], "rloo": {"tools": [""]}}
            path = apply_override(values, f"{key}={written}", RunConfig)
            for part in path:
                values = values[part]
            assert values == meant and type(values) is type(meant), written


def test_what_is_written_is_read_back() -> None:
    """A prompt that reads `no`, and `1e5` as text, came back as something else; to YAML 1.1 readers 1e-05 is text."""
    text = "no\n  two: lines # \\boxed{} 'quoted' \"twice\" é 😀\n"
    values = {"b": [text, "no", "1e5", "", "null", "~", "0x1F", "2026-11-21", True, None, 1.0], "a": {"c": [{"d": []}]}}
    assert read_yaml(dump_yaml(values))[0] == values and list(values) == ["b", "a"]
    assert dump_yaml({"rate": 1e-5, "items": [1, 2]}) == "rate: 1.0e-05\nitems: [1, 2]\n"
