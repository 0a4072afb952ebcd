"""What tests use of pytest, in the jail of `code_reward`: there it is the module `pytest`."""

import builtins
import functools
import re
import sys
from collections.abc import Callable
from types import FunctionType, GeneratorType
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
        rows = [value if len(titles) > 1 or isinstance(value, param) else (value,) for value in values]

        def decorate(function: Any) -> Any:
            cases = getattr(function, "cases", [{}])
            function.cases = [case | dict(zip(titles, row, strict=True)) for row in rows for case in cases]
            return function

        return decorate

    def __getattr__(self, name: str) -> Any:
        def decorate(function: Any) -> Any:
            function.__unittest_skip__ = name in ("skip", "skipif", "xfail")
            return function

        return lambda *given, **_: decorate(given[0]) if len(given) == 1 and callable(given[0]) else decorate


def find_tests(space: dict[str, Any], called: list[str]) -> list[Callable[[], Any]]:
    """A call for each test among the tests' own names, and each of its cases, but of those that are called already."""
    calls: list[Callable[[], Any]] = []
    case_class = getattr(sys.modules.get("unittest"), "TestCase", ())
    for name, value in list(space.items()):
        is_class = type(value) is type and value.__module__ == "__main__"
        if type(value) is FunctionType and name.startswith("test") and name not in called:
            calls += [functools.partial(_call, value, value, space, case) for case in _cases(value)]
        elif is_class and issubclass(value, case_class):
            calls.append(value.setUpClass)
            calls += [value(method).debug for method in _methods(value)]
            calls.append(value.tearDownClass)
        elif is_class and name.startswith("Test"):
            for method in _methods(value):
                calls += [
                    functools.partial(_run, value, method, space, case) for case in _cases(getattr(value, method))
                ]
    return calls


def _methods(kind: Any) -> list[str]:
    return [name for name in dir(kind) if name.startswith("test") and _cases(kind) and _cases(getattr(kind, name))]


def _cases(test: Any) -> list[dict[str, Any]]:
    """The arguments that a test is called with, each time; [] for one that is skipped."""
    skips = ("__unittest_skip__", "__unittest_expecting_failure__")
    return [] if any(getattr(test, name, False) for name in skips) else getattr(test, "cases", [{}])


def _call(function: Any, code: Any, space: dict[str, Any], case: dict[str, Any]) -> Any:
    """What a test or a fixture gives, with a fresh one of each fixture that it names."""
    names = code.__code__.co_varnames[: code.__code__.co_argcount]
    made = {
        name: _call(space[name], space[name], space, {}) for name in names if hasattr(space.get(name), "is_fixture")
    }
    result = function(**made, **case)
    return next(result) if type(result) is GeneratorType else result


def fixture(function: Any = None, **_: Any) -> Any:
    if function is None:
        return fixture
    function.is_fixture = True
    return function


def _run(kind: Any, method: str, space: dict[str, Any], case: dict[str, Any]) -> None:
    """A test of a class without unittest, on an object of its own."""
    test = kind()
    for name in ("setup_class", "setup_method", "setup"):
        _call_hook(test, name)
    try:
        _call(getattr(test, method), getattr(kind, method), space, case)
    finally:
        for name in ("teardown_method", "teardown"):
            _call_hook(test, name)


def _call_hook(test: Any, name: str) -> None:
    if hook := getattr(test, name, None):
        hook(*[None] * (hook.__func__.__code__.co_argcount - 1))


class param(tuple[Any, ...]):
    def __new__(cls, *values: Any, **_: Any) -> "param":
        return super().__new__(cls, values)


def fail(reason: str = "") -> None:
    raise AssertionError(reason)


mark = _Mark()
