"""The tests' end of `crossing`: what stands for the code's objects there, and the verdict. Standard library only."""

from __future__ import annotations

import builtins
import functools
import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress

from rloo_kit.graders.crossing import SHARED, Gone, Link, Uncrossed, base_of, is_container, name_of_type, resolve

TYPE_CHECKING = False  # typing takes a tenth of the start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

COMPARISONS = "eq ne lt le gt ge contains"
BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or"
OPERATORS = " ".join(f"{name} r{name} i{name}" for name in BINARY.split())
OTHERS = (
    "len getitem setitem delitem iter next reversed enter exit bool int float complex index abs neg pos invert round "
    "trunc floor ceil str repr format bytes hash length_hint missing"
)
GUARDED = frozenset(f"{COMPARISONS} {OPERATORS}".split())  # get no plain value but by a trusted object
TRUSTED = frozenset(f"{OPERATORS} pos neg abs invert round enter".split())  # give another trusted object
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
    owner = next((kind for kind in type(self).__mro__[:-1] if name in vars(kind)), None)
    is_asked = owner is None or isinstance(owner, Mirror)
    return PEER[0].read(self, name) if is_asked else object.__getattribute__(self, name)


SPECIAL = {f"__{name}__": special(f"__{name}__") for name in f"{COMPARISONS} {OPERATORS} {OTHERS}".split()}
SPECIAL["__call__"] = lambda self, /, *args, **named: PEER[0].call(self, *args, **named)
OF_ALL: dict[str, Any] = {
    "__getattribute__": read_attribute,
    "__setattr__": lambda self, name, value: (
        object.__setattr__(self, name, value) if name in OF_TESTS else PEER[0].call("setattr", self, name, value)
    ),
    "__delattr__": lambda self, name: PEER[0].call("delattr", self, name),
    "__dir__": lambda self: PEER[0].call("dir", self),
    "__copy__": lambda self: PEER[0].call("copy.copy", self),
    "__deepcopy__": lambda self, seen: PEER[0].call("copy.deepcopy", self),
    "__reduce_ex__": lambda self, version: PEER[0].refuse("they pickle an object of the code's"),
}


