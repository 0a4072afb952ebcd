"""What runs inside the jail of `code_reward`, and what locks it. Standard library only."""

from __future__ import annotations

import builtins
import ctypes
import io
import json
import os
import resource
import shutil
import signal
import struct
import sys
import time
import types
from contextlib import suppress

from rloo_kit.graders.crossing import LONGEST, CodeEnd
from rloo_kit.graders.mirrors import TestsEnd, cpu_s, is_idle, is_late, judge, judge_code

TYPE_CHECKING = False  # typing takes a tenth of the start
if TYPE_CHECKING:
    from typing import Any

MAY, ERROR, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x00050000, 0x80000000, 1, 38  # what a filter of system calls returns
AUDIT_X86_64, CLONE, CLONE3, CLONE_THREAD, FCNTL = 0xC000003E, 56, 435, 0x00010000, 72
# What makes or replaces a process (fork, vfork, execve), reaches another one (kill, ptrace, pidfd, process_vm, shmget),
# or asks the kernel for more than Python needs (socket, mount, unshare, bpf, keyctl, io_uring, memfd, userfaultfd).
REFUSED = (
    *(155, 166, 165, 59, 322, 41, 101, 310, 311, 161, 272, 308, 321, 248, 249, 250, 298, 323, 304, 319, 29, 68, 64),
    *(240, 175, 313, 246, 62, 200, 234, 129, 297, 57, 58, *range(424, 435), 438, 442, 447),
)
LIBC = ctypes.CDLL(None, use_errno=True)
# Modules that programs import, loaded once and not for each test.
LOADED = "bisect collections copy datetime decimal fractions functools heapq itertools math numpy operator re string"


def check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def limit(memory_mb: int, cpu_s: int) -> None:
    """Limits of this process and of each that it forks."""
    most = {"AS": memory_mb * 2**20, "CPU": cpu_s, "FSIZE": LONGEST, "NOFILE": 64, "CORE": 0, "STACK": 2**26}
    if tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (5, 14):  # from then on of a namespace alone
        most["NPROC"] = 64
    for name, value in most.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        resource.setrlimit(number, (value if hard == resource.RLIM_INFINITY else min(value, hard),) * 2)


