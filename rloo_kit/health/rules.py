"""The rules of a run's health, each with its texts above its detector: for the live run, `rloo-kit show`, the report.

A detector is a pure function of the logged values and the run's context. docs/runs.md lists windows and limits;
docs/benchmarks.md says how runs that were made to fail changed them.
"""

import re
import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rloo_kit.health.series import EQUAL_REWARDS, TIED, Series, at_ceiling
from rloo_kit.system.problems import Problem

SOLVED = 0.9  # accuracy on the training prompts from which tied groups and low entropy mean success
MOVED = 1e-5  # relative to the weights' norm: below it nothing has been trained (ten steps at 1e-6 are above)
TRUNCATED = 0.8  # share of completions above which the limit decides which of them end
PRESSED = 0.2  # share of thoughts closed by the budget from which it asks for shorter ones
MOSTLY_FAILED = 0.5  # share of samples on which a reward fails, below which the others still teach
OFTEN_CUT, SELDOM_CLOSED, DRIFTED = 0.3, 0.2, 2.0  # shares of completions; nats a token of KL
GAP_LOOK = 12  # rows in which a few gaps between sampler and trainer count, in a row or not
ANSWERS = ("answer_reward", "math_answer_reward", "reasoning_gym_score")  # their mean is the accuracy in training
SHORTENING = ("relative_length_penalty", "thinking_budget_reward", "soft_overlong_penalty")
REWARD_MEAN = re.compile(r"rewards/(.+)/mean")
mean = statistics.fmean


@dataclass(frozen=True)
class Context:
    """What the rules need to know about a run besides its rows: the values of `rloo:`, the rules that stop the run or
    are off, the weights of the rewards, the steps in a row without signal before it is reported."""

    rloo: Mapping[str, Any]
    stop: Collection[str] = ()
    off: Collection[str] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    no_signal_steps: int = 5  # healthy runs have a few in a row

    @classmethod
    def of(cls, run: Any) -> "Context":
        """The context of a `RunConfig`."""
        return cls(run.rloo.model_dump(), run.health.stop, run.health.off, run.reward_weights)

    def wants_shorter(self, forced_share: float) -> bool:
        """Whether a reward asks for less thinking, or a budget that closed so many thoughts at the start. The usual
        budget, which leaves room for an answer, closes few."""
        return any(self.weights.get(name, 0.0) > 0 for name in SHORTENING) or forced_share >= PRESSED


class Evidence(NamedTuple):
    """What a rule has found: the first step that shows it, a text, and cause and fix if they differ from the rule's.
    `level`: "warning" for what does not keep a run from learning."""

    since: int
    text: str
    cause: str = ""
    fix: str = ""
    level: str = "error"


@dataclass
class Finding(Problem):
    """A rule's finding in a run: `name` is the rule's, `found` the evidence. `step`: when it was found; `since` and
    `last`: the first and the latest step that show it; `explains`: rules that fired as its consequences."""

    step: int = 0
    since: int = 0
    last: int = 0
    cause: str = ""
    explains: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The rule's name with spaces."""
        return self.name.replace("_", " ")

    def to_dict(self) -> dict[str, Any]:
        """As in `health.jsonl`."""
        found = {"rule": self.name, "step": self.step, "since": self.since, "last": self.last, "evidence": self.found}
        return found | {"cause": self.cause, "fix": self.fix, "explains": self.explains}

    def __str__(self) -> str:
        return f"{self.title} since step {self.since}: {self.found}. {self.cause}. To do: {self.fix}"


Detect = Callable[[Series, Context], Evidence | None]


@dataclass(frozen=True)
class Rule:
    """Detects one way in which a run fails; see `rule`."""

    name: str
    detect: Detect
    cause: str
    fix: str
    follows: tuple[str, ...]


RULES: dict[str, Rule] = {}


