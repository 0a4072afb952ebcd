"""Runs whose tools fail, and runs that are killed while a tool is called."""

import signal

import pytest

from tests.episodes import calling_model, calling_tokenizer
from tests.faults.place import Place, assert_equal

TOOLS = '''
import os, pathlib, signal

FOLDER = pathlib.Path(__file__).parent

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first one.
        b: the second one.
    """
    with open(FOLDER / "tool_calls", "a") as file:
        file.write("x")
    kill_at = FOLDER / "kill_at"
    if kill_at.exists() and (FOLDER / "tool_calls").stat().st_size >= int(kill_at.read_text()):
        kill_at.unlink()
        os.kill(os.getppid(), signal.SIGKILL)
    return a + b

def fail() -> str:
    """Fail."""
    raise ConnectionError("the index is down")
'''
WORDS = (
    "rloo.tools=[tools.py:add, tools.py:fail]",
    "rloo.max_completion_length=160",
    "model.max_seq_length=256",
    "rloo.max_steps=4",
    "rloo.tool_result_tokens=40",
)


@pytest.fixture(scope="module")
def calling_folder(tmp_path_factory, make_tiny_model, tiny_tokenizer):
    folder = tmp_path_factory.mktemp("calling")
    calling_model(make_tiny_model).save_pretrained(folder)
    calling_tokenizer(tiny_tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def place_with_tools(tmp_path, calling_folder):
    def build(name: str) -> Place:
        place = Place(tmp_path / name, calling_folder)
        (place.folder / "tools.py").write_text(TOOLS)
        return place

    return build


@pytest.mark.slow
def test_a_run_killed_in_an_episode_ends_like_one_that_was_not(place_with_tools):
    """SIGKILL while a tool is called: ids, rewards and weights end to the bit like without. Which rows are computed
    together depends on the tool's time, so the sampler's rounding may differ."""
    whole = place_with_tools("whole")
    assert whole.run(*WORDS) == 0, whole.printed()
    metrics, rows, _ = whole.result()
    calls = (whole.folder / "tool_calls").stat().st_size
    assert calls > 10 and any(row["tool_calls"] > 1 for row in rows) and metrics[0]["tools/failure_frequency"] > 0
    assert any("error: fail: ConnectionError" in str(row["turns"]) for row in rows), "the model reads why"
    assert "WARNING: tool fail: ConnectionError: the index is down (tools.py, line" in whole.printed()

    killed = place_with_tools("killed")
    (killed.folder / "kill_at").write_text(str(calls * 2 // 3))
    assert killed.run(*WORDS) == -signal.SIGKILL and killed.status()["step"] < 4
    assert killed.run("--resume", *WORDS) == 0, killed.printed()
    results = [killed.result(), whole.result()]
    for row in (row for metrics, _, _ in results for row in metrics):
        assert row.pop("sampling/logp_difference_max") < 1e-5 and row.pop("sampling/logp_difference_mean") < 1e-6
    assert_equal(*results)


@pytest.mark.slow
def test_tools_that_mostly_fail_end_the_run_with_a_checkpoint(place_with_tools):
    """Hours of episodes in which every call failed taught a model not to call."""
    place = place_with_tools("failing")
    (place.folder / "tools.py").write_text(TOOLS.replace("return a + b", "raise OSError('no route')"))
    assert place.run(*WORDS) == 2, place.printed()
    assert "of the tools' calls failed" in place.errors()[-1] and "no route" in place.errors()[-1]
    assert place.checkpoints()
