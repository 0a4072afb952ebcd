"""Digests of the sources of users' rewards: a resumed run and a comparison notice an edited one."""

import functools
import inspect
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

from rloo_kit.rewarding.guard import reward_name, unwrap
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
            read = {f"reward {reward_name(inner)}": digest_texts(_read_main(made, set()))}
        else:
            read = _read_file(made)
        while not isinstance(reward, functools.partial) and hasattr(reward, "reward"):
            reward = reward.reward
        keywords = getattr(reward, "keywords", {}).items()
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
        return read_files(file, [str(Path(file).parent)]) if file and not module.startswith("rloo_kit") else {}
    return {}


def _read_main(made: Any, seen: set[Any]) -> list[str]:
    """The source of a function, or of a class's methods; then the functions, classes and constants that it uses."""
    seen.add(made)
    texts = []
    classes = [one for one in made.__mro__ if one.__module__ == "__main__"] if isinstance(made, type) else []
    methods = [one for base in classes for one in vars(base).values() if inspect.isfunction(one)]
    for one in methods if classes else [inspect.unwrap(made)]:
        with suppress(OSError, TypeError):  # no source
            texts.append(inspect.getsource(one))
        for name in sorted(_names(one.__code__) & one.__globals__.keys()):
            used = one.__globals__[name]
            if isinstance(used, str | int | float):
                counts = re.search(rf"\bglobal\b.*\b{name}\b", "".join(texts))
                texts += [] if counts else [f"{name} = {used!r}"]
            elif getattr(used, "__module__", None) != "__main__":
                texts += map(str, sorted(_read_file(used).items()))
            elif (inspect.isfunction(used) or isinstance(used, type)) and used not in seen:
                texts += _read_main(used, seen)
    return texts


def _names(code: CodeType) -> set[str]:
    """The names that a function uses, with those of the comprehensions and lambdas in it."""
    return set(code.co_names).union(*(_names(one) for one in code.co_consts if isinstance(one, CodeType)))