def rule(cause: str, fix: str, follows: tuple[str, ...] = ()) -> Callable[[Detect], Detect]:
    """Add a detector to RULES; its name is that in `health.stop` and `health.off`.

    Args:
        cause, fix: texts; {key} is replaced with the value of rloo.key.
        follows: rules whose finding, if it began no later, is the cause of this one, which is then not reported.
    """

    def register(detect: Detect) -> Detect:
        RULES[detect.__name__] = Rule(detect.__name__, detect, cause, fix, follows)
        return detect

    return register


# ------------------------------------------------------------------------------------------ shared by several rules


def is_solved(seen: Series, context: Context) -> bool:
    """Whether the run has learnt its task: accuracy of SOLVED or above; if no reward compares answers, rewards at their
    ceiling, or a mean reward that has risen by half of its standard deviation and is near its maximum."""
    answers = answer_metric(seen, context)
    if answers or seen.all("eval/accuracy"):
        return max(*seen.last("eval/accuracy", 1), 0.0, mean(last_of(seen, answers, 5))) >= SOLVED
    parts = {found[1]: last_of(seen, name, 5) for name in seen.names() if (found := REWARD_MEAN.fullmatch(name))}
    if at_ceiling(context.weights, parts):
        return True
    now, spread = seen.last("reward", 5), seen.first("reward_std", 5)
    if not now or not spread or len(seen.all("reward")) < 10:
        return False
    best = seen.best_mean("reward", 5, 1)
    risen = mean(now) - mean(seen.first("reward", 5)) >= 0.5 * mean(spread)
    return risen and best is not None and mean(now) >= best[0] - 0.25 * mean(spread)


def answer_metric(seen: Series, context: Context) -> str:
    """The metric that is the accuracy on the training prompts; empty if no reward with a weight compares answers."""
    paid = [one for one in ANSWERS if context.weights.get(one, 1.0)]
    return next((name for one in paid if seen.all(name := f"rewards/{one}/mean")), "")


def last_of(seen: Series, name: str, count: int) -> list[float]:
    """The last values, or as many as there are; [0.0] without any."""
    return [point.value for point in seen.all(name)[-count:]] or [0.0]


def has_risen(seen: Series, name: str, sign: int = 1) -> bool:
    """Whether a metric's last five values are above its first five by more than their noise; `sign` -1: below."""
    now, begun = seen.last(name, 5), seen.first(name, 5)
    return bool(now) and sign * (mean(now) - mean(begun)) > 2 * seen.noise(name) * (2 / 5) ** 0.5


def in_a_row(seen: Series, since: int) -> str:
    """The number of steps up to now, in words."""
    return f"{max(seen.step - since + 1, 1)} steps in a row"


# ------------------------------------------------------------------------------------------ the policy breaks


@rule(
    cause="Updates were too large and destroyed the policy: rloo.learning_rate ({learning_rate}) is too high",
    fix="lower rloo.learning_rate ten times (currently {learning_rate}), keep rloo.max_grad_norm at 1.0, and start "
    "again, or from a checkpoint before that step",
    follows=("reward_failures", "reward_hacking"),
)  # fmt: skip
def broken_policy(seen: Series, context: Context) -> Evidence | None:
    """The reward falls by half of its standard deviation and stays there, and the policy has changed: entropy, KL,
    repetition, truncation, closing or the share of equal groups differ from before."""
    now, best = seen.last("reward", 3), seen.best_mean("reward", 3, 3)
    spread = seen.all("reward_std")
    if not now or best is None or not spread:
        return None
    high, at = best
    low = mean(now)
    around = [point.value for point in spread[-500:] if at - 5 <= point.step <= at]
    if high - low < 0.5 * max(mean(around) if around else 0.0, EQUAL_REWARDS) or max(now) > (high + low) / 2:
        return None

    def change(name: str, words: str, shows: Callable[[float, float], bool]) -> str:
        """How a metric has changed since the best reward; empty if it does not show a broken policy."""
        old, new = seen.mean_around(name, at, 5), seen.last(name, 3)
        if old is None or not new or not shows(old, mean(new)):
            return ""
        return f"{words} went from {old:.3g} to {mean(new):.3g}"

    narrower = change("entropy", "the entropy", lambda old, new: new <= 0.5 * old)
    equal = change("frac_reward_zero_std", "the groups with equal rewards", lambda old, new: new >= old + 0.4)
    signs = [
        f"{narrower} and {equal}" if narrower and equal else "",
        change("entropy", "the entropy", lambda old, new: new >= max(2 * old, old + 0.5)),
        change("entropy", "the entropy", lambda old, new: new <= min(0.1 * old, 0.05)),
        change("kl", "the KL", lambda old, new: new > 2.0 and new > 3 * old),
        change("completions/repeated_ratio", "the repeated share", lambda old, new: new >= old + 0.3),
        change("completions/clipped_ratio", "the truncated share", lambda old, new: new >= old + 0.5),
        change("thinking/closed_ratio", "the closed share", lambda old, new: new <= old - 0.5),
    ]
    if not any(signs):
        return None
    since = seen.since("reward", at, lambda reward: reward <= (high + low) / 2)
    text = f"the reward fell from {high:.3g} to {low:.3g} while {', '.join(filter(None, signs))}"
    return Evidence(since, text)


