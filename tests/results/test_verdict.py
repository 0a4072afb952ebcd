"""The verdict: a run that learnt nothing never looks like a success, and one that learnt says by how much."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.config.run import RunConfig
from rloo_kit.health.rule import Finding
from rloo_kit.results.evaluation import Evaluation, compare
from rloo_kit.results.intervals import clustered, mean_of_prompts
from rloo_kit.results.result import TrainResult, load_result
from rloo_kit.results.verdict import judge_run, record_verdict
from rloo_kit.runs.run_dir import RunDir

COUNT = 400


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    return RunConfig(
        run={"name": "tried", "output_dir": str(tmp_path)},
        model={"name": "embedded/thinking"},
        data={"source": "embedded/addition"},
        rewards=[{"name": "answer_reward"}],
        rloo={"max_steps": 30},
    )


def evaluation(right: int, **changes: Any) -> Evaluation:
    shares = [1.0] * right + [0.0] * (COUNT - right)
    found = Evaluation("", COUNT, 1, 1.0, 64, prompts_digest="same", per_prompt=shares, num_judged=COUNT)
    found.accuracy, found.low, found.high = clustered(shares, 1)
    found.samples = [{"prompt": "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n<think>\n"}]
    return replace(found, **changes)


def with_reward(found: Evaluation, values: list[float]) -> Evaluation:
    found.reward, found.reward_low, found.reward_high = mean_of_prompts(values, 1)
    return replace(found, reward_per_prompt=values)


def result(run: RunConfig, *findings: Finding, **changes: Any) -> TrainResult:
    made = TrainResult(run.folder, run.folder / "adapter", 30, [], 12.0, adapter_step=30, findings=list(findings))
    return replace(made, **changes)


def finding(rule: str, level: str = "alarming", last: int = 30) -> Finding:
    return Finding(rule, 5, 3, last, "what it saw", "why", "change rloo.key", level)


def test_a_run_that_learnt_says_by_how_much(run: RunConfig) -> None:
    verdict = judge_run(run, result(run), evaluation(88), evaluation(368))
    assert verdict.kind == "learnt"
    assert verdict.sentence.startswith("Accuracy rose from 22 % to 92 % (+70 points, 95 % CI 65 to 74, 400 held-out")
    assert verdict.change is not None and verdict.change.value == pytest.approx(0.7)
    assert [command.split()[1] for command in verdict.commands] == ["ask", "export"]
    assert '"1+2="' in verdict.commands[0], "a question that the model was made for"


def test_a_rise_is_shown_with_greedy_accuracy_and_thinking(run: RunConfig) -> None:
    """Sampled accuracy alone also rises if sampling only got sharper: "from 24 % to 94 %" was no evidence."""

    def side(right: int, greedy: int, thinking: float) -> Evaluation:
        shares = [1.0] * greedy + [0.0] * (COUNT - greedy)
        measured = dict(zip(("greedy_accuracy", "greedy_low", "greedy_high"), clustered(shares, 1), strict=True))
        return evaluation(right, greedy_per_prompt=shares, mean_thinking_tokens=thinking, **measured)

    verdict = judge_run(run, result(run), side(56, 4, 5.1), side(360, 396, 18.9))
    assert verdict.sentence.endswith("prompts); greedy from 1 % to 99 %; thinking from 5 to 19 tokens.")


def test_a_difference_within_its_interval_is_no_evidence(run: RunConfig) -> None:
    verdict = judge_run(run, result(run), evaluation(200), evaluation(204))
    assert verdict.kind == "no evidence" and "went from 50.0 % to 51.0 %" in verdict.sentence
    assert "eval.num_prompts" in verdict.next or "rloo.max_steps" in verdict.next
    assert not any("ask" in command for command in verdict.commands)


def test_a_solved_task_is_told_to_find_harder_prompts(run: RunConfig) -> None:
    verdict = judge_run(run, result(run), evaluation(396), evaluation(397))
    assert verdict.kind == "no evidence" and "harder prompts" in verdict.next


@pytest.mark.parametrize("rule", ["no_signal", "truncation", "cold_start", "zero_gradient", "all_none"])
@pytest.mark.parametrize("evaluated", [True, False])
def test_a_run_without_signal_never_looks_like_a_success(run: RunConfig, rule: str, evaluated: bool) -> None:
    sides = (evaluation(200), evaluation(201)) if evaluated else (None, None)
    verdict = judge_run(run, result(run, finding(rule)), *sides)
    assert verdict.kind == "no signal" and "what it saw" in verdict.sentence and "rloo.key" in verdict.next


def test_a_short_run_whose_groups_were_all_tied_had_no_signal(run: RunConfig) -> None:
    """Three steps are too few for the health rule, and "train longer" would be bad advice."""
    tied = [{"step": step, "frac_score_zero_std": 1.0} for step in (1, 2, 3)]
    verdict = judge_run(run, result(run, steps=3, metrics=tied), evaluation(0), evaluation(0))
    assert verdict.kind == "no signal" and "rloo-kit sft" in verdict.next
    assert judge_run(run, result(run, metrics=tied), evaluation(396), evaluation(396)).kind == "no evidence"
    tied[1]["frac_score_zero_std"] = 0.5
    assert judge_run(run, result(run, metrics=tied), evaluation(0), evaluation(0)).kind == "no evidence"


def test_groups_may_be_tied_where_the_task_is_solved(run: RunConfig) -> None:
    """The limit for an accuracy was applied to a reward too, which may be any number."""
    tied = [{"step": step, "frac_score_zero_std": 1.0} for step in (1, 2, 3)]
    no_answers = evaluation(0, accuracy=None, low=None, high=None, per_prompt=None, num_judged=0)
    for reward in (0.5, 5.0):
        side = with_reward(no_answers, [reward] * COUNT)
        assert judge_run(run, result(run, metrics=tied), side, side).kind == "no signal"
    solved = [row | {"rewards/answer_reward/mean": 1.0} for row in tied]
    assert "solved" not in judge_run(run, result(run, metrics=tied)).sentence
    assert judge_run(run, result(run, metrics=tied)).kind == "no signal"
    assert judge_run(run, result(run, metrics=solved)).kind == "no evidence", "worked solutions would not help"


def test_a_last_step_that_was_not_logged_ends_no_finding(run: RunConfig) -> None:
    """With logging_steps 5 and 62 steps every alarm counted as over, and the run only as "not evaluated"."""
    rows = [{"step": step} for step in range(5, 61, 5)]
    verdict = judge_run(run, result(run, finding("truncation", last=60), steps=62, metrics=rows))
    assert verdict.kind == "no signal" and verdict.next == "change rloo.key."
    verdict = judge_run(run, result(run, finding("truncation", last=55), steps=62, metrics=rows))
    assert verdict.kind == "no evidence"


def test_a_run_that_still_trains_is_not_judged_as_ended(run: RunConfig) -> None:
    """The advice was to continue with --resume, and after one step with tied groups that there was no signal."""
    tied = [{"step": 1, "frac_score_zero_std": 1.0}]
    for changes in ({"steps": 0}, {"steps": 1, "metrics": tied}):
        verdict = judge_run(run, result(run, stopped="running", **changes), evaluation(88))
        assert verdict.kind == "no evidence" and "has not ended" in verdict.sentence and not verdict.next


def test_what_stopped_a_run_is_known_from_its_folder_too(run: RunConfig) -> None:
    """`rloo-kit report` wrote "ended as failed" over "no learning signal"."""
    with RunDir.create(run) as run_dir:
        run_dir.set_status("failed", step=4, max_steps=30, stopped_by="no signal", error="why")
    assert load_result(run).stopped == "no signal"
    with RunDir.create(run, resume=True) as run_dir:
        assert load_result(run).stopped == "running"
        run_dir.set_status("failed", step=4, stopped_by={})
    assert load_result(run).stopped == "failed"


def test_supervised_training_is_told_its_own_keys(run: RunConfig) -> None:
    for sides in ((evaluation(300), evaluation(20)), (evaluation(200), evaluation(201))):
        advice = judge_run(run, result(run, method="sft"), *sides).next
        assert "sft." in advice and "rloo." not in advice


def test_signal_that_came_back_is_no_verdict(run: RunConfig) -> None:
    verdict = judge_run(run, result(run, finding("no_signal", last=12)), evaluation(88), evaluation(368))
    assert verdict.kind == "learnt"


def test_a_model_that_became_worse_is_broken(run: RunConfig) -> None:
    verdict = judge_run(run, result(run, finding("broken_policy")), evaluation(300), evaluation(20))
    assert verdict.kind == "broken" and "fell from 75 % to 5 %" in verdict.sentence and "rloo.key" in verdict.next
    assert judge_run(run, result(run, finding("broken_policy"))).kind == "broken", "without an evaluation too"
    assert "rloo.learning_rate" in judge_run(run, result(run), evaluation(300), evaluation(20)).next


def test_reward_without_accuracy_is_gamed(run: RunConfig) -> None:
    before = with_reward(evaluation(300), [0.2 + 0.001 * (number % 7) for number in range(COUNT)])
    after = with_reward(evaluation(200), [0.9 + 0.001 * (number % 5) for number in range(COUNT)])
    verdict = judge_run(run, result(run), before, after)
    assert verdict.kind == "gamed" and "reward rose from 0.20 to 0.90" in verdict.sentence
    assert "accuracy fell" in verdict.sentence
    assert judge_run(run, result(run, finding("reward_hacking")), evaluation(200), evaluation(199)).kind == "gamed"
    assert judge_run(run, result(run, finding("reward_hacking")), evaluation(100), evaluation(300)).kind == "learnt"


def test_without_an_answer_the_reward_decides(run: RunConfig) -> None:
    sides = [
        with_reward(evaluation(0, accuracy=None, low=None, high=None, per_prompt=None), values)
        for values in ([0.1 + 0.01 * (n % 9) for n in range(COUNT)], [1.1 + 0.01 * (n % 8) for n in range(COUNT)])
    ]
    verdict = judge_run(run, result(run), *sides)
    assert verdict.kind == "learnt" and verdict.sentence.startswith("The held-out reward rose from 0.14 to 1.1")


@pytest.mark.parametrize(
    "changes, word",
    [({"temperature": 0.5}, "temperature 1 and 0.5"), ({"max_completion_length": 32}, "completion limit 64 and 32")],
)
def test_evaluations_made_differently_are_not_compared(run: RunConfig, changes: dict[str, Any], word: str) -> None:
    verdict = judge_run(run, result(run), evaluation(88), evaluation(368, **changes))
    assert verdict.kind == "no evidence" and word in verdict.sentence and verdict.change is None
    assert f"made differently: {word}" in str(compare(evaluation(88), evaluation(368, **changes)))
    assert "differently" not in str(compare(evaluation(88), evaluation(368)))


def test_other_prompts_and_sample_counts_are_compared_with_a_word(run: RunConfig) -> None:
    verdict = judge_run(run, result(run), evaluation(88), evaluation(368, prompts_digest="others"))
    assert verdict.kind == "learnt" and "on different prompts" in verdict.sentence
    verdict = judge_run(run, result(run), evaluation(88), evaluation(368, num_samples=4))
    assert "from 1 and 4 completions per prompt" in verdict.sentence


def test_the_best_of_many_evaluations_is_said_to_be_partly_luck(run: RunConfig) -> None:
    verdict = judge_run(run, result(run, adapter_step=10), evaluation(88), evaluation(368))
    assert "of step 10" in verdict.sentence and "luck" in verdict.sentence


def test_a_run_that_was_cut_off_has_no_verdict_to_boast_of(run: RunConfig) -> None:
    verdict = judge_run(run, result(run, steps=7, stopped="interrupted"), evaluation(88))
    assert verdict.kind == "no evidence" and "step 7" in verdict.sentence and "--resume" in verdict.next


def test_the_verdict_is_kept_beside_the_rest_of_the_status(run: RunConfig) -> None:
    with RunDir.create(run) as run_dir:
        run_dir.set_status("finished", step=30, max_steps=30, adapter_step=20, stopped_early="why")
    verdict = judge_run(run, result(run), evaluation(88), evaluation(368))
    record_verdict(run.folder, verdict)
    status = json.loads((run.folder / "status.json").read_text())
    assert status["verdict"]["kind"] == "learnt" and status["verdict"]["change"]["prompts"] == COUNT
    assert (status["adapter_step"], status["stopped_early"], status["state"]) == (20, "why", "finished")
    with RunDir.create(run, resume=True):
        assert "verdict" not in RunDir(run.folder).status(), "it trains on"
        record_verdict(run.folder, verdict)
        assert "verdict" not in RunDir(run.folder).status()


def test_the_line_of_an_evaluation_names_each_thinking_budget() -> None:
    """When the line replaced the table in a run's output, the accuracies at thinking budgets were gone."""
    budgets = [{"budget": 8, "accuracy": 0.5}, {"budget": 4, "accuracy": None}]
    line = Evaluation("after", 1000, 1, 1.0, 48, pass_at_k={4: 0.75}, budgets=budgets).describe()
    assert line == "Evaluation after: pass@4 0.750, 0.500 at 8 tokens of thinking, 0% truncated; 1,000 held-out prompts"
