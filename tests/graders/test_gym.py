"""`reasoning_gym_score`: the library's verifiers in their process, as a reward and as the judge of an evaluation."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rloo_kit.checks.rewards import find_reward_faults
from rloo_kit.completion import Completion
from rloo_kit.config.run import RunConfig
from rloo_kit.data.answers import GymRow, gold_answers
from rloo_kit.data.sources import Part
from rloo_kit.errors import WholeBatchError
from rloo_kit.evals.evaluate import AnswerJudge
from rloo_kit.graders import verifier
from rloo_kit.graders.verifier import FINDERS, ReasoningGymScore
from rloo_kit.loop.metrics import find_answer_column
from rloo_kit.rewarding.guard import guard
from rloo_kit.system.versions import is_importable
from rloo_kit.tasks import gym
from rloo_kit.tasks.gym import GYM_COLUMN, read_gym
from tests.data.conftest import InPlace

END = 151668
pytestmark = pytest.mark.skipif(not is_importable("reasoning_gym"), reason="make reasoning-gym has not been run")


def row(answer: str = "7", task: str = "chain_sum", **metadata: Any) -> str:
    entry = {"question": "3 + 4 =", "answer": answer, "metadata": metadata}
    return json.dumps({"task": task, "options": {}, "entry": entry})


@pytest.fixture(scope="module")
def score() -> Any:
    """One reward, and so one process, for all tests here."""
    reward = ReasoningGymScore()
    yield reward
    reward.worker.close()


def judge(reward: ReasoningGymScore, *pairs: tuple[str, Any], ids: tuple[int, ...] = (7, END, 19)) -> list[Any]:
    return reward(
        prompts=["p"] * len(pairs),
        completions=[f"so</think>{given}" for given, _ in pairs],
        completion_ids=[list(ids)] * len(pairs),
        reasoning_gym=[expected for _, expected in pairs],
        answer=["7"] * len(pairs),
    )


@pytest.mark.slow
def test_the_verifier_scores_what_follows_the_tag(score: ReasoningGymScore) -> None:
    """Partial credit is the verifier's; a row of another source has no such score; no tag is no answer."""
    pairs = [("7", row()), ("+7.0", row()), ("8", row()), ("", row()), ("seven 7", row()), ("7", None)]
    found = judge(score, *pairs)
    assert found[:4] == [1.0, 1.0, 0.0, 0.0] and found[5] is None and found[4] == pytest.approx(1 / 7)
    assert judge(score, ("7", row()), ids=(7, 19)) == [0.0], "spelled out, and never closed by its id"
    batch = {"completions": ["7"], "completion_ids": [[19]], "reasoning_gym": [row()]}
    spoken = ReasoningGymScore(thinking=False)
    spoken.__dict__["worker"] = score.worker
    assert spoken(**batch) == [1.0] and guard(spoken)(prompts=["p"], **batch) == [1.0]


@pytest.mark.slow
def test_a_threshold_and_where_the_answer_is_looked_for(score: ReasoningGymScore) -> None:
    """A chat model answers in a sentence, and gets a share for the length of the right part."""

    def scored(given: str, **params: Any) -> list[Any]:
        reward = ReasoningGymScore(**params)
        reward.__dict__["worker"] = score.worker
        return judge(reward, (given, row()))

    assert scored("seven 7", threshold=1.0) == [0.0] and scored("7", threshold=1) == [1.0]
    assert scored("seven 7", threshold=0.1) == [1.0]
    assert scored(r"It is \boxed{7}.", find="boxed", threshold=1.0) == [1.0]
    assert scored("It is <answer> 7 </answer>.", find="answer_tag", threshold=1.0) == [1.0]
    assert scored("It is </answer> 7 <answer>.", find="answer_tag") == [0.0]
    assert scored("It is 7.", find="boxed") == [0.0]


