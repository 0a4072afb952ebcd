"""Health rules: recorded failing and healthy runs, made-up rows for each rule, and the handling of several findings at
once."""

import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest

from rloo_kit.config.checks import HealthRule
from rloo_kit.config.run import load_config
from rloo_kit.data.answers import GYM_REWARD, REWARDS_WITH_ANSWERS
from rloo_kit.health.rules import ANSWERS, RULES, Context, Finding
from rloo_kit.health.watch import HealthWatch, examine

ROOT = Path(__file__).resolve().parents[2]
SERIES = sorted((Path(__file__).parent / "series").glob("*.jsonl"))
WITHIN = 20  # steps after the onset of a fault

RLOO = {"max_completion_length": 128, "num_generations": 4, "temperature": 0.7, "beta": 0.0}
RLOO |= {"learning_rate": 0.3, "kl_form": "sum", "max_grad_norm": 1.0, "num_iterations": 1}
WELL = {
    "loss": 0.0, "reward": 0.5, "reward_std": 0.5, "frac_score_zero_std": 0.25, "frac_reward_zero_std": 0.25,
    "grad_norm": 0.3, "completions/clipped_ratio": 0.1, "completions/mean_length": 60.0, "entropy": 0.3,
    "thinking/closed_ratio": 0.9, "thinking/mean_length": 50.0, "rewards/unscored_ratio": 0.0,
    "rewards/failed_ratio": 0.0, "completions/repeated_ratio": 0.01, "clip_ratio/region_mean": 0.0,
}  # fmt: skip
TIED = WELL | {"frac_score_zero_std": 1.0, "frac_reward_zero_std": 1.0, "reward": 0.0, "grad_norm": 0.0}


