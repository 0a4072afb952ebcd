"""What the name of a model says: built-in models with their task families, and models that think."""

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rloo_kit.system.environment import cache_folder

KINDS = ("thinking", "instruct", "untaught")  # untaught: a thinking model with random weights
FAMILIES = ("addition", "subtraction", "checked_addition", "chain_sum", "shapes")  # in tasks/families.py
DEFAULT_FAMILY = "addition"
EMBEDDED_PREFIX = "embedded/"
SMOLLM2_PREFIX = "smollm2/"  # a real language model, from a Python package
SMOLLM2 = ("smollm2/instruct", "smollm2/thinking", "smollm2/tools")
RECORD = "embedded.json"  # in the folder of a built-in model: what was built; its presence marks it as complete

# By the last part of a name, before there is a tokenizer: models that always think, and hybrid ones that think by
# default or only if asked to.
_ALWAYS = re.compile(
    r"(?<![a-z])(?<!no-)(?<!non-)(thinking|reasoning(?!.gym))|-think(-|$)|(deepseek-|open-?)r1(-|$)|r1-distill|"
    r"^qwq-\d+b(?!-preview)|openthinker|acereason|deepscaler|deepcoder|skywork-or1|exaone-deep|vibethinker",
    re.I,
)
_IF_ASKED = re.compile(r"^qwen3\.5-(0\.8|2)b(?!.*base)", re.I)
_BY_DEFAULT = re.compile(r"^(smollm3|qwen3(\.\d+)?)-(?!(0\.8|2)b)\d(?!.*(instruct|base))", re.I)


def split_model_name(name: str) -> tuple[str, str]:
    """Kind and family of an embedded model; the prefix is optional.

    >>> split_model_name("embedded/thinking@subtraction"), split_model_name("instruct")
    (('thinking', 'subtraction'), ('instruct', 'addition'))
    """
    kind, _, family = name.removeprefix(EMBEDDED_PREFIX).partition("@")
    return kind, family or DEFAULT_FAMILY


def smollm2_folder(name: str) -> Path:
    """Where the cache has a model of `SMOLLM2`, built or not."""
    return cache_folder() / f"{name.replace('/', '-')}-r1"


def find_embedded_problem(name: str) -> str | None:
    """Why no embedded model has that name (prefix optional); None if one does.

    >>> find_embedded_problem("embedded/thinking@subtraktion")
    "there is no task family 'subtraktion': take addition, subtraction, checked_addition, chain_sum, shapes"
    """
    kind, _, family = name.removeprefix(EMBEDDED_PREFIX).partition("@")
    if kind not in KINDS:
        names = ", ".join(f"{EMBEDDED_PREFIX}{kind}" for kind in KINDS)
        return f"there is no embedded model '{kind}': model.name is {names}, or {EMBEDDED_PREFIX}thinking@FAMILY"
    if "@" not in name:
        return None
    if kind != "thinking":
        return f"'{name}' names a task family, which only {EMBEDDED_PREFIX}thinking@{family or 'FAMILY'} takes"
    return find_family_problem(family)


def find_family_problem(family: str) -> str | None:
    """Why no task family has that name; None if one does."""
    if family in FAMILIES:
        return None
    if family.endswith(".py"):
        return (
            f"'{family}' is a file, and task families are built in ({', '.join(FAMILIES)}): for a task of your own put "
            "its rows into a file (data.source=rows.jsonl) and take any small model, such as "
            "model.name=smollm2/instruct; see docs/embedded.md"
        )
    return f"there is no task family '{family}': take {', '.join(FAMILIES)}"


def find_near_miss(name: str, for_models: bool) -> str | None:
    """The built-in name, of a model or of a source or environment, that `name` nearly is; None if it is none.

    >>> find_near_miss("embeded/thinking", True), find_near_miss("reasoning-gym/chain_sum", False)
    ('embedded/thinking', 'reasoning_gym/chain_sum')
    """
    written = re.sub(r"^([^/]*?)[-_:\\ ](?=[^/]*$)", r"\1/", name.casefold())  # embedded-thinking
    owner, _, rest = written.partition("/")
    sources = [*(f"embedded/{family}" for family in FAMILIES), f"reasoning_gym/{rest}", f"verifiers/{rest}"]
    models = [f"embedded/{kind}" for kind in (*KINDS, *(f"thinking@{family}" for family in FAMILIES))]
    near = difflib.get_close_matches(written, [*models, *SMOLLM2] if for_models else sources, n=1, cutoff=0.75)
    prefix = near[0].partition("/")[0] if near and rest else "/"
    is_near = difflib.SequenceMatcher(None, owner, prefix).ratio() > 0.84 and not name.startswith(f"{prefix}/")
    return near[0] if is_near else None


def always_thinks(name: str) -> bool:
    """Whether a model thinks whatever its template says, according to its name.

    >>> always_thinks("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"), always_thinks("Qwen/Qwen3-0.6B")
    (True, False)
    """
    return any(_ALWAYS.search(part) for part in _names_in(name))


def thinks_if_asked(name: str) -> bool:
    """Whether a hybrid model thinks only with `enable_thinking: true`, according to its name."""
    return any(_IF_ASKED.search(part) for part in _names_in(name))


def thinks_by_keys(model: Mapping[str, Any]) -> bool:
    """Whether the model thinks according to the keys of `model:`: by its family, else by its name.

    >>> thinks_by_keys({"name": "Qwen/Qwen3-0.6B"}), thinks_by_keys({"name": "Qwen/Qwen3-4B-Instruct-2507"})
    (True, False)
    """
    family, switch, name = model.get("family", "auto"), model.get("enable_thinking"), str(model.get("name"))
    if family == "auto" and switch is None:
        return always_thinks(name) or any(_BY_DEFAULT.search(part) for part in _names_in(name))
    return family == "thinking" or (family in ("auto", "hybrid") and switch is not False)


def _names_in(name: str) -> list[str]:
    """What may name a model: the last part of a hub id, all parts of a folder's path, or those of an adapter's base."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return [name.rstrip("/").rpartition("/")[2]]
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
        return _names_in(str(base))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return list(folder.parts)
