"""The verdict: a run that learnt nothing never looks like a success, and one that learnt says by how much."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import RewardSection
from rloo_kit.data.answers import EXACT
from rloo_kit.health.rules import Finding
from rloo_kit.results.changes import compare
from rloo_kit.results.evaluation import THINKING, Evaluation
from rloo_kit.results.intervals import Measured
from rloo_kit.results.verdict import TrainResult, judge_run, load_result, record_verdict
from rloo_kit.runs.folder import RunDir
from tests.evaluations import mean_of
from tests.results.test_report import make_config

COUNT = 400


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    return make_config("tried", tmp_path)


def right_of_all(right: int) -> Measured:
    return mean_of([1.0] * right + [0.0] * (COUNT - right))


def evaluation(right: int, **changes: Any) -> Evaluation:
    found = Evaluation("", COUNT, 1, 1.0, 64, {"accuracy": right_of_all(right)}, prompts_digest="same")
    found.samples = [{"prompt": "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n<think>\n"}]
    return replace(found, **changes)


def thinks(found: Evaluation, tokens: float, **measures: Measured) -> Evaluation:
    lengths = mean_of([tokens * (0.9 + 0.2 * (number % 2)) for number in range(COUNT)])
    return replace(found, measures=found.measures | {THINKING: lengths} | measures)


def by_reward(right: int, exact: int = 0, greedy: int | None = None, **rewards: list[float]) -> Evaluation:
    """Of a run whose rewards compare no answers: `right` prompts earn 1, `exact` match."""
    found = evaluation(exact, judged_by=EXACT)
    rewards = rewards or {"sentence": [1.0] * right + [0.0] * (COUNT - right)}
    total = [sum(values) for values in zip(*rewards.values(), strict=True)]
    found.take_rewards([[one] for one in total], {name: [[one] for one in of] for name, of in rewards.items()})
    if greedy is not None:
        found.measures["greedy_reward"] = right_of_all(greedy)
    return found


def result(run: RunConfig, *findings: Finding, **changes: Any) -> TrainResult:
    made = TrainResult(run.folder, run.folder / "adapter", 30, [], 12.0, adapter_step=30, findings=list(findings))
    return replace(made, **changes)


def finding(rule: str, last: int = 30) -> Finding:
    return Finding(rule, "what it saw", "change rloo.key", since=3, last=last, cause="why")


def test_a_run_that_learnt_says_by_how_much(run: RunConfig) -> None:
    verdict = judge_run(run, result(run), evaluation(88), evaluation(368))
    assert verdict.kind == "learnt"
    assert verdict.sentence.startswith("Accuracy rose from 22 % to 92 % (+70 points, 95 % CI 65 to 74, 400 held-out")
    assert verdict.change is not None and verdict.change.difference.value == pytest.approx(0.7)
    assert [command.split()[1] for command in verdict.commands] == ["ask", "export"]
    assert '"1+2="' in verdict.commands[0], "a question that the model was made for"


@pytest.mark.parametrize(
    ("sides", "rule", "changes", "kind", "words", "advice"),
    [
        ((396, 397), "", {}, "no evidence", "", "harder prompts"),
        # with logging_steps 5 and 62 steps every alarm counted as over
        ((), "truncation", {"steps": 62, "metrics": [{"step": 30}]}, "no signal", "what it saw", "rloo.key"),
        ((300, 20), "", {"method": "sft"}, "broken", "", "lower sft.learning_rate or sft.num_train_epochs"),
        ((200, 201), "", {"method": "sft"}, "no evidence", "", "sft.num_train_epochs"),
        ((100, 300), "reward_hacking", {}, "learnt", "400 held-out prompts), but what it saw", "rloo.key"),
        ((88,), "", {"steps": 7, "stopped": "interrupted", "method": "sft"}, "no evidence", "step 7", "--overwrite"),
        # the cause of steps that are over
        ((300, 20), "truncation", {"metrics": [{"step": 40}]}, "broken", "fell", "lower rloo.learning_rate"),
        ((88, 368), "", {"adapter_step": 10}, "learnt", "of step 10, so part of it is luck", ""),
    ],
)  # fmt: skip
def test_what_is_concluded(
    sides: tuple[int, ...], rule: str, changes: dict[str, Any], kind: str, words: str, advice: str, run: RunConfig
) -> None:
    """A run without a signal never looks like a success, one that was cut off has nothing to boast of, and supervised
    training is advised in its own keys."""
    found = [finding(rule)] if rule else []
    verdict = judge_run(run, result(run, *found, **changes), *map(evaluation, sides))
    assert verdict.kind == kind and words in verdict.sentence
    assert advice in verdict.next if advice else not verdict.next
    assert "ask" not in verdict.commands[0] or kind == "learnt"
    assert changes.get("method") != "sft" or "rloo." not in verdict.next


@pytest.mark.parametrize(
    ("right", "tokens", "asked", "kind", "words"),
    [
        ((344, 348), (1204, 496), "budget", "learnt", "As right with 41 % of the thinking, 496 for 1,204 tokens (95 %"),
        ((344, 348), (1204, 496), "reward", "learnt", "accuracy went from 86.0 % to 87.0 % (+1.0 points, 95 % CI"),
        ((344, 348), (1204, 496), "", "no evidence", "Accuracy went from 86.0 % to 87.0 %"),
        ((344, 348), (1204, 1160), "usual budget", "no evidence", "Accuracy went from 86.0 % to 87.0 %"),
        ((344, 348), (1204, 1204), "budget", "no evidence", "Accuracy went from 86.0 % to 87.0 %"),
        ((344, 346), (496, 1204), "budget", "no evidence", "Accuracy went from"),
        ((344, 331), (1204, 496), "budget", "broken", "thinking from 1,204 to 496 tokens"),
        ((344, 300), (1204, 496), "reward", "broken", "Accuracy fell from 86 % to 75 %"),
        ((200, 360), (1204, 496), "reward", "learnt", "Accuracy rose from 50 % to 90 %"),
    ],
)  # fmt: skip
def test_shorter_and_as_right_is_learnt_where_the_run_asks_for_it(
    right: tuple[int, int], tokens: tuple[int, int], asked: str, kind: str, words: str, run: RunConfig
) -> None:
    """With flat accuracy a run that halved the thinking had "no evidence"; shorter and worse stays a failure, and the
    usual budget, which closes few thoughts, is no wish for shorter ones."""
    rewards = [RewardSection(name="answer_reward")]
    rewards += [RewardSection(name="relative_length_penalty", weight=0.4)] if asked == "reward" else []
    run, closed = run.model_copy(update={"rewards": rewards}), {"budget": 0.6, "usual budget": 0.04}.get(asked)
    sides = [thinks(evaluation(n, forced_share=closed), many) for n, many in zip(right, tokens, strict=True)]
    verdict = judge_run(run, result(run), *sides)
    assert verdict.kind == kind and words in verdict.sentence
    assert verdict.sentence.count("thinking") <= 1


def test_few_prompts_widen_the_margin_which_is_said(run: RunConfig) -> None:
    """Ten prompts rule out nothing: their interval is wider than the widest margin. "A loss of 4 points is ruled out"
    stood next to an interval from -4.3."""

    def side(count: int, wrong: range, tokens: float) -> Evaluation:
        right = mean_of([float(number not in wrong) for number in range(count)])
        measures = {"accuracy": right, THINKING: mean_of([tokens + number % 3 for number in range(count)])}
        return Evaluation("", count, 1, 1.0, 64, measures, prompts_digest="same", forced_share=0.6)

    verdicts = [
        judge_run(run, result(run), side(count, range(14), 900), side(count, range(shift, shift + 14), 300))
        for count, shift in ((100, 4), (20, 4))
    ]
    assert [one.kind for one in verdicts] == ["learnt", "no evidence"]
    assert "95 % CI -6.1 to 6.1" in verdicts[0].sentence
    assert verdicts[0].sentence.endswith("; a loss of 7 points is ruled out.")
    assert "data.test_size" in verdicts[1].next, "all that were held out are measured"


def test_an_edited_reward_that_decides_is_not_compared_by_exact_match(run: RunConfig) -> None:
    """ "Exact match went from 0.0 % to 0.0 %: train longer", of a run that only its own reward judges."""
    sides = [replace(by_reward(200), sources=text) for text in ("before", "after")]
    verdict = judge_run(run, result(run), *sides)
    assert verdict.change is None and "A reward was edited" in verdict.sentence and "rewards before" in verdict.next


def test_evaluations_made_differently_are_not_compared(run: RunConfig) -> None:
    after = evaluation(368, temperature=0.5, max_completion_length=32)
    verdict = judge_run(run, result(run), evaluation(88), after)
    assert verdict.kind == "no evidence" and verdict.change is None
    assert "temperature 1 and 0.5" in verdict.sentence and "completion limit 64 and 32" in verdict.sentence
    assert "made differently: temperature 1 and 0.5" in str(compare(evaluation(88), after))
    assert "differently" not in str(compare(evaluation(88), evaluation(368)))


def test_other_prompts_and_sample_counts_are_compared_with_a_word(run: RunConfig) -> None:
    verdict = judge_run(run, result(run), evaluation(88), evaluation(368, prompts_digest="others"))
    assert verdict.kind == "learnt" and "on different prompts" in verdict.sentence
    digests = [str(number) for number in range(COUNT)]
    before = evaluation(88, prompt_digests=digests)
    half = evaluation(0, num_prompts=300, prompts_digest="others", prompt_digests=digests[100:])
    half.measures["accuracy"] = mean_of([0.0] * 60 + [1.0] * 240)
    verdict = judge_run(run, result(run), before, half)
    assert "on the 300 prompts that both measured" in verdict.sentence and "different" not in verdict.sentence
    change = verdict.change
    assert (change.before.value, change.after.value, change.difference.value) == (0.0, 0.8, 0.8), "not 22 %"
    verdict = judge_run(run, result(run), evaluation(88), evaluation(368, num_samples=4))
    assert "from 1 and 4 completions per prompt" in verdict.sentence


def test_the_verdict_is_kept_beside_the_rest_of_the_status(run: RunConfig) -> None:
    """`rloo-kit report` wrote "ended as failed" over "no learning signal"."""
    with RunDir.create(run) as run_dir:
        run_dir.set_status("failed", step=4, max_steps=30, stopped_by="no signal", error="why")
        assert load_result(run).stopped == "no signal"
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


# ------------------------------------------------------------------------------------------------ rewards that lead


TIED = [{"step": step, "frac_score_zero_std": 1.0} for step in (1, 2, 3)]


@pytest.mark.parametrize(
    ("weights", "before", "after", "solved"),
    [
        ({"sentence": 1.0}, {"sentence": [1.0] * 392 + [0.0] * 8}, None, True),
        ({"sentence": 1.0}, {"sentence": [0.0] * COUNT}, None, False),  # never solved is no signal
        ({"sentence": 1.0}, {"sentence": [5.0] * COUNT}, None, False),  # all equal: the best is not known
        ({"sentence": 1.0}, {"sentence": [5.0] * COUNT}, {"sentence": [5.0] * 399 + [2.0]}, True),
        ({"form": 0.0, "sentence": 0.5}, {"form": [0.2] * COUNT, "sentence": [1.0] * COUNT}, None, True),
        ({"sentence": 1.0}, {"sentence": [1.0] * COUNT, "repetition_penalty": [0.0] * COUNT}, None, True),
        ({"wordiness": -1.0}, {"wordiness": [1.0] * COUNT}, None, False),
    ],
)
@pytest.mark.parametrize("evaluated", [True, False])
def test_a_run_that_starts_solved_needs_harder_prompts(
    run: RunConfig, weights: dict[str, float], before: Any, after: Any, solved: bool, evaluated: bool
) -> None:
    """Only an accuracy could be solved: an SFT that had reached 98 % was advised to raise its learning rate."""
    run.rewards = [RewardSection(name=f"mine.py:{name}", weight=weight) for name, weight in weights.items()]
    if evaluated:
        sides = by_reward(0, **before), by_reward(0, **(after or before))
        verdict = judge_run(run, result(run, metrics=TIED), *sides)
    elif after is not None:
        return
    else:
        means = {f"rewards/{name}/mean": sum(values) / COUNT for name, values in before.items()}
        verdict = judge_run(run, result(run, metrics=[row | means for row in TIED]))
    assert ("harder prompts" in verdict.next) == solved
    assert verdict.kind == ("no evidence" if solved else "no signal")
    assert solved or "learning_rate" not in verdict.next


def test_a_reward_with_accuracy_in_its_name_keeps_it() -> None:
    """Under exact match the row of the user's reward accuracy_of_digits was called "reward exact match_of_digits"."""
    found = by_reward(0, exact=100, accuracy_of_digits=[1.0] * COUNT, brief=[0.5] * COUNT)
    names = [name for name, _ in found.rows()]
    assert "reward accuracy_of_digits" in names and "exact match, temperature 1" in names