class Mirror(type):
    """A class of the code's, as the tests have it: with the bases that are builtin and the special methods, so that
    Python itself does for its instances what it does for the code's. Everything else is asked for."""

    def __new__(cls, *_: Any) -> Any:
        PEER[0].refuse("they make a subclass of a class of the code's")

    def __call__(cls, /, *args: Any, **named: Any) -> Any:
        made = PEER[0].call(cls, *args, **named)
        if cls in PEER[0].tested:
            PEER[0].trusted.add(id(made))
        return made

    def __getattribute__(cls, name: str) -> Any:
        is_special = name.startswith("__") and name.endswith("__")
        return type.__getattribute__(cls, name) if is_special and name != "__doc__" else PEER[0].read(cls, name)

    def __getattr__(cls, name: str) -> Any:
        return PEER[0].read(cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        PEER[0].call("setattr", cls, name, value)

    def __bool__(cls) -> bool:
        return True

    def __instancecheck__(cls, value: Any) -> bool:  # a protocol says more than its bases
        return type.__instancecheck__(cls, value) or (is_own(value) and PEER[0].call("isinstance", value, cls))

    def __subclasscheck__(cls, kind: Any) -> bool:
        return type.__subclasscheck__(cls, kind) or (is_own(kind) and PEER[0].call("issubclass", kind, cls))

    __iter__, __len__, __getitem__ = special("__iter__"), special("__len__"), special("__getitem__")
    __contains__, __repr__ = special("__contains__"), special("__repr__")


def is_mirrored(value: Any) -> bool:
    return type(value) is Mirror or type(type(value)) is Mirror


def is_own(value: Any) -> bool:
    """Whether a value, or each in it, is the code's, so that the code learns nothing by it."""
    return is_mirrored(value) or (type(value) in (list, tuple, set) and value and all(map(is_own, value)))


class TestsEnd(Link):
    """`pid`: of the code's process; `call_s`, `answer_s`: limits of CPU time, or sleep, for one answer and for all.

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
            message = super().receive()
        except Exception as error:
            if not isinstance(error, Gone | json.JSONDecodeError):  # else the code's process is late, or has ended
                self.uncrossed.append("a value of the code's cannot cross")
            self.stop()
        if message[0] == "uncrossed":
            self.refuse(message[1])
        return message

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

    def call(self, function: Any, /, *args: Any, **named: Any) -> Any:
        """What a function of the code's, or one of the standard library's by its name, gives where the code is."""
        return self.ask("call", function, args, tuple(named.items()))

    def read(self, value: Any, name: str) -> Any:
        if name.startswith("__array"):  # by which numpy would hand it the other value
            raise AttributeError(name)
        result = self.call("getattr", value, name)
        is_of_object = value is not self.solution and type(value) is not Mirror and id(value) not in self.trusted
        if is_of_object and name in COMPARING.split() and is_mirrored(result):
            self.refuse(f"they give a value to {name} of an object that the code has made")
        if name == "__dataclass_fields__":
            self.refuse("they read __dataclass_fields__")
        return result

    def do_special(self, name: str, value: Any, given: tuple[Any, ...]) -> Any:
        if name == "__exit__":
            given = (*given[:2], None)  # a traceback is the tests' own
        short, is_trusted = name.strip("_"), id(value) in self.trusted
        if short in GUARDED and not is_trusted and not is_own(given[0]):
            return self.doubt(name, value, given[0])
        result = self.ask("special", value, name, given)
        if is_trusted and short in TRUSTED and is_mirrored(result):
            self.trusted.add(id(result))
        return result

    def doubt(self, name: str, value: Any, other: Any) -> Any:
        """What an operator of the code's gives with a plain value that it must not see: as if there were none, if it
        gives the same whatever it is given. Else only plain Python knows."""
        results: list[Any] = []
        with suppress(Exception):
            results = [self.ask("special", value, name, (decoy(other, sign),)) for sign in (1, -1)]
        says = [result for result in results if result is not NotImplemented]
        if name in ("__eq__", "__contains__"):
            is_blind = any(says)
        elif name == "__ne__":
            is_blind = not all(says)
        else:
            is_blind = len(says) == 2 and says[0] == says[1] and not is_mirrored(says[0])
        self.has_blind |= is_blind
        if is_blind or (results and not says):
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
        kind = "function" if is_function else "iterator"
        return {kind: [number, title.rpartition(".")[2], getattr(value, "__doc__", None)]}

    def decode_other(self, name: str, given: Any) -> Any:
        if name == "shared":
            shared = resolve(given) if given.rpartition(".")[0] in SHARED else None
            if isinstance(shared, type) or shared in (NotImplemented, Ellipsis):
                return shared
        if name == "class":
            return self.mirror(*given)
        number, kind, made = given
        kind = self.decode(kind)
        base = base_of(kind)
        self.has_objects |= kind.__module__ != "builtins"
        if any(method in vars(mirror) for mirror in kind.__mro__ for method in ("cr_frame", "__await__", "__anext__")):
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
        space: dict[str, Any] = {name: True for name in members if not name.startswith("__")}
        space |= {name: SPECIAL[name] for name in members if name in SPECIAL} | OF_ALL
        space |= {"__module__": module, "__qualname__": title}
        parents = tuple(map(self.decode, bases)) or (object,)
        base: Any = next(filter(None, map(base_of, parents)), object)
        if name_of_type(base) == "collections.Counter" and "__eq__" not in members:  # its own asks for each count
            space["__eq__"] = lambda self, other: base(dict(dict.items(self))) == other
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
    names = {(base.__module__, base.__qualname__) for base in mirrors if base.__module__ not in ("builtins", *SHARED)}
    return any((base.__module__, base.__qualname__) in names for base in kinds if real(base, type))


def call_where_it_is(name: str, real: Any, value: Any, /, *args: Any, **named: Any) -> Any:
    """What a function of the standard library's that looks into an object gives where the object is."""
    if is_mirrored(value):
        return PEER[0].call(name, value, *args, **named)
    return real(value, *args, **named)


def judge(space: dict[str, Any], row: dict[str, Any], is_gone: Callable[[], bool] = bool) -> float:
    """The share of the asserts that hold; 1.0 needs that one ran, no statement raised and the code did not end."""
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
        if any("dataclasses" in statement for statement in row["statements"]):
            module = __import__("dataclasses")
            for name in ("asdict", "astuple", "fields", "is_dataclass", "replace"):
                shared = functools.partial(call_where_it_is, f"dataclasses.{name}", getattr(module, name))
                setattr(module, name, shared)
        peer.expects_stop = any("StopIteration" in statement for statement in row["statements"])
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
