"""How tests and the code that they test, two processes joined by pipes, work as if they were one.

The tests ask, the code answers (`Link`). Plain values cross as copies; containers are kept equal on both ends; of any
other object its number crosses, and the tests hold an instance of a class that mirrors the object's (`mirrors`). So
no expected value ever is where the code is. Standard library only.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import operator
import sys
from contextlib import suppress

TYPE_CHECKING = False  # typing takes a tenth of the start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LONGEST = 16 * 2**20  # bytes of a message
MADE_OF: dict[str, Callable[[Any], Any]] = {  # values that cross as their type's name and what makes an equal one
    **dict.fromkeys(("tuple", "frozenset"), list),
    "bytes": lambda value: [value.decode("latin-1")],
    "complex": lambda value: [value.real, value.imag],
}
TIMES = [f"datetime.{name}" for name in ("date", "time", "datetime", "timedelta", "timezone")]
REDUCED = ("range", "slice", "fractions.Fraction", "decimal.Decimal", *TIMES, "pathlib.PosixPath")
MADE_OF |= dict.fromkeys(REDUCED, lambda value: value.__reduce__()[1])
OPTIONS = {"collections.deque": "maxlen", "collections.defaultdict": "default_factory"}
ARRAY = "numpy.ndarray"
DICTS = ("dict", "collections.OrderedDict", "collections.defaultdict", "collections.Counter")
CONTAINERS = ("list", "set", "bytearray", "collections.deque", *DICTS, ARRAY)
# A mirror is a subclass of one of these.
BASES = ("int", "float", "complex", "str", "bytes", "tuple", "frozenset", *CONTAINERS)
SHARED = ("", "collections", "fractions", "decimal", "datetime", "pathlib")  # modules whose classes both ends have


class Gone(Exception):
    """The code's process ended, is late, or its answer cannot be read."""


class Uncrossed(BaseException):
    """The tests need what cannot cross."""


def resolve(name: str) -> Any:
    module, _, rest = name.rpartition(".")
    return getattr(__import__(module or "builtins", fromlist=[rest]), rest)


@functools.cache
def name_of_type(kind: type) -> str:
    """A class's name with its module's, which builtins are without; "" if it cannot be found by that."""
    with suppress(Exception):
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        return name if resolve(name) is kind else ""
    return ""


def base_of(kind: type) -> Any:
    """The first builtin class with content of its own that a class inherits from: of BASES, or an exception."""
    for base in kind.__mro__:
        if name_of_type(base) in BASES or (base.__module__ == "builtins" and issubclass(base, BaseException)):
            return base
    return None


def is_container(kind: type) -> bool:
    return name_of_type(base_of(kind) or object) in CONTAINERS


def array_of(kind: str, shape: Any, text: str) -> Any:
    return resolve("numpy.frombuffer")(text.encode("latin-1"), kind).reshape(shape).copy()


def parts_of(array: Any) -> list[Any]:
    if array.dtype.kind not in "biufcSUmM":
        raise Uncrossed("an array of objects cannot cross")
    return [array.dtype.str, list(array.shape), array.tobytes().decode("latin-1")]


def pairs_of(base: Any, value: Any) -> list[Any]:
    if name_of_type(base) == "collections.OrderedDict":
        return [(key, dict.__getitem__(value, key)) for key in base.__iter__(value)]
    return list(dict.items(value))


def items_of(value: Any) -> Any:
    """What a container holds, one after the other, without a call of the code's."""
    base = base_of(type(value))
    if name_of_type(base) == ARRAY:
        return value.tobytes()
    if issubclass(base, dict):
        return [item for pair in pairs_of(base, value) for item in pair]
    return [*base.__iter__(value)]


def fill(value: Any, items: list[Any]) -> None:
    """Give a container other content, whatever its subclass makes of its methods."""
    base = base_of(type(value))
    if name_of_type(base) == ARRAY:
        value[...] = array_of(*items)
        return
    base.clear(value)
    if issubclass(base, dict):
        for key, item in items:
            base.__setitem__(value, key, item)
    elif base is set:
        base.update(value, items)
    else:
        base.extend(value, items)


