"""How tests and the code that they test, two processes joined by pipes, work as if they were one.

The tests ask, the code answers (`Link`). Plain values cross as copies; containers are kept equal on both ends; of any
other object its number crosses, and the tests hold an instance of a class that mirrors the object's (`Mirror`). So no
expected value ever is where the code is. Standard library only.
"""

from __future__ import annotations

import builtins
import io
import itertools
import json
import operator
import os
import resource
import signal
import sys
import time
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
REDUCED = (
    "range slice fractions.Fraction decimal.Decimal datetime.date datetime.time datetime.datetime datetime.timedelta "
    "datetime.timezone pathlib.PosixPath"
)
MADE_OF |= dict.fromkeys(REDUCED.split(), lambda value: value.__reduce__()[1])
OPTIONS = {"collections.deque": "maxlen", "collections.defaultdict": "default_factory"}
DICTS = ["dict", "collections.OrderedDict", "collections.defaultdict", "collections.Counter"]
ARRAY = "numpy.ndarray"
CONTAINERS = ("list", "set", "bytearray", "collections.deque", *DICTS, ARRAY)
BASES = (
    "int",
    "float",
    "complex",
    "str",
    "bytes",
    "tuple",
    "frozenset",
    *CONTAINERS,
)  # of which a mirror is a subclass
SHARED = ("", "collections", "fractions", "decimal", "datetime", "pathlib")  # modules whose classes both ends have
NAMES: dict[type, str] = {}


class Gone(Exception):
    """The code's process ended, is late, or its answer cannot be read."""


class Uncrossed(BaseException):
    """The tests need what cannot cross."""


def resolve(name: str) -> Any:
    module, _, rest = name.rpartition(".")
    return getattr(__import__(module or "builtins", fromlist=[rest]), rest)


def name_of(kind: type) -> str:
    """A class's name with its module's, which builtins are without; "" if it cannot be found by that."""
    if kind not in NAMES:
        NAMES[kind] = ""
        with suppress(Exception):
            name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
            NAMES[kind] = name if resolve(name) is kind else ""
    return NAMES[kind]


def base_of(kind: type) -> Any:
    """The first builtin class with content of its own that a class inherits from: of BASES, or an exception."""
    for one in kind.__mro__:
        if name_of(one) in BASES or (one.__module__ == "builtins" and issubclass(one, BaseException)):
            return one
    return None


def is_container(kind: type) -> bool:
    return name_of(base_of(kind) or object) in CONTAINERS


def array_of(kind: str, shape: Any, text: str) -> Any:
    return resolve("numpy.frombuffer")(text.encode("latin-1"), kind).reshape(shape).copy()


def parts_of(array: Any) -> list[Any]:
    if array.dtype.kind not in "biufcSUmM":
        raise Uncrossed("an array of objects cannot cross")
    return [array.dtype.str, list(array.shape), array.tobytes().decode("latin-1")]


def pairs_of(base: Any, value: Any) -> list[Any]:
    if name_of(base) == "collections.OrderedDict":
        return [(key, dict.__getitem__(value, key)) for key in base.__iter__(value)]
    return list(dict.items(value))


def items_of(value: Any) -> Any:
    """What a container holds, one after the other, without a call of the code's."""
    base = base_of(type(value))
    if name_of(base) == ARRAY:
        return value.tobytes()
    return (
        [one for pair in pairs_of(base, value) for one in pair] if issubclass(base, dict) else [*base.__iter__(value)]
    )


def fill(value: Any, items: list[Any]) -> None:
    """Give a container other content, whatever its subclass makes of its methods."""
    base = base_of(type(value))
    if name_of(base) == ARRAY:
        value[...] = array_of(*items)
        return
    base.clear(value)
    if issubclass(base, dict):
        for key, item in items:
            base.__setitem__(value, key, item)
    else:
        (base.update if base is set else base.extend)(value, items)


