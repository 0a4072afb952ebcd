"""Rewards that do harm for the completion "bad" and give 1.0 for any other; loaded by name, as a config names them."""

import atexit
import contextlib
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time


def harm(function):
    """A reward that calls `function(columns)` for the completion "bad"; what that returns, if anything, is returned."""

    def reward(completions, **columns):
        found = function(columns) if "bad" in completions else None
        return [1.0 for _ in completions] if found is None else found

    reward.__name__ = function.__name__
    return reward


def fork_detached(then=lambda: time.sleep(600)):
    """A grandchild in its own session, which keeps every file descriptor of the worker open."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with contextlib.suppress(BaseException):
                then()
        os._exit(0)
    os.wait()


def write_to_replies(payload):
    """Into all of the worker's sockets, one of which is the one of the replies."""
    for number in range(3, 64):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                os.write(number, payload)


def frame(payload):
    return struct.pack("!i", len(payload)) + payload


@harm
def detached_and_hangs(columns):
    fork_detached()
    time.sleep(600)


@harm
def detached_and_exits(columns):
    fork_detached()
    os._exit(7)


@harm
def detached_and_goes_on(columns):
    fork_detached()


@harm
def clean_children_without_end(columns):
    """Goes on starting such children, which show `columns["path"]` in their command line, until it is killed."""
    while True:
        subprocess.Popen([columns["path"], "600"], executable=shutil.which("sleep"), env={}, start_new_session=True)
        time.sleep(0.01)


@harm
def stops_itself(columns):
    os.kill(os.getpid(), signal.SIGSTOP)


@harm
def stops_later_detached(columns):
    fork_detached()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()


@harm
def calls_exit(columns):
    sys.exit("enough")


@harm
def raises_interrupt(columns):
    raise KeyboardInterrupt


@harm
def forks_and_both_return(columns):
    if os.fork():
        os.wait()


@harm
def aborts(columns):
    os.abort()


@harm
def closes_every_file(columns):
    os.closerange(0, 256)


@harm
def writes_to_descriptor_1(columns):
    os.write(1, b"\x00\xff" * 4096)


@harm
def part_of_a_reply(columns):
    write_to_replies(struct.pack("!i", 100) + b"{")
    time.sleep(600)


@harm
def extra_reply(columns):
    """After the reward's own: what the next call would read as its result."""
    threading.Timer(0.2, write_to_replies, [frame(b"[null, [[9.0], []]]")]).start()


class RunsCode:
    def __reduce__(self):
        return os.mkdir, (self.path,)


@harm
def forged_pickle(columns):
    """What ran code in the run's own process as long as replies were pickles."""
    forged = RunsCode()
    forged.path = columns["path"]
    write_to_replies(frame(pickle.dumps(("value", forged))))


@harm
def a_megabyte_of_error(columns):
    raise ValueError("x" * 1_000_000 + "\ud800")


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@harm
def an_error_without_a_text(columns):
    raise Speechless


@harm
def logs_too_much(columns):
    columns["log_extra"]("text", ["x" * 20_000_000])


@harm
def logs_what_is_no_number(columns):
    columns["log_metric"]("length", "long")


@harm
def changes_folder(columns):
    os.chdir("/")


@harm
def sets_an_alarm(columns):
    def ring(number, frame):
        raise TimeoutError("rang")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.2)


@harm
def ignores_signals(columns):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(600)


@harm
def hangs_at_exit(columns):
    atexit.register(time.sleep, 600)


@harm
def returns_odd_numbers(columns):
    return [5e-324, -0.0, 1.7976931348623157e308, 0.1 + 0.2, 1 / 3, None, float("nan"), float("-inf")]


LEAK = []


@harm
def leaks(columns):
    LEAK.append(bytearray(os.urandom(1) * 40_000_000))


@harm
def asks_for_all_memory(columns):
    return [bytearray(1 << 60)]


@harm
def deletes_the_folder(columns):
    shutil.rmtree(columns["path"])


def environment(completions, log_extra, **columns):
    log_extra("names", sorted(os.environ))
    log_extra("values", [os.environ[name] for name in sorted(os.environ)])
    return [1.0 for _ in completions]
