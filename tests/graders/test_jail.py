"""Attacks on the jail of `code_reward`, judged by their effects."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rloo_kit.errors import RewardError
from rloo_kit.graders import code as code_module
from rloo_kit.graders.code import CodeReward, Jail, bubblewrap, find_jail

SECRET = "swordfish-70417"
ANSWER = 6174309582
MARK = 509  # memory_mb of these tests, to find their processes by
HONEST = f"def f():\n    return {ANSWER}\n"
TESTS = [f"assert f() == {ANSWER}"]


# A role for tests alone: it runs a program in a locked process and shows what it prints.
SHOWN = """
def show(null, *limits):
    text = jailed.read_block()
    jailed.become(0, 1)
    exec(compile(text, "solution.py", "exec"), vars(jailed.python_module("__main__")))
jailed.ROLES["shown"] = show
"""


@contextmanager
def program(jail: Jail, code: str, output: Any = subprocess.PIPE, **settings: Any) -> Iterator[Any]:
    """The process of a program, which has been given its code."""
    before, main, after = code_module.BOOT.rpartition("jailed.main()")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code_module, "BOOT", before + SHOWN + main + after)
        with jail.start("shown", subprocess.PIPE, output, **{"memory_mb": MARK, "cpu_s": 3} | settings) as process:
            process.stdin.write(f"{len(code.encode())}\n{code}".encode())
            process.stdin.flush()
            yield process


def printed(jail: Jail, code: str) -> str:
    """What a program prints in the jail, its exceptions included."""
    tried = f"try:\n{textwrap.indent(code, '    ')}\n"
    with program(jail, f"{tried}except BaseException as error: print(type(error).__name__, error)") as process:
        return str(process.communicate(timeout=30)[0].decode())


def score(jail: Jail, code: str, *tests: Any, **limits: Any) -> float | None:
    """The reward of a completion that is all code."""
    reward = CodeReward(thinking=False, memory_mb=MARK, **limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code_module, "find_jail", lambda: jail)
        return reward(completions=[code], completion_ids=[[1]], tests=[list(tests or TESTS)])[0]


def bare(code: str) -> str:
    """What the same code prints without a jail."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30).stdout


