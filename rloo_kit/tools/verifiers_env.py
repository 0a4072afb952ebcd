"""Environments of the package `verifiers` (0.4: `verifiers.v1`) as the kit's own, for the process of the tools."""

import asyncio
import functools
import importlib
import inspect
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, get_type_hints

from rloo_kit.errors import ConfigError, describe_error

Messages = list[dict[str, Any]]
_vf = functools.partial(importlib.import_module, package="verifiers.v1")  # of "." or ".types": it loads slowly
_loop = functools.cache(asyncio.new_event_loop)  # one for the process: what an environment opens belongs to its loop


def read_verifiers_rows(name: str, count: int | None = None) -> list[dict[str, Any]]:
    """The first `count` tasks (None: all) as rows: `prompt`, `info` (the task as JSON) and `answer`, if it has one."""
    rows = []
    for task in itertools.islice(_load(name)[0].taskset, count):
        data = task.data.model_dump(mode="json")
        answer = {"answer": str(data["answer"])} if "answer" in data else {}
        rows.append({"prompt": _opening(f"verifiers/{name}", data), **answer, "info": json.dumps(data)})
    return rows


@functools.cache
def _load(name: str) -> tuple[Any, str, list[Any]]:
    """An environment, its agent's name and its tasks' shared servers; raises ConfigError if a run cannot play it."""
    try:
        vf, find_marked = _vf("."), _vf(".utils.decorators").discover_decorated
        env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": name}}))
    except Exception as error:  # of the user's package too
        need = "a package with a vf.Taskset (not load_environment(), as before 0.4) and pip install 'verifiers>=0.4'"
        raise ConfigError(f"rloo.environment: verifiers/{name} needs {need}: {describe_error(error)}") from None
    kind, config = type(env.taskset).task_type(), env.taskset.config.task
    task, shared = kind(kind.data_type().model_construct(), config), env.taskset.toolsets(env.taskset.config)
    servers = [*kind.toolsets(config), *shared]
    is_remote = any(server.config.url or server.config.runtime.type != "subprocess" for server in servers)
    agents = {key: value for key, value in env.config if isinstance(value, vf.AgentConfig)}
    for feature, has_it in (
        (f"{len(agents)} agents ({', '.join(agents)}), and a run has one model", len(agents) > 1),
        ("a harness of its own, and a run offers the task's tools only", vf.default_harness_id(name) != "bash"),
        ("tasks for a container (NEEDS_CONTAINER)", kind.NEEDS_CONTAINER),
        ("a judge, another model", config.judges or any(isinstance(value, vf.JudgeConfig) for _, value in config)),
        ("@vf.stop or @vf.intercept", task.hooks("stop") or find_marked(task, "intercept")),
        ("tools of a remote server", is_remote),
        ("no @vf.reward", type(env) is vf.SingleAgentEnv and not task.hooks("reward")),
    ):
        if has_it:
            raise ConfigError(f"rloo.environment: verifiers/{name} cannot be carried into a run: it has {feature}")
    for start in (env.start, *(server.setup for server in shared)):
        _loop().run_until_complete(start())
    return env, next(iter(agents)), shared