class Link:
    """One end of the pipes. `objects` are what both ends know, by number; `seen`: what containers held at the last
    message, so that a change crosses with the next one."""

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
        if name_of(base) == ARRAY:
            return parts_of(value)
        if issubclass(base, dict):
            return [[self.encode(key), self.encode(item)] for key, item in pairs_of(base, value)]
        return [self.encode(one) for one in list(base.__iter__(value))]

    def contained(self, value: Any) -> list[Any]:
        """What makes an equal container: a longest length or a factory, and the content."""
        base = base_of(type(value))
        option: Any = OPTIONS.get(name_of(base))
        return [self.encode(getattr(base, option).__get__(value)) if option else None, self.content(value)]

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:
            return value if value.bit_length() < 10_000 else {"int": hex(value)}
        if (number := self.numbers.get(id(value))) is not None:
            return {"same": number}
        name = name_of(kind)
        if name in MADE_OF:
            return {name: [self.encode(one) for one in MADE_OF[name](value)]}
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
        [(name, given)] = data.items()
        if name == "same":
            return self.known(given)
        if name == "int":
            return int(given, 16)
        if name == "bytes":
            return given[0].encode("latin-1")
        if name in MADE_OF:
            parts = [self.decode(one) for one in given]
            return resolve(name)(parts) if name in ("tuple", "frozenset") else resolve(name)(*parts)
        if name in CONTAINERS:
            return self.contain(resolve(name), *given)
        if name == "numpy":
            return array_of(*given)[()]
        if name == "error":
            return self.raised(*map(self.decode, given))
        return self.decode_other(name, given)

    def raised(self, name: str, *args: Any) -> BaseException:
        """An exception of the standard library's."""
        if name.rpartition(".")[0].partition(".")[0] not in {"", *sys.stdlib_module_names}:
            raise ValueError(name)
        kind = resolve(name)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ValueError(name)
        error = kind.__new__(kind, *args)
        with suppress(TypeError):  # made of other arguments than it keeps
            kind.__init__(error, *args)
        return error

    def contain(self, kind: Any, number: int, option: Any, items: list[Any]) -> Any:
        base = base_of(kind)
        value = array_of(*items) if name_of(base) == ARRAY else base.__new__(kind)
        if name := OPTIONS.get(name_of(base)):
            base.__init__(value, *([] if name == "default_factory" else [()]), self.decode(option))
        self.add(value, number)
        fill(value, self.decode_all(items))
        return value

    def decode_all(self, items: list[Any]) -> list[Any]:
        return [tuple(map(self.decode, one)) if isinstance(one, list) else self.decode(one) for one in items]

    def known(self, number: int) -> Any:
        return self.objects[number]

    def encode_other(self, value: Any) -> Any:
        raise NotImplementedError

    def decode_other(self, name: str, given: Any) -> Any:
        raise NotImplementedError

    def operate(self, operation: str, *given: Any) -> Any:
        """Do what the other end asks for."""
        raise NotImplementedError

    def printed(self) -> str:
        """What the code has printed since the last message."""
        return ""

    def settle(self) -> None:
        for number in [number for number, items in self.seen.items() if items is None]:
            self.seen[number] = items_of(self.objects[number])

    def send(self, kind: str, *given: Any) -> None:
        known, changes, dropped = set(self.objects), [], []
        try:
            encoded = [self.encode(one) for one in given]
        except BaseException as error:  # nothing crosses
            for number in self.objects.keys() - known:
                self.forget(number)
            if isinstance(error, RecursionError):
                raise Uncrossed("a value is nested too deep to cross") from None
            raise
        for number in [one for one in known & self.seen.keys() if self.seen[one] is not None]:  # it is being decoded
            value = self.objects[number]
            items = items_of(value)
            if len(items) != len(self.seen[number]) or any(map(operator.is_not, items, self.seen[number])):
                changes.append([number, self.content(value)])
                self.seen[number] = items
            del value, items
            is_plain = name_of(type(self.objects[number])) in CONTAINERS
            if is_plain and sys.getrefcount(self.objects[number]) <= self.unused:
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
        found = [self.decode(one) for one in given]
        for number, items in changes:
            fill(self.objects[number], self.decode_all(items))
            self.seen[number] = None
        self.settle()
        for number in dropped:
            self.forget(number)
        sys.stdout.write(printed)
        return [kind, *found]

    def ask(self, *request: Any) -> Any:
        """What the other end gives; raises what it raises. It may ask in return before it answers."""
        self.send("ask", *request)
        while True:
            kind, *found = self.receive()
            if kind == "value":
                return found[0]
            if kind == "raise":
                raise found[0] from found[1]
            self.answer(*found)

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
        number, bases = self.add(kind), [one for one in kind.__bases__ if one is not object]
        parents = [{"shared": name_of(one)} if base_of(one) is one else self.encode_class(one) for one in bases]
        members = [name for name, value in vars(kind).items() if value is not None]
        return {"class": [number, kind.__module__, kind.__qualname__, parents, members]}

    def encode_other(self, value: Any) -> Any:
        if isinstance(value, type):
            name = name_of(value)
            return {"shared": name} if name and name.rpartition(".")[0] in SHARED else self.encode_class(value)
        base, made = base_of(type(value)), None
        kind, number = self.encode_class(type(value)), self.add(value)
        if base is not None and issubclass(base, BaseException):
            made = [self.encode(one) for one in value.args]
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
        if operation == "call":
            function, args, named = given
            return function(*args, **dict(named))
        if operation == "special":
            value, name, args = given
            if name == "__getitem__":
                return value[args[0]]
            if not hasattr(type(value), name):
                raise TypeError(f"{type(value).__name__} has no {name}")
            return getattr(type(value), name)(value, *args)
        name, args, named = given
        return resolve(name)(*args, **dict(named))


