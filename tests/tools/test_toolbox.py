"""Tools in their process: what a fault costs the model, and what its user sees."""

import asyncio
import functools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError, RewardError
from rloo_kit.rewarding.worker import end_workers
from rloo_kit.tools import toolbox
from rloo_kit.tools.toolbox import Result, Toolbox, ToolHost, open_toolbox, own_reward

FILE = Path(__file__).parent / "faulty_tools.py"
LEAKING = Path(__file__).parent / "leaking_tools.py"


@pytest.fixture(scope="module", autouse=True)
def no_process_left() -> Iterator[None]:
    """Toolboxes are kept for equal settings; tests of other files count this process's workers."""
    yield
    end_workers()


@pytest.fixture
def fresh() -> Iterator[None]:
    """No toolbox of another test, whose processes have other variables."""
    toolbox._open.cache_clear()
    yield
    toolbox._open.cache_clear()


def make_run(*tools: str, file: Path = FILE, **keys: Any) -> RunConfig:
    rloo = {"tools": [f"{file}:{name}" for name in tools], "max_steps": 1, "tool_timeout_s": 1.0} | keys
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
    "argument that Python uses": ("good", {"a": 4, "self": 4}, "invalid", "argument self: Unexpected keyword argument"),
    "error in half characters": ("deep_error", {}, "failed", "error: deep_error: OSError: no file ?"),
    "leaves asynchronously": ("leaves", {}, "failed", "error: leaves: SystemExit: enough"),
    "no such tool": ("goood", {}, "invalid", "error: there is no tool 'goood'; there are good, "),
}
NAMES = ("good", "raises", "hangs", "dies", "quits", "nothing", "an_object", "endless", "prints", "half", "later")
NAMES += ("deep_error", "leaves")


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


READ: list[tuple[str, Any, str]] = [  # an argument of `typed`, what the model gives, what the tool gets of it
    ("text", 12345, "['12345']"), ("text", 1.5, "['1.5']"), ("text", True, "['true']"), ("text", "00123", "['00123']"),
    ("text", "[1]", "['[1]']"), ("text", None, ""), ("text", ["a"], ""), ("texts", [1, "2"], "[['1', '2']]"),
    ("texts", '["a", "007"]', "[['a', '007']]"), ("texts", "a", ""), ("by", {"a": 1}, "[{'a': '1'}]"),
    ("by", '{"a": "1"}', "[{'a': '1'}]"), ("one", 2, "['2']"), ("one", 3, ""), ("either", "007", "['007']"),
    ("either", 7, "[7]"), ("yes", "true", "[True]"), ("yes", "maybe", ""), ("number", "1e400", ""),
    ("number", "NaN", ""), ("number", "1e3", "[1000.0]"), ("maybe", 3.0, "[3]"), ("maybe", 3.5, ""),
    ("maybe", "null", "[]"), ("maybe", "9" * 5000, ""), ("maybe", "[" * 5000, ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "got"), READ, ids=lambda one: str(one)[:20])
def test_arguments_are_read_as_the_hints_say(name, value, got):
    """An order number that the model wrote as a number was refused, and a list in an XML call was never one."""
    toolbox = toolbox_of("typed")
    toolbox.reset([0], [{}])
    (found,) = toolbox.call(0, [("typed", {name: value})]).result()
    assert (found.kind, found.content) == ("ok", got) if got else found.kind == "invalid", found


def test_kinds_of_functions():
    """Cached, static and bound ones, hints in quotes and keyword-only ones: transformers read few of them."""
    toolbox = toolbox_of("cached", "client.ask", "Client.static", "keeps_number")
    assert toolbox.schemas[0]["function"]["parameters"]["properties"]["y"]["description"] == "the second."
    toolbox.reset([0], [{}])
    calls = [("cached", {"x": "4", "y": 5}), *[("ask", {"text": "a"})] * 3, ("static", {"text": 1})]
    calls += [("keeps_number", {"x": 2})]
    numbers = '{"2": [0.5, [0, 1]]}'
    assert [one.content for one in toolbox.call(0, calls).result()] == ["(4, '5')", "a", "a", "a", "1", numbers]


