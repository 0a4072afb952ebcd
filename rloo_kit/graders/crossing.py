"""How tests ask the code that they test, another process, by a pair of pipes.

Plain values cross as copies; what a call changes in the containers it is given comes back with its answer. Of any other
object a number crosses, and the other end has a stand-in for it (`mirrors`). So no expected value ever is where the
code is. Standard library only.
"""

from __future__ import annotations

import functools
import json
import operator
import sys
from contextlib import suppress

TYPE_CHECKING = False  # typing takes a tenth of the start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LONGEST = 16 * 2**20  # bytes of a message
SEQUENCES = ("list", "tuple", "set", "frozenset")
MAPPINGS = ("dict", "collections.OrderedDict", "collections.Counter")
TIMES = [f"datetime.{name}" for name in ("date", "time", "datetime", "timedelta", "timezone")]
ARGUMENTS: dict[str, Callable[[Any], Any]] = {  # of the type, for an equal value
    **dict.fromkeys(("bytes", "bytearray"), lambda value: [value.decode("latin-1"), "latin-1"]),
    "complex": lambda value: [value.real, value.imag],
    "collections.deque": lambda value: [list(value), value.maxlen],
    "collections.defaultdict": lambda value: [value.default_factory, dict(value)],
    **dict.fromkeys(
        ("range", "slice", "fractions.Fraction", "decimal.Decimal", *TIMES), lambda value: value.__reduce__()[1]
    ),
}
COPIED = (*SEQUENCES, *MAPPINGS, *ARGUMENTS)
CHANGING = ("list", "set", "bytearray", "collections.deque", "collections.defaultdict", *MAPPINGS)


class Gone(Exception):
    """The code's process ended, is late, or its answer cannot be read."""


class Uncrossed(BaseException):
    """The tests need what cannot cross."""


def resolve(name: str) -> Any:
    module, _, rest = name.rpartition(".")
    return getattr(__import__(module or "builtins", fromlist=[rest]), rest)


@functools.cache
def name_of_type(kind: Any) -> str:
    """A class's or function's name with its module's, which builtins are without; "" if that does not lead to it."""
    with suppress(Exception):
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        return name if resolve(name) is kind else ""
    return ""


def name_of(value: Any) -> str:
    kind: Any = type(value)
    return name_of_type(kind)


def is_standard(name: str) -> bool:
    return name.rpartition(".")[0].partition(".")[0] in {"", *sys.stdlib_module_names} - {"__main__"}


def parts_of(name: str, value: Any) -> list[Any]:
    """What an equal value is made of."""
    if name in SEQUENCES:
        return list(value)
    if name in MAPPINGS:
        return [part for pair in value.items() for part in pair]
    return list(ARGUMENTS[name](value))


def make(name: str, parts: list[Any]) -> Any:
    kind = resolve(name)
    if name in SEQUENCES:
        return kind(parts)
    return kind(dict(zip(parts[::2], parts[1::2], strict=True))) if name in MAPPINGS else kind(*parts)


