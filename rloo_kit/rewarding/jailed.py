"""What runs inside the jail of `code_reward`, as `python -I -S -c TEXT SETTINGS`: standard library only.

The code and its tests are two processes joined by pipes, so the expected answers never are where the code is: the tests
ask, the code's process answers. Plain values cross as JSON; of any other object of the code's its number crosses, and
the tests hold a `Proxy`.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import operator
import os
import resource
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


def enter_root(binds: list[str], links: dict[str, str]) -> None:
    """Move into a read-only root folder of nothing but `binds` and `links`."""
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


class Gone(Exception):
    """The code's process ended, is late, or its answer cannot be read."""


class Broken(BaseException):
    """The tests cannot be used."""


PARTS: dict[str, Callable[[Any], Any]] = {  # of what crosses as its type's name and a plainer value
    **dict.fromkeys(("tuple", "set", "frozenset", "bytes"), list),
    "dict": lambda value: list(value.items()),
    "complex": str,
}


def encode(value: Any, number_of: Callable[[Any], int]) -> Any:
    """`value` as JSON has it, of a subclass the plain base; what is not plain by its number."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(one, number_of) for one in value]
    for name, parts in PARTS.items():
        if isinstance(value, getattr(builtins, name)):
            return {name: encode(parts(value), number_of)}
    return {"object": number_of(value)}


def decode(data: Any, find: Callable[[int], Any]) -> Any:
    if isinstance(data, list):
        return [decode(one, find) for one in data]
    if not isinstance(data, dict):
        return data
    [(name, inner)] = data.items()
    if name == "object":
        return find(inner)
    return getattr(builtins, name)(decode(inner, find)) if name in PARTS else None


class Peer:
    """The tests' end of the pipes; raises Gone from the first failure on.

    Args:
        source, sink: open files. call_s, answer_s: limits for one answer and for all, in seconds.
    """

    def __init__(self, source: Any, sink: Any, call_s: float, answer_s: float) -> None:
        self.source, self.sink = source, sink
        self.call_s, self.ends_at, self.gone = call_s, time.monotonic() + answer_s, False
        self.proxies: dict[int, Proxy] = {}
        signal.signal(signal.SIGALRM, self.stop)

    def stop(self, *_: Any) -> None:
        self.gone = True
        raise Gone

    def ask(self, operation: str, *given: Any) -> Any:
        """What the code's process answers; raises what the operation raised there."""
        message = json.dumps(encode([operation, *given], number_of_proxy)).encode()
        left_s = min(self.call_s, self.ends_at - time.monotonic())
        if self.gone or left_s <= 0:
            self.stop()
        signal.setitimer(signal.ITIMER_REAL, left_s)
        try:
            self.sink.write(message + b"\n")
            self.sink.flush()
            outcome, *found = decode(json.loads(self.source.readline(LONGEST)), self.proxy)
        except Exception:
            self.stop()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if outcome == "value":
            return found[0]
        raise named_error(*found)

    def proxy(self, number: int) -> Proxy:
        return self.proxies.setdefault(number, Proxy(self, number))


def number_of_proxy(value: Any) -> int:
    if isinstance(value, Proxy):
        return value._number_
    raise Broken(
        f"they hand the code an object of {type(value).__name__}; it takes plain values and objects of its own, no "
        "functions"
    )


def named_error(names: list[str], text: str) -> Exception:
    """A builtin exception of the first of `names` that there is."""
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            with suppress(TypeError):
                return kind(text)
    return RuntimeError(text)


def asks(operation: str, compares: bool = False) -> Any:
    def ask(self: Proxy, *given: Any) -> Any:
        if compares and not isinstance(given[0], Proxy):
            return NotImplemented
        return self._peer_.ask(operation, self, *given)

    return ask


class Proxy:
    """An object of the code's. It is never compared with a plain value, which is often the expected one, where the code
    is: the two are unequal."""

    __slots__ = ("_number_", "_peer_")

    def __init__(self, peer: Peer, number: int) -> None:
        self._peer_, self._number_ = peer, number

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._peer_.ask("call", self, args, named)

    def __hash__(self) -> int:
        return hash(self._number_)

    __getattr__, __getitem__, __len__ = asks("getattr"), asks("getitem"), asks("len")
    __iter__, __next__, __bool__ = asks("iter"), asks("next"), asks("bool")
    __str__, __repr__ = asks("str"), asks("repr")
    __eq__, __lt__, __le__ = (asks(name, compares=True) for name in ("eq", "lt", "le"))