def test_async_tools_in_a_process_that_runs_a_loop():
    """In a notebook asyncio.run raised, and elsewhere each call closed the loop to which a tool's client belonged."""
    from tests.tools.faulty_tools import Client, later

    toolbox = Toolbox.of([Client().ask, later], None)
    toolbox.reset([0, 1], [{}, {}])

    async def call_twice() -> list[str]:
        results = [toolbox.call(number, [("ask", {"text": "a"})]).result() for number in (0, 1)]
        return [one.content for (one,) in results] + [toolbox._places[0].call(0, ({}, []), "later", {}).content]

    assert asyncio.run(call_twice()) == ["a", "a", "[1, 2]"]


def test_an_environment_survives_the_death_of_its_process():
    """Each environment is built again from its own calls, in a time of its own, or one call would cost all rows."""
    toolbox = toolbox_of(environment=f"{FILE}:Counter")
    assert toolbox.owns_reward and toolbox.environment == "Counter"
    found = toolbox.reset([0, 1, 2], [{"start": 5, "prompt": "x"}, {"start": 0}, {"start": -1}])
    assert [(one.content, one.kind) for one in found] == [(" (from 5)", "ok"), ("", "ok"), ("", "failed")]
    slow = [("step", {"by": 4})] * 3
    assert [result.content for result in toolbox.call(0, slow).result()] == ["9", "13", "17"]
    (late,) = toolbox.call(1, [("step", {"by": 13})]).result()
    assert late.kind == "failed"
    assert toolbox.call(0, [("step", {"by": 1})]).result() == [Result("18")]
    assert toolbox.ask(0, "get_reward", []).result() == 18.0
    assert toolbox.environments()[0].count == 18
    (lost,) = toolbox.call(2, [("step", {"by": 1})]).result()
    assert lost.kind == "failed" and "cannot be started" in lost.content


class World:
    """What the environments below have in common."""

    def reset(self, answer: object = None, **row: object) -> Any:
        """Return what the row says."""
        return answer


def text_tool(self, x: str) -> str:
    """Take it.

    Args:
        x: what.
    """
    return x


def len_tool(x: str) -> int:
    """Its length.

    Args:
        x: what.
    """
    return len(x)


RESERVED: dict[str, tuple[dict[str, Any], str]] = {  # members of the class, words of the error or what is offered
    "respond as a tool": ({"respond": text_tool}, r"World.respond is not the respond\(messages\)"),
    "respond without messages": ({"respond": lambda self: []}, "World.respond"),
    "respond with more": ({"respond": lambda self, messages, turn: []}, "World.respond"),
    "respond as a text": ({"respond": "yes"}, "World.respond"),
    "respond in tools()": ({"respond": text_tool, "tools": lambda self: [self.respond]}, "['text_tool'] False False"),
    "tools as a tool": ({"tools": lambda self: "a saw"}, "tools.. returned 'a saw'"),
    "tools that takes something": ({"tools": text_tool}, r"World.tools is not the tools\(\)"),
    "tools as a list": ({"tools": ["hammer", "saw"]}, "World.tools"),
    "tools of nothing": ({"tools": lambda self: None}, "tools.. returned None"),
    "get_reward with the answer": ({"get_reward": lambda self, answer: 1.0}, "World.get_reward"),
    "get_reward as a number": ({"get_reward": 1.0}, "World.get_reward"),
    "get_reward with a default": ({"get_reward": lambda self, scale=1.0: scale}, "[] True False"),
    "as documented": ({"get_reward": lambda self, messages: 1.0, "respond": lambda self, messages: []}, "[] True True"),
    "a name that is no text": ({"name": ["x"], "look": text_tool}, "['text_tool'] False False"),
    "a cached method": ({"look": functools.lru_cache(text_tool)}, "['text_tool'] False False"),
    "a method of the class": ({"look": classmethod(text_tool)}, "['text_tool'] False False"),
    "a cached method of the class": ({"look": classmethod(functools.cache(text_tool))}, "['text_tool'] False False"),
    "a function of the class": ({"look": staticmethod(len_tool)}, "['len_tool'] False False"),
    "a nested class": ({"Kind": Result, "rule": property(text_tool)}, "[] False False"),
    "a cached property": ({"view": functools.cached_property(text_tool), "size": len}, "[] False False"),
    "no reset": ({"reset": None}, "no method reset"),
}  # fmt: skip


