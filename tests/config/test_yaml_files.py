"""YAML as people write it, overrides, and values that survive being written and read."""

from pathlib import Path
from typing import Any

import pytest

from rloo_kit.config.run import RunConfig
from rloo_kit.config.section import apply_override
from rloo_kit.config.yaml_files import dump_yaml, read_file, read_yaml, write_value
from rloo_kit.errors import ConfigError


def test_a_number_with_an_exponent_is_a_number() -> None:
    """PyYAML reads `5e-6` as text, so the learning rate of half of all recipes reached the optimiser as a string."""
    values, _ = read_yaml("a: 5e-6\nb: 1E3\nc: -2.5e+10\nd: .5\ne: 1_000\nf: 5e-6x\ng: 1.\nh: 0x1F")
    assert list(values.values()) == [5e-6, 1000.0, -2.5e10, 0.5, 1000, "5e-6x", 1.0, 31]
    assert isinstance(values["b"], float) and isinstance(values["e"], int)


def test_words_and_dates_stay_text() -> None:
    """In YAML 1.1 a prompt that says `no` is false, `12:30` is 750 and a run named after a day is a date object."""
    values, _ = read_yaml("a: no\nb: on\nc: 12:30\nd: 2026-11-21\ne: 'true'\nf: ~\ng:\nh: 010")
    assert list(values.values()) == ["no", "on", "12:30", "2026-11-21", "true", None, None, 10]


def test_merge_keys() -> None:
    """`<<: *base` is how people share settings; an own key over a merged one is not that key given twice."""
    values, _ = read_yaml("base: &base {a: 1, b: 2}\nmore: &more {<<: *base, b: 3}\nmost: {<<: *more, a: 4}")
    assert (values["more"], values["most"]) == ({"a": 1, "b": 3}, {"a": 4, "b": 3})
    with pytest.raises(ConfigError, match="mapping"):
        read_yaml("a: {<<: 3}")


@pytest.mark.parametrize(
    ("text", "place", "found"),
    [
        ("rloo:\n  beta: 1\n  beta: 2\n", "run.yaml:3:", 'duplicate key "beta"'),
        ("rloo: [1\n", "run.yaml:2:", ""),
        ("- a\n- b\n", "run.yaml:", "contains a list; it needs a mapping of sections"),
        ("a: 1\n\tb: 2\n", "run.yaml:2:", ""),
        ("a: 1\n---\nb: 2\n", "run.yaml:2:", "another document"),
        ("a: " + "[" * 5000, "run.yaml:", "nested too deeply"),
        ("a:\n  b: " + "9" * 5000, "run.yaml:2:", "5000 digits"),
    ],
)
def test_broken_yaml_says_where(tmp_path: Path, text: str, place: str, found: str) -> None:
    """PyYAML silently keeps the last of two equal keys: the run used an unintended beta."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert place in str(caught.value) and found in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rloo.beta", "'rloo.beta' is not of the form section.key=value"),
        ("rloo..beta=3", "is not of the form"),
        ("model.name.x=3", "model.name is 'm', which has no keys below it"),
        ("rewards.1.weight=3", "rewards is a list of 1; use an index below that"),
        ("reward.0.name=b", "did you mean rewards.0.name?"),
        ("reward.nmae=b", "did you mean rewards.0.name?"),
        ("rewards.name=b", "did you mean rewards.0.name?"),
        ("rewards[0].name=b", "did you mean rewards.0.name?"),
        ("rlo.beta=1", "did you mean rloo.beta?"),
        ("eval.pass_at_k.0=3", "set eval.pass_at_k=[...]"),
    ],
)
def test_overrides_that_lead_nowhere(override: str, message: str) -> None:
    """An override that does not reach its key must not create a new key."""
    with pytest.raises(ConfigError) as caught:
        apply_override({"model": {"name": "m"}, "rewards": [{"name": "a"}]}, override, RunConfig)
    assert message in str(caught.value)


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
