"""Runs that a judge scores: faults of its server, a judge that is down, and what is found before the model loads."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rloo_kit as kit
from rloo_kit.checks.faults import find_faults
from rloo_kit.errors import RewardError
from rloo_kit.graders import judge as module
from rloo_kit.rewarding.registry import build_rewards
from tests.judge_server import FAULTS, MODEL, JudgeServer
from tests.loop.conftest import lines, status

Start = Callable[..., Any]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    """Grades by the characters, hardly two answers alike; pauses are short."""
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.0005)
    found = JudgeServer(lambda answer: sum(map(ord, answer)) % 97 / 97)
    yield found
    found.stop()


@pytest.fixture
def judged(start: Start, write_config: Any, server: JudgeServer, tiny_tokenizer: Any) -> Start:
    """`judged(mode, resume=...)`: a run of three steps whose one reward is the judge's."""

    def run(mode: str = "score", steps: int = 3, timeout_s: float = 0.5, **options: Any) -> Any:
        params = {"url": server.url, "model": MODEL, "mode": mode, "request_timeout_s": timeout_s, "thinking": False}
        config = kit.load_config(write_config(), rewards=[{"name": "judge_reward", "params": params}])
        rewards = build_rewards(config, tiny_tokenizer)
        return start(f"rloo.max_steps={steps}", rewards=rewards, **options)

    return run


@pytest.mark.parametrize("mode", ["score", "rank"])
def test_faults_that_pass_lose_no_sample(judged: Start, server: JudgeServer, mode: str, tmp_path: Path) -> None:
    """Guards against steps that train on less than they sampled: every third request fails, each in another way."""
    server.stall_s = 0.8
    server.fault = lambda number, text: FAULTS[number // 3 % len(FAULTS)] if number % 3 == 0 else None
    result = judged(mode)
    assert result.steps == 3 and len(server.requests) > 3
    for row in result.metrics:
        assert row["rewards/unscored_ratio"] == row["rewards/failed_ratio"] == row["judge/failed"] == 0
    assert sum(row["judge/retries"] for row in result.metrics) > 0
    assert all(row["judge/tokens"] >= 0 and row["judge/calls"] >= 0 for row in result.metrics)
    if mode == "rank":
        assert all(row["judge/agreement"] == 1.0 for row in result.metrics if "judge/agreement" in row)
        assert all(abs(row["reward"] - 0.5) < 1e-6 for row in result.metrics)


def test_a_judge_that_goes_down_saves_and_stops_the_run(
    judged: Start, server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a night without a reward: the run saves and stops, and resumes without paying twice."""
    judged(steps=2)
    before = len(server.requests)
    server.fault = lambda number, text: "503"
    with pytest.raises(RewardError, match="503"):
        judged(steps=8, resume=True)
    folder = tmp_path / "outputs" / "tiny"
    failed = [row for row in lines(folder, "metrics.jsonl") if row["step"] > 2]
    assert status(folder)["state"] == "failed" and "503" in capsys.readouterr().out
    assert failed and all(row["rewards/unscored_ratio"] == 1.0 and row["judge/failed"] > 0 for row in failed)
    assert len(server.requests) > before
    server.fault = lambda number, text: None
    result = judged(steps=8, resume=True)
    assert result.steps == 8 and result.metrics[-1]["rewards/unscored_ratio"] == 0


def errors_of(config: Path, where: str, params: dict[str, Any], *overrides: str) -> list[str]:
    """What is wrong with a judge of those parameters, as a reward or in the evaluation."""
    as_reward = {"rewards": [{"name": "judge_reward", "params": params}]}
    run = kit.load_config(
        config, *overrides, **(as_reward if where == "reward" else {"eval": {"judge": {"params": params}}})
    )
    return [str(one) for one in find_faults(run) if one.level == "error"]


@pytest.mark.parametrize("where", ["reward", "eval"])
def test_a_judge_that_is_missing_is_found_before_the_model_loads(
    write_config: Any, server: JudgeServer, where: str
) -> None:
    """Guards against an hour of loading and evaluating before the first request; the fix is in the message."""
    name = "rewards.0.params" if where == "reward" else "eval.judge.params"

    def errors(**params: Any) -> list[str]:
        return errors_of(write_config(), where, {"url": server.url, "model": MODEL} | params)

    assert not errors()
    for wrong, words in (({"model": "other"}, MODEL), ({"rubrik": "Good?"}, "rubric"), ({"url": "host"}, "http://")):
        (found,) = errors(**wrong)
        assert name in found and words in found
    server.stop()
    (found,) = errors()
    assert server.url in found and name in found


@pytest.mark.parametrize("where", ["reward", "eval"])
def test_a_template_that_does_not_fit_the_rows_is_found_before_the_model_loads(
    write_config: Any, server: JudgeServer, where: str, tmp_path: Path
) -> None:
    """Guards against a misspelt column that makes every reward None; columns that only a run has are no fault."""
    answers = '<answer>\n{{ answer }}\n</answer> "score"'
    if where == "eval":
        answers = "{% for one in answers %}<answer>\n{{ one }}\n</answer>\n{% endfor %}"

    def errors(text: str, *overrides: str) -> list[str]:
        (tmp_path / "t.jinja").write_text(f"{{{{ task }}}} {text} {answers}")
        params = {"url": server.url, "model": MODEL, "template": str(tmp_path / "t.jinja")}
        return errors_of(write_config(), where, params, *overrides)

    for text in ("", "{{ row.answer }}", "{{ row.question }}", "{{ row.prompt }}"):
        assert not errors(text), text
    assert not errors("{{ row.thinking_forced }}", "rloo.thinking_budget=4")
    asked = len(server.requests)
    for text in ("{{ row.contxt }}", "{{ anwser }}", "{{ row.answer.nothing }}", "{% if %}", "{{ 1 / 0 }}"):
        (found,) = errors(text)
        assert "params" in found and "t.jinja" in found, text
    assert len(server.requests) == asked