class Link:
    """One end of the pipes. `objects` are what both ends know, by number; `seen`: what containers held at the last
    message, so that a change crosses with the next one."""

    encode_other: Callable[[Any], Any]  # each end has its own
    decode_other: Callable[[str, Any], Any]
    operate: Callable[..., Any]  # do what the other end asks for

    def __init__(self, source: Any, sink: Any, first: int) -> None:
        self.source, self.sink, self.fresh = source, sink, itertools.count(first, 2)
        self.objects: dict[int, Any] = {0: []}
        self.numbers: dict[int, int] = {}
        self.seen: dict[int, Any] = {}
        self.unused = sys.getrefcount(self.objects[0])

    def add(self, value: Any, number: int | None = None) -> int:
        number = next(self.fresh) if number is None else number
        self.objects[number], self.numbers[id(value)] = value, number
        if is_container(type(value)):
            self.seen[number] = None
        return number

    def forget(self, number: int) -> None:
        self.numbers.pop(id(self.objects.pop(number, None)), None)
        self.seen.pop(number, None)

    def content(self, value: Any) -> list[Any]:
        base = base_of(type(value))
        if name_of_type(base) == ARRAY:
            return parts_of(value)
        if issubclass(base, dict):
            return [[self.encode(key), self.encode(item)] for key, item in pairs_of(base, value)]
        return [self.encode(item) for item in list(base.__iter__(value))]

    def contained(self, value: Any) -> list[Any]:
        """What makes an equal container: a longest length or a factory, and the content."""
        base = base_of(type(value))
        option: Any = OPTIONS.get(name_of_type(base))
        return [self.encode(getattr(base, option).__get__(value)) if option else None, self.content(value)]

    def encode(self, value: Any) -> Any:
        kind: Any = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:
            return value if value.bit_length() < 10_000 else {"int": hex(value)}
        if (number := self.numbers.get(id(value))) is not None:
            return {"same": number}
        name = name_of_type(kind)
        if name in MADE_OF:
            return {name: [self.encode(part) for part in MADE_OF[name](value)]}
        if name in CONTAINERS:
            return {name: [self.add(value), *self.contained(value)]}
        if kind.__module__ == "numpy" and hasattr(value, "dtype"):
            return {"numpy": parts_of(value)}
        if value is NotImplemented or value is Ellipsis:
            return {"shared": str(value)}
        if isinstance(value, BaseException) and name and kind.__module__.partition(".")[0] in sys.stdlib_module_names:
            return {"error": [name, *map(self.encode, value.args)]}
        return self.encode_other(value)

    def decode(self, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        [(name, payload)] = data.items()
        if name == "same":
            return self.known(payload)
        if name == "int":
            return int(payload, 16)
        if name == "bytes":
            return payload[0].encode("latin-1")
        if name in MADE_OF:
            parts = [self.decode(part) for part in payload]
            return resolve(name)(parts) if name in ("tuple", "frozenset") else resolve(name)(*parts)
        if name in CONTAINERS:
            return self.contain(resolve(name), *payload)
        if name == "numpy":
            return array_of(*payload)[()]
        if name == "error":
            return self.raised(*map(self.decode, payload))
        return self.decode_other(name, payload)

    def raised(self, name: str, *args: Any) -> BaseException:
        """An exception of the standard library's."""
        is_standard = name.rpartition(".")[0].partition(".")[0] in {"", *sys.stdlib_module_names}
        kind = resolve(name) if is_standard else None
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ValueError(name)
        error = kind.__new__(kind, *args)
        with suppress(TypeError):  # made of other arguments than it keeps
            kind.__init__(error, *args)
        return error

    def contain(self, kind: Any, number: int, option: Any, items: list[Any]) -> Any:
        base = base_of(kind)
        value = array_of(*items) if name_of_type(base) == ARRAY else base.__new__(kind)
        if name := OPTIONS.get(name_of_type(base)):
            base.__init__(value, *([] if name == "default_factory" else [()]), self.decode(option))
        self.add(value, number)
        fill(value, self.decode_all(items))
        return value

    def decode_all(self, items: list[Any]) -> list[Any]:
        return [tuple(map(self.decode, item)) if isinstance(item, list) else self.decode(item) for item in items]

    def known(self, number: int) -> Any:
        return self.objects[number]

    def printed(self) -> str:
        """What the code has printed since the last message."""
        return ""

    def settle(self) -> None:
        for number in [number for number, items in self.seen.items() if items is None]:
            self.seen[number] = items_of(self.objects[number])

    def send(self, kind: str, *given: Any) -> None:
        known, changes, dropped = set(self.objects), [], []
        try:
            encoded = [self.encode(value) for value in given]
        except BaseException as error:  # nothing crosses
            for number in self.objects.keys() - known:
                self.forget(number)
            if isinstance(error, RecursionError):
                raise Uncrossed("a value is nested too deep to cross") from None
            raise
        for number in [number for number in known & self.seen.keys() if self.seen[number] is not None]:  # being decoded
            value = self.objects[number]
            items = items_of(value)
            if len(items) != len(self.seen[number]) or any(map(operator.is_not, items, self.seen[number])):
                changes.append([number, self.content(value)])
                self.seen[number] = items
            del value, items
            stored: Any = type(self.objects[number])
            if name_of_type(stored) in CONTAINERS and sys.getrefcount(self.objects[number]) <= self.unused:
                dropped.append(number)  # so that tests in a loop do not collect what nobody reads any more
                self.forget(number)
        message = json.dumps([kind, encoded, changes, dropped, self.printed()]).encode() + b"\n"
        if len(message) > LONGEST:
            raise Uncrossed("a value is too long to cross")
        self.sink.write(message)
        self.sink.flush()
        self.settle()

    def receive(self) -> list[Any]:
        kind, given, changes, dropped, printed = json.loads(self.source.readline(LONGEST))
        values = [self.decode(value) for value in given]
        for number, items in changes:
            fill(self.objects[number], self.decode_all(items))
            self.seen[number] = None
        self.settle()
        for number in dropped:
            self.forget(number)
        sys.stdout.write(printed)
        return [kind, *values]

    def ask(self, *request: Any) -> Any:
        """What the other end gives; raises what it raises. It may ask in return before it answers."""
        self.send("ask", *request)
        while True:
            kind, *values = self.receive()
            if kind == "value":
                return values[0]
            if kind == "raise":
                raise values[0] from values[1]
            self.answer(*values)

    def answer(self, *request: Any) -> None:
        try:
            self.send("value", self.operate(*request))
        except (Gone, Uncrossed):
            raise
        except BaseException as error:
            self.send("raise", error, error.__cause__)


class CodeEnd(Link):
    """The end of the code's process, which does what the tests ask for."""

    def __init__(self, source: Any, sink: Any, solution: Any) -> None:
        super().__init__(source, sink, 2)
        self.solution, self.shown = solution, io.BytesIO()
        sys.stdout = io.TextIOWrapper(self.shown, "utf-8", write_through=True)

    def printed(self) -> str:
        text = b""
        with suppress(ValueError):  # the code has closed it
            text = self.shown.getvalue()
            self.shown.seek(0)
            self.shown.truncate()
        return text.decode(errors="replace")

    def answer(self, *request: Any) -> None:
        try:
            super().answer(*request)
        except Uncrossed as error:
            self.send("uncrossed", str(error))

    def encode_class(self, kind: type) -> Any:
        if (number := self.numbers.get(id(kind))) is not None:
            return {"same": number}
        number, bases = self.add(kind), [base for base in kind.__bases__ if base is not object]
        parents = [
            {"shared": name_of_type(base)} if base_of(base) is base else self.encode_class(base) for base in bases
        ]
        members = [name for name, value in vars(kind).items() if value is not None]
        return {"class": [number, kind.__module__, kind.__qualname__, parents, members]}

    def encode_other(self, value: Any) -> Any:
        if isinstance(value, type):
            name = name_of_type(value)
            return {"shared": name} if name and name.rpartition(".")[0] in SHARED else self.encode_class(value)
        base, made = base_of(type(value)), None
        kind, number = self.encode_class(type(value)), self.add(value)
        if base is not None and issubclass(base, BaseException):
            made = [self.encode(argument) for argument in value.args]
        elif is_container(type(value)):
            made = self.contained(value)
        elif base is not None:
            plain = frozenset(base.__iter__(value)) if base is frozenset else base(*base.__getnewargs__(value))
            made = self.encode(plain)
        return {"object": [number, kind, made]}

    def decode_other(self, name: str, given: Any) -> Any:
        if name == "shared":
            return resolve(given)

        def function(*args: Any, **named: Any) -> Any:
            return self.ask("call", made, args, tuple(named.items()))

        made: Any = function
        function.__name__ = function.__qualname__ = given[1]
        function.__doc__ = given[2]
        if name == "iterator":
            made = iter(lambda: self.ask("next", made), function)
        self.add(made, given[0])
        return made

    def operate(self, operation: str, *given: Any) -> Any:
        if operation == "run":
            exec(compile(given[0], "solution.py", "exec"), vars(self.solution))
            return self.solution
        if operation == "special":
            value, name, args = given
            if name == "__getitem__":
                return value[args[0]]
            if not hasattr(type(value), name):
                raise TypeError(f"{type(value).__name__} has no {name}")
            return getattr(type(value), name)(value, *args)
        function, args, named = given
        return (resolve(function) if type(function) is str else function)(*args, **dict(named))