def lock() -> None:
    """No capabilities and a filter of system calls, for good."""
    check(LIBC.capset(struct.pack("II", 0x20080522, 0), bytes(24)), "capset")
    check(LIBC.prctl(38, 1, 0, 0, 0), "no_new_privs")
    rules = [(0x20, 0, 0, 4), (0x15, 1, 0, AUDIT_X86_64), (0x06, 0, 0, KILL), (0x20, 0, 0, 0)]
    rules += [(0x35, 0, 1, 0x40000000), (0x06, 0, 0, KILL), (0x15, 0, 1, CLONE3), (0x06, 0, 0, ERROR | ENOSYS)]  # x32
    for number in REFUSED:
        rules += [(0x15, 0, 1, number), (0x06, 0, 0, ERROR | EPERM)]
    # Of fcntl F_SETOWN, F_SETSIG and F_SETOWN_EX, which send signals to another process.
    rules += [(0x15, 0, 6, FCNTL), (0x20, 0, 0, 24), (0x15, 2, 0, 8), (0x15, 1, 0, 10)]
    rules += [(0x15, 0, 1, 15), (0x06, 0, 0, ERROR | EPERM), (0x20, 0, 0, 0)]
    rules += [(0x15, 0, 3, CLONE), (0x20, 0, 0, 16), (0x45, 1, 0, CLONE_THREAD), (0x06, 0, 0, ERROR | EPERM)]
    text = b"".join(struct.pack("HBBI", *rule) for rule in [*rules, (0x06, 0, 0, MAY)])
    program = ctypes.create_string_buffer(text)
    check(LIBC.prctl(22, 2, struct.pack("HxxxxxxQ", len(text) // 8, ctypes.addressof(program)), 0, 0), "seccomp")


def become(stdin: int, stdout: int, *kept: int) -> None:
    """Give a forked process its ends, close what else is open, and lock it."""
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    for end in {*range(3, 64)} - {*kept}:
        with suppress(OSError):
            os.close(end)
    lock()


def files(source: int, sink: int) -> tuple[Any, Any]:
    return open(source, "rb", closefd=False), open(sink, "wb", closefd=False)


def python_module(name: str) -> types.ModuleType:
    """A module for the code, in a process that has what `python FILE` has."""
    sys.argv, sys.modules[name] = ["solution.py"], types.ModuleType(name)  # dataclasses and pickle look there
    quitter = __import__("_sitebuiltins").Quitter
    builtins.exit, builtins.quit = quitter("exit", "Ctrl-D"), quitter("quit", "Ctrl-D")

    def open_file(file: Any, *given: Any, real: Any = open, **named: Any) -> Any:
        return real(os.dup(0) if str(file) in ("/dev/stdin", "/dev/fd/0") else file, *given, **named)

    builtins.open = io.open = open_file
    return sys.modules[name]


def run_asserts(null: int, call_s: float, answer_s: float) -> None:
    """Write the verdict on a row, which comes by standard input once the code's process is another one."""
    code_in, tests_out = os.pipe()
    tests_in, code_out = os.pipe()
    if not (pid := os.fork()):
        become(null, null, code_in, code_out)
        link = CodeEnd(*files(code_in, code_out), python_module("solution"))
        with suppress(ValueError):  # the tests have ended
            while True:
                link.answer(*link.receive()[1:])
        os._exit(0)
    verdict = os.dup(1)
    os.close(code_in)
    os.close(code_out)
    lock()
    row = json.load(sys.stdin)
    os.dup2(null, 1)
    peer = TestsEnd(*files(tests_in, tests_out), pid, call_s, answer_s)
    os.write(verdict, json.dumps(judge_code(peer, row)).encode())


def run_plain(null: int, call_s: float, answer_s: float) -> None:
    """Write the verdict of plain Python: code and tests in one process, where the code can do with both as it likes."""
    lock()
    row, verdict, solution = json.load(sys.stdin), os.dup(1), python_module("solution")
    os.dup2(null, 1)
    with suppress(Exception, SystemExit):
        exec(compile(row["code"], "solution.py", "exec"), vars(solution))
        space = {name: getattr(solution, name) for name in row["names"] if hasattr(solution, name)}
        value = judge({"solution": solution} | space | {"__name__": "__main__"}, row)
        os.write(verdict, json.dumps({"value": value}).encode())
        os._exit(0)


def run_programs(null: int, call_s: float, answer_s: float) -> None:
    """Write for each input the status of a process of its own that ran the program, and the digest of its output."""
    text = read_block()
    for name in LOADED.split():
        if name.encode() in text:
            with suppress(ImportError):
                __import__(name)
    code: Any = text
    with suppress(Exception):  # else each process fails
        code = compile(text, "solution.py", "exec")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while given := read_block():
        stdin, stdout = os.memfd_create("input"), os.memfd_create("output")
        os.write(stdin, given[1:])
        os.lseek(stdin, 0, os.SEEK_SET)
        if not (pid := os.fork()):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            become(stdin, stdout)
            sys.stdin, sys.stdout = (io.TextIOWrapper(file, "utf-8", "surrogateescape") for file in files(0, 1))
            exec(code, vars(python_module("__main__")))
            return
        started, ended = time.monotonic(), 0
        while not ended:
            signal.sigtimedwait({signal.SIGCHLD}, 0.02)
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            waited = time.monotonic() - started
            if not ended and is_late(cpu_s(pid), waited, min(call_s, answer_s)):
                os.kill(pid, signal.SIGKILL)
        used = usage.ru_utime + usage.ru_stime
        answer_s -= waited if is_idle(used, waited) else used
        os.lseek(stdout, 0, os.SEEK_SET)
        with open(stdout, "rb") as output:
            os.write(1, f"{status} {digest_output(output.read())}\n".encode())
        os.close(stdin)
        shutil.rmtree("/tmp", ignore_errors=True)  # all but itself, a mount; bubblewrap before 0.7 gives none


def read_block() -> bytes:
    """What comes next by standard input, and no more: a length, and as many bytes; empty at the end."""
    header, text = os.read(0, 1), b""
    while header and not header.endswith(b"\n"):
        header += os.read(0, 1)
    while header and len(text) < int(header):
        text += os.read(0, int(header) - len(text))
    return text


def digest_output(text: bytes) -> str:
    """Of what a program prints, without blanks at the ends of lines and empty lines at the end."""
    import hashlib

    lines = [line.rstrip() for line in text.decode(errors="replace").rstrip().splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def probe(null: int, call_s: float, answer_s: float) -> None:
    """Raise unless the jail holds: nothing of the machine's to see, no process, no network, no file."""
    import socket

    if os.uname().machine != "x86_64":
        raise OSError(f"it locks system calls of x86_64 only, and this is {os.uname().machine}")
    lock()
    seen = [path for path in ("/etc/passwd", "/proc/self", "/sys/kernel", "/dev/null") if os.path.exists(path)]
    attempts: dict[str, Any] = {"fork": os.fork, "socket": socket.socket, "mkdir": lambda: os.mkdir("/a")}
    for name, attempt in attempts.items():
        with suppress(OSError):
            attempt()
            seen.append(name)
    if seen:
        raise OSError(f"the jail allows {', '.join(seen)}")
    os.write(2, b"ready\n")


ROLES = {"asserts": run_asserts, "plain": run_plain, "programs": run_programs, "probe": probe}


def main() -> None:
    settings = json.loads(sys.argv.pop())
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy would reserve more memory than there is
    limit(settings["memory_mb"], settings["cpu_s"])
    null, role = settings["null"], ROLES[settings["role"]]
    for number in (signal.SIGIO, signal.SIGURG):  # which the code's process may send
        signal.signal(number, signal.SIG_IGN)
    if role is not probe:
        os.write(2, b"ready\n")
        os.dup2(null, 2)
    role(null, settings["call_s"], settings["answer_s"])
