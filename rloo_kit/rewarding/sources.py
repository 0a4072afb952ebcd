"""Digests of the sources of users' rewards: a resumed run and a comparison notice an edited one."""

import dis
import functools
import inspect
import re
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
        inner = unwrap(reward)
        of_object = inspect.ismethod(inner) and not isinstance(inner.__self__, type)
        made = type(inner.__self__) if of_object else inner if inspect.isroutine(inner) else type(inner)
        if isinstance(inner, WorkerReward):
            read = inner.worker.sources
        elif made.__module__ == "__main__":
            texts = _read_main(made, set())
            counted = set(re.findall(r"\w+", " ".join(re.findall(r"\bglobal\b(.*)", "\n".join(texts)))))
            texts = [text for text in texts if text.partition(" = ")[0] not in counted]
            read = {f"reward {reward_name(inner)}": digest_texts(texts)}
        else:
            read = _read_file(made)
        while isinstance(reward, NamedReward | GuardedReward):
            reward = reward.reward
        keywords = reward.keywords.items() if isinstance(reward, functools.partial) else ()
        if plain := sorted((name, one) for name, one in keywords if isinstance(one, str | int | float)):
            read = read | {f"arguments of {reward_name(inner)}": digest_texts([repr(plain)])}
        for name, digest in read.items():
            found.setdefault(name, []).append(digest)
    return {name: digest_texts(digests) for name, digests in found.items()}


def _read_file(made: Any) -> dict[str, str]:
    """`read_files` of the module that a function, class or module comes from; empty for the kit's and compiled ones."""
    module = str(getattr(made, "__module__", None) or getattr(made, "__name__", ""))
    with suppress(OSError, TypeError):  # no source
        file = inspect.getsourcefile(made)
        return read_files(file, [str(Path(file).parent)]) if file and module.partition(".")[0] != "rloo_kit" else {}
    return {}


def _read_main(made: Any, seen: set[Any]) -> list[str]:
    """The source of a function, or of a class's methods; then the functions, classes and constants that it uses."""
    seen.add(made)
    texts = []
    classes = [one for one in made.__mro__ if one.__module__ == "__main__"] if isinstance(made, type) else []
    methods = [getattr(one, "__func__", one) for base in classes for one in vars(base).values()]  # of static ones too
    for one in filter(inspect.isfunction, methods) if classes else [inspect.unwrap(made)]:
        with suppress(OSError, TypeError):  # no source
            texts.append(inspect.getsource(one))
        for name in sorted(_names(one.__code__) & one.__globals__.keys()):
            used = one.__globals__[name]
            if isinstance(used, str | int | float):
                texts.append(f"{name} = {used!r}")
            elif getattr(used, "__module__", None) != "__main__":
                texts += map(str, sorted(_read_file(used).items()))
            elif (inspect.isfunction(used) or isinstance(used, type)) and used not in seen:
                texts += _read_main(used, seen)
    return texts


def _names(code: CodeType) -> set[str]:
    """The global names that a function reads, with those of the comprehensions and lambdas in it."""
    read = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    return read.union(*(_names(one) for one in code.co_consts if isinstance(one, CodeType)))
