"""What tests use of pytest, in the jail of `code_reward`: there it is the module `pytest`."""

import builtins
import re
from collections.abc import Callable
from typing import Any


class raises:
    def __init__(self, kinds: Any, *function: Any, match: str | None = None, **named: Any) -> None:
        self.kinds, self.pattern = kinds, match
        if function:
            with self:
                function[0](*function[1:], **named)

    def __enter__(self) -> "raises":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        assert kind is not None, "nothing was raised"
        self.type, self.value = kind, error
        return issubclass(kind, self.kinds) and (self.pattern is None or self.match(self.pattern))

    def match(self, pattern: str) -> bool:
        assert re.search(pattern, str(self.value)), f"{self.value} does not match {pattern}"
        return True


class approx:
    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:
        self.expected, self.nan_ok = expected, nan_ok
        self.rel = rel if rel is not None else 1e-6 if abs is None else 0.0
        self.abs = abs if abs is not None else 1e-12 if rel is None else 0.0

    def __eq__(self, actual: Any) -> bool:
        return self._is_near(actual, self.expected)

    def _is_near(self, actual: Any, expected: Any) -> bool:
        actual, expected = (value.tolist() if hasattr(value, "tolist") else value for value in (actual, expected))
        if isinstance(expected, dict):
            is_like = isinstance(actual, dict) and actual.keys() == expected.keys()
            return is_like and all(self._is_near(actual[key], expected[key]) for key in expected)
        if isinstance(expected, list | tuple):
            is_like = isinstance(actual, list | tuple) and len(actual) == len(expected)
            return is_like and all(map(self._is_near, actual, expected))
        if actual == expected or (self.nan_ok and actual != actual and expected != expected):
            return True
        most = max(self.abs, self.rel * builtins.abs(expected))
        return most != float("inf") and bool(builtins.abs(actual - expected) <= most)


class _Mark:
    def parametrize(self, names: Any, values: Any, **_: Any) -> Any:
        titles = [title.strip() for title in names.split(",")] if isinstance(names, str) else list(names)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **named: Any) -> None:
                for value in values:
                    parts = value if len(titles) > 1 or isinstance(value, param) else (value,)
                    try:
                        function(*args, **named, **dict(zip(titles, parts, strict=True)))
                    except Exception:
                        function.__globals__["_mark_"](False)  # and the next case runs

            run.__globals__["_mark_"] = function.__globals__["_mark_"]  # of a decorator above this one
            return run

        return decorate

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **_: given[0] if len(given) == 1 and callable(given[0]) else lambda function: function


class param(tuple[Any, ...]):
    def __new__(cls, *values: Any, **_: Any) -> "param":
        return super().__new__(cls, values)


def fail(reason: str = "") -> None:
    raise AssertionError(reason)


mark = _Mark()