class VerifiersEnvironment:
    """An environment of `rloo.environment: verifiers/NAME`, for rows of `read_verifiers_rows`; raises as `_load`."""

    def __init__(self, name: str) -> None:
        self.name = f"verifiers/{name}"
        self._env, self._seat, self._shared = _load(name)
        self._kind, self._config = type(self._env.taskset).task_type(), self._env.taskset.config.task
        self._servers = self._kind.toolsets(self._config)  # of the episode
        self._playing: Any = None  # the episode, as a task of the loop

    def tools(self) -> list[Callable[..., Any]]:
        """The `@vf.tool` methods of the task's tool servers, under the names that the package gives them."""
        find = _vf(".utils.decorators").discover_decorated
        servers = self._servers + self._shared
        return [self._as_tool(server, method) for server in servers for method in find(server, "tool")]

    def reset(self, info: str, **row: Any) -> None:
        """Start the episode of a row; of its columns only `info` is read."""
        if self._playing is not None:  # the last one, perhaps not over
            self._playing.cancel()
            _loop().run_until_complete(asyncio.wait([self._playing]))
        task = self._kind(self._kind.data_type().model_validate_json(info), self._config)
        self._asked, self._answers = asyncio.Queue[Messages](), asyncio.Queue[Messages]()
        self._seen, self._servers = 0, self._kind.toolsets(self._config)
        self._trace: Any = None
        self._opening = _opening(self.name, json.loads(info))
        self._playing = _loop().create_task(self._play(task))
        self._listen()

    def respond(self, messages: Messages) -> Messages:
        """The next user messages after a turn without a call (none: it is over); `messages`: the completion so far."""
        if self._playing.done():
            return []
        new = [message for message in messages[self._seen :] if message["role"] != "user"]
        called, answered = itertools.count(self._seen), itertools.count(self._seen)
        for message in new:  # this process's copies get what an API has: ids of calls and results, arguments as text
            if message["role"] == "tool":
                message["tool_call_id"] = f"call_{next(answered)}"
            for call in message.get("tool_calls") or []:
                call["id"] = f"call_{next(called)}"
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        self._seen = len(messages)
        self._answers.put_nowait(new)
        return self._listen()

    def get_reward(self, messages: Messages) -> float:
        """The sum of the weighted rewards; `messages` as in `respond`. What a limit cut is scored as it is."""
        while not self._playing.done():
            self.respond(messages)
        self._playing.result()
        return float(self._trace.reward)

    def _listen(self) -> Messages:
        """What the environment sends next; nothing if the episode is over. Raises what it raised."""
        sent = _loop().run_until_complete(self._asked.get())
        if not sent:
            _loop().run_until_complete(self._playing)
        return sent

    async def _play(self, task: Any) -> None:
        """The episode from the environment's side; where it would ask its model, `_turn` waits for the run's."""
        vf, agent = _vf("."), SimpleNamespace(run=self._run, interaction=self._interact)
        try:
            await self._env.run(task, SimpleNamespace(**{self._seat: agent}))
            about, trace = vf.EnvInfo(id=self.name), self._trace
            await self._env.finalize(task, vf.Episode(env=about, task=trace.task, traces=[trace], ok=True))
        finally:
            self._asked.put_nowait([])

    async def _run(self, task: Any) -> Any:
        async with self._interact(task) as interaction:
            await interaction.turn()
        return self._trace

    @asynccontextmanager
    async def _interact(self, task: Any) -> AsyncIterator[Any]:
        """As `vf.Agent.interaction`: prepared, led by the caller, scored."""
        if self._trace is not None:
            raise ConfigError(f"{self.name} has two conversations in an episode, and a completion is one")
        vf, invoke, state = _vf("."), _vf(".utils.decorators").invoke, _vf(".state").state_cls(type(task))()
        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        trace = self._trace = vf.Trace(task=about, agent=vf.AgentInfo(config=vf.AgentConfig()), state=state)
        async with _vf(".runtimes").provision_runtime(vf.SubprocessConfig(), trace.id, task.runtime_env()) as folder:
            await invoke(task.setup, {"trace": trace, "runtime": folder})
            for server in self._servers:
                await server.setup()
                await server.setup_task(task.data)
            yield SimpleNamespace(trace=trace, turn=self._turn)
            trace.stop("agent_completed")
            await invoke(task.finalize, {"trace": trace, "runtime": folder})
            await task.score(trace, folder)

    async def _turn(self, message: str | None = None) -> Any:
        """As `vf.Interaction.turn`: sends the user's message; returns the model's, up to a turn without a call."""
        vf, nodes = _vf("."), self._trace.nodes
        if self._trace.stop_condition or not (isinstance(message, str) if nodes else message is None):
            raise ConfigError(f"{self.name} sends a message before the first turn, after the end or without text")
        new = self._opening if message is None else [{"role": "user", "content": message}]
        self._asked.put_nowait(new)
        answer = await self._answers.get()
        if not answer:  # a limit of the run
            self._trace.stop("max_turns")
        typed = list(map(_vf(".dialects.chat").parse_message, [*new, *answer]))
        for index, parsed in enumerate(typed):
            parent, is_sampled = len(nodes) - 1 if nodes else None, index >= len(new) and parsed.role == "assistant"
            nodes.append(vf.MessageNode(parent=parent, message=parsed, sampled=is_sampled))
        return vf.Segment(messages=typed[len(new) :], terminated=not answer)

    def _as_tool(self, server: Any, method: Any) -> Callable[..., Any]:
        @functools.wraps(method)
        def tool(*args: Any, **kwargs: Any) -> Any:
            _vf(".mcp.server")._call_state.set(self._trace.state)  # which the server reads as `self.state`
            result = method(*args, **kwargs)
            result = _loop().run_until_complete(result) if inspect.isawaitable(result) else result
            return "" if result is None else result

        tool.__name__ = "_".join(filter(None, (server.server_name, method.tool_name or method.__name__)))
        tool.__annotations__ = {name: hint for name, hint in get_type_hints(method).items() if name != "return"}
        tool.__doc__ = inspect.getdoc(method) or method.__name__
        if tool.__annotations__ and "Args:" not in tool.__doc__:  # which a schema needs
            tool.__doc__ += "\n\nArgs:" + "".join(f"\n    {name}: {name}" for name in tool.__annotations__)
        return tool


def _opening(name: str, data: dict[str, Any]) -> Messages:
    """The messages of a task before the model's first turn."""
    prompt = data["prompt"] or []
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    unfit = not messages or data["image"] or data["agent_user"] or data["skills"]
    if unfit or not all(isinstance(message["content"], str) for message in messages):
        raise ConfigError(f"{name} has tasks for a container, with skills, or without a text as their prompt")
    return [*([{"role": "system", "content": data["system_prompt"]}] if data["system_prompt"] else []), *messages]