def test_parameters_out_of_range() -> None:
    for name, value, words in (
        ("threshold", 0, "it must be"), ("threshold", 1.5, "it must be above 0 and at most 1"),
        ("find", "last_number", "it must be one of whole, boxed, answer_tag"), ("answer_timeout_s", 0, "it must be"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} is {value!r}; {words}"):
            ReasoningGymScore(**{name: value})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`fake(**params)`: a reward whose library is the stand-in: it does to its process what the answer names."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "data" / "fake_gym"))
    made: list[ReasoningGymScore] = []

    def build(**params: Any) -> ReasoningGymScore:
        made.append(ReasoningGymScore(**params))
        return made[-1]

    yield build
    for reward in made:
        reward.worker.close()


@pytest.mark.slow
def test_what_a_verifier_does_costs_its_answer_alone(fake: Any) -> None:
    """A verifier that raises finds a wrong answer. `exit()` as an answer left the whole batch unscored."""
    given = ("raise", "exit()", "7", "die", "7", "interrupt", "7")
    found = judge(fake(), *((answer, row()) for answer in given))
    assert [str(value) for value in found] == ["0.0", "0.0", "1.0", "nan", "1.0", "nan", "1.0"]


@pytest.mark.slow
def test_a_verifier_that_takes_long_to_make(fake: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """count_primes sieves when it is made, within the first answer's limit: right answers were wrong, silently."""
    slow = row().replace('"options": {}', '"options": {"build_s": 0.8}')
    reward = fake(answer_timeout_s=0.4)
    assert judge(reward, ("7", slow), ("hang", slow), ("7", slow)) == [1.0, 0.0, 1.0]
    monkeypatch.setattr(verifier, "BUILD_TIMEOUT_S", 0.4)
    reward = fake(answer_timeout_s=0.4)
    for _ in range(2):
        found = judge(reward, ("7", slow), ("7", row()))
        assert math.isnan(found[0]) and found[1] == 1.0, "failed, not wrong"
    assert capsys.readouterr().out.count("WARNING: reasoning_gym_score cannot score rows of") == 1


def test_rows_of_a_file_may_name_any_task(score: ReasoningGymScore, capsys: Any) -> None:
    """A verifier that runs the answer as Python is refused in rows too that were drawn elsewhere."""
    found = judge(score, ("1", row(task="simple_integration")), ("1", "{"), ("7", row()), ("8", row()))
    assert [str(value) for value in found] == ["nan", "nan", "1.0", "0.0"]
    assert "simple_integration is refused: its verifier runs the answer as Python" in capsys.readouterr().out


def test_without_the_column_or_the_library(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one's own have no verifier; a library that is missing is no wrong answer."""
    reward = fake()
    with pytest.raises(ValueError, match=r"needs the column 'reasoning_gym'.*columns found: answer"):
        reward(completions=["7"], completion_ids=[[7]], answer=["7"])
    monkeypatch.setenv("RLOO_KIT_BROKEN_GYM", "1")
    with pytest.raises(WholeBatchError, match="make reasoning-gym.*libgym.so is missing"):
        judge(fake(), ("7", row()))


def make_run(*rewards: dict[str, Any]) -> RunConfig:
    return RunConfig(
        model={"name": "mine"}, data={"source": "reasoning_gym/chain_sum"}, rewards=list(rewards), rloo={"max_steps": 1}
    )


class Table(dict):
    column_names = property(lambda self: list(self))


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "Worker", InPlace)
    monkeypatch.setattr(gym, "Worker", InPlace)


@pytest.mark.slow
def test_accuracy_is_the_verifiers(tiny_tokenizer: Any, in_place: None) -> None:
    """Several orders of courses or paths are right: compared with the stored answer, most right answers were wrong."""
    (end_id,) = [tiny_tokenizer.get_vocab()["</think>"]]
    table = Table(answer=["7", "12", None], **{GYM_COLUMN: [row(), None, None]})
    gold = gold_answers(table)
    assert gold == [row(), "12", None] and isinstance(gold[0], GymRow) and gold_answers(Table(prompt=[])) is None
    assert gold_answers(Table(answer=["1"])) == ["1"]
    run = make_run({"name": "reasoning_gym_score", "params": {"threshold": 0.1}}, {"name": "answer_reward"})
    judged = AnswerJudge(run, tiny_tokenizer, gold)
    verifier = judged.gym_reward.reward
    assert verifier.threshold is None and verifier.think_end_id == end_id

    def done(text: str) -> Completion:
        return Completion(tiny_tokenizer(f"so</think>{text}")["input_ids"], f"so</think>{text}", ended=True)

    completions = [done(text) for text in ("+7.0", "is 7", "12", "7", "7", "9")]
    assert judged.judge(completions) == [True, False, True, False, None, None]
    gym_only = AnswerJudge(make_run({"name": "length_reward"}), tiny_tokenizer, gold[:1])
    assert gym_only.reward is None and gym_only.judge(completions[:2]) == [True, False]


def test_the_verifiers_column_is_the_accuracy_of_a_rollout() -> None:
    """In a mix the answer reward scores the library's rows too, by the stored answer."""
    nan = math.nan
    rewards = torch.tensor([[0.0, 1.0], [1.0, nan], [nan, nan]])
    found = find_answer_column(rewards, ["answer_reward", "reasoning_gym_score"])
    assert found is not None and found[:2].tolist() == [1.0, 1.0] and found[2].isnan()
    only = find_answer_column(rewards, ["length_reward", "reasoning_gym_score"])
    assert only is not None and only[0] == 1.0 and only[1].isnan()
    assert find_answer_column(rewards, ["length_reward", "x"]) is None


def test_the_cheap_checks_try_it(tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, in_place: None) -> None:
    """It is called on made-up completions of a real row before any weights are loaded, and says what is missing."""
    source = read_gym(Part("reasoning_gym/number_sorting", count=3), 11)
    run, drawn = make_run({"name": "reasoning_gym_score"}), source.row(0)
    for find in FINDERS:  # no completion had the tag: a run that looks for it was warned that it teaches nothing
        tried = make_run({"name": "reasoning_gym_score", "params": {"find": find, "threshold": 1.0}})
        assert list(find_reward_faults(tried, tiny_tokenizer, True, drawn)) == []
    monkeypatch.setattr("rloo_kit.tasks.gym.is_importable", lambda name: False)
    (fault,) = find_reward_faults(run, tiny_tokenizer, True, drawn)
    assert fault.key == "rewards.0.name" and "make reasoning-gym" in fault.text
