"""Digests of the sources of users' rewards: a resumed run and a comparison notice an edited one."""

import dis
import functools
import inspect
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

from rloo_kit.rewarding.guard import GuardedReward, NamedReward, reward_name, unwrap
from rloo_kit.rewarding.worker import WorkerReward, digest_texts, read_files


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
    if isinstance(reward, WorkerReward):
        return reward.worker.sources
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