@pytest.mark.parametrize("case", RESERVED)
def test_methods_that_the_kit_calls_are_not_taken_for_tools(case):
    """tau-bench's `respond(content)` answers the customer: it was offered to nobody, and called after each turn."""
    members, words = RESERVED[case]
    kind = type("World", (World,), members)
    if words.startswith("["):
        host = ToolHost([], kind)
        offered = [one["function"]["name"] for one in host.schemas]
        assert f"{offered} {host.owns_reward} {host.responds}" == words and host.environment == "World"
        assert not host.owns_reward or own_reward(kind(), []) == 1.0
    else:
        with pytest.raises(ConfigError, match=words):
            ToolHost([], kind)


@pytest.mark.parametrize("found", [("text", {}), {"text": 1}, ["text"], 3, 0, b"text", None, "", "text", "half \ud83d"])
def test_an_observation_is_a_text_or_none(found):
    """Of gym's (observation, info) the model read the tuple as Python writes it."""
    result, fine = ToolHost([], World).reset(0, {"answer": found}), isinstance(found, str | None)
    assert (result.kind, result.content) == (("ok", found or "") if fine else ("failed", ""))
    assert fine or f"reset returned {found!r}" in result.detail


def test_rewards_read_what_an_environment_holds():
    """TRL's examples keep state in names with an underscore; one odd value kept all of it in the process."""
    toolbox = toolbox_of(environment=f"{FILE}:Stateful")
    toolbox.reset([0], [{}])
    (seen,) = toolbox.environments()
    for one in (seen, pickle.loads(pickle.dumps(seen))):
        values = one._solved, one.rounds, one.won, one.place, one.visited, one.counts, one.best
        assert values == (True, 3, True, (0, 1), {(0, 1)}, {1: "a"}, float("inf"))
        assert (one.hands, one.mode) == ({"r": 1.0, (1,): [-float("inf"), 2]}, "fast")
        values = one.seen, one.queue, one.past, one.cell
        assert values == ({"a": 2, "b": 1}, [1], {frozenset({1}), frozenset()}, [0, 1])
        with pytest.raises(AttributeError, match="environment's clock .* _solved, best, cell, .* visited, won"):
            one.clock  # noqa: B018
        assert not any(hasattr(one, name) for name in ("words", "broken", "leaves", "look"))


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
        ({"tools": [f"{FILE}:partly"]}, "tool partial: it is no function: write one"),
        ({"tools": [f"{FILE}:client"]}, "tool Client: it is no function: write one"),
        ({"tools": [f"{FILE}:Client"]}, "tool Client: it is no function: write one"),
        ({"tools": [f"{FILE}:Client.ask"]}, "tool ask: it is a method without its object: name one of an object"),
        ({"tools": [f"{FILE}:Client.no_such"]}, "has no 'Client.no_such'"),
        ({"tools": [f"{FILE}:takes_any"]}, "tool takes_any: it takes .texts.*by their names"),
        ({"tools": [f"{FILE}:numpy_style"]}, "tool numpy_style: .*'x'.*below `Args:`"),
        ({"tools": [f"{FILE}:caches_async"]}, "tool caches_async: it is a cached async function"),
        ({"tools": [f"{FILE}:yields"]}, "tool yields: it yields"),
        ({"tools": [f"{FILE}:yields_async"]}, "tool yields_async: it yields"),
        ({"tools": [f"{FILE}:caches_yields"]}, "tool yields: it yields"),
        ({"tools": ["no_such_module:f"]}, "there is no module 'no_such_module'"),
        ({"environment": f"{FILE}:good"}, "good"),
    ],
)
def test_tools_that_cannot_be_offered(keys, words):
    """The key and what is wrong, before a model is loaded."""
    with pytest.raises(ConfigError, match=f"rloo.tools.*{words}"):
        open_toolbox(make_run(**keys))


KEY = "sk-Canary/4711+a\"b'c\\d 50%\ne"
WAYS = ("as it is", "json", "php", "repr", "json in repr", "codes", "bytes", "quote", "quote twice", "small hex")


