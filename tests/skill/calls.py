"""Calls in the Python blocks of a page, resolved to the real functions and classes that they name.

A page's blocks are read in order and share their imports, as a notebook's cells do. Keywords that only `**kwargs` would
take do not count as known. Methods of the pages' variables (`trainer.train`) are not looked up.
"""

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

from tests.skill.pages import Block

LIBRARIES = ("rloo_kit", "rewards", "trl", "transformers", "peft", "datasets", "unsloth", "dataclasses")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call with keyword arguments: where, what is called as it is written, its dotted origin, the keywords."""

    place: str
    written: str
    origin: str
    keywords: tuple[str, ...]


def read_calls(blocks: list[Block]) -> list[Call]:
    """Every call of a page's blocks that gives keyword arguments to a name of LIBRARIES."""
    origins: dict[str, str] = {}
    calls = []
    for block in blocks:
        tree = ast.parse(block.code, filename=block.place)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                origins |= {alias.asname or alias.name: alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                origins |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                keywords = tuple(word.arg for word in node.keywords if word.arg is not None)
                written = re.sub(r"\(.*?\)", "", ast.unparse(node.func))
                origin = find_origin(written, origins)
                if keywords and origin is not None:
                    calls.append(Call(f"{block.page}:{block.line + node.lineno - 1}", written, origin, keywords))
    return calls


def find_origin(written: str, origins: dict[str, str]) -> str | None:
    """`module:dotted.name` of what is called, or None."""
    head, _, rest = written.partition(".")
    origin = origins.get(head)
    if origin is None or origin.partition(":")[0].partition(".")[0] not in LIBRARIES:
        return None
    module, _, name = origin.partition(":")
    return f"{module}:{'.'.join(part for part in (name, rest) if part)}"


def resolve(origin: str) -> Any:
    """The object of an origin. Raises AttributeError or ImportError where the installed version has no such name."""
    module, _, dotted = origin.partition(":")
    found: Any = import_module(module)
    for name in dotted.split("."):
        found = getattr(found, name)
    return found


def known_keywords(origin: str) -> set[str]:
    """The keyword arguments that what is called names itself."""
    if origin.endswith(".with_"):  # a reward's parameters
        return {field.name for field in dataclasses.fields(resolve(origin.removesuffix(".with_")))}
    if re.fullmatch(r"transformers:Auto\w+\.from_pretrained", origin):
        return read_popped(resolve("transformers:PreTrainedModel.from_pretrained"))
    called = resolve(origin)
    if not inspect.isclass(called):
        return named_by(called)[0]
    known, open_ended = named_by(called)
    for parent in called.__mro__[1:]:  # a class that hands **kwargs on takes what its parent takes
        if not open_ended or "__init__" not in vars(parent):
            continue
        more, open_ended = named_by(parent)
        known |= more
    return known


def named_by(called: Callable[..., Any]) -> tuple[set[str], bool]:
    """Keywords that a signature names, and whether it takes any others."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(called).parameters
    names = {name for name, one in parameters.items() if one.kind in kinds}
    return names, any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())


def read_popped(function: Callable[..., Any]) -> set[str]:
    """Keywords that a function takes out of its **kwargs, read in its source."""
    named = set(inspect.signature(function).parameters)
    return named | set(re.findall(r"kwargs\.pop\(\s*\"(\w+)\"", inspect.getsource(function)))


def find_faults(calls: list[Call]) -> list[str]:
    """Calls that the installed versions would refuse."""
    faults = []
    for call in calls:
        try:
            known = known_keywords(call.origin)
        except (AttributeError, ImportError) as error:
            faults.append(f"{call.place}: {call.written}: {error}")
            continue
        faults += [f"{call.place}: {call.written} takes no {word}" for word in call.keywords if word not in known]
    return faults


def find_missing_names(blocks: list[Block], modules: tuple[str, ...]) -> list[str]:
    """Imported names, and public names of the kit as `kit.NAME`, that the installed versions do not have."""
    faults, aliases = [], {}
    for block in blocks:
        for node in ast.walk(ast.parse(block.code)):
            wanted: list[str] = []
            if isinstance(node, ast.Import):
                aliases |= {alias.asname or alias.name: alias.name for alias in node.names}
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                wanted = [f"{node.module}:{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
                wanted = [f"{aliases[node.value.id]}:{node.attr}"]
            for name in wanted:
                if name.partition(":")[0].partition(".")[0] not in modules:
                    continue
                try:
                    resolve(name) if ":" in name else import_module(name)
                except (AttributeError, ImportError) as error:
                    faults.append(f"{block.place}: {name}: {error}")
    return faults
