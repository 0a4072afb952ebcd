"""`code_reward`: the code of a completion (`code_tests`) against the tests of its row, in a jail of bubblewrap."""

import functools
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rloo_kit.errors import RewardError, WholeBatchError, excerpt, shorten
from rloo_kit.graders import code_tests
from rloo_kit.graders.verifier import AnswerReader
from rloo_kit.rewards._binding import check_int, check_positive
from rloo_kit.system.processes import say

NO_JAIL = (
    "code_reward runs code in a jail of bubblewrap only, and it does not work here: {}\nInstall it with apt install "
    "bubblewrap. A container has to allow user namespaces: docker run --security-opt seccomp=unconfined --security-opt "
    "apparmor=unconfined, or --cap-add SYS_ADMIN; a host too: sysctl user.max_user_namespaces above 0, and on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0"
)
PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))  # not a virtual environment's
PLACE = "/packages"  # where the jail has INSTALLED, and what runs in it
BOOT = f"""# the jail of `code_reward`
import sys
sys.path.append("{PLACE}")
from rloo_kit.graders import jailed
jailed.main()"""
HERE = Path(__file__).parent
BUBBLEWRAP = "--unshare-all --die-with-parent --new-session --hostname jail --cap-drop ALL"
_SAID: set[str] = set()  # reasons, each of which is said once


@dataclass(frozen=True)
class Jail:
    """`command`: what stands before the interpreter, so that it sees nothing but its own folders."""

    command: tuple[str, ...]

    @contextmanager
    def start(self, role: str, stdin: Any, stdout: Any, **settings: Any) -> Iterator[Any]:
        """The process of a role, limited already; killed at the end. Raises RewardError if it could not be."""
        with ExitStack() as stack:
            null = stack.enter_context(open(os.devnull, "r+b", 0)).fileno()  # the jail has no /dev
            defaults = {"memory_mb": 512, "cpu_s": 60, "call_s": 2.0, "answer_s": 10.0, "role": role, "null": null}
            command = [*self.command, PYTHON, "-I", "-S", "-X", "utf8", "-c", BOOT, json.dumps(defaults | settings)]
            ends: dict[str, Any] = {"stdin": stdin, "stdout": stdout, "stderr": subprocess.PIPE}
            process: Any = stack.enter_context(subprocess.Popen(command, env={}, cwd="/", pass_fds=(null,), **ends))
            stack.callback(process.kill)
            if (first := process.stderr.readline()) != b"ready\n":
                lines = (first + process.stderr.read()).decode(errors="replace").strip().splitlines()
                raise RewardError(shorten(lines[-1] if lines else "it ended without a word", 300))
            yield process

    def run(self, role: str, given: bytes, patience: float = 5, **settings: Any) -> bytes:
        """What a role writes, 16 MiB at most, within `patience` times `answer_s` of CPU time, as other processes may
        take their share. Raises RewardError if the machine is too busy."""
        with open(os.memfd_create(role), "rb") as output:
            with self.start(role, subprocess.PIPE, output, **settings) as process:
                try:
                    process.communicate(given, timeout=2 + patience * settings["answer_s"])
                except subprocess.TimeoutExpired:
                    if role != "plain" and os.getloadavg()[0] > 2 * (os.cpu_count() or 1):
                        raise RewardError(
                            f"the machine is too busy: code that may take {settings['answer_s']:g} s of CPU time has "
                            f"not ended after {patience:g} times as long (params.answer_timeout_s, params.workers)"
                        ) from None
            output.seek(0)
            return output.read()


@functools.cache
def find_jail() -> Jail:
    """The jail, tried out. Raises WholeBatchError with the reason if it does not work."""
    try:
        jail = bubblewrap()
        with jail.start("probe", subprocess.DEVNULL, subprocess.DEVNULL):
            return jail
    except (RewardError, OSError) as error:
        raise WholeBatchError(NO_JAIL.format(error)) from None


def bubblewrap() -> Jail:
    """A jail that shows what Python needs to run, read-only."""
    program = shutil.which("bwrap")
    if program is None:
        raise RewardError("there is no bwrap on PATH")
    importlib.import_module("rloo_kit.graders.jailed")  # which compiles it, once for all jails
    libraries = [f"{top}/{name}" for top in ("", "/usr") for name in ("lib", "lib32", "lib64", "libx32")]
    options = BUBBLEWRAP.split()
    for path in dict.fromkeys((*libraries, os.path.realpath(f"{sys.base_prefix}/lib"), PYTHON, "/etc/ld.so.cache")):
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            options += ["--ro-bind", path, path]
    shown = {f"rloo_kit/graders/{name}.py": HERE / f"{name}.py" for name in ("jailed", "crossing", "mirrors")}
    shown["pytest.py"] = HERE / "jail_pytest.py"
    for package in code_tests.INSTALLED:
        spec: Any = importlib.util.find_spec(package)
        place = Path(spec.origin).parent
        shown |= {path.name: path for path in (place, place.with_name(f"{package}.libs")) if path.is_dir()}
    for name, file in shown.items():
        options += ["--ro-bind", str(file), f"{PLACE}/{name}"]
        compiled = Path(importlib.util.cache_from_source(str(file)))
        if compiled.is_file():
            options += ["--ro-bind", str(compiled), f"{PLACE}/{importlib.util.cache_from_source(name)}"]
    if b"--size" in subprocess.run([program, "--help"], capture_output=True, check=False).stdout:
        options += ["--size", str(16 * 2**20), "--tmpfs", "/tmp"]
    return Jail((program, *options, "--remount-ro", "/", "--chdir", "/tmp" if "/tmp" in options else "/"))