@pytest.mark.usefixtures("fresh")
def test_a_tool_never_shows_a_key_that_it_was_given(monkeypatch):
    """An HTTP error's address had the key: the model read it, and rollouts/, the report and the log had it."""
    monkeypatch.setenv("MY_API_KEY", KEY)
    names = ("fails", "shows", "returns", "is_no_text", "hangs")
    toolbox = toolbox_of(*names, file=LEAKING, tool_env=["MY_API_KEY"], tool_processes=2)

    def call(number, name, **arguments):
        (found,) = toolbox.call(number, [(name, arguments)]).result()
        shown = found.content + found.detail
        assert "***" in shown and not any(part in shown for part in ("4711", "50%", "b'c", "c\\d")), shown
        return found.content

    toolbox.reset([0, 1], [{}, {}])
    for number in (0, 1):
        for by in WAYS:
            whole = '{"key": "***"}' if by == "json in repr" else "401 for https://host/?q=1&key=***&page=2"
            assert whole in call(number, "shows", by=by) and whole in call(number, "fails", by=by)
        assert call(number, "returns", depth=2) == '[[{"code": 401, "key": "***"}, 1, "<***>"], 1, "<***>"]'
        assert call(number, "is_no_text", length=30).startswith("error: is_no_text returned {'xxx")
    (late,) = toolbox.call(0, [("hangs", {})]).result()
    assert late.kind == "failed" and "took longer" in late.content
    assert "key=***&page=2" in call(0, "fails", by="quote")


@pytest.mark.usefixtures("fresh")
def test_a_limit_that_falls_into_a_key_leaves_none_of_it(monkeypatch):
    """The kit cuts an error at 500 and at 1,000 characters, a result at 100,000: half a key is no longer found."""
    monkeypatch.setenv("MY_API_KEY", key := "sk-Canary/4711+abc")
    toolbox = toolbox_of("fails", "shows", file=LEAKING, tool_env=["MY_API_KEY"])
    toolbox.reset([0], [{}])
    for at in (*range(390, 480, 3), *range(870, 980, 3), *range(99_920, 99_990, 3)):
        for found in toolbox.call(0, [("fails", {"by": str(at)}), ("shows", {"by": str(at)})]).result():
            shown = found.content + found.detail
            assert not any(key[place : place + 4] in shown for place in range(len(key) - 3)), (at, shown[-200:])


@pytest.mark.usefixtures("fresh")
def test_an_environment_never_shows_a_key_that_it_was_given(monkeypatch):
    """Observations, messages and attributes go into prompts, rollouts/ and rewards' columns; numbers stay numbers."""
    monkeypatch.setenv("MY_API_KEY", KEY)
    toolbox = toolbox_of(environment=f"{LEAKING}:Leaky", tool_env=["MY_API_KEY"])
    good, bad = toolbox.reset([0, 1], [{}, {"fail": 1}])
    assert good.content == " Ask https://host/?key=***."
    assert bad.detail.startswith("reset: ConnectionError: no host ***")
    assert toolbox.call(0, [("look", {})]).result()[0].content == "from https://host/?key=***"
    assert toolbox.ask(0, "respond", []).result() == [{"role": "user", "content": "use ***", "number": 0}]
    with pytest.raises(RewardError, match=r"no reward from https://host/\?key=\*\*\*"):
        toolbox.ask(0, "get_reward", []).result()
    (seen, _) = toolbox.environments()
    assert (seen.url, seen.one, seen.parts) == ("https://host/?key=***", 1, [{"key": "***", "***": 1.0}])


@pytest.mark.usefixtures("fresh")
def test_only_what_is_worth_hiding_is_hidden(monkeypatch):
    """A dummy key would star half of all texts; the longer of two goes whole, stripped or line by line."""
    values = {
        "DUMMY_KEY": "1", "LOCAL_TOKEN": "EMPTY", "LEVEL": "debug", "SERVER_URL": "https://host/", "A_KEY": "sk-abcdef",
        "B_KEY": "sk-abcdef-ghi", "PADDED_KEY": "  sk-padded\n", "MY_API_KEY": "-----BEGIN-----\nqwertz\n-----END-----",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    toolbox = toolbox_of("echo", file=LEAKING, tool_env=[*values, "MISSING_KEY"])
    toolbox.reset([0], [{}])
    for text, shown in (
        ("1 + 11 = 12", "1 + 11 = 12"), ("debug: key EMPTY", "debug: key ***"), ("at https://host/v1", "at ***v1"),
        ("sk-abcdef-ghi, sk-abcdef-jkl", "***, ***-jkl"), ("Bearer sk-padded.", "Bearer ***."),
        (values["MY_API_KEY"], "***"), ("bad line 'qwertz'", "bad line '***'"),
        ('{"n": 1, "t": "sk-abcdef"}', '{"n": 1, "t": "***"}'),
    ):  # fmt: skip
        assert toolbox.call(0, [("echo", {"text": text})]).result() == [Result(shown)]