def number(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with steps 1, 2, 3, ..."""
    return [{"step": step} | row for step, row in enumerate(rows, 1)]


def make_context(stop: Any = (), off: Any = (), patience: int = 3, weights: Any = None, **rloo: Any) -> Context:
    return Context(RLOO | rloo, stop, off, weights or {}, patience)


def look(rows: list[dict[str, Any]], **context: Any) -> list[Finding]:
    return examine(number(rows), make_context(**context))


def names(findings: list[Finding]) -> list[tuple[str, int, int]]:
    """Rule, first step, and step at which it was found."""
    return [(one.name, one.since, one.step) for one in findings]


# ------------------------------------------------------------------------------------------------ recorded runs


@pytest.mark.parametrize("path", SERIES, ids=lambda path: path.stem)
def test_recorded_runs(path: Path) -> None:
    """Runs of the embedded model that were made to fail are each found by name within 20 steps of the fault, and
    healthy ones stay silent: a policy destroyed by a learning rate of 0.3 got the advice to use other prompts."""
    head, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    config = load_config(ROOT / "configs" / f"{head['config']}.yaml", *head["overrides"])
    watch = HealthWatch(Context.of(config))
    reported = [finding for row in rows for finding in watch.observe(row)]
    if not head["rule"]:
        assert reported == []
        return
    found = next(one for one in reported if one.name == head["rule"])
    assert found.step - head["onset"] <= WITHIN and found.since <= found.step
    assert head["rule"] in {one.name for one in watch.findings}, "it follows from none of the others"


# ------------------------------------------------------------------------------------------------ each rule


def drift(name: str, begin: float, end: float, steps: int = 24, **more: Any) -> list[dict[str, Any]]:
    """Healthy rows in which one metric moves from one value to another, with a little noise."""
    values = (begin + (end - begin) * step / (steps - 1) for step in range(steps))
    return [WELL | more | {name: value * (1 + 0.01 * (place % 3))} for place, value in enumerate(values)]


def apart(*gaps: float) -> list[dict[str, Any]]:
    """Healthy rows with these gaps between sampler and trainer, in nats per token."""
    return [WELL | {"sampling/logp_difference_mean": gap} for gap in gaps]


RATE, ANSWER = "rloo.learning_rate (currently 0.3)", "rewards/answer_reward/mean"


def hacked(truth: str, half: float = 0.0) -> list[dict[str, Any]]:
    """A part of the reward rises while accuracy falls; `half`: of its interval."""
    rows = drift("rewards/mine/mean", 0.1, 0.9, **{"rewards/mine/std": 0.2})
    for place, row in enumerate(rows):
        row["reward"] = row["rewards/mine/mean"]
        if truth != "eval/accuracy" or place % 6 == 0:
            row |= {truth: 0.6 - 0.02 * place, f"{truth}_high": 0.6 - 0.02 * place + half}
    return rows


GONE = {"reward": 0.0, "reward_std": 0.0, "frac_score_zero_std": 1.0, "grad_norm": 0.0}
CASES: list[tuple[str, list[dict[str, Any]], dict[str, Any], str]] = [
    ("no_signal", [WELL] * 5 + [TIED] * 5, {}, "rloo.temperature (currently 0.7)"),
    ("no_signal", [WELL | {"reward_std": 0.0}] * 5, {"baseline": "none"}, "rloo.num_generations, currently 4"),
    ("no_signal", [WELL | {"frac_reward_zero_std": 0.0, "frac_score_zero_std": 1.0}] * 4, {}, "rloo.temperature"),
    ("no_signal", [TIED | {"reward": 1.0, ANSWER: 1.0}] * 5, {}, "solved from the start. To do: harder prompts"),
    ("reward_hacking", hacked(ANSWER, 0.02), {}, "--order best"),
    ("reward_hacking", hacked("eval/accuracy", 0.02), {}, "mine rose"),
    ("truncation", [WELL | {"completions/clipped_ratio": 0.85}] * 5, {}, "rloo.max_completion_length (currently 128)"),
    ("reward_failures", [TIED | {"rewards/unscored_ratio": 1.0, "reward": None}] * 5, {}, "data.answer_column"),
    ("reward_failures", [WELL | {"rewards/failed_ratio": 0.3}] * 5, {}, "fix the reward"),
    ("cold_start", [TIED | {ANSWER: 0.0}] * 8, {}, "rloo-kit sft"),
    ("no_movement", [WELL | {"grad_norm": 0.0}] * 5, {}, "model.lora"),
    ("no_movement", [WELL | {"grad_norm": 0.0}] * 5, {"reward_clip_range": [0.0, 0.1]}, "currently [0.0, 0.1]"),
    ("no_movement", [WELL | {"grad_norm": 0.0}] * 5, {"mask_truncated_completions": True}, "rloo.mask_truncated"),
    ("broken_policy", [WELL] * 8 + [WELL | GONE | {"entropy": 5.7}] * 6, {}, "ten times (currently 0.3)"),
    ("broken_policy", [WELL | {"kl": 0.1}] * 2 + [WELL | GONE | {"kl": 8.8}] * 6, {}, "rloo.learning_rate"),
    ("entropy_collapse", [WELL | {"entropy": 0.005}] * 6, {}, "rloo.temperature (currently 0.7)"),
    ("kl_explosion", [WELL | {"kl": 3.0}] * 5, {"beta": 0.1}, "rloo.beta (currently 0.1)"),
    ("length_explosion", drift("completions/mean_length", 60, 200, **{ANSWER: 0.3}), {}, "thinking_budget_reward"),
    ("length_collapse", drift("thinking/mean_length", 50, 5), {"beta": 0.05}, "rloo.kl_form=length_normalized"),
    ("never_closed", drift("thinking/closed_ratio", 0.9, 0.0), {}, "think_format_reward"),
    ("no_movement", [WELL | {"policy/moved": 2e-8 * step} for step in range(12)], {}, RATE),
    ("sampler_gap", apart(*[0.2] * 4), {}, "rloo.sampler_correction=token"),
    ("sampler_gap", apart(0, 0.44, 0, 0.79, 0, 0, 0, 0.5, 0, 0, 0.6, 0), {}, "rollout.engine=generate"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "rows", "options", "key"), CASES, ids=[case[0] for case in CASES])
def test_each_rule_alone(rule: str, rows: list[dict[str, Any]], options: dict[str, Any], key: str) -> None:
    """Each rule fires on made-up rows of its fault, and its fix names a key to change."""
    (found,) = look(rows, **options)
    assert found.name == rule and key in str(found) and found.fix and found.found and found.cause
    assert look(rows, **options, off=[rule, *found.explains]) == []


@pytest.mark.parametrize(("weights", "forced"), [({}, 0.5), ({"relative_length_penalty": 0.4}, 0.0)])
def test_shorter_thinking_is_no_fault_where_the_run_asks_for_it(weights: dict[str, float], forced: float) -> None:
    """A run that halved its thinking got the advice for collapsed lengths. Each run of a Qwen3 model has a budget,
    which leaves room for the answer and asks for nothing."""

    def found(rows: list[dict[str, Any]], **usual: Any) -> list[str]:
        return [one.name for one in look([{"thinking/forced_ratio": forced} | row for row in rows], **usual)]

    shorter = drift("thinking/mean_length", 50, 5)
    worse = [row | {ANSWER: 0.7 - 0.01 * n} for n, row in enumerate(shorter)]
    assert found(shorter, weights=weights) == [] and "length_collapse" in found(worse, weights=weights)
    assert "length_collapse" in [one.name for one in look(shorter, thinking_budget=3552)]


def test_every_rule_has_its_key_and_its_case() -> None:
    """A rule that the schema does not name cannot stop a run; one without a test case may never fire, and one that no
    page explains has to be looked up in the source."""
    assert set(RULES) == set(get_args(HealthRule))
    assert set(RULES) == {case[0] for case in CASES}
    assert all(set(rule.follows) <= set(RULES) - {rule.name} for rule in RULES.values())
    assert (*REWARDS_WITH_ANSWERS, GYM_REWARD) == ANSWERS
    text = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    assert [name for name in RULES if f"| `{name}` |" not in text] == []


def learnt() -> list[dict[str, Any]]:
    """A task learnt to its end: groups tie, entropy falls and the gradient vanishes."""
    rows = drift("reward", 0.2, 0.95, 20)
    return rows + [TIED | {"reward": 1.0, "reward_std": 0.0, "entropy": 0.004}] * 15


def more_right(rows: list[dict[str, Any]], **more: float) -> list[dict[str, Any]]:
    """The rows with more and more right answers."""
    return [row | {ANSWER: 0.2 + 0.03 * n} | more for n, row in enumerate(rows)]


ODD = dict.fromkeys(WELL | {"kl": 0, "kl/spread_ratio": 0, "policy/moved": 0}, math.nan)
ALMOST = WELL | {"frac_score_zero_std": 0.99, "completions/clipped_ratio": 0.79, "grad_norm": 1e-4}
SILENT: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "healthy": ([WELL] * 50, {}),
    "at the limits": ([ALMOST] * 50, {}),
    "two tied batches now and then": ([TIED, TIED, WELL] * 10, {}),
    "learnt, by its reward": (learnt(), {}),
    "learnt, by its answers": ([row | {ANSWER: row["reward"]} for row in learnt()], {}),
    "longer thoughts, more right": (more_right(drift("completions/mean_length", 60, 180)), {}),
    "a length penalty that longer thinking pays": (
        [row | {"reward": 0.4 + 0.01 * n} for n, row in enumerate(
            more_right(drift("rewards/brevity/mean", 0.9, 0.2, **{"rewards/brevity/std": 0.1})))], {}),
    "accuracy falls within its interval": (hacked("eval/accuracy", 0.6), {}),
    "accuracy falls with the reward": ([row | {"reward": 1 - row["reward"]} for row in hacked("eval/accuracy")], {}),
    "equal groups without a baseline": ([WELL | {"frac_score_zero_std": 1.0}] * 5, {"baseline": "none"}),
    "a gap between samplers twice in twelve steps": (apart(0, 0.44, *[0] * 8, 0.79, 0), {}),
    "not a number": ([ODD] * 10, {}),
    "each rollout used twice": ([WELL, {"grad_norm": 0.2, "loss": 0.0}] * 5, {"patience": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_what_is_no_fault(name: str) -> None:
    """A rule that fires on healthy runs gets switched off, and is missing when it is needed."""
    rows, options = SILENT[name]
    assert look(rows, **options) == []


# ------------------------------------------------------------------------------------- causes and consequences

CUT = {"completions/clipped_ratio": 0.9}
OPEN = {"thinking/closed_ratio": 0.1}
NONE = TIED | {"reward": None, "reward_std": None, "rewards/unscored_ratio": 1.0}
PUBLISHED = {"reward": -1.0, "completions/clipped_ratio": 1.0, "thinking/closed_ratio": 0.0,
             ANSWER: 0.0}  # fmt: skip
CAUSES: dict[str, tuple[list[dict[str, Any]], list[str], set[str]]] = {
    "a zero gradient repeats the tied groups": ([TIED] * 5, ["no_signal"], {"no_movement"}),
    "the published recipe: 128 tokens, -1 without </think>": (
        [TIED | PUBLISHED] * 6, ["truncation"], {"no_signal", "no_movement", "cold_start"}),
    "rewards that fail": ([NONE | {"rewards/failed_ratio": 1.0}] * 6, ["reward_failures"], set()),
    "rewards of None": ([NONE] * 6, ["reward_failures"], set()),
    "a limit leaves thinking open": (
        [WELL] * 6 + [WELL | CUT] * 6 + [WELL | CUT | OPEN] * 9, ["truncation"], set()),
    "open thinking reaches the limit": (
        [WELL] * 6 + [WELL | OPEN] * 6 + [WELL | CUT | OPEN] * 9, ["never_closed"], set()),
    "short completions and a low entropy, each a sign of the other": (
        [WELL] * 8 + [WELL | {"thinking/mean_length": 5, "entropy": 0.005}] * 9,
        ["length_collapse"], {"entropy_collapse"}),
    "a cause long past explains nothing": (
        [WELL | {"rewards/failed_ratio": 0.5}] * 4 + [WELL] * 40 + [TIED] * 5, ["reward_failures", "no_signal"], set()),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_the_first_in_time_is_the_cause(name: str) -> None:
    """One fault gave two warnings with different advice."""
    rows, expected, explained = CAUSES[name]
    found = look(rows)
    assert [one.name for one in found] == expected and explained <= set(found[0].explains)


# ------------------------------------------------------------------------------------------------ the watch


def test_another_cause_of_the_same_rule_is_reported_with_its_fix() -> None:
    """A judge's hiccup, and later rewards that are never scored: nothing was said, and the fix was the first one's."""
    rows = [WELL] * 2 + [WELL | {"rewards/failed_ratio": 0.3}] * 3 + [WELL] * 14 + [NONE] * 12
    watch = HealthWatch(make_context())
    reported = [finding for row in number(rows) for finding in watch.observe(row)]
    assert [(one.name, one.level) for one in reported] == [("reward_failures", "warning"), ("reward_failures", "error")]
    (found,) = watch.findings
    assert "no completion was scored" in found.found and "data.answer_column" in found.fix and found.since == 20


def test_a_finding_is_reported_once() -> None:
    """A line per step would bury the run's own output."""
    watch = HealthWatch(make_context())
    assert [len(watch.observe(row)) for row in number([TIED] * 6 + [WELL] * 3 + [TIED] * 6)] == [0, 0, 1] + [0] * 12
    (found,) = watch.findings
    assert (found.since, found.last) == (10, 15) and watch.holds(found)
    assert "6 steps in a row" in found.found, "they were counted from the first time, three healthy steps included"


EVALUATED = [{"step": n // 2 + 1} | ({"eval/accuracy": 0.1} if n % 2 else TIED) for n in range(9)]


@pytest.mark.parametrize(
    ("rows", "context", "found"),
    [
        # with num_iterations=2 every second row has no rewards; such rows used to break the series
        (number([TIED | {"grad_norm": 0.2}, {"grad_norm": 0.2, "loss": 0.0}] * 3), {"patience": 4}, (1, 4)),
        # a held-out accuracy between two steps is no step: it would turn three tied ones into five
        (EVALUATED[:8], {"patience": 5}, None),
        (EVALUATED, {"patience": 5}, (1, 5)),
    ],
)  # fmt: skip
def test_steps_are_counted_whatever_has_a_row(
    rows: list[dict[str, Any]], context: dict[str, int], found: tuple[int, int] | None
) -> None:
    expected = [] if found is None else [("no_signal", *found)]
    assert names(examine(rows, make_context(**context))) == expected


def test_a_run_that_is_resumed_does_not_find_it_a_second_time() -> None:
    """The counts restarted at 0 after each resume, and an old finding was printed as a new one."""
    rows = number([WELL] * 4 + [TIED] * 8)
    whole = HealthWatch(make_context())
    for row in rows:
        whole.observe(row)
    cut = HealthWatch(make_context(), rows[:9])
    assert [new for row in rows[9:] for new in cut.observe(row)] == [] and cut.findings == whole.findings
    early = HealthWatch(make_context(), rows[:6])
    assert names([new for row in rows[6:] for new in early.observe(row)]) == [("no_signal", 5, 7)]


def test_what_stops_a_run_and_what_does_not() -> None:
    """`stop: [no_signal]` holds also if truncation is the cause, which the message names.
    A run that is resumed after it was stopped is meant to continue."""
    row = TIED | {"completions/clipped_ratio": 1.0}
    rows, context = number([row] * 8), make_context(stop=["no_signal"])
    watch = HealthWatch(context)
    steps = [watch.observe(one) and watch.stopped_by for one in rows]
    assert steps[:3] == [[], [], "no_signal"] and watch.stop is not None and watch.stop.name == "truncation"
    again = HealthWatch(context, rows[:3])
    for one in rows[3:]:
        again.observe(one)
    assert again.stopped_by is None
    for one in [{"step": 9} | WELL, *({"step": step} | row for step in (10, 11, 12))]:
        again.observe(one)
    assert again.stopped_by == "no_signal"
    assert HealthWatch(make_context(), rows).stopped_by is None