def jails() -> list[int]:
    """The processes of these tests' jails."""
    processes = [
        process
        for process in psutil.process_iter(["cmdline"])
        if f'"memory_mb": {MARK}' in str(process.info["cmdline"])
    ]
    return [process.pid for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def left() -> list[int]:
    """Those that still run after the kernel has had time to end them."""
    until = time.monotonic() + 10
    while (running := jails()) and time.monotonic() < until:
        time.sleep(0.05)
    return running


def fork_bomb(jail: Jail, place: Path) -> None:
    """`os.fork` and `vfork` in a loop, `subprocess`, `multiprocessing`, `posix_spawn`, `clone` without threads"""
    text = printed(
        jail,
        "import os, sys, ctypes, subprocess, multiprocessing\n"
        "def spawn(): return os.posix_spawn(sys.executable or '/bin/sh', ['x'], {})\n"
        "def run(): return subprocess.run([sys.executable, '-c', ''])\n"
        "def work():\n    one = multiprocessing.Process(target=print)\n    one.start()\n"
        "libc, made = ctypes.CDLL(None, use_errno=True), 0\n"
        "def raw(*args):\n    if libc.syscall(*args) < 0: raise OSError(ctypes.get_errno(), 'syscall')\n"
        "numbers = [(56, 17, 0), (57,), (58,), (435, 0, 0)]\n"
        "calls = [os.fork, os.forkpty, spawn, run, work, *[lambda n=n: raw(*n) for n in numbers]]\n"
        "for call in calls * 20:\n"
        "    try: call(); made += 1\n"
        "    except (OSError, ImportError): pass\n"
        "print('made', made)",
    )
    assert text == "made 0\n", text


def sockets(jail: Jail, place: Path) -> None:
    """connecting to a listener on this machine, by address and by a Unix socket's name"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}))\nprint('connected')"
        assert bare(code) == "connected\n"
        server.accept()[0].close()
        assert "PermissionError" in printed(jail, code)
        with pytest.raises(TimeoutError):
            server.accept()
    for kind in ("AF_UNIX", "AF_NETLINK, socket.SOCK_RAW"):
        assert "PermissionError" in printed(jail, f"import socket\nsocket.socket(socket.{kind})")


def proc(jail: Jail, place: Path) -> None:
    """`/proc` of this and of every other process, their environments, `/sys`, `/dev`"""
    code = (
        "import glob\nfor path in glob.glob('/proc/*/environ') + glob.glob('/proc/self/*') + glob.glob('/sys/*'):\n"
        "    try: print(path, open(path, errors='replace').read())\n"
        "    except OSError as error: print(path)\n"
        "import os\nprint(sorted(os.listdir('/')), dict(os.environ))"
    )
    os.environ["CODE_REWARD_SECRET"] = SECRET
    try:
        text = printed(jail, code)
        assert SECRET in bare(code)
    finally:
        del os.environ["CODE_REWARD_SECRET"]
    assert SECRET not in text and "/proc/" not in text and "/sys/" not in text
    assert not {"proc", "sys", "dev", "home", "work"} & set(eval(text.splitlines()[-1].partition("]")[0] + "]"))


def writing_outside(jail: Jail, place: Path) -> None:
    """writing to a folder of this machine, to `/`, the standard library; `memfd`, remounting; 1 GB to its own `/tmp`"""
    targets = [str(place / "made"), "/made", "/usr/lib/made", os.__file__, "/packages/made"]
    before = Path(os.__file__).stat().st_mtime_ns
    text = printed(
        jail,
        f"import os, ctypes\nfor path in {targets}:\n"
        "    try: open(path, 'a').write('#'); print('wrote', path)\n"
        "    except OSError: pass\n"
        "try: os.memfd_create('x'); print('memfd')\n"
        "except OSError: pass\n"
        "for flags in (32, 4096, 0):\n"
        "    if ctypes.CDLL(None).mount(b'x', b'/', b'tmpfs', flags, None) == 0: print('mounted')\n"
        "print('end')",
    )
    assert text == "end\n" and not (place / "made").exists() and Path(os.__file__).stat().st_mtime_ns == before
    fill = (
        "for n in range(64):\n    try: open(str(n), 'wb').write(bytes(2**24))\n    except OSError as e: print(e.errno)"
    )
    if "--size" in jail.command:
        assert "28" in printed(jail, fill) and printed(jail, "import os; print(os.listdir('/tmp'))") == "[]\n"


def kill_parent(jail: Jail, place: Path) -> None:
    """SIGKILL to the parent, the group, everything, the run's process id"""
    code = (
        f"import os\nfor pid in (os.getppid(), 0, 1, {os.getpid()}, {os.getppid()}, -1):\n"
        "    try: os.kill(pid, 9)\n"
        "    except OSError: pass\n" + HONEST
    )
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert score(jail, code.replace("(os.getppid()", f"({bystander.pid}, os.getppid()")) in (0.0, 1.0)
    assert bystander.poll() is None, "another process of this user was killed"
    bystander.kill()
    bystander.wait()
    assert score(jail, HONEST) == 1.0


def much_output(jail: Jail, place: Path) -> None:
    """1 GB printed by a program, 1 GB returned by a function, 1 GB printed by one"""
    endless = "import sys\nfor _ in range(1024):\n    sys.stdout.write('x' * 2**20)\n"
    with tempfile.TemporaryFile() as output:
        with program(jail, endless, output, cpu_s=5) as process:
            process.communicate(timeout=30)
        assert os.fstat(output.fileno()).st_size <= 16 * 2**20 and process.returncode != 0
    before = psutil.Process().memory_info().rss
    assert score(jail, endless, {"input": "", "output": "x"}) == 0.0
    assert score(jail, "def f(): return 'x' * 10**9") == 0.0
    assert score(jail, "def f(): return 'x' * 10**8") == 0.0
    assert score(jail, "import os\n" + HONEST.replace("return", "os.write(1, b'x' * 10**8) * 10; return")) == 1.0
    assert psutil.Process().memory_info().rss - before < 200 * 2**20


def reading_outside(jail: Jail, place: Path) -> None:
    """a file by its path, by links and by `..`, every file that a walk from `/` finds, `chroot`, the old root folder"""
    (place / ".env").write_text(SECRET, encoding="utf-8")
    target = str(place / ".env")
    code = (
        f"import os\ntry: os.symlink({target!r}, '/tmp/link')\nexcept OSError: pass\n"
        f"for way in ('', '/usr/lib/../..', '/lib/../../../..', '../..'):\n"
        f"    try: print(open(way + {target!r}).read())\n"
        "    except OSError: pass\n"
        "try: print(open('/tmp/link').read())\nexcept OSError: print('missing')\n"
        "for top, folders, files in os.walk('/'):\n"
        "    for name in files:\n"
        "        if name == '.env' or name.endswith(('.jsonl', '.safetensors')): print(os.path.join(top, name))\n"
        "for call in (os.chroot, lambda path: os.fchdir(os.open(path, 0))):\n"
        "    try: call('..'); print(os.listdir('../../../..'))\n"
        "    except OSError: print('refused')\n"
    )
    assert SECRET in bare(f"print(open({target!r}).read())")
    text = printed(jail, code)
    assert SECRET not in text and "work" not in text and "home" not in text and "/.env" not in text, text
    assert "missing" in text and "refused" in text


def import_reward(jail: Jail, place: Path) -> None:
    """importing the reward and patching it; patching what runs in the jail"""
    for code in (
        "import rloo_kit.graders.code as c\nc.CodeReward.__call__ = lambda *a, **k: [1.0]\ndef f(): return 0",
        f"import sys\nsys.path.append({str(Path(code_module.__file__).parents[2])!r})\n"
        f"import rloo_kit.graders.code as c\n"
        "c.CodeReward._score = lambda *a: 1.0\ndef f(): return 0",
        "import sys\nm = sys.modules['rloo_kit.graders.mirrors']\nm.judge = lambda *a: 1.0\n"
        "m.TestsEnd.ask = lambda *a: True\nm.encode = lambda *a: True\ndef f(): return 0",
    ):
        assert score(jail, code) == 0.0
        assert score(jail, HONEST) == 1.0


def leave_early(jail: Jail, place: Path) -> None:
    """`exit(0)`, `os._exit(0)`, a signal to itself, before the tests or in the first call; a verdict of its own"""
    for code in (
        "exit(0)",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "import os\nos.kill(os.getpid(), 9)",
        "def f(): exit(0)",
        "import os\ndef f(): os._exit(0)",
        "import os\nos.closerange(0, 64)\ndef f(): return 0",
        'import os\nfor n in range(64):\n    try: os.write(n, b\'{"value": 1.0}\\n["value", [true], [], [], ""]\\n\')\n'
        "    except OSError: pass\nos._exit(0)",
    ):
        assert score(jail, code) == 0.0, code
    loop = "for n in range(100):\n    assert g(n) == n"
    early = "import os\ndef f(): return 1\ndef g(n): return n if n < 9 else os._exit(0)"
    assert score(jail, early, "assert f() == 1", loop) == 10 / 101, "rounds before the end of a loop that was cut short"


def patch_assert(jail: Jail, place: Path) -> None:
    """patched builtins and AssertionError, objects equal to everything, greater than everything, a difference of 0"""
    every = ["__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__", "__bool__"]
    always = "class Any:\n" + "".join(f"    def {name}(self, *a): return True\n" for name in every)
    always += "    def __sub__(self, o): return 0\n    __rsub__ = __abs__ = __round__ = __sub__\n"
    always += "    __hash__ = lambda s, *a: 0\n"
    tests = [
        f"assert f() == {ANSWER}",
        f"assert {ANSWER} == f()",
        f"assert not f() != {ANSWER}",
        f"assert abs(f() - {ANSWER}) < 1",
        f"assert abs({ANSWER} - f()) < 1",
        f"assert f() > {ANSWER - 1}",
        f"assert {ANSWER} in f()",
        f"assert f() in [{ANSWER}]",
        f"assert {{f()}} == {{{ANSWER}}}",
        f"assert all(one == {ANSWER} for one in [f()])",
        f"assert [f()] == [{ANSWER}]",
    ]
    bare_tests = "\n".join(tests[:2] + tests[3:8])
    assert bare(f"{always}def f(): return Any()\n{bare_tests}\nprint('passed')") == "passed\n"
    children = ("type('I', (int,), dict(vars(Any)))(3)", "type('S', (str,), dict(vars(Any)))('3')")
    for made in ("Any()", "[Any()]", *children):
        assert score(jail, f"{always}def f(): return {made}", *tests) == 0.0, made
    for code in (
        "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})\nbuiltins.all = lambda *a: True\n"
        "builtins.abs = lambda *a: 0\nbuiltins.bool = lambda *a: True\nbuiltins.isinstance = lambda *a: True",
        "def all(*a): return True\nabs = set = list = all\n_mark_ = lambda *a: None\ndef check(*a): return True",
        "import sys\nsys.settrace(lambda *a: None)\nsys.excepthook = print\nException = BaseException",
    ):
        assert score(jail, f"{code}\ndef f(): return 0", *tests) == 0.0, code


def read_answers(jail: Jail, place: Path) -> None:
    """the expected value in frames, `gc`, `sys.argv`, open files and pipes, modules and memory"""
    hunt = (
        "import gc, re, sys, os\n"
        "def seen():\n"
        "    frame, found = sys._getframe(), []\n"
        "    while frame: found += [frame.f_locals, frame.f_globals, frame.f_code.co_consts]; frame = frame.f_back\n"
        "    found += [sys.argv, sys.orig_argv, dict(os.environ), gc.get_objects()]\n"
        "    for fd in [fd for fd in range(64) if fd > 2]:\n"
        "        try: os.set_blocking(fd, False); found.append(os.read(fd, 10**6))\n"
        "        except OSError: pass\n"
        "    for one in list(sys.modules.values()): found.append(getattr(one, '__dict__', {}))\n"
        "    return repr(found)\n"
        "def f():\n"
        "    for number in re.findall(r'\\b\\d{10}\\b', seen()):\n"
        "        if number.startswith('6174') and number.endswith('9582'): return int(number)\n"
    )
    assert bare(f"tests = {TESTS!r}\n{hunt}exec(tests[0])\nprint('passed')") == "passed\n"
    assert score(jail, hunt) == 0.0
    assert score(jail, hunt + "found = f()\ndef f(): return found\n") == 0.0


def memory(jail: Jail, place: Path) -> None:
    """8 GB in one piece, and in small ones, of memory that is kept"""
    assert printed(jail, "bytearray(8 * 2**30)").startswith("MemoryError")
    assert printed(jail, "kept = []\nwhile True: kept.append(bytearray(10**6))").startswith("MemoryError")
    assert score(jail, "kept = []\nwhile True: kept.append('x' * 10**6)") == 0.0
    assert score(jail, "def f():\n    x = []\n    for _ in range(10**5): x = [x]\n    return x") == 0.0


def endless_loop(jail: Jail, place: Path) -> None:
    """a loop that catches everything, also in one call; a sleep; a regular expression that backtracks for ever"""
    limits = {"test_timeout_s": 0.3, "answer_timeout_s": 1.0}
    for code in (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "import time\ntime.sleep(1000)",
        "import re\nre.match('(a*)*b', 'a' * 60)",
        "def f():\n    while True: pass",
        "import itertools\ndef f(): return itertools.count()",
        "class A:\n    def __repr__(s):\n        while 1: pass\ndef f(): return A()",
    ):
        assert score(jail, code, f"assert str(f()) == str({ANSWER})", f"assert {ANSWER} in f()", **limits) == 0.0, code


def thread_bomb(jail: Jail, place: Path) -> None:
    """threads with small stacks without end"""
    code = (
        "import threading, time\nthreading.stack_size(32768)\n"
        "while True:\n    threading.Thread(target=time.sleep, args=(100,)).start()\n    print(flush=True)"
    )
    with tempfile.TemporaryFile() as output:
        with program(jail, code, output) as process, suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=5)
        count = os.fstat(output.fileno()).st_size
    assert 0 < count < (20_000 if os.getuid() == 0 else 64)


