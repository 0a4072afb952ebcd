"""Digests of the sources of users' rewards: a resumed run and a comparison notice an edited one."""

import ast
import contextlib
import dis
import functools
import hashlib
import inspect
import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

from rloo_kit.rewarding.guard import GuardedReward, NamedReward, reward_name, unwrap
from rloo_kit.system.isolation import starting_folder

MOST_FILES = 100  # that are read for a digest: a large package of the user's would take seconds


def read_sources(rewards: Iterable[Any]) -> dict[str, str]:
    """Digests of users' rewards: of the file that defines one and the local modules that this imports; in a notebook or
    a script, of the function or class and what it uses there. Empty for the kit's own, which the configuration
    describes. Keywords of a partial count, attributes of an object do not: rewards count and cache in them."""
    found: dict[str, list[str]] = {}
    for reward in rewards:
        while isinstance(reward, NamedReward | GuardedReward):
            reward = reward.reward
        keywords = reward.keywords if isinstance(reward, functools.partial) else {}
        plain = sorted((name, one) for name, one in keywords.items() if isinstance(one, str | int | float))
        given = {f"reward {reward_name(reward)}, keywords": repr(plain)} if plain else {}
        for name, text in (_read_source(unwrap(reward)) | given).items():
            found.setdefault(name, []).append(text)
    return {name: digest_texts(texts) for name, texts in found.items()}


def _read_source(reward: Any) -> dict[str, str]:
    """What identifies the source of an unwrapped reward, by file or function."""
    if digests := getattr(reward, "__dict__", {}).get("source_digests"):  # a `WorkerReward`'s
        return digests
    made = reward if inspect.isroutine(reward) else type(reward)
    if inspect.ismethod(reward) and not inspect.isclass(reward.__self__):
        made = type(reward.__self__)
    return {f"reward {reward_name(reward)}": _read_main(made)} if made.__module__ == "__main__" else _read_file(made)


def _read_file(made: Any) -> dict[str, str]:
    """`read_files` of the module that a function, class or module comes from; empty for the kit's and compiled ones."""
    module = str(getattr(made, "__module__", None) or getattr(made, "__name__", ""))
    with suppress(OSError, TypeError):  # no source
        file = inspect.getsourcefile(made)
        return read_files(file, [str(Path(file).parent)]) if file and module.partition(".")[0] != "rloo_kit" else {}
    return {}


def _read_main(made: Any) -> str:
    """The source of a function or of a class's methods in a notebook, and of the functions, classes, modules and
    constants that it uses; a global that one of them assigns is no constant but a counter."""
    texts: list[str] = []
    constants: dict[str, Any] = {}
    assigned: set[str] = set()
    todo = [made]
    for made in todo:  # which grows
        classes = [one for one in made.__mro__ if one.__module__ == "__main__"] if inspect.isclass(made) else []
        methods = [getattr(one, "__func__", one) for base in classes for one in vars(base).values()]  # static ones too
        for one in filter(inspect.isfunction, methods) if classes else [inspect.unwrap(made)]:
            with suppress(OSError, TypeError):  # no source
                texts.append(inspect.getsource(one))
            assigned |= _names(one.__code__, "STORE_GLOBAL")
            for name in sorted(_names(one.__code__, "LOAD_GLOBAL") & one.__globals__.keys()):
                used = one.__globals__[name]
                if isinstance(used, str | int | float):
                    constants[name] = used
                elif getattr(used, "__module__", None) != "__main__":
                    texts += map(str, sorted(_read_file(used).items()))
                elif (inspect.isfunction(used) or inspect.isclass(used)) and used not in todo:
                    todo.append(used)
    return repr((texts, sorted((name, value) for name, value in constants.items() if name not in assigned)))


def _names(code: CodeType, operation: str) -> set[str]:
    """The globals that a function reads or assigns, also in the comprehensions and lambdas in it."""
    names = {one.argval for one in dis.get_instructions(code) if one.opname == operation}
    return names.union(*(_names(one, operation) for one in code.co_consts if isinstance(one, CodeType)))


def read_files(module: str, folders: list[str]) -> dict[str, str]:
    """Digests of a module, given by its name or its file, and of those that it imports; installed ones are left out."""
    folders, installed = [*folders, starting_folder() or os.getcwd()], (sys.prefix, sys.base_prefix)
    todo = [Path(module)] if module.endswith(".py") else _find(module, folders)
    todo = [] if module.startswith(installed) or re.search("/(?:site|dist)-packages/", module) else todo
    files: dict[Path, str] = {}
    while todo and len(files) < MOST_FILES:
        if (file := todo.pop().resolve()) in files or not file.is_file():
            continue
        files[file] = file.read_text(encoding="utf-8-sig", errors="replace")
        with contextlib.suppress(SyntaxError, ValueError, IndexError, RecursionError):  # reported when it is imported
            tree = ast.parse(files[file])
            for node in ast.walk(tree):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    base = getattr(node, "module", None)
                    names = [base or "", *(f"{base}.{one.name}" if base else one.name for one in node.names)]
                    above = file.parents[max(getattr(node, "level", 0), 1) - 1]
                    todo += [one for name in names for one in _find(name, [above, *folders])]
            files[file] = ast.unparse(tree)  # without comments and layout
    named = {file.name: [text for one, text in sorted(files.items()) if one.name == file.name] for file in files}
    return {name: digest_texts(texts) for name, texts in named.items()}


def _find(module: str, folders: Sequence[str | Path]) -> list[Path]:
    """The user's file of a module, in the first folder that has it; the kit's own are left out."""
    name = module.replace(".", "/")
    places = [Path(folder, name + end) for folder in folders for end in (".py", "/__init__.py")]
    return [] if module.partition(".")[0] in ("", "rloo_kit") else list(filter(Path.is_file, places))[:1]


def digest_texts(texts: Iterable[str]) -> str:
    """A digest of the texts in their order, 16 characters."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
