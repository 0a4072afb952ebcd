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


LEAK = []
detached_and_hangs = harm(lambda columns: fork_detached() or time.sleep(600))
detached_and_exits = harm(lambda columns: fork_detached() or os._exit(7))
detached_and_goes_on = harm(lambda columns: fork_detached())
stops_later_detached = harm(
    lambda columns: fork_detached() or threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
)
calls_exit = harm(lambda columns: sys.exit("enough"))
forks_and_both_return = harm(lambda columns: os.fork() and os.wait() and None or None)
aborts = harm(lambda columns: os.abort())
closes_every_file = harm(lambda columns: os.closerange(0, 256))
writes_to_descriptor_1 = harm(lambda columns: os.write(1, b"\x00\xff" * 4096) and None)
part_of_a_reply = harm(lambda columns: write_to_replies(struct.pack("!i", 100) + b"{") or time.sleep(600))
extra_reply = harm(lambda columns: threading.Timer(0.2, write_to_replies, [frame(b"[null, [[9.0], []]]")]).start())
logs_too_much = harm(lambda columns: columns["log_extra"]("text", ["x" * 20_000_000]))
logs_what_is_no_number = harm(lambda columns: columns["log_metric"]("length", "long"))
hangs_at_exit = harm(lambda columns: atexit.register(time.sleep, 600) and None)
leaks = harm(lambda columns: LEAK.append(bytearray(os.urandom(1) * 40_000_000)))
asks_for_all_memory = harm(lambda columns: [bytearray(1 << 60)])


@harm
def clean_children_without_end(columns):
    """Goes on starting such children, which show `columns["path"]` in their command line, until it is killed."""
    while True:
        subprocess.Popen([columns["path"], "600"], executable=shutil.which("sleep"), env={}, start_new_session=True)
        time.sleep(0.01)


@harm
def raises_interrupt(columns):
    raise KeyboardInterrupt


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


def environment(completions, log_extra, **columns):
    log_extra("names", sorted(os.environ))
    log_extra("values", [os.environ[name] for name in sorted(os.environ)])
    return [1.0 for _ in completions]
