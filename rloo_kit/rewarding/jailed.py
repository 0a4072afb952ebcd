"""What runs inside the jail of `code_reward`, as `python -I -S -c TEXT SETTINGS`: standard library only.

The code and its tests are two processes joined by pipes, so the expected answers never are where the code is. A plain
value crosses as JSON; of any other object its number crosses, and the other end holds a `Proxy`.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import json
import marshal
import operator
import os
import resource
import select
import signal
import struct
import sys
import time
import types
from contextlib import suppress

TYPE_CHECKING = False  # typing takes a tenth of the start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LONGEST = 16 * 2**20  # bytes of a message, and of what a program prints
MAY, ERROR, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x00050000, 0x80000000, 1, 38  # what a filter of system calls returns
CLONE3, MOUNT_SETATTR, CLONE_THREAD = 435, 442, 0x00010000
# Refused: pivot_root, umount2, mount, execve, execveat, socket, ptrace, process_vm_readv and _writev, chroot, unshare,
# setns, bpf, add_key, request_key, keyctl, perf_event_open, userfaultfd, open_by_handle_at, memfd_create, shmget,
# msgget, semget, mq_open, init_module, finit_module, kexec_load; of x86_64 fork and vfork too.
REFUSED = {
    "x86_64": "155 166 165 59 322 41 101 310 311 161 272 308 321 248 249 250 298 323 304 319 29 68 64 240 175 313 246 "
    "57 58",
    "aarch64": "41 39 40 221 281 198 117 270 271 51 97 268 280 217 218 219 241 282 265 279 194 186 190 180 105 273 104",
}
# On both: io_uring_setup, _enter, _register, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, pidfd_open,
# pidfd_getfd, mount_setattr, memfd_secret.
REFUSED_TOO = (*range(425, 435), 438, MOUNT_SETATTR, 447)
MACHINES = {"x86_64": (0xC000003E, 56), "aarch64": (0xC00000B7, 220)}  # its mark, and clone
LIBC = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: bytes | None, flags: int) -> None:
    check(LIBC.mount(source.encode(), target.encode(), kind, ctypes.c_ulong(flags), None), f"mount {target}")


def enter_root(binds: list[str], links: dict[str, str], hidden: list[str]) -> None:
    """Move into a read-only root folder of nothing but `binds` and `links`; the folders `hidden` in them are empty."""
    root, pivot_root = "/proc", int(REFUSED[os.uname().machine].split()[0])  # exists everywhere, and is no bind
    os.setsid()  # kill(0) would reach the run's group
    mount("jail", root, b"tmpfs", 0x6)  # MS_NOSUID | MS_NODEV
    for path in binds:
        os.makedirs(root + (path if os.path.isdir(path) else os.path.dirname(path)), exist_ok=True)
        if not os.path.isdir(path):
            os.close(os.open(root + path, os.O_CREAT))
        mount(path, root + path, None, 0x5000)  # MS_BIND | MS_REC
    for path, target in links.items():
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(target, root + path)
    for path in hidden:
        mount("jail", root + path, b"tmpfs", 0x6)
    os.chdir(root)
    check(LIBC.syscall(pivot_root, b".", b"."), "pivot_root")
    check(LIBC.umount2(b".", 2), "umount2")  # MNT_DETACH
    os.chdir("/")
    flags = struct.pack("QQQQ", 0x7, 0, 0, 0)  # MOUNT_ATTR_RDONLY | _NOSUID | _NODEV; then AT_RECURSIVE
    check(LIBC.syscall(MOUNT_SETATTR, -100, b"/", 0x8000, flags, 32), "mount_setattr (Linux 5.12)")
    check(LIBC.sethostname(b"jail", 4), "sethostname")


def lock(memory_mb: int, cpu_s: int) -> None:
    """Limits, no capabilities and a filter of system calls, for good."""
    most = {"AS": memory_mb * 2**20, "CPU": cpu_s, "FSIZE": LONGEST, "NOFILE": 64, "CORE": 0, "STACK": 2**26}
    if tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (5, 14):  # from then on of a namespace alone
        most["NPROC"] = 64
    for name, value in most.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        resource.setrlimit(number, (value if hard == resource.RLIM_INFINITY else min(value, hard),) * 2)
    for capability in range(64):
        LIBC.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP; not possible, nor needed, under bubblewrap
    check(LIBC.capset(struct.pack("II", 0x20080522, 0), bytes(24)), "capset")
    check(LIBC.prctl(38, 1, 0, 0, 0), "no_new_privs")
    machine, clone = MACHINES[os.uname().machine]
    rules = [(0x20, 0, 0, 4), (0x15, 1, 0, machine), (0x06, 0, 0, KILL), (0x20, 0, 0, 0)]
    rules += [(0x35, 0, 1, 0x40000000), (0x06, 0, 0, KILL), (0x15, 0, 1, CLONE3), (0x06, 0, 0, ERROR | ENOSYS)]  # x32
    for number in (*map(int, REFUSED[os.uname().machine].split()), *REFUSED_TOO):
        rules += [(0x15, 0, 1, number), (0x06, 0, 0, ERROR | EPERM)]
    rules += [(0x15, 0, 3, clone), (0x20, 0, 0, 16), (0x45, 1, 0, CLONE_THREAD), (0x06, 0, 0, ERROR | EPERM)]
    text = b"".join(struct.pack("HBBI", *rule) for rule in [*rules, (0x06, 0, 0, MAY)])
    program = ctypes.create_string_buffer(text)
    check(LIBC.prctl(22, 2, struct.pack("HxxxxxxQ", len(text) // 8, ctypes.addressof(program)), 0, 0), "seccomp")


class Gone(BaseException):
    """The code's process ended, is late or does not answer what was asked."""


