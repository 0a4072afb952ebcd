"""The tables of docs/config.md match the code. `python tests/config/test_docs.py` rewrites its tables."""

import re
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from rloo_kit.config.old_names import CONFIG_NAMES
from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import LoraSection, RewardSection, SourceSection, VllmSection
from rloo_kit.config.section import Section, declared, describe_field

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"
FIELDS = {name: field.annotation for name, field in RunConfig.model_fields.items()}
NESTED = {"model.lora": LoraSection, "data.sources": SourceSection, "rollout.vllm_engines": VllmSection}
SECTIONS: dict[str, Any] = FIELDS | NESTED | {"rewards": RewardSection}


def show(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, Section):
        return "see below"
    if value is None or isinstance(value, bool):
        return f"`{'null' if value is None else str(value).lower()}`"
    if isinstance(value, list) and len(value) > 3:
        return "all seven"
    return f"`{value}`"


def table(section: type[Section]) -> str:
    rows = ["| key | takes | default | what it is |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        assert field.description, name
        default = field.default_factory() if field.default_factory else field.default  # type: ignore[call-arg]
        shown, what = show(default), field.description
        if trl := declared(field, "trl"):
            shown = f"{shown} (TRL: {show(trl.value)})"
        if follows := declared(field, "follows"):
            what = f"{what}. Default: {follows}"
        rows.append(f"| `{name}` | {describe_field(field)} | {shown} | {what} |")
    return "\n".join(rows)


def trl_table() -> str:
    rows = ["| key | the kit's | TRL's | why |", "|---|---|---|---|"]
    for section, kind in SECTIONS.items():
        for name, field in kind.model_fields.items():
            if trl := declared(field, "trl"):
                follows = declared(field, "follows")
                ours = show(field.default) + (f"; {follows}" if follows else "")
                rows.append(f"| `{section}.{name}` | {ours} | {show(trl.value)} | {trl.reason} |")
    return "\n".join(rows)


def old_table() -> str:
    names: dict[str, list[str]] = {}  # by what became of them: one row for names that share it
    for name, entry in CONFIG_NAMES.items():
        if name == "stop_token_id":
            today = "refused: completions end at the tokenizer's end token"
        elif entry.new:
            today = f"`{entry.new}`" + (f": {entry.note}" if entry.note else "")
        else:
            today = f"no effect: {entry.note}"
        names.setdefault(today, []).append(f"`{name}`")
    rows = [f"| {', '.join(old)} | {today} |" for today, old in names.items()]
    return "\n".join(["| old name | today |", "|---|---|", *rows])


def tables() -> dict[str, str]:
    return {name: table(section) for name, section in SECTIONS.items()} | {
        "defaults that are not TRL's": trl_table(),
        "old names": old_table(),
    }


def written(text: str, name: str) -> re.Match[str] | None:
    return re.search(rf"(<!-- table: {re.escape(name)} -->\n\n)(.*?)(\n*<!-- end -->)", text, flags=re.S)


def test_tables_say_what_the_code_says() -> None:
    """Readers believe a documented default, even an outdated one."""
    text = PAGE.read_text(encoding="utf-8")
    for name, expected in tables().items():
        found = written(text, name)
        assert found is not None, f"{PAGE.name} has no table for {name}"
        assert found[2] == expected, f"the table of {name} is out of date: python {Path(__file__).name}"
    assert set(SECTIONS) - set(NESTED) == set(RunConfig.model_fields)


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    for title, content in tables().items():
        place = written(page, title)
        assert place is not None, title
        page = page[: place.start(2)] + content + "\n\n<!-- end -->" + page[place.end() :]
    PAGE.write_text(page, encoding="utf-8")
