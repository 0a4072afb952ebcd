"""The tests' end of `crossing`: what stands for the code's objects there, and the verdict. Standard library only."""

from __future__ import annotations

import builtins
import functools
import os
import resource
import signal
import time
from contextlib import suppress

from rloo_kit.graders.crossing import Copies, Gone, Link, Uncrossed, is_standard, make, name_of, name_of_type, resolve

TYPE_CHECKING = False  # typing takes a tenth of the start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

COMPARISONS = "eq lt le gt ge contains"
BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or"
OPERATORS = " ".join(f"{name} r{name} i{name}" for name in BINARY.split())
# Functions with a special method each that are called where the object is.
ASKED = (
    "len iter next reversed bool int float complex abs round str repr format bytes hash dir setattr delattr "
    "operator.getitem operator.setitem operator.delitem operator.index operator.pos operator.neg operator.invert "
    "math.trunc math.floor math.ceil"
)
# Methods of plain values that tests hand the expected one.
COMPARING = (
    "startswith endswith count index rindex find rfind issubset issuperset isdisjoint difference symmetric_difference "
    "union intersection equals"
)
SHARED = ("", "collections", "fractions", "decimal", "datetime")  # modules whose classes both ends have
PEER: list[TestsEnd] = []  # of which a process has one


class Remote:
    """An object of the code's, or a class of it: whatever is done with it is asked for."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        return PEER[0].read(self, name)

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        return PEER[0].call_object(self, args, named)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __enter__(self) -> Any:
        return PEER[0].read(self, "__enter__")()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return PEER[0].read(self, "__exit__")(kind, error, None)  # a traceback is the tests' own

    def __reduce_ex__(self, version: Any) -> Any:
        PEER[0].refuse("they copy or pickle an object of the code's")

    def __instancecheck__(self, value: Any) -> bool:
        return is_own(value) and PEER[0].call("isinstance", value, self)

    def __subclasscheck__(self, kind: Any) -> bool:
        return is_own(kind) and PEER[0].call("issubclass", kind, self)

    __class__ = property(lambda self: PEER[0].read(self, "__class__"))
    __doc__ = property(lambda self: PEER[0].read(self, "__doc__"))


def asking(function: str) -> Callable[..., Any]:
    return lambda self, *given: PEER[0].call(function, self, *given)


def guarded(name: str) -> Callable[..., Any]:
    return lambda self, other: PEER[0].operate_on(self, f"__{name}__", other)


for _function in ASKED.split():
    _name = _function.rpartition(".")[2]
    setattr(Remote, f"__{_name}__", asking(_function))
for _name in f"{COMPARISONS} {OPERATORS}".split():
    setattr(Remote, f"__{_name}__", guarded(_name))


class RemoteError(type):
    """The class of the classes that stand for the code's exceptions, which tests can catch."""

    def __call__(cls, *args: Any, **named: Any) -> Any:
        return PEER[0].call(cls, *args, **named)

    def __getattr__(cls, name: str) -> Any:
        return PEER[0].read(cls, name)


OF_ERRORS: dict[str, Any] = {
    "__getattr__": lambda self, name: PEER[0].read(self, name),
    "__str__": lambda self: PEER[0].call("str", self),
    "__repr__": lambda self: PEER[0].call("repr", self),
}


def is_own(value: Any) -> bool:
    """Whether a value, or each in it, is the code's, so that the code learns nothing by it."""
    if id(value) in PEER[0].foreign:
        return True
    return type(value) in (list, tuple, set) and bool(value) and all(map(is_own, value))