def judge(peer: Peer, row: dict[str, Any]) -> float:
    """1.0 if all asserts that ran hold, at least one ran and no statement raised; else the share that holds."""
    marks: list[bool] = []
    space: dict[str, Any] = {"__name__": "__main__", "_mark_": lambda holds: marks.append(bool(holds))}
    try:
        peer.ask("run", row["code"])
        for name in row["names"]:
            with suppress(AttributeError):
                space[name] = getattr(peer.proxy(0), name)
    except Exception:
        return 0.0
    for statement in row["statements"]:
        before = len(marks)
        try:
            exec(compile(statement, "tests.py", "exec"), space)
        except Broken:
            raise
        except BaseException:
            marks[before:] = [False]  # a loop that was cut short says nothing of its other rounds
    if marks and all(marks) and not peer.gone:
        return 1.0
    return sum(marks) / max(row["asserts"], len(marks), sum(marks) + 1)


def module(name: str) -> types.ModuleType:
    sys.modules[name] = types.ModuleType(name)  # dataclasses and pickle look there
    return sys.modules[name]


def run_candidate(settings: dict[str, Any], source: int, sink: int) -> None:
    """Run the code that the tests' process sends, then do what that asks of it, until it ends."""
    objects: list[Any] = [module("solution")]
    numbers: dict[int, int] = {}

    def number_of(value: Any) -> int:
        number = numbers.setdefault(id(value), len(objects))
        if number == len(objects):
            objects.append(value)  # kept, so that no other object gets its id
        return number

    operations: dict[str, Callable[..., Any]] = {
        **vars(builtins),
        **vars(operator),
        "call": lambda function, args, named: function(*args, **named),
        "run": lambda code: exec(compile(code, "solution.py", "exec"), vars(objects[0])),
    }
    with open(source, "rb") as asked, open(sink, "wb") as answers:
        for line in asked:
            try:
                operation, *given = decode(json.loads(line), objects.__getitem__)
                answer = json.dumps(["value", encode(operations[operation](*given), number_of)])
            except BaseException as error:
                text = "without a text"
                with suppress(BaseException):
                    text = str(error)[:1000]
                answer = json.dumps(["error", [kind.__name__ for kind in type(error).__mro__], text])
            answers.write(answer.encode() + b"\n")
            answers.flush()


def run_tests(settings: dict[str, Any], source: int, sink: int) -> None:
    """Judge the code as standard input says, and write the verdict."""
    with open(source, "rb") as given:
        row = json.load(given)
    read, write = settings["link"]
    verdict: dict[str, Any] = {}
    with open(read, "rb") as answers, open(write, "wb") as asked:
        try:
            verdict["value"] = judge(Peer(answers, asked, row["call_s"], row["answer_s"]), row)
        except Broken as error:
            verdict["broken"] = str(error)
        os.write(sink, json.dumps(verdict).encode())
        os._exit(0)


def run_program(length: int) -> None:
    """Run the first `length` bytes of standard input as a program that reads the rest."""
    text = b""
    while len(text) < length:
        text += os.read(0, length - len(text))
    exec(compile(text, "solution.py", "exec"), vars(module("__main__")))


def probe() -> None:
    """Raise unless the jail holds: nothing of the machine's to see, no process, no network, no file."""
    import socket

    seen = [path for path in ("/etc/passwd", "/proc/self", "/sys/kernel", "/dev/null") if os.path.exists(path)]
    attempts: dict[str, Callable[[], Any]] = {"fork": os.fork, "socket": socket.socket, "mkdir": lambda: os.mkdir("/a")}
    for what, attempt in attempts.items():
        with suppress(OSError):
            attempt()
            seen.append(what)
    if seen:
        raise OSError(f"the jail allows {', '.join(seen)}")


def main() -> None:
    settings = json.loads(sys.argv.pop())
    if settings["root"]:
        enter_root(**settings["root"])
    lock(settings["memory_mb"], settings["cpu_s"])
    if settings["role"] == "probe":
        probe()
    os.write(2, b"ready\n")
    os.dup2(settings["null"], 2)
    if settings["role"] == "program":
        run_program(settings["length"])
    elif settings["role"] != "probe":
        ends = os.dup(0), os.dup(1)
        for end in (0, 1):
            os.dup2(settings["null"], end)
        {"candidate": run_candidate, "tests": run_tests}[settings["role"]](settings, *ends)
        os._exit(0)


if __name__ == "__main__":
    main()
