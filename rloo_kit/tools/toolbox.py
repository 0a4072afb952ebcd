"""The tools of a run: the user's functions and environments, called in processes of their own, so that a hang can be
ended; in the drop-in trainer, whose tools are Python objects, in this process.

A process that was ended is replaced, and the environments that it held are built again from their calls so far.
"""

import functools
import inspect
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_type_hints

from pydantic import ConfigDict, ValidationError, validate_call

from rloo_kit.config.checks import VERIFIERS_PREFIX
from rloo_kit.config.run import RunConfig
from rloo_kit.data.sources import Columns, DataSource, Part, read_given_rows
from rloo_kit.errors import ConfigError, DataError, RewardError, WholeBatchError, describe_error, excerpt, shorten
from rloo_kit.system.input_files import find_target
from rloo_kit.system.isolation import LateError, Worker, worker_environment
from rloo_kit.system.user_code import (
    PlainState,
    describe_user_error,
    finish,
    import_target,
    make_plain,
    pack_state,
    read_files,
)

START_TIMEOUT_S = 120.0  # to start the interpreter and import the tools
LONGEST_RESULT = 100_000  # characters that leave the process
# Public methods that the kit calls, with their arguments; they are not offered to the model.
NO_TOOLS = {"reset": "**row", "tools": "", "respond": "messages", "get_reward": "[messages]"}

Call = tuple[str, dict[str, Any]]  # name and arguments; of an environment's own reply: "", {"messages": [...]}
Past = tuple[dict[str, Any], list[Call]]  # the row that an environment was reset with, and its calls so far


class Result(NamedTuple):
    """The outcome of a call: the text for the model; "ok", "failed" (the tool raised, took too long, died or returned
    what is no text) or "invalid" (the call names no tool, or its arguments do not fit); for the user, why it failed."""

    content: str
    kind: str = "ok"
    detail: str = ""


