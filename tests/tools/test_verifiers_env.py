"""Environments of the package `verifiers`, as the kit's own."""

import functools
import json
from pathlib import Path

import pytest

from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.system.versions import is_importable
from rloo_kit.tools.toolbox import ToolHost, open_toolbox, read_library_rows
from rloo_kit.tools.verifiers_env import VerifiersEnvironment, read_verifiers_rows

needs_package = pytest.mark.skipif(not is_importable("verifiers"), reason="the package verifiers is not installed")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The environments of `fake_verifiers` and of `tmp_path` are installed packages, as far as imports can see."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("fake_verifiers")))
    return tmp_path


def say(text, *names):
    """A turn of the model, with calls of the tools that it names."""
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in names]
    return {"role": "assistant", "content": text, "tool_calls": calls}


@needs_package
def test_tools_share_the_state_of_their_episode_and_no_other():
    """Two episodes in one process: each has its servers, its task and its state; the reward sees state and calls."""
    rows = read_verifiers_rows("kit_vault")
    host, past = ToolHost([], functools.partial(VerifiersEnvironment, "kit_vault")), [(row, []) for row in rows]
    assert [schema["function"]["name"] for schema in host.schemas] == ["vault_dial", "time"]
    assert host.schemas[0]["function"]["parameters"]["properties"]["code"]["type"] == "integer"
    assert [host.reset(number, row).kind for number, row in enumerate(rows)] == ["ok", "ok"]
    results = [host.call(number, past[number], "vault_dial", {"code": 123}).content for number in (0, 1, 0)]
    assert [json.loads(one)["opened"] for one in results] == [True, False, True]
    assert host.call(1, past[1], "time", {}).content == "noon"
    result = {"role": "tool", "name": "time", "content": "noon"}
    messages = [say("", "time", "time"), result, dict(result), say("open")]
    assert host.ask(0, past[0], "respond", messages) == []
    assert host.ask(0, past[0], "get_reward", messages) == pytest.approx(1 - 0.03 - 0.002)
    assert host.ask(1, past[1], "get_reward", []) == pytest.approx(-0.02)  # cut by a limit


@needs_package
def test_an_environment_answers_turns():
    """It answers, ends, or is cut by a limit with an answer that it has not heard; weights and `finalize` count."""
    row = read_verifiers_rows("kit_guess")[1]
    assert row["prompt"] == [{"role": "system", "content": "Short."}, {"role": "user", "content": "Guess below 10."}]
    environment, messages = VerifiersEnvironment("kit_guess"), []
    environment.reset(**row)
    for guess, reply in (("1", ["Not 1."]), ("2", ["Not 2."]), ("7", [])):
        messages.append(say(guess))
        found = environment.respond(messages)
        assert [one["content"] for one in found] == reply
        messages += found
    assert environment.get_reward(messages) == pytest.approx(2 + 0.1 / 3)
    environment.reset(**row)
    assert environment.respond(messages[:1]) and environment.get_reward(messages[:3]) == pytest.approx(0.1 / 2)


@needs_package
def test_a_run_plays_it_in_its_processes():
    """From the rows of the data source to the reward through real workers, where imports and pipes may fail."""
    row = read_library_rows("verifiers/kit_guess", 1, [])[0]
    rloo = {"environment": "verifiers/kit_guess", "max_steps": 1}
    settings = {"model": {"name": "smollm2/tools"}, "data": {"source": "verifiers/kit_guess"}, "rloo": rloo}
    toolbox = open_toolbox(RunConfig.model_validate(settings | {"rewards": []}))
    assert [one.kind for one in toolbox.reset([0, 1], [row, row])] == ["ok", "ok"]
    assert toolbox.ask(1, "respond", [say("3")]).result() == [{"role": "user", "content": "Not 3."}]
    assert [one.get_reward([say("4")]) for one in toolbox.environments()] == pytest.approx([2.1, 0.1])
    with pytest.raises(DataError, match="no_such_env needs a package .* pip install 'verifiers>=0.4'"):
        read_library_rows("verifiers/no_such_env", 1, [])


TASKSET = """import verifiers.v1 as vf
class Task(vf.Task):
    {task}
    @vf.{mark}
    async def right(self) -> float: return 1.0
class Tasks(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self): return [Task(vf.TaskData({data}), self.config.task)]
{more}
__all__ = [name for name in ("Tasks", "More") if name in globals()]
"""
REMOTE = "toolsets = classmethod(lambda cls, config: [vf.Toolset(vf.ToolsetConfig(url='http://localhost:1'))])"
CRITIC = "class Config(vf.SingleAgentEnvConfig):\n    critic: vf.AgentConfig = vf.AgentConfig()\n"
AGENTS = f"{CRITIC}class More(vf.Env[Config]):\n    async def run(self): ..."
REFUSED = {
    "tasks for a container": {"task": "NEEDS_CONTAINER = True"},
    "a container, with skills": {"data": "prompt='?', image='ubuntu'"},
    "without a text": {"data": "prompt=[{'role': 'user', 'content': [{'type': 'text', 'text': '?'}]}]"},
    "tools of a remote server": {"task": REMOTE},
    "@vf.stop": {"task": "@vf.stop\n    async def end(self, trace: vf.Trace) -> bool: ..."},
    r"2 agents \(agent, critic.": {"more": AGENTS},
    "a harness": {"more": "class More(vf.Harness[vf.HarnessConfig]):\n    async def launch(self): ..."},
    "no @vf.reward": {"mark": "metric"},
    "before 0.4": {"more": "def load_environment(): ...\ndel Tasks"},
}


@needs_package
@pytest.mark.parametrize("what", REFUSED)
def test_what_a_run_does_not_have_is_refused_by_name(folder, what):
    """An environment that would be scored on less than it asks for never starts: the error names it and the feature."""
    name, parts = f"refused_{list(REFUSED).index(what)}", {"task": "", "mark": "reward", "data": "prompt='?'"}
    (folder / f"{name}.py").write_text(TASKSET.format(**{"more": ""} | parts | REFUSED[what]))
    with pytest.raises(ConfigError, match=f"verifiers/{name} .*{what}"):
        read_verifiers_rows(name)