def escapes(jail: Jail, place: Path) -> None:
    """`unshare`, `setns`, `mount`, `ptrace`, `keyctl`, `bpf`, `io_uring`, `execve`, 32-bit calls, raising the limits"""
    text = printed(
        jail,
        "import ctypes, os, resource\nlibc, refused = ctypes.CDLL(None, use_errno=True), 0\n"
        "x86 = [272, 308, 165, 161, 101, 250, 321, 425, 59, 322, 41, 310, 298, 323, 304, 29, 155, 428, 442, 434]\n"
        "for number in x86:\n"
        "    refused += libc.syscall(number, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 1\n"
        "print(refused, len(x86))\n"
        "try: resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n"
        "except (OSError, ValueError): print('limits stay')\n"
        "print(os.uname().nodename)",
    )
    assert text == "20 20\nlimits stay\njail\n", text
    with program(jail, "import ctypes\nprint(ctypes.CDLL(None).syscall(0x40000000 + 39))") as process:
        assert process.communicate(timeout=30)[0] == b"" and process.returncode != 0


THREE = ["assert f(1) == 11", "assert f(2) == 22", "assert f(3) == 33"]
LINK = "import gc, json\ndef link(): return next(one for one in gc.get_objects() if type(one).__name__ == 'CodeEnd')\n"