# ------------------------------------------------------------------------------------------ no signal


@rule(
    cause="A reward raises an error, exceeds its time limit or returns something that is not a number",
    fix="fix the reward: the run's output names it and the first sample it failed on",
)  # fmt: skip
def reward_failures(seen: Series, context: Context) -> Evidence | None:
    failing = seen.lasting("rewards/failed_ratio", lambda share: share >= 0.2, 2)
    share = last_of(seen, "rewards/failed_ratio", 1)[0]
    unscored = seen.held("rewards/unscored_ratio", lambda share: share >= 1.0, context.no_signal_steps)
    if failing is not None and (unscored is None or share >= MOSTLY_FAILED):
        text = f"a reward failed on {share:.0%} of the samples, {in_a_row(seen, failing.begins)}"
        return Evidence(failing.begins, text, level="error" if share >= MOSTLY_FAILED else "warning")
    if unscored is None or share >= MOSTLY_FAILED:
        return None
    cause = "Every reward returned None, which a reward does if its column is missing"
    text = f"no completion was scored in {in_a_row(seen, unscored.begins)}"
    return Evidence(unscored.begins, text, cause, "check rewards and data.answer_column")


@rule(
    cause="The limit is too short to reach an end, so chance decides which completions end",
    fix="raise rloo.max_completion_length (currently {max_completion_length}), and model.max_seq_length with it",
    follows=("broken_policy", "length_explosion", "never_closed"),
)  # fmt: skip
def truncation(seen: Series, context: Context) -> Evidence | None:
    point = seen.held("completions/clipped_ratio", lambda share: share > TRUNCATED, context.no_signal_steps)
    share, closed = last_of(seen, "completions/clipped_ratio", 1)[0], seen.all("thinking/closed_ratio")
    thinking = f", and {closed[-1].value:.0%} close their thinking" if closed else ""
    truncated = f"{share:.0%} of the completions are truncated{thinking}"
    return point and Evidence(point.begins, f"{truncated}, {in_a_row(seen, point.begins)}")


@rule(
    cause="The model does not solve these prompts at all, so there is nothing to reinforce, or the reward never "
    "matches",
    fix="score reference answers by hand; try easier prompts (data.source), rollout.difficulty_samples, rloo-kit sft "
    "first, or a graded reward",
    follows=("reward_failures", "truncation"),
)
def cold_start(seen: Series, context: Context) -> Evidence | None:
    points = seen.all(answer_metric(seen, context))
    if len(points) < 2 or seen.step < context.no_signal_steps or seen.step > 200:
        return None
    values = [point.value for point in points]
    if max(values) > 0.05 or mean(values) > 0.01:
        return None
    right = f"{mean(values):.1%} of the completions were right in the first {seen.step} steps"
    return Evidence(points[0].step, right)


