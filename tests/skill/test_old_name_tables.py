"""The tables of old names in references/trl-api.md, and its defaults.

`python tests/skill/test_old_name_tables.py` writes the tables anew from `rloo_kit/config/old_names.py`.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from rloo_kit.config.old_names import CONFIG_NAMES, TRAINER_NAMES, OldName
from rloo_kit.config.schema import RLOOSection

PAGE = Path(__file__).resolve().parents[2] / "references" / "trl-api.md"
REFUSED = ("stop_token_id",)


def make_table(names: Mapping[str, OldName]) -> str:
    """One row for each name that has a successor; those without share a row where the reason is the same."""
    rows, reasons = ["| old | today |", "|---|---|"], dict[str, list[str]]()
    for name, entry in names.items():
        if name in REFUSED:
            reasons["refused: completions end at the tokenizer's end token"] = [name]
        elif entry.new:
            rows.append(f"| `{name}` | `{entry.new}`" + (f": {entry.note} |" if entry.note else " |"))
        else:
            reasons.setdefault(f"no effect: {entry.note}", []).append(name)
    rows += [f"| {', '.join(f'`{name}`' for name in found)} | {reason} |" for reason, found in reasons.items()]
    return "\n".join(rows)


def tables() -> dict[str, str]:
    return {
        "old names of the config": make_table(CONFIG_NAMES),
        "old arguments of the trainer": make_table(TRAINER_NAMES),
    }


def find(text: str, title: str) -> re.Match[str]:
    found = re.search(rf"(<!-- table: {re.escape(title)} -->\n)(.*?)(<!-- end -->)", text, flags=re.S)
    assert found is not None, f"{PAGE.name} has no table '{title}'"
    return found


def test_the_tables_are_the_codes() -> None:
    """An agent that ports a recipe believes the table; a name that was added to the code alone is not ported."""
    text = PAGE.read_text(encoding="utf-8")
    for title, expected in tables().items():
        assert find(text, title)[2].strip() == expected, f"run python tests/skill/{Path(__file__).name}"


def test_the_defaults_are_the_installed_ones() -> None:
    """TRL changed the default of beta and of the learning rate between two releases."""
    import trl

    stock = {field.name: field.default for field in dataclasses.fields(trl.RLOOConfig)}
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| [^|]*\|$", text.partition("## Names")[2], flags=re.M)
    assert len(rows) == 10
    for name, in_trl, in_kit in rows:
        ours = RLOOSection.model_fields[name].default
        assert (in_trl, in_kit) == (str(stock[name]), str(ours)), name


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    for title, table in tables().items():
        place = find(page, title)
        page = page[: place.start(2)] + "\n" + table + "\n\n" + page[place.end(2) :]
    PAGE.write_text(page, encoding="utf-8")