class ToolHost:
    """Functions and environments where they are called: in a worker, or in this process. Raises ConfigError for a tool
    without hints or docstring, two of one name, an environment without `reset`. `factory` makes an environment for each
    row of a batch; instances are reused."""

    sources: dict[str, str] = {}  # as those of `_InWorker`

    def __init__(self, tools: Sequence[Callable[..., Any]], factory: Callable[[], Any] | None = None) -> None:
        self.factory, self._functions = factory, list(tools)
        self._pool: dict[int, Any] = {}  # instances by row, reused by later batches
        self._live: dict[int, dict[str, Any]] = {}  # by row: the tools by name
        probe = None if factory is None else self.take(0)
        self.environment = None if probe is None else type(probe).__name__
        if probe is not None and not callable(getattr(probe, "reset", None)):
            raise ConfigError(f"rloo.environment: {self.environment} has no method reset(**row); it starts an episode")
        methods = _methods(probe)
        self.owns_reward = _has_own(probe, "get_reward", methods, [], ["messages"])
        self.responds = _has_own(probe, "respond", methods, ["messages"])
        self.schemas = list(map(_read_schema, [*self._functions, *methods]))
        names = [schema["function"]["name"] for schema in self.schemas]
        if doubled := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"two tools are named {sorted(doubled)[0]}: rename one of them")
        self._tools = _by_name(self._functions)

    def reset(self, number: int, row: dict[str, Any]) -> Result:
        """Start the episode of row `number`; the content is the observation, empty for none."""
        self._live.pop(number, None)
        try:
            observation = finish(self.take(number).reset(**row))
        except BaseException as error:  # sys.exit too: it is the environment's
            return Result("", "failed", f"reset: {describe_user_error(error)}")
        if not isinstance(observation, str | None):
            return Result("", "failed", f"reset returned {excerpt(observation, 60)}; it returns a text or None")
        self._live[number] = self._tools | _by_name(_methods(self._pool[number]))
        return Result(observation or "")

    def call(self, number: int, past: Past, name: str, arguments: dict[str, Any]) -> Result:
        """Call a tool in the episode of row `number`; `past` rebuilds its environment, if this process has none."""
        if self.factory is not None and (lost := self.restore(number, past)) is not None:
            return lost
        tools = self._live.get(number, self._tools)
        if name not in tools:
            return Result(f"error: there is no tool {excerpt(name)}; there are {', '.join(tools)}", "invalid")
        tool, read = tools[name]
        try:
            try:
                values = _read_arguments(read, arguments)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                return Result(f"error: {name}: argument {'.'.join(map(str, first['loc']))}: {first['msg']}", "invalid")
            return _as_result(finish(tool(**values)), name)
        except BaseException as error:  # sys.exit and KeyboardInterrupt too
            text = shorten(f"error: {name}: {describe_error(error)}", 500)
            return Result(text, "failed", f"{name}: {describe_user_error(error)}")

    def ask(self, number: int, past: Past, what: str, messages: list[dict[str, Any]]) -> Any:
        """The environment's "respond" (its messages after a turn without a call, none if the episode is over),
        "get_reward", or "view" (its attributes as plain values); raises RewardError."""
        if (lost := self.restore(number, past)) is not None:
            raise RewardError(lost.detail)
        environment = self._pool[number]
        try:
            if what == "respond":
                replies = list(finish(environment.respond(messages)))
                if not all(isinstance(reply, dict) for reply in replies):
                    raise TypeError(f"it returned {excerpt(replies, 60)}, no messages")
                return replies
            if what == "get_reward":
                return own_reward(environment, messages)
            return pack_state(environment)
        except BaseException as error:  # as above
            raise RewardError(f"{what}: {describe_user_error(error)}") from None

    def run(self, timeout_s: float, method: str, *args: Any) -> Any:
        """Call a method in this process, where the time is not limited, because a thread cannot be ended."""
        return getattr(self, method)(*args)

    def take(self, number: int) -> Any:
        """The environment of row `number` itself."""
        assert self.factory is not None
        if number not in self._pool:
            self._pool[number] = self.factory()
        return self._pool[number]

    def restore(self, number: int, past: Past) -> Result | None:
        """Make sure that row `number` has its environment, in the state after `past`; a failed Result if not."""
        if number not in self._live:
            result = self.reset(number, past[0])
            if result.kind == "failed":
                return Result("error: the environment cannot be started", *result[1:])
            for name, arguments in past[1]:
                if name:
                    self.call(number, past, name, arguments)
                else:
                    self.ask(number, past, "respond", **arguments)
        return None


def own_reward(environment: Any, messages: list[dict[str, Any]]) -> float:
    """`get_reward()` of an environment, or `get_reward(messages)` if it takes the episode's."""
    method = environment.get_reward
    return float(finish(method(messages) if "messages" in inspect.signature(method).parameters else method()))


def _methods(environment: Any) -> list[Callable[..., Any]]:
    """The tools of an environment: what its `tools()` returns, or its public methods."""
    if environment is None:
        return []
    if _has_own(environment, "tools", [], []):
        if not isinstance(tools := environment.tools(), list | tuple) or not all(map(callable, tools)):
            raise ConfigError(f"rloo.environment: tools() returned {excerpt(tools, 60)}; it returns a list of tools")
        return list(tools)
    members = inspect.getmembers(type(environment), callable)  # of the class: a property may be a program
    functions = [name for name, tool in members if inspect.isfunction(inspect.unwrap(getattr(tool, "__func__", tool)))]
    return [getattr(environment, name) for name in functions if not name.startswith("_") and name not in NO_TOOLS]


def _has_own(environment: Any, name: str, tools: list[Any], *calls: list[str]) -> bool:
    """Whether the kit calls an environment's method, which is no tool; ConfigError if it fits no call's arguments."""
    if (method := getattr(environment, name, None)) is None or method in tools:
        return False
    for arguments in calls:
        with suppress(TypeError, ValueError):
            inspect.signature(method).bind(**dict.fromkeys(arguments))
            return True
    problem = f"{type(environment).__name__}.{name} is not the {name}({NO_TOOLS[name]}) that the kit calls"
    raise ConfigError(f"rloo.environment: {problem}: rename it, or, if it is a tool, return it in the list of tools()")