@rule(
    cause="All completions of a prompt earn the same reward, so every advantage is zero",
    fix="use prompts that are solved sometimes (data.source), a graded reward (rewards), more completions per prompt "
    "(rloo.num_generations, currently {num_generations}) or a higher rloo.temperature (currently {temperature}); "
    "a reward whose pattern wants <think> gives all the same if the prompt opens it",
    follows=("reward_failures", "broken_policy", "truncation", "cold_start", "entropy_collapse", "never_closed"),
)  # fmt: skip
def no_signal(seen: Series, context: Context) -> Evidence | None:
    # A KL penalty alone makes the rewards of a group differ, so the scores before the penalty come first.
    # Without a group baseline, a solved and a failed group differ, and both are trained on.
    steps, grouped = context.no_signal_steps, context.rloo.get("baseline") != "none"
    name = next((one for one in TIED if grouped and seen.all(one)), "")
    tied = seen.held(name, lambda share: share >= 1.0, steps)
    equal = seen.held("reward_std", lambda deviation: deviation < EQUAL_REWARDS, steps)
    found = min((point for point in (tied, equal) if point is not None), default=None)
    if found is None:
        return None
    since, solved = found.begins, is_solved(seen, context)
    reward = f" (mean reward {last_of(seen, 'reward', 1)[0]:.3g})" if seen.all("reward") else ""
    text = f"the completions of every group earned the same reward in {in_a_row(seen, since)}{reward}"
    if not solved:
        return Evidence(since, text)
    if since > 1:
        return None
    return Evidence(since, text, "The prompts were solved from the start", "harder prompts (data.source)")


@rule(
    cause="The steps are too small to move the weights",
    fix="raise rloo.learning_rate (currently {learning_rate}): 1e-5 and above for an adapter; see rloo.warmup_steps",
    follows=("reward_failures", "broken_policy", "no_signal", "truncation", "cold_start", "entropy_collapse"),
)  # fmt: skip
def no_movement(seen: Series, context: Context) -> Evidence | None:
    zero = seen.held("grad_norm", lambda norm: norm == 0.0, context.no_signal_steps)
    if zero is not None and not is_solved(seen, context):
        fix = "check that something is trainable (model.lora) and that not everything is masked"
        if clip := context.rloo.get("reward_clip_range"):
            fix = f"widen rloo.reward_clip_range (currently {list(clip)}), which may flatten all rewards"
        if context.rloo.get("mask_truncated_completions"):
            fix = "rloo.mask_truncated_completions excludes truncated completions: raise rloo.max_completion_length"
        text = f"the gradient was zero in {in_a_row(seen, zero.begins)}"
        return Evidence(zero.begins, text, "Rewards differ, but no weight moves", fix)
    moved = seen.all("policy/moved")
    if len(moved) < 10 or max(point.value for point in moved[-500:]) >= MOVED:
        return None
    if not any(norm > 0 for norm in last_of(seen, "grad_norm", 10)):
        return None
    text = f"after {seen.step} steps with a gradient the weights have moved by {moved[-1].value:.1g} of their norm"
    return Evidence(moved[0].step, text)


# ------------------------------------------------------------------------------------------ drift and collapse


@rule(
    cause="The policy drifts far from its reference",
    fix="raise rloo.beta (currently {beta}) or lower rloo.learning_rate (currently {learning_rate})",
    follows=("broken_policy",),
)
def kl_explosion(seen: Series, context: Context) -> Evidence | None:
    point = seen.lasting("kl", lambda value: value > DRIFTED, 3)
    return point and Evidence(point.step, f"the KL is {mean(seen.last('kl', 3)):.3g} nats a token")