def forge_messages(jail: Jail, place: Path) -> None:
    """messages of its own on the pipe: values in advance, exceptions that are functions, changes, classes, questions"""
    lines = [
        ["value", [True], [], [], ""],
        ["value", [{"error": ["exec", "import os; os.write(3, b'{}')"]}], [], [], ""],
        ["value", [{"shared": "os.system"}], [], [], ""],
        ["value", [0], [[number, [1]] for number in range(9)], [*range(9)], ""],
        ["value", [{"object": [99, {"class": [98, "builtins", "int", [], ["__eq__"]]}, None]}], [], [], ""],
        ["value", [{"object": [99, {"class": [98, "", "X", [{"shared": "type"}], ["__eq__"]]}, None]}], [], [], ""],
        ["value", [{"same": 1}], [], [], ""],
        ["ask", ["next", {"same": 1}], [], [], ""],
        ["uncrossed", ["it"], [], [], ""],
        ["raise", [{"error": ["SystemExit", 0]}, None], [], [], ""],
        ["raise", [0, None], [], [], ""],
    ]
    for line in lines:
        sent = f"link().sink.write(json.dumps({line!r}).encode() + b'\\n'); link().sink.flush()"
        assert score(jail, f"{LINK}def f(x):\n    {sent}\n    return 0", *THREE) == 0.0, line
        assert score(jail, f"{LINK}{sent}\ndef f(x): return 0", *THREE) == 0.0, line