class Copies:
    """The containers that have crossed in one question and its answer, in the order in which both ends count them."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.places: dict[int, int] = {}
        self.parts: list[list[Any]] = []

    def add(self, name: str, value: Any) -> None:
        if name in CHANGING:
            self.places[id(value)] = len(self.values)
            self.values.append(value)
            self.parts.append(parts_of(name, value))

    def changed(self) -> list[tuple[int, list[Any]]]:
        """The places and the parts of those that are not what they were."""
        now = [parts_of(name_of(value), value) for value in self.values]
        return [
            (place, parts)
            for place, (parts, old) in enumerate(zip(now, self.parts, strict=True))
            if len(parts) != len(old) or any(map(operator.is_not, parts, old))
        ]


class Link:
    """One end of the pipes. `owned`: objects that cross by number; `stand_ins`: what the tests have of them."""

    describe: Callable[[Any, Copies], Any]  # each end has its own
    stand_in: Callable[..., Any]

    def __init__(self, source: Any, sink: Any) -> None:
        self.source, self.sink = source, sink
        self.owned: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.stand_ins: dict[int, Any] = {}
        self.foreign: dict[int, int] = {}

    def encode(self, value: Any, copies: Copies) -> Any:
        kind: Any = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:
            return value if value.bit_length() < 10_000 else {"int": hex(value)}
        if (number := self.foreign.get(id(value))) is not None:
            return {"yours": number}
        if (place := copies.places.get(id(value))) is not None:
            return {"same": place}
        name = name_of_type(kind)
        if name in COPIED:
            data = {name: [self.encode(part, copies) for part in parts_of(name, value)]}
            copies.add(name, value)
            return data
        if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
            return self.encode(value.item(), copies)
        if value is NotImplemented or value is Ellipsis:
            return {"shared": str(value)}
        if issubclass(kind, type) and (shared := name_of_type(value)) and is_standard(shared):
            return {"shared": shared}
        if issubclass(kind, BaseException) and name and is_standard(name):
            return {"error": [name, *(self.encode(part, copies) for part in value.args)]}
        if id(value) in self.numbers:
            return {"mine": [self.numbers[id(value)]]}
        description = self.describe(value, copies)
        if isinstance(description, dict):
            return description
        self.numbers[id(value)] = len(self.owned)
        self.owned.append(value)
        return {"mine": [self.numbers[id(value)], *description]}

    def decode(self, data: Any, copies: Copies) -> Any:
        if not isinstance(data, dict):
            return data
        [(name, payload)] = data.items()
        if name == "int":
            return int(payload, 16)
        if name == "yours":
            return self.owned[payload]
        if name == "same":
            return copies.values[payload]
        if name == "shared":
            return self.shared(payload)
        if name == "mine":
            number, *description = payload
            if number not in self.stand_ins:
                value = self.stand_in(*(self.decode(part, copies) for part in description))
                self.stand_ins[number], self.foreign[id(value)] = value, number
            return self.stand_ins[number]
        parts = [self.decode(part, copies) for part in payload]
        if name == "error":
            return self.raised(*parts)
        if name not in COPIED:
            raise ValueError(name)
        value = make(name, parts)
        copies.add(name, value)
        return value

    def shared(self, name: str) -> Any:
        return resolve(name)

    def raised(self, name: str, *args: Any) -> BaseException:
        """An exception of the standard library's."""
        kind = resolve(name) if is_standard(name) else None
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ValueError(name)
        error = kind.__new__(kind, *args)
        with suppress(TypeError):  # made of other arguments than it keeps
            kind.__init__(error, *args)
        return error

    def send(self, kind: str, given: Any, copies: Copies) -> None:
        try:
            changes = [[place, [self.encode(part, copies) for part in parts]] for place, parts in copies.changed()]
            message = json.dumps([kind, changes, self.encode(given, copies)]).encode() + b"\n"
        except RecursionError:
            raise Uncrossed("a value is nested too deep to cross") from None
        if len(message) > LONGEST:
            raise Uncrossed("a value is too long to cross")
        self.sink.write(message)
        self.sink.flush()

    def receive(self) -> list[Any]:
        kind, changes, data = json.loads(self.source.readline(LONGEST))
        return [kind, changes, data]


class CodeEnd(Link):
    """The end of the code's process, which does what the tests ask for."""

    def __init__(self, source: Any, sink: Any, solution: Any) -> None:
        super().__init__(source, sink)
        self.solution = solution

    def serve(self) -> None:
        with suppress(ValueError):  # the tests have ended
            while True:
                self.answer(self.receive()[2])

    def answer(self, data: Any) -> None:
        copies = Copies()
        try:
            kind, given = "value", self.operate(*self.decode(data, copies))
        except BaseException as error:
            kind, given = "raise", error
        try:
            self.send(kind, given, copies)
        except Uncrossed as error:
            self.send("uncrossed", str(error), Copies())

    def describe(self, value: Any, copies: Copies) -> list[Any]:
        """Whether an object is of a class of the code's; of exceptions also what makes one that tests can catch."""
        if isinstance(value, type) and issubclass(value, BaseException):
            return [True, value.__name__, self.encode(value.__bases__, copies)]
        if isinstance(value, BaseException):
            return [True, self.encode(type(value), copies), self.encode(value.args, copies)]
        return [type(value).__module__ != "builtins"]

    def operate(self, operation: str, *given: Any) -> Any:
        if operation == "run":
            exec(compile(given[0], "solution.py", "exec"), vars(self.solution))
            return self.solution
        if operation == "is every object's":
            value, name = given
            return getattr(type(value), name, None) is getattr(object, name, None)
        if operation == "special":
            value, name, other = given
            return getattr(type(value), name, lambda *_: NotImplemented)(value, other)
        function, args, named = given
        return (resolve(function) if type(function) is str else function)(*args, **named)
