"""The tables of docs/config.md match the code. `python tests/config/test_docs.py` rewrites its tables."""

import re
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rloo_kit.config.old_names import CONFIG_NAMES
from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import JudgeSection, LoraSection, RewardSection, SourceSection, VllmSection
from rloo_kit.config.section import Section, declared
from rloo_kit.config.supervised import RewardModelSection

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"
FIELDS = {name: field.annotation for name, field in RunConfig.model_fields.items()}
NESTED = {"model.lora": LoraSection, "data.sources": SourceSection, "rollout.vllm": VllmSection}
NESTED |= {"eval.judge": JudgeSection}
SECTIONS: dict[str, Any] = FIELDS | NESTED | {"rewards": RewardSection, "reward_model": RewardModelSection}


def show(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, Section):
        return "see below"
    if value is None or isinstance(value, bool):
        return f"`{'null' if value is None else str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def parts(annotation: Any) -> list[tuple[Any, list[Any]]]:
    """The types of a union, each with its metadata."""
    if get_origin(annotation) in (Union, UnionType):
        return [found for part in get_args(annotation) for found in parts(part)]
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        return [(inner, metadata)]
    return [(annotation, [])]


def limits(field: FieldInfo, default: Any) -> str:
    """A key's other choices and bounds, without what the default or the text above the tables says."""
    kinds = parts(field.annotation)
    types = [kind for kind, _ in kinds]
    choices = [show(value) for kind in types if get_origin(kind) is Literal for value in get_args(kind)]
    choices += ["`true`", "`false`"] if bool in types and (choices or default is None) else []
    choices = [choice for choice in choices if choice != show(default)]
    bounds: dict[str, float] = {}
    for metadata in (field.metadata, *(found for _, found in kinds)):
        for item in metadata:
            for one in getattr(item, "metadata", [item]):  # of a pydantic Field
                for sign in ("ge", "gt", "le", "lt"):
                    if (value := getattr(one, sign, None)) is not None and value < 2**31:
                        bounds[sign] = value
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if low is not None and high is not None:
        choices.append(f"{'[' if 'ge' in bounds else '('}{low:g}, {high:g}{']' if 'le' in bounds else ')'}")
    elif low is not None and not (int in types and bounds == {"ge": 1}):
        choices.append(f"{'≥' if 'ge' in bounds else '>'} {low:g}")
    return ", ".join(choices)


def table(section: type[Section]) -> str:
    rows = {"key | default; values | what it is": "", "---|---|---": ""}  # a dict: the same row once
    follow = [name for name, field in section.model_fields.items() if field.description == f"null: data.{name}"]
    for name, field in section.model_fields.items():
        assert field.description, name
        default = field.default_factory() if field.default_factory else field.default  # type: ignore[call-arg]
        shown = "; ".join(filter(None, (show(default), limits(field, default))))
        follows = declared(field, "follows")
        what = f"{field.description}. Default: {follows}" if follows else field.description
        what = what.replace("</think>", "`</think>`")  # else a renderer takes it for HTML
        key = f"`{name}`"
        if len(follow) > 1 and name in follow:
            key, what = ", ".join(f"`{one}`" for one in follow), "null: the key of the same name in data"
        rows[f"{key} | {shown} | {what}"] = ""
    return "\n".join(rows)


def trl_table() -> str:
    """Left out: keys that are null, which a file leaves to TRL."""
    rows = ["key | here | TRL | why", "---|---|---|---"]
    for section, kind in SECTIONS.items():
        for name, field in kind.model_fields.items():
            if (trl := declared(field, "trl")) and field.default is not None:
                rows.append(f"`{section}.{name}` | {show(field.default)} | {show(trl.value)} | {trl.reason}")
    return "\n".join(rows)


def old_table() -> str:
    """One row for each name that has a new one; one for those that have no effect, whose warnings say the rest."""
    names: dict[str, list[str]] = {}  # by what became of them
    for name, entry in CONFIG_NAMES.items():
        if name == "stop_token_id":
            today = "refused: completions end at the tokenizer's end token"
        elif entry.new:
            today = f"`{entry.new}`" + (f": {entry.note}" if entry.note else "")
        else:
            today = "no effect; the warning says why, and what to set instead"
        names.setdefault(today, []).append(f"`{name}`")
    rows = [f"{', '.join(old)} | {today}" for today, old in names.items()]
    return "\n".join(["old name | today", "---|---", *rows])


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


def keys_of(section: type[BaseModel], prefix: str = "") -> set[str]:
    """The keys of a section and of those in it; those of a list without their number."""
    found = set()
    for name, field in section.model_fields.items():
        found.add(f"{prefix}{name}")
        inner = [kind for one, _ in parts(field.annotation) for kind in (one, *get_args(one)) if isinstance(kind, type)]
        for kind in inner:
            found |= keys_of(kind, f"{prefix}{name}.") if issubclass(kind, Section) else set()
    return found


def test_keys_in_the_pages_exist() -> None:
    """A key that was renamed stays in a sentence, where no table is written again."""
    root, keys = PAGE.parents[1], keys_of(RunConfig)
    named = re.compile(rf"(?<![\w./])((?:{'|'.join(FIELDS)})(?:\.\w+)+)(?![\w/(])")
    methods = {"model.generate", "model.add_adapter"}  # of a model in Python
    unknown = [
        f"{path.name}: {key}"
        for path in [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("references/*.md")]
        if path.name not in ("CHANGELOG.md", "log.md")  # what was
        for code in re.findall(r"`([^`\n]+)`", path.read_text(encoding="utf-8"))
        for key in named.findall(code)
        if re.sub(r"\.(\d+|N)(?=\.|$)", "", key) not in keys | methods and not key.endswith((".py", ".json", ".jsonl"))
    ]
    assert not unknown, "\n".join(unknown)


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    for title, content in tables().items():
        place = written(page, title)
        assert place is not None, title
        page = page[: place.start(2)] + content + "\n\n<!-- end -->" + page[place.end() :]
    PAGE.write_text(page, encoding="utf-8")
