"""The win rate: what the judge is shown, and what counts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError
from rloo_kit.evals.win_rate import measure_win_rate
from rloo_kit.graders import judge as module
from rloo_kit.results.changes import change_of, compare
from rloo_kit.results.evaluation import Evaluation, digest_prompt
from rloo_kit.results.verdict import TrainResult, judge_run
from tests.evaluations import mean_of
from tests.judge_server import MODEL, JudgeServer

QUALITY = {"good": 1.0, "fair": 0.5, "poor": 0.0}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    """Judges by an answer's first word; its pauses are short."""
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.0005)
    found = JudgeServer(lambda answer: QUALITY.get(answer.partition(" ")[0], 0.25))
    yield found
    found.stop()


def make_run(folder: Path, url: str, against: str = "base", **params: Any) -> RunConfig:
    return RunConfig(
        run={"name": "summaries", "output_dir": str(folder)},
        model={"name": "my-model"},
        data={"source": "any.jsonl"},
        rewards=[{"name": "length_reward"}],
        rloo={"max_steps": 1},
        eval={"judge": {"against": against, "params": {"url": url, "model": MODEL} | params}},
    )


def make_evaluation(label: str, answers: list[str], **measures: Any) -> Evaluation:
    prompts = [f"prompt {i}" for i in range(len(answers))]
    blank = {"thinking": "", "correct": None, "ended": True, "closed": False, "tokens": 3, "thinking_tokens": None}
    samples = [{"prompt": prompt, "answer": answer} | blank for prompt, answer in zip(prompts, answers, strict=True)]
    return Evaluation(
        label, len(answers), 1, 1.0, 50, measures=measures, samples=samples[:2], more_samples=samples[2:],
        prompts_digest="d", prompt_digests=list(map(digest_prompt, prompts)),
    )  # fmt: skip


def measure(run: RunConfig, base: list[str], after: list[str], **columns: list[str]) -> tuple[Evaluation, Evaluation]:
    """Both evaluations with their win rates."""
    sides = make_evaluation("before", base), make_evaluation("after", after)
    rows = {
        "prompt": [f"prompt {i}" for i in range(len(base))],
        "question": [f"question {i}" for i in range(len(base))],
    }
    for side in sides:
        measure_win_rate(run, datasets.Dataset.from_dict(rows | columns), side, sides[0])
    return sides


def test_wins_ties_and_losses_against_the_base(server: JudgeServer, tmp_path: Path) -> None:
    """Guards against a win rate that is not one: ties cost no call, a missing answer loses, before is one half."""
    base = ["fair", "fair", "fair", "", "fair", "poor a"]
    before, after = measure(make_run(tmp_path, server.url), base, ["good", "poor", "fair", "good", "", "poor b"])
    assert before.measures["win_rate"].per_prompt == [0.5] * 6 and before.value("win_rate") == 0.5
    assert after.measures["win_rate"].per_prompt == [1.0, 0.0, 0.5, 1.0, 0.0, 0.5]
    assert after.judge_agreement == 1.0 and len(server.requests) == 2 * 3
    asked = server.requests[0]["messages"][0]["content"]
    assert "question" in asked and "prompt " not in asked
    assert Evaluation.from_dict(json.loads(json.dumps(after.to_dict()))) == after
    assert f"against the base, by {MODEL}" in str(after) and "win rate" in after.describe()


def test_against_a_column_both_sides_are_measured(server: JudgeServer, tmp_path: Path) -> None:
    """Guards against one number where the paper has two: 33 % before, 51 % after, against the reference summaries."""
    run, size = make_run(tmp_path, server.url, against="summary"), 40
    sides = measure(run, ["poor"] * 30 + ["good"] * 10, ["poor"] * 10 + ["good"] * 30, summary=["fair"] * size)
    assert [one.value("win_rate") for one in sides] == [0.25, 0.75]
    change = change_of("win_rate", *sides)
    assert change is not None and change.paired and change.rose and change.difference.value == 0.5
    assert str(change).startswith("Win rate rose from 25 % to 75 % (+50 points, 95 % CI")
    with pytest.raises(ConfigError, match="summary"):
        measure(run, ["a"], ["b"])


def test_the_verdict_rests_on_the_win_rate(server: JudgeServer, tmp_path: Path) -> None:
    """Guards against a verdict from the reward that was trained on, which rose, while the judge prefers the base."""
    run = make_run(tmp_path, server.url)
    before, after = measure(run, ["fair"] * 40, ["poor"] * 30 + ["good"] * 10)
    before.measures["reward"], after.measures["reward"] = mean_of([0.1] * 40), mean_of([0.9] * 40)
    result = TrainResult(tmp_path, tmp_path / "adapter", 1, [], 1.0)
    assert (after.leading, judge_run(run, result, before, after).kind) == ("win_rate", "gamed")
    before, after = measure(run, ["fair"] * 40, ["good"] * 30 + ["poor"] * 10)
    verdict = judge_run(run, result, before, after)
    assert verdict.kind == "learnt" and "Win rate rose from 50 % to 75 %" in verdict.sentence
    assert "win rate +0.250 [" in str(compare(before, after))
    always = change_of("win_rate", *measure(run, ["fair"] * 40, ["good"] * 40))
    assert always is not None and always.difference.ends[0] == always.difference.high == 0.5
    before.judged_by = after.judged_by = "answer_reward"
    before.measures["accuracy"] = after.measures["accuracy"] = mean_of([1.0] * 40)
    assert after.leading == "accuracy"  # a reward of the run compares answers