class Broken(BaseException):
    """The tests cannot be used."""


class Peer:
    """One end of the two pipes: `ask` has the other end do an operation, and serves what that asks meanwhile.

    Args:
        operations: what the other end may ask for, by name.
        call_s: limit for one answer, in seconds, of the tests' end; None: the code's, which waits.
    """

    def __init__(self, source: int, sink: int, operations: dict[str, Any], call_s: float | None = None) -> None:
        self.source, self.sink, self.operations, self.call_s = source, sink, operations, call_s
        self.late_at, self.gone, self.received = float("inf"), False, b""
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.proxies: dict[int, Proxy] = {}
        for end in (source, sink):
            os.set_blocking(end, False)

    def wait(self, end: int, event: int) -> None:
        poll = select.poll()
        poll.register(end, event)
        left_s = max(0.0, self.late_at - time.monotonic())
        if not poll.poll(None if self.call_s is None else left_s * 1000):
            raise Gone

    def send(self, *message: Any) -> None:
        rest = memoryview(json.dumps(message).encode() + b"\n")
        while rest:
            self.wait(self.sink, select.POLLOUT)
            rest = rest[os.write(self.sink, rest[: select.PIPE_BUF]) :]

    def receive(self) -> Any:
        parts = [self.received]
        while b"\n" not in parts[-1]:
            self.wait(self.source, select.POLLIN)
            parts.append(os.read(self.source, 2**16))
            if not parts[-1] or sum(map(len, parts)) > LONGEST:
                raise Gone
        message, _, self.received = b"".join(parts).partition(b"\n")
        return json.loads(message)

    def ask(self, operation: str, *args: Any, **named: Any) -> Any:
        if self.gone:
            raise Gone
        outer, given = self.late_at, [*args, *named.values()]
        self.late_at = min(time.monotonic() + (self.call_s or 0.0), outer)
        try:
            self.send("ask", operation, [self.encode(one) for one in given], list(named))
            while (reply := self.receive())[0] == "ask":
                self.serve(*reply[1:])
            if reply[0] == "error":
                raise named_error(*reply[1:])
            for old, new in zip(given, map(self.decode, reply[2]), strict=True):
                if type(old) is type(new) is list:
                    old[:] = new
                elif type(old) is type(new) and type(old) in (dict, set):
                    old.clear()
                    old.update(new)
            return self.decode(reply[1])
        except (Exception, Gone) as error:
            if hasattr(error, "from_code"):
                raise
            self.gone = True
            raise Gone from None
        finally:
            self.late_at = outer

    def serve(self, operation: str, sent: list[Any], names: list[str]) -> None:
        """Do it, and send the value and what became of the lists, dicts and sets that were handed over."""
        try:
            given = [self.decode(one) for one in sent]
            options = dict(zip(names, given[len(given) - len(names) :], strict=True))
            value = self.encode(self.operations[operation](*given[: len(given) - len(names)], **options))
            after = [self.encode(one) if type(one) in (list, dict, set) else None for one in given]
            changed = [new if new != old else None for old, new in zip(sent, after, strict=True)]
        except (Gone, Broken):
            raise
        except BaseException as error:
            text = "without a text"
            with suppress(BaseException):
                text = str(error)[:1000]
            self.send("error", [kind.__name__ for kind in type(error).__mro__], text)
        else:
            self.send("value", value, changed)

    def encode(self, value: Any) -> Any:
        kind: Any = type(value)
        if kind in (type(None), bool, int, float, str):
            return value
        if kind is list:
            return [self.encode(one) for one in value]
        if kind is Proxy:
            return {"yours": value.number__}
        if kind is type and value in vars(builtins).values():
            return {"type": value.__name__}
        if parts := REBUILT.get(name := f"{kind.__module__}.{kind.__qualname__}"):
            return {name: [self.encode(one) for one in parts(value)]}
        sent: dict[str, Any] = {"mine": self.export(value)}
        for base in PLAIN:
            if isinstance(value, base):  # of a subclass (a namedtuple, an enum) the plain value too
                sent["value"] = [self.encode(base(value))]
        return sent

    def decode(self, data: Any) -> Any:
        if not isinstance(data, dict):
            return [self.decode(one) for one in data] if isinstance(data, list) else data
        if (number := data.get("mine")) is not None:
            return self.proxies.setdefault(number, Proxy(self, number, self.decode(data.get("value", []))))
        [(name, inner)] = data.items()
        if name == "yours":
            return self.objects[inner]
        if name == "type":
            return inner if not isinstance(found := getattr(builtins, inner), type) else found
        module, _, kind = name.rpartition(".")
        return getattr(importlib.import_module(module), kind)(*map(self.decode, inner)) if name in REBUILT else None

    def export(self, value: Any) -> int:
        if self.call_s is not None and not (callable(value) or hasattr(value, "__next__")):
            raise Broken(
                f"they hand the code an object of {type(value).__name__} that is not the code's own; it takes plain "
                "values, functions and what the code made"
            )
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]


