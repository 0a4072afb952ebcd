"""The table of verdicts: every row from a written folder, with its sentence on every surface; and what must never be
said, over all combinations of measure, greedy, reward, health and how the run ended.

A newcomer's run said "Nothing could be learnt since step 1" above a page on which the reward had risen from 0.10 to
0.31.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rloo_kit.cli import app
from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import RewardSection
from rloo_kit.results.evaluation import Evaluation
from rloo_kit.results.overview import describe_run
from rloo_kit.results.report import write_report
from rloo_kit.results.verdict import OUTCOMES, _Facts, judge_run, load_result, record_verdict
from rloo_kit.results.versus import compare_runs
from rloo_kit.runs.folder import RunDir
from tests.evaluations import mean_of
from tests.html_page import Page
from tests.results.test_report import make_config
from tests.results.test_verdict import finding, result

COUNT = 200
STEPS = 12
CALM = {"reward": 0.5, "reward_std": 0.3, "frac_score_zero_std": 0.4, "grad_norm": 0.3, "entropy": 0.3}
CALM |= {"completions/clipped_ratio": 0.1, "completions/mean_length": 30.0, "rewards/mine/mean": 0.5}


def line(first: float, last: float) -> list[float]:
    """Values of a metric over the steps, on a line."""
    return [first + (last - first) * step / (STEPS - 1) for step in range(STEPS)]


CUT = {"completions/clipped_ratio": [0.97] * STEPS}
TIED_BRIEFLY = {"frac_score_zero_std": [1.0] * 3}
RISING = {"reward": line(0.1, 0.6)}
BROKEN = {"reward": [0.8] * 8 + [0.1] * 4, "entropy": [0.3] * 8 + [3.0] * 4}
HACKED = {"rewards/answer_reward/mean": [0.8] * 6 + [0.1] * 6, "reward": line(0.4, 0.9)}
HACKED |= {"rewards/mine/mean": line(0.1, 0.9), "rewards/mine/std": [0.2] * STEPS}
SLIGHT = (100, 103)
UP, DOWN, FLAT = (40, 160), (160, 40), (100, 100)


@dataclass(frozen=True)
class Case:
    """A run: its metrics, right answers (of COUNT) and mean rewards before and after, and what the verdict has to be.

    `says`: in the sentence, in this order. `advice`: words of the advice, empty for none."""

    kind: str
    says: Sequence[str]
    advice: str
    metrics: dict[str, list[float]] = field(default_factory=dict)
    right: tuple[int, int] | None = None
    reward: tuple[int, int] | None = None
    greedy: tuple[int, int] | None = None
    tokens: tuple[int, int] | None = None
    state: str = "finished"
    weight: float = 1.0
    truncated: float = 0.0
    evaluation: dict[str, Any] = field(default_factory=dict)


CASES = {
    "gamed in training": Case("gamed", ["unintended", "answer_reward fell", "; accuracy went"], "weights", HACKED,
         FLAT),
    "learnt": Case("learnt",
         ["Accuracy rose from 20 % to 80 %", "greedy from 10 % to 90 %", "thinking from 5 to 19 tokens."], "", {}, UP,
         greedy=(20, 180), tokens=(5, 19)),
    "learnt, then the limit": Case("learnt",
         ["Accuracy rose", "but 97% of the completions are truncated", "12 steps in a row", "greedy from"],
         "raise rloo.max_completion_length (currently 120)", CUT, UP, greedy=FLAT),
    "by reward, then the limit": Case("learnt",
         ["The held-out reward rose from 0.20 to 0.80", "but 97% of the completions"], "max_completion_length", CUT,
         reward=UP),
    "shorter": Case("learnt", ["As right with 33 %", "a loss of"], "", {}, FLAT, tokens=(900, 300)),
    "shorter, then the limit": Case("learnt", ["As right with 33 %", "but 97% of"], "max_completion_length", CUT, FLAT,
         tokens=(900, 300)),
    "gamed": Case("gamed", ["held-out reward rose", "but accuracy fell", "greedy from"], "weights", {}, DOWN, UP, DOWN),
    "worse": Case("broken", ["Accuracy fell from 80 % to 20 %", "greedy from 80 % to 20 %"], "lower rloo.learning_rate",
         {}, DOWN, greedy=DOWN),
    "worse, it broke": Case("broken", ["Accuracy fell"], "ten times", BROKEN, DOWN),
    "broke": Case("broken", ["The policy broke", "; accuracy went", "greedy"], "ten times", BROKEN, FLAT, greedy=DOWN),
    "broke, risen": Case("broken", ["The held-out reward rose", "but the policy broke"], "ten times", BROKEN, FLAT, UP),
    "risen, but cut off": Case("no evidence",
         ["The held-out reward rose from 0.20 to 0.80", "but 97% of the completions", "; accuracy went", "greedy from"],
         "max_completion_length", CUT, FLAT, UP, FLAT),
    "risen in training, but cut off": Case("no evidence",
         ["The reward in training rose from 0.19 to 0.51", "but 97% of"], "max_completion_length", CUT | RISING),
    "no signal": Case("no signal",
         ["Nothing could be learnt since step 1: 97% of", "12 steps in a row", "; accuracy went"],
         "max_completion_length", CUT, FLAT, FLAT),
    "no signal, interrupted": Case("no signal", ["Nothing could be learnt", "the run ended early, at step 12"],
         "max_completion_length", CUT, state="interrupted"),
    "running": Case("no evidence", ["The run has not ended; it is at step 3"], "", TIED_BRIEFLY, state="running"),
    "rewards that fail on a few": Case("no evidence", ["Accuracy went from"], "fix the reward",
         {"rewards/failed_ratio": [0.25] * 12}, FLAT),
    "rewards that fail on most": Case("no signal", ["Nothing could be learnt", "failed on 75%"], "fix the reward",
         {"rewards/failed_ratio": [0.75] * 12}, FLAT),
    "tied": Case("no signal", ["In every step all completions"], "rloo-kit sft", TIED_BRIEFLY, FLAT),
    "tied but once": Case("no evidence", ["Accuracy went"], "train longer", {"frac_score_zero_std": [1, 0.5, 1]}, FLAT),
    "interrupted": Case("no evidence", ["The run ended early, at step 12 (interrupted)"], "--resume", {},
         state="interrupted"),
    "interrupted, risen": Case("no evidence", ["The reward in training rose", "but the run ended early"], "--resume",
         RISING, state="interrupted"),
    "a reward rose, accuracy did not": Case("no evidence",
         ["The held-out reward rose", "but accuracy went from 50.0 % to 51.5 %"], "data.test_size", {}, SLIGHT, UP),
    "one reward of two rose": Case("no evidence",
         ["The held-out reward mine rose", "but accuracy went", "; the held-out reward fell"], "max_steps", {}, FLAT,
         DOWN, evaluation={"mine": UP}),
    "flat": Case("no evidence", ["Accuracy went from 50.0 % to 51.5 %", "greedy from 50 % to 50 %"], "data.test_size",
         {}, SLIGHT, greedy=FLAT),
    "flat, weight 0": Case("learnt", ["The held-out reward rose"], "", {"rewards/answer_reward/mean": [0.0] * STEPS},
         DOWN, UP, weight=0.0),
    "cold start of weight 0": Case("no evidence", ["The held-out reward went"], "train longer",
         {"rewards/answer_reward/mean": [0.0] * STEPS}, FLAT, FLAT, weight=0.0),
    "accuracy of weight 0 rose": Case("no evidence",
         ["Accuracy rose from 20 % to 80 %", "but 97% of", "; the held-out reward went"], "max_completion_length", CUT,
         UP, FLAT, weight=0.0),
    "greedy rose alone": Case("no evidence", ["Greedy accuracy rose from 5 % to 95 %", "but 97% of", "; accuracy went"],
         "max_completion_length", CUT, FLAT, greedy=(10, 190)),
    "cut off, in a short run": Case("no evidence", ["Accuracy went", "; 97% of the held-out completions are truncated"],
         "raise rloo.max_completion_length (currently 120)", {}, FLAT, truncated=0.97),
    "not evaluated": Case("no evidence", ["The run was not evaluated"], "run.evaluate", {}),
    "not evaluated, risen": Case("no evidence", ["The reward in training rose", "but the run was not evaluated"],
         "run.evaluate", RISING),
}  # fmt: skip


def values(ones: int) -> Any:
    return mean_of([1.0] * ones + [0.0] * (COUNT - ones))


def side(case: Case, place: int) -> Evaluation | None:
    """The evaluation before (0) or after (1)."""
    if case.right is None and case.reward is None:
        return None
    ones = {"accuracy": case.right, "greedy_accuracy": case.greedy, "reward": case.reward}
    ones |= {f"rewards/{name}": pair for name, pair in case.evaluation.items()}
    found = Evaluation("", COUNT, 1, 1.0, 64, {name: values(pair[place]) for name, pair in ones.items() if pair})
    if case.right is not None:
        found.judged_by, found.judge_weight = "answer_reward", case.weight
    if case.tokens is not None:
        found.forced_share = 0.6
        found.measures["thinking_tokens"] = mean_of([case.tokens[place] * (0.9 + 0.2 * (n % 2)) for n in range(COUNT)])
    found.prompts_digest, found.truncated_share = "same", case.truncated
    return found


def write_run(case: Case, folder: Path, name: str) -> RunConfig:
    """A run's folder as training leaves it."""
    run = make_config(name, folder)
    run.rewards = [
        RewardSection(name="answer_reward", weight=case.weight),
        RewardSection(name="mine.py:mine", weight=1),
    ]
    steps = max((len(column) for name, column in case.metrics.items() if name == "frac_score_zero_std"), default=STEPS)
    rows = [{"step": step + 1} | CALM | {name: of[step] for name, of in case.metrics.items()} for step in range(steps)]
    with RunDir.create(run) as run_dir:
        run_dir.append_jsonl("metrics.jsonl", [row | {"run": run_dir.id} for row in rows])
        for place, when in enumerate(("before", "after")):
            if (found := side(case, place)) is not None:
                run_dir.write_json(f"{when}.json", found.to_dict())
        run_dir.set_status(case.state, step=steps, max_steps=30, adapter_step=steps, seconds=1.0)
    return run


