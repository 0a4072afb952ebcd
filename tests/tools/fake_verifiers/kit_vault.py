"""Tools with a state: two servers of an episode, one of which knows the task."""

from typing import Annotated

import verifiers.v1 as vf
from pydantic import Field


class Data(vf.TaskData):
    code: int


class State(vf.State):
    tried: list[int] = []
    opened: bool = False


class Vault(vf.Toolset[vf.ToolsetConfig, State]):
    async def setup_task(self, task: Data) -> None:
        self.code = task.code

    @vf.tool
    async def dial(self, code: Annotated[int, Field(description="three digits")]) -> dict[str, bool]:
        """Try a code."""
        self.state.tried.append(code)
        self.state.opened = code == self.code
        return {"opened": self.state.opened}


class Clock(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool(name="time")
    def now(self) -> str:
        """The time of day."""
        return "noon"


class Task(vf.Task[Data, State]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Vault(vf.ToolsetConfig())]

    async def setup(self, trace: vf.Trace) -> None:
        trace.state.tried.append(0)

    @vf.reward
    async def opened(self, trace: vf.Trace) -> float:
        called = [call.name for message in trace.assistant_messages for call in message.tool_calls or []]
        return trace.state.opened - 0.01 * len(trace.state.tried) - 0.001 * len(called)


class Vaults(vf.Taskset[Task, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Clock(vf.SharedToolsetConfig())]

    def load(self) -> list[Task]:
        return [Task(Data(prompt="Open the vault.", code=code), self.config.task) for code in (123, 456)]


__all__ = ["Vaults"]
