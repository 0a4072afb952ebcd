"""The healthy range of each metric that has one (docs/metrics.md), and the detectors of each fault: one pure function
per rule of `health/rules.py`."""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence

from rloo_kit.health.rule import Context, Evidence, Threshold
from rloo_kit.health.series import Series

SOLVED = 0.9  # accuracy on the training prompts from which tied groups and low entropy mean success
CEILING = 0.95  # mean of a reward from which there is little left to learn
EQUAL_REWARDS = 1e-6  # a standard deviation below this is rounding
MOVED = 1e-5  # relative to the weights' norm: below it nothing has been trained (ten steps at 1e-6 are above)
GAP_LOOK = 12  # rows in which a few gaps between sampler and trainer count, in a row or not
REWARD_MEAN = re.compile(r"rewards/(.+)/mean")
mean = statistics.fmean

CLIPPED = Threshold(
    ("completions/clipped_ratio",),
    high=0.3,
    alarm_high=0.8,
    if_high="raise rloo.max_completion_length, or add soft_overlong_penalty to rewards",
)
TIED = Threshold(
    ("frac_score_zero_std", "frac_reward_zero_std"),
    high=0.8,
    alarm_high=0.8,
    if_high="if solved (reward near its maximum): harder prompts in data.source; else easier prompts, a graded reward "
    "in rewards, more rloo.num_generations or a higher rloo.temperature",
    unless_solved=True,
)
ENTROPY = Threshold(
    ("entropy",),
    low=0.05,
    high=0.5,
    alarm_low=0.01,
    if_low="lower rloo.learning_rate, raise rloo.beta or rloo.temperature; normal at the end of a run that has learnt "
    "its task",
    if_high="normal at the start; if it keeps rising, lower rloo.learning_rate",
    unless_solved=True,
)
KL = Threshold(("kl",), high=0.5, alarm_high=2.0, if_high="raise rloo.beta or lower rloo.learning_rate")
SPREAD = Threshold(
    ("kl/spread_ratio",),
    high=1.0,
    if_high="the KL penalty outweighs the reward: lower rloo.beta or set rloo.kl_form=length_normalized",
    unless_solved=True,
)
GRADIENT = Threshold(
    ("grad_norm",),
    low=0.001,
    high=1.0,
    alarm_high=10.0,
    if_low="no signal: see frac_score_zero_std and completions/clipped_ratio; or raise rloo.learning_rate",
    if_high="lower rloo.learning_rate",
    unless_solved=True,
)
RATIO = Threshold(
    ("clip_ratio/region_mean",),
    high=0.0,
    alarm_high=0.0,
    if_high="on-policy this is a bug, because the ratio has to be exactly 1; see references/troubleshooting.md",
    on_policy=True,
)
FAILED = Threshold(
    ("rewards/failed_ratio",),
    high=0.0,
    alarm_high=0.5,
    if_high="fix the reward: the run's output names it and the first sample it failed on",
)
REPEATED = Threshold(
    ("completions/repeated_ratio",),
    high=0.3,
    alarm_high=0.5,
    if_high="read rollouts/: a reward pays for repetition, or rloo.learning_rate is too high",
)
CLOSED = Threshold(
    ("thinking/closed_ratio",),
    low=0.5,
    alarm_low=0.2,
    if_low="raise rloo.max_completion_length, or add think_format_reward to rewards",
)
GAP = Threshold(
    ("sampling/logp_difference_mean",),
    high=0.1,
    alarm_high=0.1,
    if_high="sampler and trainer are two policies: set rloo.sampler_correction=token",
)


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


def at_ceiling(weights: Mapping[str, float], *values: Mapping[str, Sequence[float]], share: float = CEILING) -> bool:
    """Whether no reward with a weight can rise much: its first values have a mean of `share` or above, if all are in
    [0, 1]; else that share of them is the highest value, and there is a lower one.

    >>> at_ceiling({}, {"a": [0.9, 1.0]}), at_ceiling({}, {"a": [5.0, 5.0]}), at_ceiling({}, {"a": [5.0]}, {"a": [3.0]})
    (True, False, True)

    Args:
        weights: by name; 1 for a reward without. A negative one turns the reward around; a penalty is in [-1, 0].
        values: of each reward by name, of the measurement to judge first.
    """

    def is_high(name: str) -> bool:
        sign, best = (-1, 1) if weights.get(name, 1) < 0 else (1, 1 if name.endswith("penalty") else 0)
        first, *others = [[best + sign * value for value in one.get(name, ())] for one in values]
        seen = [*first, *(value for one in others for value in one)]
        if first and min(seen) >= 0 and max(seen) <= 1:
            return mean(first) >= share
        return bool(first) and min(seen) < max(seen) and first.count(max(seen)) >= share * len(first)

    weighted = [name for name in values[0] if weights.get(name, 1)]
    return bool(weighted) and all(map(is_high, weighted))