@pytest.mark.parametrize(
    "change", [{"rubric": "Longer."}, {"options": {"seed": 1}}, {"template": "mine.jinja"}, {"url": None}], ids=str
)
def test_another_rubric_template_or_address_is_another_judge(
    server: JudgeServer, tmp_path: Path, change: dict[str, Any]
) -> None:
    """Guards against 'learnt' from 0 % by one rubric and 100 % by the next: the verdict does not compare them."""
    (tmp_path / "mine.jinja").write_text("{% for one in answers %}<answer>\n{{ one }}\n</answer>\n{% endfor %}Better?")
    change = {name: str(tmp_path / value) if name == "template" else value for name, value in change.items()}
    change |= {"url": server.url.replace("127.0.0.1", "localhost")} if "url" in change else {}
    rows = {"prompt": [f"prompt {i}" for i in range(40)], "summary": ["fair"] * 40}
    run, dataset = make_run(tmp_path, server.url, "summary"), datasets.Dataset.from_dict(rows)
    before, after = measure(run, ["poor"] * 40, ["good"] * 40, summary=rows["summary"])
    assert not compare(before, after).made_differently
    other = make_run(tmp_path, **{"url": server.url, "against": "summary", **change})
    measure_win_rate(other, dataset, after, before)
    result = TrainResult(tmp_path, tmp_path / "adapter", 1, [], 1.0)
    (found,) = compare(before, after).made_differently
    assert "judge" in found and "rubric" in found
    verdict = judge_run(other, result, before, after)
    assert verdict.kind == "no evidence" and "rubric" in verdict.sentence


@pytest.mark.parametrize("missing", [None, "", float("nan")], ids=str)
def test_a_reference_that_is_not_there_loses_without_a_call(server: JudgeServer, tmp_path: Path, missing: Any) -> None:
    """Guards against an opponent called 'None'; a reference of 0 is one."""
    run = make_run(tmp_path, server.url, against="summary")
    rows = {"prompt": ["prompt 0", "prompt 1"], "summary": [missing, missing]}
    measured = make_evaluation("before", ["poor", ""])
    measure_win_rate(run, datasets.Dataset.from_dict(rows), measured, None)
    assert measured.measures["win_rate"].per_prompt == [1.0, 0.5] and not server.requests
    rows = {"prompt": ["prompt 0"], "summary": [0]}
    measure_win_rate(run, datasets.Dataset.from_dict(rows), make_evaluation("before", ["poor"]), None)
    assert "\n0\n" in server.requests[0]["messages"][0]["content"]


def test_a_row_that_the_template_cannot_show_is_left_out(
    server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a finished training that ends in a traceback, because one held-out row has an empty column."""
    file = tmp_path / "mine.jinja"
    file.write_text("{{ row.notes[:2] }}{% for one in answers %}<answer>\n{{ one }}\n</answer>\n{% endfor %}")
    run = make_run(tmp_path, server.url, template=str(file))
    _, after = measure(run, ["fair"] * 3, ["good"] * 3, notes=["abc", None, "def"])  # type: ignore[list-item]
    assert after.measures["win_rate"].per_prompt == [1.0, None, 1.0]
    assert "1 of 3 answers were not compared" in capsys.readouterr().out


def test_the_agreement_is_of_what_was_asked(server: JudgeServer, tmp_path: Path) -> None:
    """Guards against a judge that goes by position and looks consistent, because most answers are equal."""
    server.verdict = lambda request: '{"better": 1}'  # type: ignore[method-assign]
    _, after = measure(make_run(tmp_path, server.url), ["fair"] * 9 + ["poor"], ["fair"] * 8 + ["", "good"])
    assert after.judge_agreement == 0.0 and after.measures["win_rate"].per_prompt == [0.5] * 8 + [0.0, 0.5]
    _, same = measure(make_run(tmp_path, server.url), ["fair"] * 3, ["fair"] * 3)
    assert same.judge_agreement is None and same.value("win_rate") == 0.5


def test_a_judge_that_fails_is_a_warning_and_no_loss(
    server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against an evaluation that is lost with its judge, and against losses by default."""
    server.fault = lambda number, text: "400" if "question 1\n" in text else None
    run = make_run(tmp_path, server.url)
    _, after = measure(run, ["fair"] * 4, ["good"] * 4)
    assert after.measures["win_rate"].per_prompt == [1.0, None, 1.0, 1.0]
    assert "1 of 4 answers were not compared" in capsys.readouterr().out
    server.fault = lambda number, text: "400"
    _, after = measure(make_run(tmp_path / "new", server.url), ["fair"] * 4, ["good"] * 4)
    assert "win_rate" not in after.measures and "HTTP 400" in capsys.readouterr().out
