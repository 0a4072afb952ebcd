"""Environments of the package `verifiers`, as the kit's own."""

import functools
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset

from rloo_kit.config.run import RunConfig
from rloo_kit.data.load import Data
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.runs.folder import RunDir
from rloo_kit.system.versions import is_importable
from rloo_kit.tools.toolbox import ToolHost, open_toolbox, read_library_rows
from rloo_kit.tools.verifiers_env import VerifiersEnvironment, read_verifiers_rows, read_versions

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


def install(folder, name, version, *files):
    """What pip leaves of a package: its metadata, and the files that it copied."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    for old in folder.glob(f"{name.replace('-', '_')}-*.dist-info"):
        shutil.rmtree(old)
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


@pytest.fixture
def site(folder, monkeypatch):
    """A folder of installed packages, with `verifiers`."""
    site = folder / "lib" / "site-packages"
    install(site, "verifiers", "0.4.1")
    monkeypatch.syspath_prepend(str(site))
    return site


def test_the_versions_of_an_environment_are_inputs_of_the_run(site):
    """An update between a run and its resume brought other tasks, tools or rewards, and no line said so."""
    assert read_versions("") == read_versions("mine.py:World") == read_versions("verifiers_of_mine:World") == {}
    (site / "wordle.py").write_text("raise RuntimeError('imported')")
    install(site, "wordle", "0.1.0", "wordle.py")
    found = {"version of verifiers": "0.4.1", "version of wordle": "0.1.0"}
    assert read_versions("verifiers/wordle") == read_versions("verifiers/someone/wordle@latest") == found
    install(site, "wordle", "0.2.0", "wordle.py")
    assert read_versions("verifiers/wordle") == found | {"version of wordle": "0.2.0"}
    install(site, "verifiers", "0.5.0")
    assert read_versions("verifiers/wordle")["version of verifiers"] == "0.5.0"


def test_the_package_of_an_environment_may_have_another_name(site):
    """Hyphens, and a package that is called otherwise than the module in it."""
    for name, package in (("math-hard", "math-hard"), ("guess", "games-of-mine")):
        module = name.replace("-", "_")
        (site / module).mkdir()
        (site / module / "__init__.py").touch()
        install(site, package, "1.2", f"{module}/__init__.py")
        found = read_versions(f"verifiers/{name}")
        assert [value for key, value in found.items() if key.replace("_", "-") == f"version of {package}"] == ["1.2"]


def test_of_a_package_in_the_users_folder_its_files_count(site, folder):
    """An editable install is the way to write one: its version stays what it is while its source changes."""
    package = folder / "project" / "kit_maze"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from kit_maze.walls import Wall\n")
    (package / "walls.py").write_text("Wall = 1\n")
    (site / "kit_maze.pth").write_text(str(package.parent))
    install(site, "kit-maze", "0.1.0", "kit_maze.pth")
    sys.path.insert(1, str(package.parent))  # as the .pth does; the fixture restores the path
    then = read_versions("verifiers/kit-maze")
    assert then["version of kit_maze"] == "0.1.0" and "version of walls.py" in then
    assert read_versions("verifiers/kit-maze") == then
    (package / "walls.py").write_text("Wall = 2\n")
    changed = {name for name, one in read_versions("verifiers/kit-maze").items() if one != then[name]}
    assert changed == {"version of walls.py"}
    names = ("verifiers", "kit_guess", "kit_guess.py")
    assert set(read_versions("verifiers/kit_guess")) == {f"version of {name}" for name in names}
    assert not {"kit_guess", "kit_maze", "wordle"} & set(sys.modules), "they are imported in the process of the tools"


def test_a_resume_with_another_version_is_refused(site, folder, monkeypatch):
    """Refused with both versions, and with a way on; a run of before that was recorded goes on."""
    from rloo_kit.training import rloo as training

    monkeypatch.setattr(training, "open_toolbox", lambda run: None)
    rloo = {"environment": "verifiers/kit-vault", "max_steps": 3}
    settings = {"model": {"name": "smollm2/tools"}, "data": {"source": "verifiers/kit-vault"}, "rloo": rloo}
    run = RunConfig.model_validate(settings | {"rewards": [], "run": {"name": "one", "output_dir": str(folder)}})
    install(site, "kit-vault", "0.1.0", "kit_vault.py")
    data = Data(Dataset.from_dict({"prompt": ["a"]}), Dataset.from_dict({"prompt": ["b"]}))

    def check(step=None, accepts=False):
        with RunDir.create(run, resume=step is not None) as run_dir:
            run_dir.resumes_from = step and SimpleNamespace(step=step)
            run_dir.accepts_changes = accepts
            training.check_inputs(run, run_dir, SimpleNamespace(weights={}), data, [])
        return json.loads((run_dir / "inputs.json").read_text())

    began = check()
    assert began["version of kit_vault"] == "0.1.0"
    assert check(1) == began
    install(site, "kit-vault", "0.2.0", "kit_vault.py")
    with pytest.raises(ConfigError, match=r"version of kit_vault .0[.]1[.]0 then, 0[.]2[.]0 now.*--accept-changes"):
        check(1)
    assert check(1, accepts=True)["version of kit_vault"] == "0.2.0" == check(1)["version of kit_vault"]
    without = {key: one for key, one in began.items() if not key.startswith("version of")}
    (run.folder / "inputs.json").write_text(json.dumps(without))
    assert check(1)["version of kit_vault"] == "0.2.0"