def answer_metric(seen: Series, context: Context) -> str:
    """The metric that is the accuracy on the training prompts; empty if no reward compares answers."""
    return next((name for one in context.answers if seen.all(name := f"rewards/{one}/mean")), "")


def last_of(seen: Series, name: str, count: int) -> list[float]:
    """The last values, or as many as there are; [0.0] without any."""
    return [point.value for point in seen.all(name)[-count:]] or [0.0]


def has_risen(seen: Series, name: str) -> bool:
    """Whether a metric's last five values are above its first five by more than their noise."""
    now, begun = seen.last(name, 5), seen.first(name, 5)
    return bool(now) and mean(now) - mean(begun) > 2 * seen.noise(name) * (2 / 5) ** 0.5


def _share(seen: Series, name: str) -> str:
    return f"{last_of(seen, name, 5)[-1]:.0%}"


def _steps(seen: Series, since: int) -> str:
    return f"{max(seen.step - since + 1, 1)} steps in a row"


# ------------------------------------------------------------------------------------------------ no signal


def no_signal(seen: Series, context: Context, window: int) -> Evidence | None:
    # A KL penalty alone makes the rewards of a group differ, so the scores before the penalty come first.
    # Without a group baseline, a solved and a failed group differ, and both are trained on.
    grouped = context.rloo.get("baseline") != "none"
    name = next((one for one in TIED.metrics if grouped and seen.all(one)), "")
    tied = seen.held(name, lambda share: share >= 1.0, window)
    equal = seen.held("reward_std", lambda deviation: deviation < EQUAL_REWARDS, window)
    found = min((point for point in (tied, equal) if point is not None), default=None)
    if found is None:
        return None
    since = found.begins
    solved, from_the_start = is_solved(seen, context), since <= 1
    if solved and not from_the_start:
        return None
    reward = f" (mean reward {last_of(seen, 'reward', 1)[0]:.3g})" if seen.all("reward") else ""
    text = f"the completions of every group earned the same reward in {_steps(seen, since)}{reward}"
    if solved:
        return Evidence(since, text, "The prompts were solved from the start", "harder prompts (data.source)")
    return Evidence(since, text)


def truncation(seen: Series, context: Context, window: int) -> Evidence | None:
    found = seen.held("completions/clipped_ratio", CLIPPED.is_alarming, window)
    if found is None:
        return None
    since = found.begins
    closed = seen.all("thinking/closed_ratio")
    thinking = f", and {closed[-1].value:.0%} close their thinking" if closed else ""
    share = _share(seen, "completions/clipped_ratio")
    return Evidence(since, f"{share} of the completions are truncated{thinking}, {_steps(seen, since)}")


def all_none(seen: Series, context: Context, window: int) -> Evidence | None:
    found = seen.held("rewards/unscored_ratio", lambda share: share >= 1.0, window)
    if found is None or last_of(seen, "rewards/failed_ratio", 1)[0] >= 0.5:
        return None
    since = found.begins
    return Evidence(since, f"no completion was scored in {_steps(seen, since)}")


def reward_failures(seen: Series, context: Context, window: int) -> Evidence | None:
    found = seen.lasting("rewards/failed_ratio", lambda share: share >= 0.2, window)
    if found is None:
        return None
    share = _share(seen, "rewards/failed_ratio")
    return Evidence(found.step, f"a reward failed on {share} of the samples, {_steps(seen, found.step)}")


def cold_start(seen: Series, context: Context, window: int) -> Evidence | None:
    name = answer_metric(seen, context)
    points = seen.all(name)
    if len(points) < 2 or seen.step < window or seen.step > 200:
        return None
    values = [point.value for point in points]
    if max(values) > 0.05 or mean(values) > 0.01:
        return None
    right = f"{mean(values):.1%} of the completions were right in the first {seen.step} steps"
    return Evidence(points[0].step, right)


def zero_gradient(seen: Series, context: Context, window: int) -> Evidence | None:
    found = seen.held("grad_norm", lambda norm: norm == 0.0, window)
    if found is None or is_solved(seen, context):
        return None
    since = found.begins
    clip = context.rloo.get("reward_clip_range")
    fix = f"widen rloo.reward_clip_range (currently {list(clip)}), which may flatten all rewards" if clip else ""
    if context.rloo.get("mask_truncated_completions"):
        fix = "rloo.mask_truncated_completions excludes truncated completions: raise rloo.max_completion_length"
    return Evidence(since, f"the gradient was zero in {_steps(seen, since)}", fix=fix)