COMPARISONS = "eq ne lt le gt ge contains"
BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or"
OPERATORS = " ".join(f"{name} r{name} i{name}" for name in BINARY.split())
OTHERS = (
    "len getitem setitem delitem iter next reversed enter exit bool int float complex index abs neg pos invert round "
    "trunc floor ceil str repr format bytes hash length_hint missing"
)
# Methods of plain values that tests hand the expected one.
COMPARING = (
    "startswith endswith count index rindex find rfind issubset issuperset isdisjoint difference symmetric_difference "
    "union intersection equals"
)
OF_TESTS = ("__class__", "__traceback__", "__cause__", "__context__", "__suppress_context__", "with_traceback")
PEER: list[TestsEnd] = []  # of which a process has one


def special(name: str) -> Callable[..., Any]:
    return lambda self, *given: PEER[0].do_special(name, self, given)


def read_attribute(self: Any, name: str) -> Any:
    if name in OF_TESTS or name in SPECIAL or name in OF_ALL:
        return object.__getattribute__(self, name)
    owner = next((one for one in type(self).__mro__[:-1] if name in vars(one)), None)
    is_asked = owner is None or isinstance(owner, Mirror)
    return PEER[0].read(self, name) if is_asked else object.__getattribute__(self, name)


def write_attribute(self: Any, name: str, value: Any) -> None:
    object.__setattr__(self, name, value) if name in OF_TESTS else PEER[0].use("setattr", self, name, value)


SPECIAL = {f"__{one}__": special(f"__{one}__") for one in f"{COMPARISONS} {OPERATORS} {OTHERS}".split()}
SPECIAL["__call__"] = lambda self, /, *args, **named: PEER[0].call(self, args, named)
OF_ALL: dict[str, Any] = {
    "__getattribute__": read_attribute,
    "__setattr__": write_attribute,
    "__delattr__": lambda self, name: PEER[0].use("delattr", self, name),
    "__dir__": lambda self: PEER[0].use("dir", self),
    "__copy__": lambda self: PEER[0].use("copy.copy", self),
    "__deepcopy__": lambda self, seen: PEER[0].use("copy.deepcopy", self),
    "__reduce_ex__": lambda self, version: PEER[0].refuse("they pickle an object of the code's"),
}


