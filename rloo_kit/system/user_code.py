"""Code of the user's, named by a config as `module:function` or `path/to/file.py:function`: importing it in a worker
process, running its coroutines, describing its errors, and digests of its sources. No torch here.
"""

import ast
import asyncio
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import threading
import traceback
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

from rloo_kit.errors import RewardError, describe_error, excerpt

_LOCK = threading.Lock()  # two threads that come first get one loop
MOST_FILES = 100  # that are read for a digest: a large package of the user's would take seconds
LONGEST_STATE = 100_000  # characters of an attribute as Python writes it
_KINDS: dict[str, Any] = {one.__name__: one for one in (dict, list, tuple, set, frozenset, bytes)}


def read_files(module: str, folders: list[str]) -> dict[str, str]:
    """Digests of a module, given by its name or its file, and of those that it imports; installed ones are left out."""
    folders, installed = [*folders, os.getcwd()], (sys.prefix, sys.base_prefix)
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


def import_target(target: str, folders: list[str]) -> Any:
    """What `module:name` or `path/to/file.py:name` names; `name` may be `Class.method`. The module path begins with
    `folders`, then the working folder. Raises RewardError if it is not there, or importing it failed."""
    with suppress(FileNotFoundError):  # the working folder was deleted
        sys.path.insert(0, os.getcwd())
    sys.path[:0] = folders
    module_name, _, name = target.rpartition(":")
    try:
        module: Any = _import_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name in (module_name, module_name.partition(".")[0]):
            looked = f"it was looked for in {', '.join(dict.fromkeys(sys.path[:2]))} and among the installed ones"
            raise RewardError(f"there is no module '{module_name}'; {looked}") from None
        raise RewardError(f"importing '{module_name}' failed: {describe_user_error(error)}") from None
    found: Any = functools.reduce(lambda one, part: getattr(one, part, None), name.split("."), module)
    if found is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RewardError(f"module '{module_name}' has no '{name}'; it offers {', '.join(names) or 'nothing to call'}")
    return found


def _import_file(path: str) -> ModuleType:
    """The module in a file, under a unique name: the user's types.py must not replace Python's. Its folder, and those
    above it that are packages, become packages for its relative imports; their `__init__` is not run."""
    folders, package = [Path(path).parent], "_reward_files"
    while (folders[0] / "__init__.py").is_file():
        folders.insert(0, folders[0].parent)
    for folder in folders:
        package += f".{folder.name}"
        parent = sys.modules[package] = ModuleType(package)
        parent.__path__ = [str(folder)]
    name = f"{package}.{Path(path).stem.replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def submit(coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
    """The future of a coroutine in the one loop of this process, in a thread of its own: a client that a function keeps
    belongs to the loop of its first call."""
    with _LOCK:
        loop = _event_loop(os.getpid())
    return asyncio.run_coroutine_threadsafe(coroutine, loop)


def finish(value: Any) -> Any:
    """What an async function returns in the end, from `submit`; any other value as it is."""
    return submit(value).result() if inspect.iscoroutine(value) else value


@functools.cache
def _event_loop(pid: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def serve() -> None:
        while True:
            with suppress(BaseException):  # sys.exit in a coroutine, whose future has it too, stops the loop
                loop.run_forever()

    threading.Thread(target=serve, name="rloo-kit-async", daemon=True).start()
    return loop


def make_plain(value: Any, exact: bool = False) -> Any:
    """`value` in the types of JSON: arrays and tensors as numbers and lists, enums as their values, anything else as
    its text. `exact`: keys, tuples and sets stay, and anything else is a TypeError."""
    value = value.value if isinstance(value, Enum) else value
    value = value.tolist() if callable(getattr(value, "tolist", None)) else value
    if value is None or isinstance(value, bool | int | float | str) or (exact and isinstance(value, bytes)):
        return value
    if isinstance(value, Mapping):
        return {make_plain(key, True) if exact else str(key): make_plain(item, exact) for key, item in value.items()}
    for kind in (list, tuple, set, frozenset, deque):
        if isinstance(value, kind):
            return (kind if exact and kind is not deque else list)([make_plain(item, exact) for item in value])
    if exact:
        raise TypeError
    return excerpt(value, 60)


def pack_state(thing: Any) -> dict[str, str]:
    """The attributes of an object, its class's and properties too, that are plain values, for `PlainState`."""
    state = {}
    for name in [one for one in dir(thing) if not one.startswith("__")]:
        with suppress(BaseException):  # a property is a program: its sys.exit takes no other attribute along
            value = make_plain(getattr(thing, name), exact=True)
            if len(repr(value)) <= LONGEST_STATE:
                state[name] = json.dumps(_pack(value))
    return state


def _pack(value: Any) -> Any:
    """A plain value for JSON: each collection under the name of its type, a dict as tuples."""
    items = value.items() if isinstance(value, dict) else value
    return {type(value).__name__: [*map(_pack, items)]} if type(value) in _KINDS.values() else value


class PlainState:
    """An environment as rewards get it: those of its attributes that left its process."""

    def __init__(self, state: dict[str, str]) -> None:
        for name, text in state.items():
            with suppress(ValueError):  # a secret was masked
                vars(self)[name] = json.loads(text, object_hook=lambda one: _KINDS[min(one)](*one.values()))

    def __getattr__(self, name: str) -> Any:
        kinds = f"ints, floats, texts, arrays, and lists, tuples, sets and dicts, up to {LONGEST_STATE:,} characters"
        has = f"of its attributes {kinds}, leave its process: {', '.join(vars(self))}"
        raise AttributeError(f"the environment's {name} is not there; {has}")


def describe_user_error(error: BaseException) -> str:
    """An error with the file and line of the user's code that raised it, or that has the syntax error."""
    if isinstance(error, SyntaxError):  # its text ends with the file and the line
        return describe_error(error, f": {error.text.strip()}" if error.text else "")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    theirs = frames and not frames[-1].filename.startswith(str(Path(__file__).parents[1]))  # not the kit's own
    return describe_error(error, f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if theirs else "")