def kl_outweighs(seen: Series, context: Context, window: int) -> Evidence | None:
    found = seen.held("kl/spread_ratio", lambda ratio: ratio > 1.0, window)
    if found is None or is_solved(seen, context):
        return None
    since, ratio = found.step - found.covered + 1, last_of(seen, "kl/spread_ratio", 1)[0]
    fix = "lower rloo.beta (currently {beta})"
    if context.rloo.get("kl_form") != "length_normalized":
        fix += ", or set rloo.kl_form=length_normalized (currently {kl_form}), which does not penalise length"
    what = f"the KL penalty varied {ratio:.2g} times as much within a group as the task reward in"
    return Evidence(since, f"{what} {_steps(seen, since)}", fix=fix)


# ------------------------------------------------------------------------------------- the policy breaks


def broken_policy(seen: Series, context: Context, window: int) -> Evidence | None:
    """The reward falls by half of its standard deviation and stays there, and the policy has changed: entropy, KL,
    repetition, truncation, closing or the share of equal groups differ from before."""
    now, best = seen.last("reward", window), seen.best_mean("reward", 3, window)
    spread = seen.all("reward_std")
    if not now or best is None or not spread:
        return None
    high, at = best
    low = mean(now)
    around = [point.value for point in spread[-500:] if at - 5 <= point.step <= at]
    if high - low < 0.5 * max(mean(around) if around else 0.0, EQUAL_REWARDS) or max(now) > (high + low) / 2:
        return None
    signs = [sign for sign in _signs(seen, at, window) if sign]
    if not signs:
        return None
    since = seen.since("reward", at, lambda reward: reward <= (high + low) / 2)
    text = f"the reward fell from {high:.3g} to {low:.3g} while {', '.join(signs)}"
    norms = [(point.value, point.step) for point in seen.all("grad_norm")[-500:] if point.step <= since]
    earlier = [norm for norm, step in norms if norm > 0]
    if norms and earlier:
        norm, step = max(norms[-5:])
        times = norm / statistics.median(earlier)
        text += f"; the gradient norm was {norm:.3g} at step {step}, {times:.1f} times its median" if times > 3 else ""
    return Evidence(since, text)


def _signs(seen: Series, at: int, window: int) -> list[str]:
    """Descriptions of what has changed about the policy since step `at`."""

    def change(name: str, words: str, shows: Callable[[float, float], bool]) -> str:
        old, new = seen.mean_around(name, at, 5), seen.last(name, window)
        if old is None or not new or not shows(old, mean(new)):
            return ""
        return f"{words} went from {old:.3g} to {mean(new):.3g}"

    narrower = change("entropy", "the entropy", lambda old, new: new <= 0.5 * old)
    equal = change("frac_reward_zero_std", "the groups with equal rewards", lambda old, new: new >= old + 0.4)
    return [
        f"{narrower} and {equal}" if narrower and equal else "",
        change("entropy", "the entropy", lambda old, new: new >= max(2 * old, old + 0.5)),
        change("entropy", "the entropy", lambda old, new: new <= min(0.1 * old, 0.05)),
        change("kl", "the KL", lambda old, new: new > 2.0 and new > 3 * old),
        change("completions/repeated_ratio", "the repeated share", lambda old, new: new >= old + 0.3),
        change("completions/clipped_ratio", "the truncated share", lambda old, new: new >= old + 0.5),
        change("thinking/closed_ratio", "the closed share", lambda old, new: new <= old - 0.5),
    ]


def gradient_spike(seen: Series, context: Context, window: int) -> Evidence | None:
    norms = [point for point in seen.all("grad_norm")[-50:] if point.value > 0]
    if len(norms) < 9 or norms[-1].step != seen.step:
        return None
    last, median = norms[-1], statistics.median(point.value for point in norms[:-1])
    if last.value <= max(10 * median, context.rloo.get("max_grad_norm") or 1.0, 1.0):
        return None
    return Evidence(last.step, f"the gradient norm was {last.value:.3g}, {last.value / median:.0f} times its median")


def kl_explosion(seen: Series, context: Context, window: int) -> Evidence | None:
    found = seen.lasting("kl", KL.is_alarming, window)
    if found is None:
        return None
    return Evidence(found.step, f"the KL is {mean(seen.last('kl', window)):.3g} nats a token")