PLAIN: tuple[Any, ...] = (str, int, float, list, tuple, dict, set)
REBUILT: dict[str, Callable[[Any], list[Any]]] = {  # of what the other end makes an equal value
    "builtins.dict": lambda value: [[[key, one] for key, one in value.items()]],
    "collections.defaultdict": lambda value: [None, [[key, one] for key, one in value.items()]],
    "collections.OrderedDict": lambda value: [[[key, one] for key, one in value.items()]],
    "collections.Counter": lambda value: [dict(value)],
    **{f"builtins.{name}": lambda value: [list(value)] for name in ("tuple", "set", "frozenset", "bytes", "bytearray")},
    "collections.deque": lambda value: [list(value)],
    "builtins.range": lambda value: [value.start, value.stop, value.step],
    "builtins.complex": lambda value: [value.real, value.imag],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    "decimal.Decimal": lambda value: [str(value)],
    "datetime.date": lambda value: [value.year, value.month, value.day],
    "datetime.datetime": lambda value: [*value.timetuple()[:6], value.microsecond],
}


def named_error(names: list[str], text: str) -> Exception:
    """A builtin exception of the first of `names` that tests may catch; never the one that fails a test."""
    made: Exception = RuntimeError(f"{names[0]}: {text}")
    for name in names:
        found = getattr(builtins, name, None)
        if isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, AssertionError):
            with suppress(TypeError):
                made = found(text)
                break
    made.from_code = True  # type: ignore[attr-defined]
    return made


class Proxy:
    """An object of the other end's. An operator never hands it a plain value, which is often the expected one: the two
    are unequal. Of a subclass of a plain type the plain value (`value__[0]`) counts."""

    __slots__ = ("number__", "peer__", "value__")

    def __init__(self, *parts: Any) -> None:
        for name, part in zip(("peer__", "number__", "value__"), parts, strict=True):
            object.__setattr__(self, name, part)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.value__[0]) if self.value__ else Proxy

    def __getattr__(self, name: str) -> Any:
        return self.peer__.ask("getattr", self, name)

    def __hash__(self) -> int:
        return hash(self.value__[0]) if self.value__ else id(self)

    def __format__(self, how: str) -> str:
        return format(self.value__[0] if self.value__ else str(self), how)

    def __mro_entries__(self, bases: Any) -> Any:
        raise Broken("they derive a class from one of the code's")

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is Proxy and self.peer__.ask("isinstance", value, self)


def asks(operation: str) -> Callable[..., Any]:
    return lambda self, *args, **named: self.peer__.ask(operation, self, *args, **named)


def combines(operation: str) -> Callable[[Proxy, Any], Any]:
    def combine(self: Proxy, other: Any) -> Any:
        if self.value__:
            other = other.value__[0] if type(other) is Proxy and other.value__ else other
            return getattr(operator, operation)(self.value__[0], other)
        return self.peer__.ask(operation, self, other) if type(other) is Proxy else NotImplemented

    return combine