class Mirror(type):
    """A class of the code's, as the tests have it: with the bases that are builtin and the special methods, so that
    Python itself does for its instances what it does for the code's. Everything else is asked for."""

    def __new__(cls, *_: Any) -> Any:
        PEER[0].refuse("they make a subclass of a class of the code's")

    def __call__(cls, /, *args: Any, **named: Any) -> Any:
        made = PEER[0].call(cls, args, named)
        if cls in PEER[0].tested:
            PEER[0].trusted.add(id(made))
        return made

    def __getattribute__(cls, name: str) -> Any:
        is_own = name.startswith("__") and name.endswith("__")
        return type.__getattribute__(cls, name) if is_own and name != "__doc__" else PEER[0].read(cls, name)

    def __getattr__(cls, name: str) -> Any:
        return PEER[0].read(cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        PEER[0].use("setattr", cls, name, value)

    def __bool__(cls) -> bool:
        return True

    def __instancecheck__(cls, value: Any) -> bool:  # a protocol says more than its bases
        return type.__instancecheck__(cls, value) or (is_own(value) and PEER[0].use("isinstance", value, cls))

    def __subclasscheck__(cls, kind: Any) -> bool:
        return type.__subclasscheck__(cls, kind) or (is_own(kind) and PEER[0].use("issubclass", kind, cls))

    __iter__, __len__, __getitem__ = special("__iter__"), special("__len__"), special("__getitem__")
    __contains__, __repr__ = special("__contains__"), special("__repr__")


def is_mirrored(value: Any) -> bool:
    return type(value) is Mirror or type(type(value)) is Mirror


def is_own(value: Any) -> bool:
    """Whether a value, or each in it, is the code's, so that the code learns nothing by it."""
    return is_mirrored(value) or (type(value) in (list, tuple, set) and value and all(map(is_own, value)))


class TestsEnd(Link):
    """The tests' end. `pid`: of the code's process; `call_s`, `answer_s`: limits of its CPU time for one answer and for
    all, in seconds; also of time in which it sleeps.

    An operator of the code's is never given a plain value, which is often the expected one, but by an object that the
    tests have made of a class that they test (`trusted`)."""

    def __init__(self, source: Any, sink: Any, pid: int, call_s: float, answer_s: float) -> None:
        super().__init__(source, sink, 1)
        self.pid, self.call_s, self.left_s, self.gone = pid, call_s, answer_s, False
        self.began: tuple[float, float] | None = None
        self.uncrossed: list[str] = []  # why only plain Python knows
        self.has_blind, self.has_objects, self.solution = False, False, None
        self.expects_stop = False  # whether the tests name StopIteration
        self.tested: set[Any] = set()
        self.trusted: set[int] = set()
        self.given: set[int] = set()  # numbers of functions and iterators that the code may call
        PEER[:] = [self]
        signal.signal(signal.SIGALRM, self.watch)

    def refuse(self, reason: str) -> Any:
        self.uncrossed.append(reason)
        raise Uncrossed(reason)

    def stop(self) -> Any:
        self.gone = True
        raise Gone

    def known(self, number: int) -> Any:
        self.trusted.discard(id(self.objects[number]))
        return self.objects[number]

    def raised(self, name: str, *args: Any) -> BaseException:
        self.has_objects |= name != "StopIteration"  # of which nothing crosses but its arguments
        return super().raised(name, *args)

    def forget(self, number: int) -> None:
        self.trusted.discard(id(self.objects.get(number)))
        super().forget(number)

    def spent(self) -> tuple[float, float]:
        """CPU time of both ends, and time, since the code was asked, in seconds."""
        assert self.began is not None
        return cpu_s(self.pid) + time.process_time() - self.began[0], time.monotonic() - self.began[1]

    def watch(self, *_: Any) -> None:
        if self.began and is_late(*self.spent(), min(self.call_s, self.left_s)):
            self.stop()

    def ask(self, *request: Any) -> Any:
        if self.gone or self.left_s <= 0:
            self.stop()
        if self.began:  # in a function of the tests' that the code has called
            return self.ask_once(*request)
        self.began = cpu_s(self.pid) + time.process_time(), time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        try:
            return self.ask_once(*request)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            used, waited = self.spent()
            self.left_s -= waited if is_idle(used, waited) else used
            self.began = None
            most = resource.getrlimit(resource.RLIMIT_CPU)[1]
            resource.setrlimit(resource.RLIMIT_CPU, (min(most, int(time.process_time() + self.left_s) + 2), most))

    def ask_once(self, *request: Any) -> Any:
        try:
            return super().ask(*request)
        except StopIteration as error:
            if self.expects_stop or request[:1] + request[2:3] == ("special", "__next__"):
                raise
            raise RuntimeError("the code raised StopIteration") from error  # which would end a loop of the tests'

    def send(self, kind: str, *given: Any) -> None:
        try:
            super().send(kind, *given)
        except OSError:
            self.stop()

    def receive(self) -> list[Any]:
        try:
            found = super().receive()
        except Exception as error:
            if not isinstance(error, Gone | json.JSONDecodeError):  # else the code's process is late, or has ended
                self.uncrossed.append("a value of the code's cannot cross")
            self.stop()
        if found[0] == "uncrossed":
            self.refuse(found[1])
        return found

    def answer(self, *request: Any) -> None:
        try:
            super().answer(*request)
        except Uncrossed as error:
            self.send("raise", RuntimeError(str(error)), None)

    def operate(self, operation: str, *given: Any) -> Any:
        function, *more = given
        if self.numbers.get(id(function)) not in self.given:
            self.stop()
        return next(function) if operation == "next" else function(*more[0], **dict(more[1]))

    def call(self, function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return self.ask("call", function, args, tuple(named.items()))

    def use(self, name: str, *args: Any, **named: Any) -> Any:
        """What a function of the standard library gives where the code is."""
        return self.ask("use", name, args, tuple(named.items()))

    def read(self, value: Any, name: str) -> Any:
        if name.startswith("__array"):  # by which numpy would hand it the other value
            raise AttributeError(name)
        found = self.use("getattr", value, name)
        is_of_object = value is not self.solution and type(value) is not Mirror and id(value) not in self.trusted
        if is_of_object and name in COMPARING.split() and is_mirrored(found):
            self.refuse(f"they give a value to {name} of an object that the code has made")
        if name == "__dataclass_fields__":
            self.refuse("they read __dataclass_fields__")
        return found

    def do_special(self, name: str, value: Any, given: tuple[Any, ...]) -> Any:
        if name == "__exit__":
            given = (*given[:2], None)  # a traceback is the tests' own
        short, is_trusted = name.strip("_"), id(value) in self.trusted
        is_guarded = short in COMPARISONS.split() + OPERATORS.split()
        if is_guarded and not is_trusted and not is_own(given[0]):
            return self.doubt(name, value, given[0])
        found = self.ask("special", value, name, given)
        if is_trusted and short in f"{OPERATORS} pos neg abs invert round enter".split() and is_mirrored(found):
            self.trusted.add(id(found))
        return found

    def doubt(self, name: str, value: Any, other: Any) -> Any:
        """What an operator of the code's gives with a plain value that it must not see: as if there were none, if it
        gives the same whatever it is given. Else only plain Python knows."""
        found: list[Any] = []
        with suppress(Exception):
            found = [self.ask("special", value, name, (decoy(other, sign),)) for sign in (1, -1)]
        says = [one for one in found if one is not NotImplemented]
        if name in ("__eq__", "__contains__"):
            is_blind = any(says)
        elif name == "__ne__":
            is_blind = not all(says)
        else:
            is_blind = len(says) == 2 and says[0] == says[1] and not is_mirrored(says[0])
        self.has_blind |= is_blind
        if is_blind or (found and not says):
            return False if name == "__contains__" else NotImplemented
        self.refuse(f"they give a plain value to {name} of an object that the code has made")

    def encode_other(self, value: Any) -> Any:
        module, title = getattr(value, "__module__", None), getattr(value, "__qualname__", type(value).__name__)
        if module in sys.stdlib_module_names and module != "__main__":
            with suppress(Exception):
                if resolve(f"{module}.{title}") is value:
                    return {"shared": f"{module}.{title}"}
        is_function = callable(value) and not isinstance(value, type)
        if not is_function and not (hasattr(value, "__next__") and type(value).__module__ in ("builtins", "itertools")):
            self.refuse(f"they hand the code {'the class' if isinstance(value, type) else 'an object of'} {title}")
        number, self.has_objects = self.add(value), True
        self.given.add(number)
        return {
            "function" if is_function else "iterator": [
                number,
                title.rpartition(".")[2],
                getattr(value, "__doc__", None),
            ]
        }

    def decode_other(self, name: str, given: Any) -> Any:
        if name == "shared":
            found = resolve(given) if given.rpartition(".")[0] in SHARED else None
            if isinstance(found, type) or found in (NotImplemented, Ellipsis):
                return found
        if name == "class":
            return self.mirror(*given)
        number, kind, made = given
        kind = self.decode(kind)
        base = base_of(kind)
        self.has_objects |= kind.__module__ != "builtins"
        if any(one in vars(mirror) for mirror in kind.__mro__ for one in ("cr_frame", "__await__", "__anext__")):
            self.refuse("they run a coroutine of the code's")
        if is_container(kind):
            return self.contain(kind, number, *made)
        if base is None:
            value = object.__new__(kind)
        elif issubclass(base, BaseException):
            value = base.__new__(kind, *map(self.decode, made))
        else:
            value = base.__new__(kind, self.decode(made))
        self.add(value, number)
        return value

    def mirror(self, number: int, module: str, title: str, bases: list[Any], members: list[str]) -> Any:
        space: dict[str, Any] = {one: True for one in members if not one.startswith("__")}
        space |= {one: SPECIAL[one] for one in members if one in SPECIAL} | OF_ALL
        space |= {"__module__": module, "__qualname__": title}
        parents = tuple(map(self.decode, bases)) or (object,)
        if (
            name_of(next(filter(None, map(base_of, parents)), object)) == "collections.Counter"
            and "__eq__" not in members
        ):
            space["__eq__"] = lambda self, other: resolve("collections.Counter")(dict(dict.items(self))) == other
        kind = type.__new__(Mirror, title.rpartition(".")[2], parents, space)
        self.add(kind, number)
        return kind


def decoy(other: Any, sign: int) -> Any:
    """A value like `other` that nobody expects."""
    number = sign * (2**33 + int.from_bytes(os.urandom(4), "little"))
    if type(other) in (str, bytes, bytearray):
        return str(number) if type(other) is str else type(other)(b"%d" % number)
    if isinstance(other, dict):
        return {number: number}
    return type(other)([number]) if type(other) in (list, tuple, set, frozenset) else number


def is_instance(value: Any, kind: Any, real: Any = isinstance) -> bool:
    """`isinstance`, which also knows the classes of the standard library that a class of the code's inherits from."""
    if real(value, kind):
        return True
    kinds = kind if real(kind, tuple) else (kind,)
    mirrors = type(value).__mro__ if is_mirrored(value) else ()
    names = {(one.__module__, one.__qualname__) for one in mirrors if one.__module__ not in ("builtins", *SHARED)}
    return any((one.__module__, one.__qualname__) in names for one in kinds if real(one, type))


def share_dataclasses() -> None:
    """Let the functions of dataclasses, which look into objects, do that where the objects are."""
    module = __import__("dataclasses")

    def share(name: str, real: Any) -> Any:
        return lambda value, *args, **named: (
            PEER[0].use(f"dataclasses.{name}", value, *args, **named)
            if is_mirrored(value)
            else real(value, *args, **named)
        )

    for name in ("asdict", "astuple", "fields", "is_dataclass", "replace"):
        setattr(module, name, share(name, getattr(module, name)))


def judge(space: dict[str, Any], row: dict[str, Any], is_gone: Callable[[], bool] = bool) -> float:
    """1.0 if all asserts that ran hold, at least one ran and no statement raised, nor did the code end; else the share
    that holds."""
    marks: list[bool] = []
    space["_mark_"] = lambda holds=True: marks.append(bool(holds))
    for statement in row["statements"]:
        before = len(marks)
        try:
            exec(compile(statement, "tests.py", "exec"), space)
        except BaseException:
            marks[before:] = [False]  # a loop that was cut short says nothing of its other rounds
        if is_gone() and all(marks[before:]):  # the tests have caught it
            marks[before:] = [False]
    return 1.0 if marks and all(marks) else sum(marks) / max(row["asserts"], len(marks), sum(marks) + 1)


def judge_code(peer: TestsEnd, row: dict[str, Any]) -> dict[str, Any]:
    """The verdict on the code at the other end, and why it may not be plain Python's."""
    builtins.isinstance = is_instance
    space, value = {"__name__": "__main__"}, 0.0
    with suppress(Exception, SystemExit, Uncrossed):
        solution = peer.solution = peer.ask("run", row["code"])
        for name in row["names"]:
            with suppress(AttributeError):
                space[name] = solution if name == "solution" else getattr(solution, name)
        if any("dataclasses" in one for one in row["statements"]):
            share_dataclasses()
        peer.expects_stop = any("StopIteration" in one for one in row["statements"])
        peer.tested = {space[name] for name in row["classes"] if type(space.get(name)) is Mirror}
        value = judge(space, row, lambda: peer.gone)
    if peer.has_objects and not peer.has_blind:
        peer.uncrossed.append("an object of the code's is not all that it is in one process")
    return {"value": value, "uncrossed": peer.uncrossed[:1]}


def is_idle(used_s: float, waited_s: float) -> bool:
    """Whether a process sleeps: one that does not gets more of the time on the busiest machine."""
    return waited_s > 0.1 and used_s < waited_s / 20


def is_late(used_s: float, waited_s: float, limit_s: float) -> bool:
    return used_s > limit_s or (waited_s > limit_s and is_idle(used_s, waited_s))


def cpu_s(pid: int) -> float:
    """CPU time of a process; 0 once it has ended."""
    with suppress(OSError):
        return time.clock_gettime(~pid << 3 | 2)
    return 0.0