def entropy_collapse(seen: Series, context: Context, window: int) -> Evidence | None:
    low = seen.lasting("entropy", ENTROPY.is_alarming, window)
    text = f"the entropy is {last_of(seen, 'entropy', 1)[0]:.2g} nats a token"
    if low is not None and not is_solved(seen, context):
        return Evidence(low.step, text)
    name = "completions/most_common_ratio"
    same = seen.lasting(name, lambda share: share >= 0.9, window)
    if (
        same is None
        or mean(seen.first(name, 5)) > 0.5
        or mean(last_of(seen, answer_metric(seen, context), 5)) >= SOLVED
    ):
        return None
    share = _share(seen, "completions/most_common_ratio")
    return Evidence(same.step, f"{text}, and {share} of the completions, of all prompts, are identical")


def entropy_explosion(seen: Series, context: Context, window: int) -> Evidence | None:
    now, begun = seen.last("entropy", window), seen.first("entropy", 5)
    if len(seen.all("entropy")) < 10 or not now or has_risen(seen, "reward"):
        return None
    limit = max(2 * mean(begun), mean(begun) + 0.5)
    if mean(now) < limit:
        return None
    since = seen.begun("entropy", lambda entropy: entropy >= limit)
    return Evidence(since, f"the entropy rose from {mean(begun):.3g} to {mean(now):.3g}, but the reward did not")


# ------------------------------------------------------------------------------------------------ completions


def length_explosion(seen: Series, context: Context, window: int) -> Evidence | None:
    name, clipped = "completions/mean_length", "completions/clipped_ratio"
    now, begun = seen.last(name, window), mean(seen.first(name, 5) or [0.0])
    if len(seen.all(name)) < 10 or not now or begun <= 0:
        return None
    cut, cut_first = mean(last_of(seen, clipped, window)), mean(seen.first(clipped, 5) or [0.0])
    into_limit = mean(now) >= 1.5 * begun and cut > (CLIPPED.high or 1) >= cut_first
    answers = answer_metric(seen, context)
    for_nothing = mean(now) >= 2 * begun and bool(answers) and not has_risen(seen, answers)
    if not into_limit and not for_nothing:
        return None
    since = seen.begun(name, lambda length: length >= 1.25 * begun)
    text = f"completions grew from {begun:.0f} to {mean(now):.0f} tokens"
    return Evidence(since, f"{text}, {cut:.0%} truncated" if into_limit else f"{text} without more right answers")


def length_collapse(seen: Series, context: Context, window: int) -> Evidence | None:
    answers = answer_metric(seen, context)
    limit = 0.5 if answers else 0.33  # without an answer reward, brevity may be intended
    if answers and has_risen(seen, answers):
        return None
    for name, what in (("completions/mean_length", "completions"), ("thinking/mean_length", "thinking")):
        now, begun = seen.last(name, window), mean(seen.first(name, 5) or [0.0])
        if len(seen.all(name)) >= 10 and now and mean(now) <= limit * begun:
            since = seen.begun(name, lambda length, begun=begun: length <= 0.75 * begun)  # type: ignore[misc]
            text = f"{what} shrank from {begun:.0f} to {mean(now):.0f} tokens without more right answers"
            return Evidence(since, text)
    return None


def repetition(seen: Series, context: Context, window: int) -> Evidence | None:
    name = "completions/repeated_ratio"
    now = seen.last(name, window)
    if not now:
        return None
    share, begun = mean(now), mean(seen.first(name, 3))
    if not REPEATED.is_alarming(share) and (REPEATED.level(share) == "healthy" or share < begun + 0.2):
        return None
    since = seen.begun(name, lambda value: value >= min((begun + share) / 2, REPEATED.high or 1))
    return Evidence(since, f"{share:.0%} of a completion's tokens repeat earlier ones (initially {begun:.0%})")


def never_closed(seen: Series, context: Context, window: int) -> Evidence | None:
    name = "thinking/closed_ratio"
    now, begun = seen.last(name, window), mean(seen.first(name, 3) or [0.0])
    if not now:
        return None
    share = mean(now)
    cut = mean(last_of(seen, "completions/clipped_ratio", window))
    fell = begun >= 0.5 and share < 0.5 * begun
    if 1 - share - cut < 0.3 or not (fell or max(now) < (CLOSED.alarm_low or 0)):  # truncated ones had no room
        return None
    since = seen.begun(name, lambda value: value < max(0.75 * begun, CLOSED.alarm_low or 0))
    return Evidence(since, f"{share:.0%} of the completions close their thinking (initially {begun:.0%})")