def objects_as_answers(jail: Jail, place: Path) -> None:
    """classes in place of functions, children of str, int, list, Counter and of metaclasses, the tested object itself,
    numpy's and a set's questions to an object"""
    always = "    def __eq__(s, o): return True\n    __hash__ = lambda s: 0\n"
    for code in (
        f"class f:\n    def __init__(s, *a): pass\n{always}",
        f"class M(type):\n{always}class f(metaclass=M):\n    def __new__(c, *a): return c",
        *(
            f"class C({kind}):\n{always}def f(x): return C()"
            for kind in ("str", "int", "float", "list", "dict", "tuple")
        ),
        "def f(x): raise StopIteration(11)",
    ):
        assert score(jail, code, *THREE) == 0.0, code
    itself = f"class Solution:\n    def __getattr__(s, n): return lambda *a: s\n{always}    items = 1\n"
    assert score(jail, itself, "s = Solution()\nassert s.pop(1) == 11\nassert s.items == 2") == 0.0
    for code, tests in (
        ("class A:\n    def __array_function__(s, *a): return True\ndef f(x): return A()", "np.allclose(f(1), [1, 2])"),
        ("class A:\n    def difference(s, o): return s\n    def __len__(s): return 0\ndef f(x): return A()",
         "not f(1).difference({11})"),
        ("class C(Counter):\n    def __getitem__(s, k): return 1\ndef f(x): return C()", "f(1) == Counter('ab')"),
    ):  # fmt: skip
        tests = f"import numpy as np\nfrom collections import Counter\nassert {tests}"
        assert score(jail, f"from collections import Counter\n{code}", tests) in (0.0, None), code