ALONE = "setattr delattr call getitem setitem delitem len iter next str repr bool int float index abs neg invert round"
WITH_ANOTHER = "eq ne lt le gt ge add sub mul truediv floordiv mod pow matmul and_ or_ xor"
for _name in ALONE.split():
    setattr(Proxy, f"__{_name}__", asks(_name))
for _name in WITH_ANOTHER.split():
    setattr(Proxy, f"__{_name.rstrip('_')}__", combines(_name))


def judge(peer: Peer, code: str, row: dict[str, Any]) -> float:
    """The share of the assertions that hold, of one in a loop its rounds; 1.0 if all that ran do, at least one ran and
    nothing was raised. Each unit is run whatever became of those before it."""
    held: dict[int, list[bool]] = {}
    space: dict[str, Any] = {"_mark_": lambda number, holds: held.setdefault(number, []).append(holds)}
    try:
        peer.ask("run", code)
        for name in row["names"]:
            with suppress(AttributeError):
                space[name] = peer.ask("find", name)
    except (Exception, Gone):
        return 0.0
    whole, total = True, len(row["straight"])
    for unit, first, end in row["units"]:
        try:
            exec(unit, space)
        except (Exception, Gone) as error:
            lacks = isinstance(error, ImportError) or "catching classes" in str(error)  # an exception that is a Proxy
            if lacks and not hasattr(error, "from_code"):
                raise Broken(f"they need what is not there: {error}") from None
            whole = False
            for number in range(first, end):
                if not row["straight"][number]:
                    held.pop(number, None)
    whole = whole and -1 not in held
    if whole and held and all(map(all, held.values())):
        return 1.0
    share = sum(sum(rounds) / len(rounds) for number, rounds in held.items() if number >= 0) / total
    return share if whole else min(share, 1 - 1 / total)


def run_candidate(settings: dict[str, Any], source: int, sink: int) -> None:
    """Run the code that the tests' process sends, then do what that asks of it, until it ends."""
    module = sys.modules["solution"] = types.ModuleType("solution")
    run = {"run": lambda code: exec(compile(code, "solution.py", "exec"), vars(module))}
    peer = Peer(source, sink, vars(builtins) | vars(operator) | run | {"find": lambda name: getattr(module, name)})
    with suppress(BaseException):
        while True:
            peer.serve(*peer.receive()[1:])


def run_tests(settings: dict[str, Any], source: int, sink: int) -> None:
    """Judge the code as standard input says, and write the verdict."""
    with open(source, "rb") as given:
        code, row = marshal.load(given)

    def stop(*_: Any) -> None:
        raise Gone

    try:
        asked = {"call": operator.call, "iter": iter, "next": next}
        read, write = settings["link"]
        peer = Peer(read, write, asked, settings["call_s"])
        peer.late_at = time.monotonic() + settings["answer_s"]
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, settings["answer_s"] + 0.2)  # for tests that loop
        verdict: dict[str, Any] = {"value": judge(peer, code, row)}
    except Broken as error:
        verdict = {"broken": str(error)}
    os.write(sink, json.dumps(verdict).encode())


def run_program(length: int) -> None:
    """Run the first `length` bytes of standard input as a program that reads the rest."""
    text = b""
    while len(text) < length:
        text += os.read(0, length - len(text))
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(text, "solution.py", "exec"), vars(module))


def probe(outside: list[str]) -> None:
    """Raise unless the jail holds: nothing of `outside`, no process, no network, no file."""
    import socket

    seen = [path for path in (*outside, "/proc/self", "/sys/kernel", "/dev/null") if os.path.exists(path)]
    attempts: dict[str, Callable[[], Any]] = {"fork": os.fork, "socket": socket.socket, "mkdir": lambda: os.mkdir("/a")}
    for what, attempt in attempts.items():
        with suppress(OSError):
            attempt()
            seen.append(what)
    if seen:
        raise OSError(f"the jail allows {', '.join(seen)}")


def main() -> None:
    settings = json.loads(sys.argv.pop())
    if settings["binds"]:
        enter_root(settings["binds"], settings["links"], settings["hidden"])
    lock(settings["memory_mb"], settings["cpu_s"])
    if settings["role"] == "probe":
        probe(settings["outside"])
    os.write(2, b"ready\n")
    os.dup2(settings["null"], 2)
    if settings["role"] == "program":
        run_program(settings["length"])
        return
    ends = os.dup(0), os.dup(1)
    for end in (0, 1):
        os.dup2(settings["null"], end)
    if settings["role"] != "probe":
        {"candidate": run_candidate, "tests": run_tests}[settings["role"]](settings, *ends)
    os._exit(0)


if __name__ == "__main__":
    main()
