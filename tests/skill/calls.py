"""Names and calls in the Python blocks of a page, looked up in the installed libraries.

A page's blocks are read in order and share their imports, as a notebook's cells do. Keywords that only `**kwargs` would
take do not count as known. Methods of the pages' variables (`trainer.train`) are not looked up.
"""

import ast
import dataclasses
import inspect
import re
from importlib import import_module
from typing import Any

from tests.skill.pages import Block

LIBRARIES = ("rloo_kit", "rewards", "trl", "transformers", "peft", "datasets", "dataclasses")


def check_names(blocks: list[Block], libraries: tuple[str, ...]) -> tuple[list[str], set[str]]:
    """Imports and calls of these libraries that would be refused, with their place; and all that were checked."""
    origins: dict[str, tuple[str, str]] = {}  # a name of the blocks: its module and its name in there
    faults, checked = [], set()
    for block in blocks:
        nodes = list(ast.walk(ast.parse(block.code, filename=block.place)))
        wanted: list[tuple[str, tuple[str, str], list[str]]] = []
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = node.module if isinstance(node, ast.ImportFrom) else None
                for alias in node.names:
                    origin = (alias.name, "") if module is None else (module, alias.name)
                    origins[alias.asname or alias.name] = origin
                    wanted.append((f"import {alias.name}", origin, []))
        for node in nodes:
            if isinstance(node, ast.Call):
                written = ast.unparse(node.func)
                head, _, rest = written.partition(".")
                if head in origins and "(" not in written:
                    module, name = origins[head]
                    keywords = [word.arg for word in node.keywords if word.arg is not None]
                    wanted.append((written, (module, ".".join(filter(None, (name, rest)))), keywords))
        for written, (module, name), keywords in wanted:
            if module.partition(".")[0] in libraries:
                checked.add(written)
                try:
                    known = known_keywords(module, name) if keywords else resolve(module, name) and set()
                except (AttributeError, ImportError) as error:
                    faults.append(f"{block.place}: {written}: {error}")
                    continue
                faults += [f"{block.place}: {written} takes no {word}" for word in keywords if word not in known]
    return faults, checked


def resolve(module: str, dotted: str) -> Any:
    """The object. Raises AttributeError or ImportError where the installed version has no such name."""
    found: Any = import_module(module)
    for name in dotted.split(".") if dotted else ():
        found = getattr(found, name)
    return found


def known_keywords(module: str, name: str) -> set[str]:
    """The keyword arguments of what is called; a class that hands **kwargs on takes its parent's."""
    if name.endswith(".with_"):  # a reward's parameters
        return {field.name for field in dataclasses.fields(resolve(module, name.removesuffix(".with_")))}
    called = resolve(module, name)
    if module == "transformers" and re.fullmatch(r"Auto\w+\.from_pretrained", name):
        called = resolve("transformers", "PreTrainedModel.from_pretrained")
        popped = re.findall(r"kwargs\.pop\(\s*\"(\w+)\"", inspect.getsource(called))
        return {*inspect.signature(called).parameters, *popped}
    known: set[str] = set()
    for part in called.__mro__ if inspect.isclass(called) else (called,):
        if part is called or "__init__" in vars(part):
            parameters = inspect.signature(part).parameters.values()
            known |= {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
            if not any(one.kind is one.VAR_KEYWORD for one in parameters):
                break
    return known
