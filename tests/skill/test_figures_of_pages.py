"""Figures and names on the skill's pages that the code holds too: token ids, defaults, old arguments."""

import dataclasses
import re

from rloo_kit.think_tags import QWEN3_IDS
from tests.skill.pages import ROOT


def read(page: str) -> str:
    return (ROOT / "references" / page).read_text(encoding="utf-8")


def test_the_ids_are_the_codes() -> None:
    """A reward that was written with a wrong id gives every completion the same."""
    from rloo_kit.embedded import tokenizer

    text = read("thinking-tokens.md").replace("\\|", "|")
    rows = re.findall(r"^\| `(<[^`]+>)`[^\n]* \| (\d+) \| (\d+) \|$", text, flags=re.M)
    assert {name: int(large) for name, large, _ in rows} == QWEN3_IDS
    vocabulary = tokenizer.build_tokenizer("thinking", "compact").get_vocab()
    assert {name: int(small) for name, _, small in rows} == {name: vocabulary[name] for name in QWEN3_IDS}
    assert f"[[19, {QWEN3_IDS['</think>']}, 19]]" in read("rewards.md")


def test_the_defaults_are_the_installed_ones() -> None:
    """TRL changed the default of beta and of the learning rate between two releases."""
    import trl

    from rloo_kit.config.schema import RLOOSection

    stock = {field.name: field.default for field in dataclasses.fields(trl.RLOOConfig)}
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| [^|]*\|$", read("trl-api.md"), flags=re.M)
    named = [row for row in rows if row[0] in stock and row[0] in RLOOSection.model_fields]
    assert len(named) == 10
    for name, in_trl, in_kit in named:
        assert (in_trl, in_kit) == (str(stock[name]), str(RLOOSection.model_fields[name].default)), name


def test_the_old_arguments_of_the_trainer_are_the_codes() -> None:
    """An agent that ports a recipe believes the table; a name that was added to the code alone is not ported."""
    from rloo_kit.config.old_names import TRAINER_NAMES

    rows = dict(re.findall(r"^\| `(\w+)` \| `?(\w+)`?[^|]* \|$", read("trl-api.md"), flags=re.M))
    for old, entry in TRAINER_NAMES.items():
        assert rows[old] == (entry.new or "no"), f"{old}: {entry}"