@dataclass
class CodeReward(AnswerReader):
    """The share of the row's tests that the completion's code passes, 0.0 to 1.0, run in a jail (`find_jail`).

    0.0 without code or if the thinking was never closed; None for a row without tests, or where the tests need what
    cannot cross between their process and the code's; failed (NaN) if the tests or the jail are broken.

    Args:
        think_end_id, thinking, decode: as for `rewards.AnswerReward`.
        tests_column: the column with the tests.
        memory_mb: limit of a process.
        test_timeout_s: limit of one call or one run of a program, in seconds of CPU time, or in which it sleeps.
        answer_timeout_s: limit for all tests of one completion.
        workers: completions that run at a time; None: one for each CPU.
    """

    __name__: ClassVar[str] = "code_reward"

    tests_column: str = "tests"
    memory_mb: int = 512
    test_timeout_s: float = 2.0
    answer_timeout_s: float = 10.0
    workers: int | None = None

    def __post_init__(self) -> None:
        check_positive("answer_timeout_s", self.answer_timeout_s)
        check_positive("test_timeout_s", self.test_timeout_s)
        check_int("memory_mb", self.memory_mb, 64)
        check_int("workers", self.workers, 1, none_allowed=True)
        try:
            find_jail()
        except RewardError as error:
            raise ValueError(str(error)) from None

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] = (),
        completion_ids: Sequence[Any] = (),
        **columns: Any,
    ) -> list[float | None]:
        tests = columns.get(self.tests_column)
        if tests is None:
            raise ValueError(
                f"code_reward needs a column '{self.tests_column}' (params.tests_column names another); columns found: "
                f"{', '.join(sorted(columns)) or 'none'}"
            )
        answers = self._answers(completions, completion_ids, columns.get("completion_mask"))
        jail = find_jail()
        test_columns = {name: columns[name] for name in code_tests.TEST_COLUMNS if columns.get(name) is not None}
        rows = [{name: values[index] for name, values in test_columns.items()} for index in range(len(answers))]
        with ThreadPoolExecutor(self.workers or len(os.sched_getaffinity(0))) as pool:
            return list(pool.map(functools.partial(self._score, jail), answers, tests, rows))

    def _score(self, jail: Jail, answer: str, raw_tests: Any, row: Mapping[str, Any]) -> float | None:
        try:
            tests, code = code_tests.read_tests(raw_tests, row), code_tests.find_code(answer)
            if not tests or not code:
                return 0.0 if tests else None
            limits: dict[str, Any] = {"memory_mb": self.memory_mb, "cpu_s": math.ceil(self.answer_timeout_s) + 1}
            limits |= {"call_s": self.test_timeout_s, "answer_s": self.answer_timeout_s}
            if isinstance(tests[0], str):
                entry = row.get("entry_point")
                compiled = code_tests.compile_tests(tuple(tests), entry if isinstance(entry, str) else "")
                value = _run_asserts(jail, limits, compiled | {"code": code})
            else:
                value = _run_programs(jail, limits, code, tests)
            if value < 1.0:
                code_tests.refuse_hidden_import(code)
            return value
        except RewardError as error:
            is_scored = not isinstance(error, code_tests.UncrossedError)
            if str(error) not in _SAID:
                _SAID.add(str(error))
                verb = "failed on" if is_scored else "does not score answers to"
                say(f"WARNING: code_reward {verb} the tests {excerpt(raw_tests)}, and like these: {error}")
            return math.nan if is_scored else None


def _run_asserts(jail: Jail, limits: dict[str, Any], row: dict[str, Any]) -> float:
    """The share of asserts that hold. Raises UncrossedError if only plain Python knows and says that all do."""
    text = json.dumps(row).encode()
    verdict: dict[str, Any] = {"value": 0.0, "uncrossed": []}
    with suppress(ValueError):  # it ran out of memory or time
        verdict = json.loads(jail.run("asserts", text, **limits))
    is_unsure = verdict["value"] < 1.0 and verdict["uncrossed"]
    if is_unsure and jail.run("plain", text, 1, **limits) == b'{"value": 1.0}':
        raise code_tests.UncrossedError(verdict["uncrossed"][0])
    return float(verdict["value"])


def _run_programs(jail: Jail, limits: dict[str, Any], code: str, tests: Sequence[Any]) -> float:
    """The share of inputs for which the program prints what it has to."""
    from rloo_kit.graders.jailed import digest_output  # which loads on Linux only

    texts = [code.encode("utf-8", "replace"), *(b"+" + stdin.encode("utf-8", "replace") for stdin, _ in tests)]
    blocks = b"".join(f"{len(text)}\n".encode() + text for text in texts)
    printed = jail.run("programs", blocks, **limits).decode().splitlines()
    if 0 < len(printed) < len(tests):
        raise RewardError(f"it ended after {len(printed)} of {len(tests)} tests")
    right = [f"0 {digest_output(expected.encode())}" for _, expected in tests]
    return sum(got == wanted for got, wanted in zip(printed, right, strict=False)) / len(tests)