@rule(
    cause="The policy has settled on one answer and no longer explores",
    fix="check what the rewards pay for; lower rloo.learning_rate (currently {learning_rate}), raise rloo.beta "
    "(currently {beta}) or rloo.temperature (currently {temperature})",
    follows=("broken_policy", "reward_hacking", "length_collapse", "length_explosion", "never_closed"),
)  # fmt: skip
def entropy_collapse(seen: Series, context: Context) -> Evidence | None:
    low = seen.lasting("entropy", lambda nats: nats < 0.01, 5)
    text = f"the entropy is {last_of(seen, 'entropy', 1)[0]:.2g} nats a token"
    if low is not None and not is_solved(seen, context):
        return Evidence(low.step, text)
    name = "completions/most_common_ratio"
    same = seen.lasting(name, lambda share: share >= 0.9, 5)
    right = mean(last_of(seen, answer_metric(seen, context), 5))
    if same is None or mean(seen.first(name, 5)) > 0.5 or right >= SOLVED:
        return None
    share = last_of(seen, name, 1)[0]
    return Evidence(same.step, f"{text}, and {share:.0%} of the completions, of all prompts, are identical")


# ------------------------------------------------------------------------------------------ completions


@rule(
    cause="Completions grow without more of them being right: a reward pays for length, or nothing for ending",
    fix="check what the rewards pay for; add soft_overlong_penalty or thinking_budget_reward to rewards, or raise "
    "rloo.max_completion_length (currently {max_completion_length}) if the thinking is good",
    follows=("broken_policy", "never_closed"),
)  # fmt: skip
def length_explosion(seen: Series, context: Context) -> Evidence | None:
    name, clipped = "completions/mean_length", "completions/clipped_ratio"
    now, begun = seen.last(name, 5), mean(seen.first(name, 5) or [0.0])
    if len(seen.all(name)) < 10 or not now or begun <= 0:
        return None
    cut, cut_first = mean(last_of(seen, clipped, 5)), mean(seen.first(clipped, 5) or [0.0])
    into_limit = mean(now) >= 1.5 * begun and cut > OFTEN_CUT >= cut_first
    answers = answer_metric(seen, context)
    for_nothing = mean(now) >= 2 * begun and bool(answers) and not has_risen(seen, answers)
    if not into_limit and not for_nothing:
        return None
    since = seen.begun(name, lambda length: length >= 1.25 * begun)
    text = f"completions grew from {begun:.0f} to {mean(now):.0f} tokens"
    return Evidence(since, f"{text}, {cut:.0%} truncated" if into_limit else f"{text} without more right answers")


@rule(
    cause="A reward or the KL sum pays for brevity",
    fix="check what the rewards pay for; with rloo.beta (currently {beta}) set rloo.kl_form=length_normalized "
    "(currently {kl_form}), and lower the weight of any length penalty",
    follows=("broken_policy", "entropy_collapse"),
)  # fmt: skip
def length_collapse(seen: Series, context: Context) -> Evidence | None:
    answers, forced = answer_metric(seen, context), mean(seen.first("thinking/forced_ratio", 5) or [0.0])
    if context.wants_shorter(forced) and not has_risen(seen, answers, -1):
        return None
    limit = 0.5 if answers else 0.33  # without an answer reward, brevity may be intended
    cut_off = mean(seen.first("completions/clipped_ratio", 5) or [0.0])
    if has_risen(seen, answers) if answers else cut_off >= 0.5 and has_risen(seen, "reward"):
        return None  # more right answers, or completions that have learnt to end before the limit
    for name, what in (("completions/mean_length", "completions"), ("thinking/mean_length", "thinking")):
        now, begun = seen.last(name, 5), mean(seen.first(name, 5) or [0.0])
        if len(seen.all(name)) >= 10 and now and mean(now) <= limit * begun:
            since = seen.begun(name, lambda length, begun=begun: length <= 0.75 * begun)  # type: ignore[misc]
            text = f"{what} shrank from {begun:.0f} to {mean(now):.0f} tokens without more right answers"
            return Evidence(since, text)
    return None


@rule(
    cause="No reward pays for closing the thinking, or one pays for leaving it open",
    fix="add think_format_reward to rewards, check what the others pay for, and set rloo.thinking_budget if thinking "
    "only runs out of room",
    follows=("broken_policy", "truncation", "length_explosion"),
)  # fmt: skip
def never_closed(seen: Series, context: Context) -> Evidence | None:
    name, least = "thinking/closed_ratio", SELDOM_CLOSED
    now, begun = seen.last(name, 5), mean(seen.first(name, 3) or [0.0])
    if not now:
        return None
    share, cut = mean(now), mean(last_of(seen, "completions/clipped_ratio", 5))
    fell = begun >= 0.5 and share < 0.5 * begun
    if 1 - share - cut < 0.3 or not (fell or max(now) < least):  # truncated ones had no room
        return None
    since = seen.begun(name, lambda value: value < max(0.75 * begun, least))
    return Evidence(since, f"{share:.0%} of the completions close their thinking (initially {begun:.0%})")


