"""Tools in their process: what a fault costs the model, and what its user sees."""

from pathlib import Path
from typing import Any

import pytest

from rloo_kit.config.run import RunConfig
from rloo_kit.data.tools import Result, Toolbox, open_toolbox
from rloo_kit.errors import ConfigError

FILE = Path(__file__).parent / "faulty_tools.py"


def make_run(*tools: str, **keys: Any) -> RunConfig:
    rloo = {"tools": [f"{FILE}:{name}" for name in tools], "max_steps": 1, "tool_timeout_s": 1.0} | keys
    return RunConfig.model_validate({
        "model": {"name": "embedded/thinking"}, "data": {"source": "embedded/addition"}, "rloo": rloo,
        "rewards": [{"name": "answer_reward"}],
    })  # fmt: skip


def toolbox_of(*tools: str, **keys: Any) -> Toolbox:
    toolbox = open_toolbox(make_run(*tools, **keys))
    assert toolbox is not None
    return toolbox


FAULTS: dict[str, tuple[str, dict[str, Any], str, str]] = {  # tool, arguments, kind, words of what the model reads
    "raises": ("raises", {"text": "short"}, "failed", "error: raises: IndexError: string index out of range"),
    "hangs": ("hangs", {}, "failed", "took longer than 1 s and was killed"),
    "dies": ("dies", {}, "failed", "ended its process with exit code 3"),
    "quits": ("quits", {}, "failed", "error: quits: SystemExit: enough"),
    "returns nothing": ("nothing", {}, "failed", "nothing returned None; a tool returns text"),
    "returns an object": ("an_object", {}, "failed", "an_object returned <object object"),
    "returns too much": ("endless", {}, "ok", "... (10,000,000 characters)"),
    "prints": ("prints", {}, "ok", "printed"),
    "returns half a character": ("half", {}, "ok", "?"),
    "is asynchronous": ("later", {}, "ok", "[1, 2]"),
    "number as text": ("good", {"a": "4"}, "ok", "5"),
    "argument of another type": ("good", {"a": "four"}, "invalid", "error: good: argument a: "),
    "argument missing": ("good", {"b": 4}, "invalid", "error: good: argument a: Missing required argument"),
    "argument too many": ("good", {"a": 4, "c": 4}, "invalid", "error: good: argument c: Unexpected keyword argument"),
    "no such tool": ("goood", {}, "invalid", "error: there is no tool 'goood'; there are good, "),
}
NAMES = ("good", "raises", "hangs", "dies", "quits", "nothing", "an_object", "endless", "prints", "half", "later")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_becomes_an_error_for_the_model(fault):
    """Any of these ended a run, hung it for good, or left the model without a word of what was wrong."""
    name, arguments, kind, words = FAULTS[fault]
    toolbox = toolbox_of(*NAMES)
    toolbox.reset([0], [{}])
    (found,) = toolbox.call(0, [(name, arguments)]).result()
    assert (found.kind, words in found.content) == (kind, True), found
    assert bool(found.detail) == (kind == "failed")
    assert toolbox.call(0, [("good", {"a": 1})]).result() == [Result("2")], "the next call is served"


def test_an_environment_survives_the_death_of_its_process():
    """A call that hangs ends the process with the environments of all rows: each is built again from its own calls."""
    toolbox = toolbox_of(environment=f"{FILE}:Counter")
    assert toolbox.owns_reward and toolbox.environment == "Counter"
    found = toolbox.reset([0, 1, 2], [{"start": 5, "prompt": "x"}, {"start": 0}, {"start": -1}])
    assert [(one.content, one.kind) for one in found] == [(" (from 5)", "ok"), ("", "ok"), ("", "failed")]
    assert toolbox.call(0, [("step", {"by": 2}), ("step", {"by": 3})]).result() == [Result("7"), Result("10")]
    (late,) = toolbox.call(1, [("step", {"by": 13})]).result()
    assert late.kind == "failed"
    assert toolbox.call(0, [("step", {"by": 1})]).result() == [Result("11")]
    assert toolbox.ask(0, "get_reward", []).result() == 11.0
    assert toolbox.environments()[0].count == 11
    (lost,) = toolbox.call(2, [("step", {"by": 1})]).result()
    assert lost.kind == "failed" and "cannot be started" in lost.content


def test_tools_of_several_processes(tmp_path):
    """Rows have their environment in one process each, whichever serves their calls."""
    toolbox = toolbox_of(environment=f"{FILE}:Counter", tool_processes=2)
    toolbox.reset(range(5), [{"start": number} for number in range(5)])
    calls = [toolbox.call(number, [("step", {"by": 1})]) for number in range(5)]
    assert [call.result()[0].content for call in calls] == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tools": [f"{FILE}:no_hints"]}, "tool no_hints: .*type hint"),
        ({"tools": [f"{FILE}:no_docstring"]}, "tool no_docstring: .*docstring"),
        ({"tools": [f"{FILE}:no_such"]}, "has no 'no_such'; it offers .*good"),
        ({"tools": [f"{FILE}:good", f"{FILE}:good"]}, "two tools are named good"),
        ({"tools": ["no_such_module:f"]}, "there is no module 'no_such_module'"),
        ({"environment": f"{FILE}:good"}, "good"),
    ],
)
def test_tools_that_cannot_be_offered(keys, words):
    """The key and what is wrong, before a model is loaded."""
    with pytest.raises(ConfigError, match=f"rloo.tools.*{words}"):
        open_toolbox(make_run(**keys))