class TestsEnd(Link):
    """`pid`: of the code's process; `call_s`, `answer_s`: limits of CPU time, or sleep, for one answer and for all.

    An operator of the code's is never given a plain value, which is often the expected one, but by an object that the
    tests have made of a class that they test (`trusted`)."""

    def __init__(self, source: Any, sink: Any, pid: int, call_s: float, answer_s: float) -> None:
        super().__init__(source, sink)
        self.pid, self.call_s, self.left_s, self.gone = pid, call_s, answer_s, False
        self.began: tuple[float, float] | None = None
        self.uncrossed: list[str] = []  # why only plain Python knows
        self.has_blind, self.has_objects, self.solution = False, False, None
        self.expects_stop = False  # whether the tests name StopIteration
        self.tested: set[int] = set()  # ids of classes, as of what is made of them
        self.trusted: set[int] = set()
        PEER[:] = [self]
        signal.signal(signal.SIGALRM, self.watch)

    def refuse(self, reason: str) -> Any:
        self.uncrossed.append(reason)
        raise Uncrossed(reason)

    def stop(self) -> Any:
        self.gone = True
        raise Gone

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
        if self.began:  # for the hash of an object in an answer's set
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
        copies = Copies()
        try:
            self.send("ask", request, copies)
            kind, changes, data = self.receive()
        except (OSError, ValueError):  # the code's process is late, or has ended
            self.stop()
        if kind == "uncrossed":
            self.refuse(data)
        try:
            for place, parts in changes:
                value: Any = copies.values[place]
                new = make(name_of(value), [self.decode(part, copies) for part in parts])
                value.clear()
                (value.extend if hasattr(value, "extend") else value.update)(new)
            result = self.decode(data, copies)
        except Gone:
            raise
        except Exception:
            self.uncrossed.append("a value of the code's cannot cross")
            self.stop()
        if kind != "raise":
            return result
        if issubclass(type(result), StopIteration) and not self.expects_stop and request[1] != "next":
            raise RuntimeError("the code raised StopIteration") from result  # which would end a loop of the tests'
        raise result

    def call(self, function: Any, /, *args: Any, **named: Any) -> Any:
        """What a function of the code's, or one of the standard library's by its name, gives where the code is."""
        return self.ask("call", function, args, named)

    def call_object(self, value: Any, args: Any, named: Any) -> Any:
        made = self.ask("call", value, args, named)
        if id(value) in self.tested and type(made) is Remote:
            self.trusted.add(id(made))
        return made

    def read(self, value: Any, name: str) -> Any:
        if name.startswith("__array"):  # by which numpy would hand it the other value
            raise AttributeError(name)
        result = self.call("getattr", value, name)
        is_made = type(value) is Remote and value is not self.solution
        if is_made and id(value) not in self.trusted | self.tested and name in COMPARING.split():
            self.refuse(f"they give a value to {name} of an object that the code has made")
        return result

    def operate_on(self, value: Any, name: str, other: Any) -> Any:
        is_trusted = id(value) in self.trusted
        if not is_own(other):
            if self.ask("is every object's", value, name):
                return other in list(value) if name == "__contains__" else NotImplemented
            if name.strip("_") in COMPARISONS and self.is_blind(value, name, other):
                self.has_blind = True
                return False if name == "__contains__" else NotImplemented
            if not is_trusted:
                self.refuse(f"they give a plain value to {name} of an object that the code has made")
        result = self.ask("special", value, name, other)
        if is_trusted and type(result) is Remote:
            self.trusted.add(id(result))
        return result

    def is_blind(self, value: Any, name: str, other: Any) -> bool:
        """Whether a comparison of the code's says the same whatever it is given."""
        results: list[Any] = []
        with suppress(Exception):
            results = [self.ask("special", value, name, decoy(other, sign)) for sign in (1, -1)]
        says = [result for result in results if result is not NotImplemented]
        return any(says) if name in ("__eq__", "__contains__") else len(says) == 2 and says[0] == says[1]

    def describe(self, value: Any, copies: Copies) -> Any:
        title = getattr(value, "__qualname__", f"an object of {type(value).__qualname__}")
        with suppress(TypeError):  # it has no hash
            if (name := name_of_type(value)) and is_standard(name):
                return {"shared": name}
        self.refuse(f"they hand the code {title}")

    def shared(self, name: str) -> Any:
        value = super().shared(name) if name.rpartition(".")[0] in SHARED else None
        if not isinstance(value, type) and value not in (NotImplemented, Ellipsis):
            raise ValueError(name)
        return value

    def raised(self, name: str, *args: Any) -> BaseException:
        self.has_objects |= name != "StopIteration"  # of which nothing crosses but its arguments
        return super().raised(name, *args)

    def stand_in(self, is_own_class: bool, made: Any = None, parts: Any = ()) -> Any:
        self.has_objects |= is_own_class
        if made is None:
            return object.__new__(Remote)
        if type(made) is str:
            return type.__new__(RemoteError, made, parts, dict(OF_ERRORS))
        error = made.__new__(made, *parts)
        error.args = parts
        return error


def decoy(other: Any, sign: int) -> Any:
    """A value like `other` that nobody expects."""
    number = sign * (2**33 + int.from_bytes(os.urandom(4), "little"))
    if type(other) in (str, bytes, bytearray):
        return str(number) if type(other) is str else type(other)(b"%d" % number)
    if isinstance(other, dict):
        return {number: number}
    return type(other)([number]) if type(other) in (list, tuple, set, frozenset) else number


def is_instance(value: Any, kind: Any, real: Any = isinstance) -> bool:
    """`isinstance`, which asks for the code's objects where they are."""
    return PEER[0].call("isinstance", value, kind) if type(value) is Remote else real(value, kind)


def type_of(value: Any, *more: Any) -> Any:
    return value.__class__ if type(value) is Remote else type(value, *more)


def judge(space: dict[str, Any], row: dict[str, Any], is_gone: Callable[[], bool] = bool) -> float:
    """The share of the asserts that hold; 1.0 needs that one ran, no statement raised and the code did not end."""
    marks: list[bool] = []
    space["_mark_"] = lambda holds=True: marks.append(bool(holds))
    steps: list[Callable[[], Any]] = [functools.partial(exec, statement, space) for statement in row["statements"]]
    if row["has_tests"]:
        steps.append(lambda: steps.extend(resolve("pytest.find_tests")(space, row["called"])))
    for step in steps:  # which grows
        before = len(marks)
        try:
            step()
        except BaseException:
            marks[before:] = [False]  # a loop that was cut short says nothing of its other rounds
        if is_gone() and all(marks[before:]):  # the tests have caught it
            marks[before:] = [False]
    return 1.0 if marks and all(marks) else sum(marks) / max(row["asserts"], len(marks), sum(marks) + 1)


def judge_code(peer: TestsEnd, row: dict[str, Any]) -> dict[str, Any]:
    """The verdict on the code at the other end, and why it may not be plain Python's."""
    builtins.isinstance = is_instance
    space, value = {"__name__": "__main__", "type": type_of}, 0.0
    with suppress(Exception, SystemExit, Uncrossed):
        peer.solution = peer.ask("run", row["code"])
        for name in row["names"]:
            with suppress(AttributeError):
                space[name] = peer.solution if name == "solution" else getattr(peer.solution, name)
        peer.expects_stop = any("StopIteration" in statement for statement in row["statements"])
        peer.tested = {id(space[name]) for name in row["classes"] if type(space.get(name)) is Remote}
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