@pytest.mark.parametrize("name", CASES)
def test_every_outcome_has_one_sentence_on_every_surface(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    run = write_run(case, tmp_path, "made")
    before, after = side(case, 0), side(case, 1)
    verdict = judge_run(run, load_result(run), before, after)
    places = [verdict.sentence.find(words) for words in case.says]
    assert verdict.kind == case.kind and -1 not in places and places == sorted(places), verdict.sentence
    assert (case.advice in verdict.next) if case.advice else not verdict.next, verdict.next
    page = Page(write_report(run, load_result(run), before, after).read_text(encoding="utf-8"))
    shown = {"show": str(describe_run(run.folder)), "report": page.text}
    shown["command line"] = CliRunner().invoke(app, ["show", str(run.folder)]).stdout
    for where, text in shown.items():
        text = " ".join(text.split())
        assert verdict.kind in text.lower() and verdict.sentence in text and verdict.next in text, where
    if case.state != "running":
        record_verdict(run.folder, verdict)
        status = json.loads((run.folder / "status.json").read_text(encoding="utf-8"))
        assert status["verdict"] == json.loads(json.dumps(verdict.to_dict()))
    other = write_run(case, tmp_path, "other")
    compared = compare_runs([run.folder, other.folder]).to_dict()["runs"][0]
    assert compared["verdict"] == verdict.to_dict()


def test_every_row_of_the_table_has_a_case(tmp_path: Path) -> None:
    """A row that none of the cases reaches is a sentence that nobody has read."""
    reached = set()
    for number, case in enumerate(CASES.values()):
        run = write_run(case, tmp_path, f"case-{number}")
        facts = _Facts(run, load_result(run), side(case, 0), side(case, 1))
        reached.add(next(outcome for outcome in OUTCOMES if facts.meet(outcome.when)))
    assert set(OUTCOMES) == reached


HEALTH = ("", "truncation", "no_signal", "cold_start", "broken_policy", "reward_hacking")


def test_no_combination_contradicts_its_page(tmp_path: Path) -> None:
    """What rose is said first, and only where nothing did "nothing could be learnt"; greedy is named wherever it was
    measured."""
    run = make_config("tried", tmp_path)
    pairs = (None, UP, FLAT, DOWN)
    ends = (None, "early", "interrupted", "running")
    for right, reward, greedy, rule, stopped in itertools.product(pairs, pairs, (None, UP), HEALTH, ends):
        if greedy and right is None:
            continue
        case = Case("", (), "", right=right, reward=reward, greedy=greedy)
        found = result(run, *[finding(rule)] * bool(rule), stopped=stopped)
        verdict = judge_run(run, found, side(case, 0), side(case, 1))
        text = f"{case}, {rule}, {stopped}: {verdict}"
        rose = UP in (right, reward, greedy)
        assert not (rose and ("could be learnt" in verdict.sentence or verdict.kind == "no signal")), text
        is_learnt = (right or reward) == UP and (rule != "reward_hacking" or right == UP)
        assert (verdict.kind == "learnt") == is_learnt, text
        if UP in (right, reward) and right != DOWN and rule != "reward_hacking" and stopped != "running":
            assert " rose from 20 % to 80 %" in verdict.sentence or " rose from 0.20 to 0.80" in verdict.sentence, text
            assert verdict.sentence.index(" rose ") < 20, text
        said = verdict.sentence.lower()
        assert said.count("greedy from 20 % to 80 %") + said.count("greedy accuracy rose from") == bool(greedy), text
        assert not (stopped == "early" and "max_steps" in verdict.next), "patience stopped it"
        assert bool(verdict.next) or verdict.kind == "learnt" or stopped == "running", text
        assert stopped != "interrupted" or "ended early, at step 30 (interrupted)" in verdict.sentence, text