# ------------------------------------------------------------------------------------------ learning


@rule(
    cause="The policy earns reward in an unintended way",
    fix="read the best completions (rloo-kit show RUN --completions 4 --order best), then fix the reward or change the "
    "weights of rewards",
)  # fmt: skip
def reward_hacking(seen: Series, context: Context) -> Evidence | None:
    """Held-out accuracy, or the answer reward, falls from its best, while the reward does not fall and one of its parts
    rises."""
    answers = answer_metric(seen, context)
    for truth, margin, count in (("eval/accuracy", 0.05, 1), (answers, 0.1, 5)):
        now, best = seen.last(truth, count), seen.best_mean(truth, count, count)
        if len(seen.all(truth)) < 2 * count or not now or best is None:
            continue
        high, at = best
        if count == 1:  # the best lies above the interval of the last evaluation
            error = max(seen.last(f"{truth}_high", 1), default=0.0) - mean(now)
        else:
            error = 4 * seen.noise(truth) * (2 / count) ** 0.5
        if high - mean(now) < max(margin, error):
            continue
        if riser := _find_riser(seen, answers, at):
            half = (high + mean(now)) / 2
            since = seen.since(truth, at, lambda value, half=half: value <= half)  # type: ignore[misc]
            what = "held-out accuracy" if count == 1 else truth.split("/")[1]
            return Evidence(since, f"{what} fell from {high:.3g} to {mean(now):.3g} while {riser}")
    return None


def _find_riser(seen: Series, answers: str, at: int) -> str:
    """A description of the reward that rose most since step `at`, in units of its standard deviation over completions;
    empty if the total reward fell or none rose beyond its noise."""

    def ends(name: str) -> tuple[float, float] | None:
        """Five values before the step, and now."""
        old, new = seen.mean_around(name, at, 5), seen.last(name, 5)
        return None if old is None or not new else (old, mean(new))

    whole = ends("reward")
    if whole is None or whole[1] < whole[0]:
        return ""
    risers = []
    for name in seen.names():
        if name == answers or (name != "reward" and not REWARD_MEAN.fullmatch(name)) or (both := ends(name)) is None:
            continue
        word = "the reward" if name == "reward" else name.split("/")[1]
        spread = "reward_std" if name == "reward" else f"{name.removesuffix('mean')}std"
        change, unit = both[1] - both[0], seen.mean_around(spread, at, 5) or 0.0
        if change > 4 * seen.noise(name) * (2 / 5) ** 0.5 and change > 0.5 * unit:
            text = f"{word} rose from {both[0]:.3g} to {both[1]:.3g}"
            risers.append((change / max(unit, EQUAL_REWARDS), name, text))
    return max(risers)[-1] if risers else ""


@rule(
    cause="Sampler and trainer are two policies (4-bit kernels, vLLM, another precision, padding)",
    fix="set rloo.sampler_correction=token (currently {sampler_correction}); if vLLM or a server samples, "
    "rollout.engine=generate avoids it",
    follows=("broken_policy",),
)
def sampler_gap(seen: Series, context: Context) -> Evidence | None:
    points = seen.all("sampling/logp_difference_mean")[-GAP_LOOK:]
    apart = [point for point in points if point.value > 0.1]  # it depends on which prompts are drawn
    if len(apart) < 3:
        return None
    gap = mean([point.value for point in apart])
    found = f"log-probabilities of trainer and sampler are {gap:.2g} nats apart, on average"
    return Evidence(apart[0].step, f"in {len(apart)} of the last {len(points)} rows {found}")