# ------------------------------------------------------------------------------------------------ learning


def reward_hacking(seen: Series, context: Context, window: int) -> Evidence | None:
    """Held-out accuracy, or the answer reward, falls from its best, while the reward does not fall and one of its parts
    rises."""
    answers = answer_metric(seen, context)
    for truth, margin in (("eval/accuracy", 0.05), (answers, 0.1)):
        count = 1 if truth == "eval/accuracy" else window
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
        riser = _find_riser(seen, answers, at, window)
        if riser:
            half = (high + mean(now)) / 2
            since = seen.since(truth, at, lambda value, half=half: value <= half)  # type: ignore[misc]
            what = "held-out accuracy" if count == 1 else truth.split("/")[1]
            return Evidence(since, f"{what} fell from {high:.3g} to {mean(now):.3g} while {riser}")
    return None


def _find_riser(seen: Series, answers: str, at: int, window: int) -> str:
    """A description of the reward that rose most since step `at`; empty if the total reward fell or none rose."""

    def rise(name: str, spread: str) -> float:
        """In units of the standard deviation over completions; -1 if it is within the noise."""
        old, new, unit = seen.mean_around(name, at, window), seen.last(name, window), seen.mean_around(spread, at, 5)
        if old is None or not new:
            return -1.0
        change = mean(new) - old
        enough = change > 4 * seen.noise(name) * (2 / window) ** 0.5 and change > 0.5 * (unit or 0.0)
        return change / max(unit or 0.0, EQUAL_REWARDS) if enough else -1.0

    before, whole = seen.mean_around("reward", at, window), seen.last("reward", window)
    if before is None or not whole or mean(whole) < before:
        return ""
    parts = [name for name in seen.names() if name.startswith("rewards/") and name.endswith("/mean")]
    risers = [(rise(name, f"{name.removesuffix('mean')}std"), name) for name in parts if name != answers]
    risers += [(rise("reward", "reward_std"), "the reward")]
    value, name = max(risers)
    old, new = seen.mean_around(name if "/" in name else "reward", at, window), mean(last_of(seen, name, window))
    if value <= 0 or old is None:
        return ""
    new = new if "/" in name else mean(whole)
    return f"{name.split('/')[1] if '/' in name else name} rose from {old:.3g} to {new:.3g}"


def no_movement(seen: Series, context: Context, window: int) -> Evidence | None:
    moved = seen.all("policy/moved")
    if len(moved) < window or max(point.value for point in moved[-500:]) >= MOVED:
        return None
    if not any(norm > 0 for norm in last_of(seen, "grad_norm", window)):
        return None
    text = f"after {seen.step} steps with a gradient the weights have moved by {moved[-1].value:.1g} of their norm"
    return Evidence(moved[0].step, text)


def nothing_learnt(seen: Series, context: Context, window: int) -> Evidence | None:
    points = seen.all("reward")
    planned = context.max_steps
    if planned is None or len(points) < window or seen.step < planned / 2 or is_solved(seen, context):
        return None
    held_out = seen.all("eval/accuracy")
    if len(held_out) > 1 and max(point.value for point in held_out) - held_out[0].value >= 0.03:
        return None
    resampled = bool(seen.all("rollout/resampled_groups"))  # dynamic sampling keeps the reward constant
    trends = {name: seen.trend(name) for name in ("reward", answer_metric(seen, context)) if name}
    if resampled or any(abs(trend) >= 2 for trend in trends.values()):
        return None
    done = f"after {seen.step / planned:.0%} of the planned steps"
    values = f"from {mean(seen.first('reward', 5)):.3g} to {mean(seen.last('reward', 5)):.3g}"
    return Evidence(points[0].step, f"{done} the reward went {values}, within its noise")


def sampler_gap(seen: Series, context: Context, window: int) -> Evidence | None:
    points = seen.all("sampling/logp_difference_mean")[-GAP_LOOK:]
    apart = [point for point in points if GAP.is_alarming(point.value)]  # it depends on which prompts are drawn
    if len(apart) < window:
        return None
    gap = mean([point.value for point in apart])
    found = f"log-probabilities of trainer and sampler are {gap:.2g} nats apart, on average"
    return Evidence(apart[0].step, f"in {len(apart)} of the last {len(points)} rows {found}")


def ratio(seen: Series, context: Context, window: int) -> Evidence | None:
    if not context.on_policy:
        return None
    found = seen.lasting("clip_ratio/region_mean", lambda share: share > 0, window)
    return None if found is None else Evidence(found.step, f"{_share(seen, 'clip_ratio/region_mean')} are clipped")
