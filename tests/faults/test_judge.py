"""A judge that accepts requests and never replies, and a run that is to end meanwhile, on the real command line."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.faults.place import Place
from tests.judge_server import MODEL, JudgeServer

pytestmark = pytest.mark.slow
LIMIT_S = 60.0  # on a busy machine; a reply may take ten minutes
WORDS: dict[tuple[str, signal.Signals], list[str]] = {  # 40 training prompts, two in a step
    ("step in the middle of a rollout", signal.SIGHUP): ["rloo.num_iterations=2"],
    ("evaluation", signal.SIGTERM): ["eval.every_steps=4", "eval.every_prompts=4", "eval.num_samples=2"],
}


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    found = JudgeServer(lambda answer: sum(map(ord, answer)) % 7 / 7)
    yield found
    found.stop()


@pytest.fixture
def judged(tmp_path: Path, tiny_folder: Path, server: JudgeServer) -> Callable[[str], Place]:
    """`judged(name)`: a folder whose one reward is the judge's."""

    def build(name: str) -> Place:
        place = Place(tmp_path / name, tiny_folder)
        params = {"url": server.url, "model": MODEL, "request_timeout_s": 600.0, "thinking": False}
        file = place.folder / "tiny.yaml"
        rewards = "rewards: [{name: length_reward}, {name: 'own:by_text'}]"
        assert rewards in (text := file.read_text())
        file.write_text(text.replace(rewards, f"rewards: [{json.dumps({'name': 'judge_reward', 'params': params})}]"))
        return place

    return build


def hang_after(server: JudgeServer, place: Place, step: int) -> Callable[[], bool]:
    """Make the judge hang once `step` is done; the result says whether it does."""
    asked: list[int] = []

    def fault(number: int, text: str) -> str | None:
        if place.status().get("step", 0) < step:
            return None
        asked.append(number)
        return "silence"

    server.stall_s, server.fault = 600.0, fault
    return lambda: bool(asked)


@pytest.mark.parametrize(("where", "number"), WORDS, ids=lambda one: str(getattr(one, "name", one)))
def test_a_run_whose_judge_hangs_ends_after_a_signal_and_resumes_as_if_it_had_not(
    judged: Callable[[str], Place], server: JudgeServer, where: str, number: signal.Signals
) -> None:
    """SIGTERM took 369 s: the step waited for five tries of a minute each, and was trained on nothing."""
    words = [*WORDS[where, number], "rloo.save_steps=100", "rloo.max_steps=8"]
    whole = judged("whole")
    assert whole.run(*words) == 0, whole.printed()
    place = judged("hung")
    hangs = hang_after(server, place, 4)
    process = place.start(*words)
    place.wait_for(hangs, process, "a request without a reply")
    process.send_signal(number)
    began = time.monotonic()
    assert process.wait(timeout=LIMIT_S) == 130, place.printed()
    print(f"{number.name} in the {where}: {time.monotonic() - began:.1f} s")
    assert (place.status()["state"], place.status()["step"]) == ("interrupted", 4), place.printed()
    assert place.checkpoints() == [4] and "Traceback" not in place.printed()
    server.fault = lambda number, text: None
    assert place.run("--resume", *words) == 0, place.printed()
    (_, rollouts, weights), (_, expected_rollouts, expected) = place.result(), whole.result()
    assert rollouts == expected_rollouts and weights.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())
    found, wanted = measured(place), measured(whole)
    assert found == wanted and bool(found) == (where == "evaluation")


def measured(place: Place) -> list[tuple[int, float]]:
    """Step and value of the evaluations during training."""
    file = place.run_folder / "evaluations.jsonl"
    rows = map(json.loads, file.read_text().splitlines() if file.exists() else [])
    return [(row["step"], row["value"]) for row in rows]