def _by_name(tools: Sequence[Callable[..., Any]]) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Tools by name, each with what reads its arguments as its hints say: the text 12 as a number, 12 as a text."""
    rules = ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=True, allow_inf_nan=False)
    return {tool.__name__: (tool, validate_call(config=rules)(_as_reader(tool))) for tool in tools}


def _read_arguments(read: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The arguments. One that does not fit is tried in its other form: a text as the JSON in it, which calls in XML
    have for lists; a boolean or a number as text. Raises ValidationError."""
    try:
        return read(**arguments)
    except ValidationError as error:
        arguments = dict(arguments)
        for name, value in arguments.items():
            if any(name == fault["loc"][0] for fault in error.errors()) and isinstance(value, str | bool | int | float):
                with suppress(ValueError, RecursionError):
                    arguments[name] = json.loads(value) if isinstance(value, str) else json.dumps(value)
    return read(**arguments)


def _as_reader(tool: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the name, hints and docstring of a tool, which returns its arguments; raises TypeError for what
    is none with named arguments."""
    if inspect.isclass(tool) or isinstance(tool, functools.partial) or not hasattr(tool, "__name__"):
        raise TypeError("it is no function: write one (def) that calls it")
    body = inspect.unwrap(tool) if hasattr(tool, "cache_parameters") else tool  # of functools
    if inspect.iscoroutinefunction(body) and not inspect.iscoroutinefunction(tool):
        raise TypeError("it is a cached async function, whose results can be read once: cache inside of the function")
    if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise TypeError("it yields, and a tool returns its result: return a list")
    hints, taken = get_type_hints(tool, include_extras=True), inspect.signature(tool).parameters
    for number, (name, parameter) in enumerate(taken.items()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"it takes {parameter}, and the model gives arguments by their names: write them out")
        if not number and name in ("self", "cls") and name not in hints:
            raise TypeError("it is a method without its object: name one of an object (file.py:index.search)")

    def read(**arguments: Any) -> dict[str, Any]:
        return arguments

    typed = rf"(?m)^(\s*(?:{'|'.join(taken)}))\s*\(.*?\)\s*:"  # x (int): ..., in Google's style too
    head, mark, rest = (inspect.getdoc(tool) or "").partition("Args:")
    doc = head + mark + re.sub(typed, r"\1:", rest)
    signed = inspect.Signature([p.replace(annotation=hints.get(name, p.empty)) for name, p in taken.items()])
    about: Any = SimpleNamespace(__name__=tool.__name__, __doc__=doc, __annotations__=hints, __signature__=signed)
    return functools.update_wrapper(read, about)


def _read_schema(tool: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema  # loads torch: in the worker

    try:
        return dict(get_json_schema(_as_reader(tool)))
    except Exception as error:  # of several kinds, each with a sentence on what is missing
        name = getattr(tool, "__name__", type(tool).__name__)
        raise ConfigError(
            f"tool {name}: {error}. A tool is a function with type hints, and a docstring that says what it does and, "
            "below `Args:`, what each argument is (`x: The number.`)"
        ) from None


def _as_result(value: Any, name: str) -> Result:
    """What a tool returned as text: a text as it is, anything else as JSON."""
    try:
        text = value if isinstance(value, str) else json.dumps(make_plain(value, True), ensure_ascii=False)
        text = text.encode("utf-8", "replace").decode()
        if value is None:
            raise TypeError
    except (TypeError, ValueError, RecursionError):
        problem = f"{name} returned {excerpt(value, 60)}; a tool returns text, or what JSON can hold"
        return Result(f"error: {problem}", "failed", problem)
    return Result(shorten(text, LONGEST_RESULT))


# ---- in the worker

_host: ToolHost


def open_host(tools: list[str], environment: str | None, folders: list[str]) -> dict[str, Any]:
    """Import the tools and the environment; returns what `Toolbox` says of them."""
    global _host
    factory: Callable[[], Any] | None = None
    if environment is not None and environment.startswith(VERIFIERS_PREFIX):
        from rloo_kit.tools.verifiers_env import VerifiersEnvironment  # loads the package

        factory = functools.partial(VerifiersEnvironment, environment.removeprefix(VERIFIERS_PREFIX))
    elif environment is not None:
        factory = import_target(environment, folders)
    try:
        _host = ToolHost([import_target(tool, folders) for tool in tools], factory)
    except ConfigError as error:
        raise RewardError(str(error)) from None
    if environment is not None and environment.startswith(VERIFIERS_PREFIX):
        _host.environment = environment
    return {name: getattr(_host, name) for name in ("schemas", "environment", "owns_reward", "responds")}


def call_host(method: str, *args: Any) -> Any:
    """Call a method of the process's host."""
    return getattr(_host, method)(*args)


# ---- in the run


@dataclass
class _InWorker:
    """A worker with a host of the named tools."""

    targets: tuple[list[str], str | None, list[str]]
    worker: Worker

    def __post_init__(self) -> None:
        self.sources = self.read_sources()
        self.live: set[int] = set()  # rows whose environments the process has

    def open(self) -> dict[str, Any]:
        self.live.clear()
        if self.read_sources() != self.sources:
            raise WholeBatchError("a file of the tools changed after they were loaded: put it back, or start again")
        try:
            return dict(self.worker.call(open_host, *self.targets, timeout_s=START_TIMEOUT_S, name="loading the tools"))
        except RewardError:
            self.worker.close()
            raise

    def read_sources(self) -> dict[str, str]:
        tools, environment, folders = self.targets
        named = [target for target in (*tools, environment or "") if ":" in target]
        files = [read_files(target.rpartition(":")[0], folders) for target in named]
        return {name: digest for digests in files for name, digest in digests.items()}

    def run(self, timeout_s: float, method: str, number: int, *args: Any) -> Any:
        """Call a method of the host. If its process was replaced, the row's environment is built again before, with
        `timeout_s` for each call so far."""
        is_lost = self.targets[1] is not None and not (self.worker.running and number in self.live)
        if is_lost and method in ("call", "ask"):
            past = args[0]
            self.run(timeout_s * (len(past[1]) + 1), "restore", number, past)
        if not self.worker.running:
            self.open()
        call = call_host, method, number, *args
        result = self.worker.call(*call, timeout_s=timeout_s, name="its process", restart=False)
        if method in ("reset", "restore"):
            self.live.add(number)
        return result


class Toolbox:
    """The tools of a run, from `open_toolbox` or `Toolbox.of`. Calls of different rows may run at the same time, in as
    many processes as there are; those of one row run one after the other.

    Attributes:
        schemas: of each tool, as chat templates read them.
        environment: name of the environment's class, None without one.
        owns_reward: the environment has `get_reward`. responds: it may answer turns without a call.
        sources: digests of the user's files.
        max_prompt_length: limit of a prompt with what `reset` returned, in tokens; None in the drop-in trainer.
    """

    def __init__(self, places: Sequence[Any], described: dict[str, Any], timeout_s: float) -> None:
        self.schemas: list[dict[str, Any]] = described["schemas"]
        self.environment: str | None = described["environment"]
        self.owns_reward, self.responds = bool(described["owns_reward"]), bool(described["responds"])
        self.sources: dict[str, str] = places[0].sources
        self._places, self._timeout_s = places, timeout_s
        self.max_prompt_length: int | None = None
        self._threads = [ThreadPoolExecutor(1, "rloo-kit-tools") for _ in places]
        self._past: dict[int, Past] = {}

    @classmethod
    def of(cls, tools: Sequence[Callable[..., Any]], factory: Callable[[], Any] | None) -> "Toolbox":
        """The toolbox of Python functions and of a class of environments, called in this process."""
        host = ToolHost(tools, factory)
        return cls([host], vars(host), 0.0)

    def reset(self, numbers: Sequence[int], rows: Sequence[dict[str, Any]]) -> list[Result]:
        """Start the episodes of a batch's rows; the contents are the environments' observations."""
        pairs = list(zip(numbers, rows, strict=True))
        self._past = {number: (row, []) for number, row in pairs}
        if self.environment is None:
            return [Result("")] * len(numbers)
        return [future.result() for future in [self._submit(number, self._reset, row) for number, row in pairs]]

    def _reset(self, place: Any, number: int, row: dict[str, Any]) -> Result:
        try:
            return Result(*place.run(self._timeout_s, "reset", number, row))
        except RewardError as error:
            return _failed("reset", error)

    def call(self, number: int, calls: Sequence[Call]) -> "Future[list[Result]]":
        """Make calls in the episode of row `number`, one after the other."""
        return self._submit(number, self._call_all, self._past, calls)

    def _call_all(self, place: Any, number: int, pasts: dict[int, Past], calls: Sequence[Call]) -> Any:
        results = []
        for name, arguments in calls:
            row, before = past = pasts[number]
            try:
                results.append(Result(*place.run(self._timeout_s, "call", number, past, name, arguments)))
                pasts[number] = (row, [*before, (name, arguments)])
            except RewardError as error:  # its process has ended, and the next one would likewise
                results.append(_failed(name, error))
        return results

    def ask(self, number: int, what: str, messages: list[dict[str, Any]]) -> "Future[Any]":
        """`ToolHost.ask` of the environment of row `number`; the future may have a RewardError."""
        return self._submit(number, self._ask, self._past, what, messages)

    def _ask(self, place: Any, number: int, pasts: dict[int, Past], what: str, messages: Any) -> Any:
        row, before = past = pasts[number]
        result = place.run(self._timeout_s, "ask", number, past, what, messages)
        if what == "respond":
            pasts[number] = (row, [*before, ("", {"messages": messages})])
        return result

    def environments(self) -> list[Any]:
        """The environments of the batch as rewards get them: the objects, or what stands for one in a process."""
        place = self._places[0]
        make = place.take if isinstance(place, ToolHost) else functools.partial(EnvironmentView, self)
        return list(map(make, self._past))

    def _submit(self, number: int, work: Callable[..., Any], *args: Any) -> "Future[Any]":
        """`work(place, number, ...)` in the thread of the row's process."""
        index = number % len(self._places)
        return self._threads[index].submit(work, self._places[index], number, *args)


def _failed(name: str, error: Exception) -> Result:
    limit = " (rloo.tool_timeout_s)" if isinstance(error, LateError) else ""
    return Result(f"error: {name}: {error}", "failed", f"{name}: {error}{limit}")


class EnvironmentView:
    """An environment that lives in the tools' process: its attributes, read when asked for, and its own reward. In a
    reward's process it is a `PlainState`."""

    def __init__(self, toolbox: Toolbox, number: int) -> None:
        self.__toolbox, self.__number = toolbox, number  # names that no environment has

    def get_reward(self, messages: list[dict[str, Any]]) -> float:
        """The environment's own reward of the episode's messages."""
        return float(self.__toolbox.ask(self.__number, "get_reward", messages).result())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of Python's protocols
            raise AttributeError(name)
        return getattr(PlainState(self.__reduce__()[1][0]), name)

    def __reduce__(self) -> Any:
        return PlainState, (self.__toolbox.ask(self.__number, "view", []).result(),)


def read_source(run: RunConfig, part: Part, thinking: bool) -> DataSource:
    """The tasks of a source `verifiers/NAME` of a run."""
    rows = read_library_rows(part.source, part.count, run.rloo.tool_env)
    return replace(read_given_rows(rows, Columns()), name=part.source)


def read_library_rows(source: str, count: int | None, env: Sequence[str]) -> list[dict[str, Any]]:
    """The tasks of `verifiers/NAME` as rows, read in a process of their own; raises DataError."""
    from rloo_kit.tools.verifiers_env import read_verifiers_rows  # the process loads the package

    read = read_verifiers_rows, source.removeprefix(VERIFIERS_PREFIX), count
    with closing(Worker(source, worker_environment(env))) as worker:
        try:
            return list(worker.call(*read, timeout_s=START_TIMEOUT_S, name=f"reading {source}"))
        except RewardError as error:
            raise DataError(f"data.source: {error}") from None


class EnvironmentReward:
    """The reward that an environment has itself, `get_reward()`, in TRL's convention; `name` is the environment's."""

    def __init__(self, name: str | None) -> None:
        self.__name__ = str(name)

    def __call__(self, environments: list[Any], turns: list[Any], **columns: Any) -> list[float]:
        return [own_reward(*pair) for pair in zip(environments, turns, strict=True)]


def own_rewards(run: RunConfig) -> list[EnvironmentReward]:
    """The reward of the run's environment, if it has one."""
    toolbox = open_toolbox(run)
    return [EnvironmentReward(toolbox.environment)] if toolbox is not None and toolbox.owns_reward else []


def make_toolbox(tools: Any, factory: Any, named: dict[str, Any]) -> Toolbox:
    """The tools of a trainer that was given some. The own reward of a class of environments is added to `named`."""
    if isinstance(tools, Toolbox):  # a run's, whose rewards have it
        return tools
    toolbox = Toolbox.of(tools or [], factory) if tools or factory else open_named(named["args"], None)
    if toolbox.owns_reward:
        rewards = named["reward_funcs"] if named["reward_funcs"] is not None else []
        rewards = rewards if isinstance(rewards, (list, tuple)) else [rewards]
        named["reward_funcs"] = [*rewards, EnvironmentReward(toolbox.environment)]
    return toolbox


def open_toolbox(run: RunConfig) -> Toolbox | None:
    """The run's tools, loaded; None if it has none. One toolbox for equal settings in a process. Raises ConfigError if
    a tool or the environment cannot be imported or offered, with its name."""
    toolbox = open_named(run.rloo, run.source and run.source.parent) if run.rloo.has_tools else None
    if toolbox is not None:
        toolbox.max_prompt_length = run.data.max_prompt_length
    return toolbox


def open_named(section: Any, next_to: Path | None) -> Toolbox:
    """The tools that `run.rloo` or an `RLOOConfig` names; files are looked for in `next_to` too."""
    names = [*section.tools, *filter(None, [section.environment])]
    located = [find_target(named, "rloo.tools", next_to) for named in names]
    targets = [target for target, _ in located]
    folders = dict.fromkeys(str(folder) for _, places in located for folder in places)
    environment = targets.pop() if section.environment else None
    limits = section.tool_timeout_s, section.tool_processes, tuple(section.tool_env)
    return _open(tuple(targets), environment, tuple(folders), *limits)


def tool_schemas(run: RunConfig) -> list[dict[str, Any]] | None:
    """The schemas of the run's tools, as chat templates read them; None without tools."""
    toolbox = open_toolbox(run)
    return None if toolbox is None else toolbox.schemas


@functools.cache
def _open(
    tools: tuple[str, ...], environment: str | None, folders: tuple[str, ...], timeout_s: float, count: int, env: Any
) -> Toolbox:
    named = ", ".join(filter(None, [*tools, environment]))
    targets = list(tools), environment, list(folders)
    places = [_InWorker(targets, Worker(f"the tools ({named})", worker_environment(env))) for _ in range(count)]
    try:
        return Toolbox(places, places[0].open(), timeout_s)
    except RewardError as error:
        raise ConfigError(f"rloo.tools, rloo.environment ({named}): {error}") from None