def hold_up(jail: Jail, place: Path) -> None:
    """SIGSTOP to the tests' process by `fcntl`, sleep and 1 GB of output where only plain Python decides, work that
    piles up in the tests' process"""
    freeze = (
        "import fcntl, os\nread, write = os.pipe()\nfcntl.fcntl(read, 8, os.getppid())\nfcntl.fcntl(read, 10, 19)\n"
        "fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)\nos.write(write, b'1')\n"
    )
    plain = "class A:\n    def __eq__(s, o): return s.at(o)\n    def at(s, o): return o == 11\ndef f(x): return A()\n"
    plain += "import gc\nif not [one for one in gc.get_objects() if type(one).__name__ == 'CodeEnd']:\n    "
    before, started = psutil.Process().memory_info().rss, time.monotonic()
    for code in (
        freeze + "def f(x): return 0",
        plain + "import time; time.sleep(1000)",
        plain + "import os\n    while 1: os.write(1, b'x' * 2**20); os.write(3, b'x' * 2**20)",
        "def f(x): return range(10**15)",
    ):
        tests = "assert sum(f(1)) == 11" if "range" in code else THREE[0]
        assert score(jail, code, tests, test_timeout_s=0.5, answer_timeout_s=1.0) == 0.0, code
    assert time.monotonic() - started < 60 and psutil.Process().memory_info().rss - before < 200 * 2**20


ATTACKS: list[Callable[[Jail, Path], None]] = [
    fork_bomb, sockets, proc, writing_outside, kill_parent, much_output, reading_outside, import_reward, leave_early,
    patch_assert, read_answers, memory, endless_loop, thread_bomb, escapes, forge_messages, objects_as_answers, hold_up,
]  # fmt: skip


@pytest.fixture(scope="module")
def jail() -> Jail:
    try:
        return find_jail()
    except RewardError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_attack(attack: Callable[[Jail, Path], None], jail: Jail, tmp_path: Path) -> None:
    """A policy finds what pays: each attack would be worth a reward of 1.0, or the machine, without the jail."""
    threads = threading.active_count()
    attack(jail, tmp_path)
    assert left() == [] and threading.active_count() == threads


@pytest.mark.slow
def test_nothing_is_left_of_a_run_that_was_killed(jail: Jail) -> None:
    """Code that sleeps would otherwise stay after a run that was killed, with its memory."""
    program = (
        "import sys\nfrom rloo_kit.graders import code\n"
        f"reward = code.CodeReward(thinking=False, memory_mb={MARK}, test_timeout_s=60, answer_timeout_s=60)\n"
        "reward(completions=['import time\\ntime.sleep(600)'], completion_ids=[[1]], tests=[['assert f() == 1']])\n"
    )
    runner = subprocess.Popen([sys.executable, "-c", program])
    until = time.monotonic() + 60
    while len(jails()) < 4:
        assert time.monotonic() < until and runner.poll() is None, "the jail never ran"
        time.sleep(0.05)
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    assert left() == []


def test_no_jail_is_a_refusal_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Code run without a jail because a package is missing would be the worst of all outcomes."""
    monkeypatch.setenv("PATH", str(tmp_path))
    find_jail.cache_clear()
    with pytest.raises(ValueError, match="no bwrap on PATH") as caught:
        CodeReward()
    assert "apt install bubblewrap" in str(caught.value)


def test_a_jail_that_shows_more_than_it_should_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bwrap that was wrapped, or a kernel that ignores a flag, has to be found by trying, not by its version."""
    made = bubblewrap() if code_module.shutil.which("bwrap") else pytest.skip("bwrap is not installed")
    leaky = Jail((*made.command[: made.command.index("--remount-ro")], "--bind", "/etc", "/etc", "--chdir", "/"))
    with pytest.raises(RewardError, match="allows /etc/passwd, mkdir"), leaky.start("probe", None, None):
        pass
