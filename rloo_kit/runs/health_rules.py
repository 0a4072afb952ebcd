"""The rules of a run's health: one table for the live run, `scripts/summarize_run.py` and the report.

Windows and limits are written down here and in docs/runs.md; docs/benchmarks.md says what the runs of
`benchmarks/health_runs.py` changed of them.
"""

import statistics
from collections.abc import Callable

from rloo_kit.runs.health import Context, Evidence, Rule, Series, Threshold

SOLVED = 0.9  # accuracy on the training prompts from which tied groups and a low entropy are success
EQUAL_REWARDS = 1e-6  # a standard deviation below this is rounding
MOVED = 1e-5  # of the weights' norm: below it nothing has been trained (ten steps at 1e-6 are above)
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
    if_high="solved (reward near its highest): harder prompts in data.source; else easier prompts, a graded reward "
    "in rewards, more rloo.num_generations or a higher rloo.temperature",
    unless_solved=True,
)
ENTROPY = Threshold(
    ("entropy",),
    low=0.05,
    high=0.5,
    alarm_low=0.01,
    if_low="lower rloo.learning_rate, raise rloo.beta or rloo.temperature; at the end of a run that has learnt its "
    "task this is normal",
    if_high="normal at the start; if it keeps rising, lower rloo.learning_rate",
    unless_solved=True,
)
KL = Threshold(("kl",), high=0.5, alarm_high=2.0, if_high="raise rloo.beta or lower rloo.learning_rate")
SPREAD = Threshold(
    ("kl/spread_ratio",),
    high=1.0,
    if_high="the KL penalty decides more than the reward: lower rloo.beta or set rloo.kl_form=length_normalized",
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
    if_high="a bug on-policy: the ratio has to be exactly 1; see references/troubleshooting.md",
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
    if_high="read rollouts.jsonl: a reward pays for repeating, or rloo.learning_rate is too high",
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
    if_high="sampler and trainer are two policies: set rloo.sampler_correction=token, or rollout.engine=native",
)


# ------------------------------------------------------------------------------------------ what several rules ask


def is_solved(seen: Series, context: Context) -> bool:
    """Whether the run has learnt its task: accuracy of SOLVED or above or, where no reward compares answers, a mean
    reward that has risen by half of its standard deviation and stands near its highest."""
    answers = answer_metric(seen, context)
    if answers or seen.all("eval/accuracy"):
        return max(*seen.last("eval/accuracy", 1), 0.0, mean(last_of(seen, answers, 5))) >= SOLVED
    now, spread = seen.last("reward", 5), seen.first("reward_std", 5)
    if not now or not spread or len(seen.all("reward")) < 10:
        return False
    best = seen.best_mean("reward", 5, 1)
    risen = mean(now) - mean(seen.first("reward", 5)) >= 0.5 * mean(spread)
    return risen and best is not None and mean(now) >= best[0] - 0.25 * mean(spread)


def answer_metric(seen: Series, context: Context) -> str:
    """The metric that is the accuracy on the training prompts; empty where no reward compares answers."""
    return next((name for one in context.answers if seen.all(name := f"rewards/{one}/mean")), "")


def last_of(seen: Series, name: str, count: int) -> list[float]:
    """The last values, or those that there are; 0 where there are none."""
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


def _no_signal(seen: Series, context: Context, window: int) -> Evidence | None:
    # With a KL penalty the rewards of a group differ by it alone, so the scores before the penalty come first.
    name = next((one for one in TIED.metrics if seen.all(one)), "")
    tied = seen.held(name, lambda share: share >= 1.0, window)
    equal = seen.held("reward_std", lambda deviation: deviation < EQUAL_REWARDS, window)
    found = min((point for point in (tied, equal) if point is not None), default=None)
    if found is None:
        return None
    since = found.step - found.covered + 1
    solved, from_the_start = is_solved(seen, context), since <= 1
    if solved and not from_the_start:
        return None
    reward = f" (mean reward {last_of(seen, 'reward', 1)[0]:.3g})" if seen.all("reward") else ""
    text = f"every group of completions earned one and the same reward in {_steps(seen, since)}{reward}"
    if solved:
        return Evidence(since, text, "The prompts were solved from the start", "harder prompts (data.source)")
    return Evidence(since, text)


def _truncation(seen: Series, context: Context, window: int) -> Evidence | None:
    assert CLIPPED.alarm_high is not None
    limit = CLIPPED.alarm_high
    found = seen.held("completions/clipped_ratio", lambda share: share > limit, window)
    if found is None:
        return None
    since = found.step - found.covered + 1
    closed = seen.all("thinking/closed_ratio")
    thinking = f", and {closed[-1].value:.0%} close their thinking" if closed else ""
    share = _share(seen, "completions/clipped_ratio")
    return Evidence(since, f"{share} of the completions are cut off before they end{thinking}, {_steps(seen, since)}")


def _all_none(seen: Series, context: Context, window: int) -> Evidence | None:
    found = seen.held("rewards/unscored_ratio", lambda share: share >= 1.0, window)
    if found is None or last_of(seen, "rewards/failed_ratio", 1)[0] >= 0.5:
        return None
    since = found.step - found.covered + 1
    return Evidence(since, f"no completion was scored in {_steps(seen, since)}")


def _reward_failures(seen: Series, context: Context, window: int) -> Evidence | None:
    found = seen.lasting("rewards/failed_ratio", lambda share: share >= 0.2, window)
    if found is None:
        return None
    share = _share(seen, "rewards/failed_ratio")
    return Evidence(found.step, f"a reward failed on {share} of the samples, {_steps(seen, found.step)}")


def _cold_start(seen: Series, context: Context, window: int) -> Evidence | None:
    name = answer_metric(seen, context)
    points = seen.all(name)
    if len(points) < 2 or seen.step < window or seen.step > 200:
        return None
    values = [point.value for point in points]
    if max(values) > 0.05 or mean(values) > 0.01:
        return None
    right = f"{mean(values):.1%} of the completions were right in the first {seen.step} steps"
    return Evidence(points[0].step, right)


def _zero_gradient(seen: Series, context: Context, window: int) -> Evidence | None:
    found = seen.held("grad_norm", lambda norm: norm == 0.0, window)
    if found is None or is_solved(seen, context):
        return None
    since = found.step - found.covered + 1
    clip = context.rloo.get("reward_clip_range")
    fix = f"widen rloo.reward_clip_range (currently {list(clip)}), which may flatten all rewards" if clip else ""
    if context.rloo.get("mask_truncated_completions"):
        fix = "rloo.mask_truncated_completions leaves truncated completions out: raise rloo.max_completion_length"
    return Evidence(since, f"the gradient was zero in {_steps(seen, since)}", fix=fix)


def _kl_outweighs(seen: Series, context: Context, window: int) -> Evidence | None:
    found = seen.held("kl/spread_ratio", lambda ratio: ratio > 1.0, window)
    if found is None or is_solved(seen, context):
        return None
    since, ratio = found.step - found.covered + 1, last_of(seen, "kl/spread_ratio", 1)[0]
    fix = "lower rloo.beta (currently {beta})"
    if context.rloo.get("kl_form") != "length_normalized":
        fix += ", or set rloo.kl_form=length_normalized (currently {kl_form}): a long thought is then charged no more"
    what = f"the KL penalty differed {ratio:.2g} times as much within a group as the task reward in"
    return Evidence(since, f"{what} {_steps(seen, since)}", fix=fix)


# ------------------------------------------------------------------------------------- the policy goes astray


def _broken_policy(seen: Series, context: Context, window: int) -> Evidence | None:
    """The reward falls by half of its standard deviation and stays there, and the policy is another one: entropy, KL,
    repetition, truncation or closing have left where they were."""
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
    """What has changed about the policy since step `at`, in words."""

    def change(name: str, words: str, shows: Callable[[float, float], bool]) -> str:
        old, new = seen.mean_around(name, at, 5), seen.last(name, window)
        if old is None or not new or not shows(old, mean(new)):
            return ""
        return f"{words} went from {old:.3g} to {mean(new):.3g}"

    return [
        change("entropy", "the entropy", lambda old, new: new >= max(2 * old, old + 0.5)),
        change("entropy", "the entropy", lambda old, new: new <= min(0.1 * old, 0.05)),
        change("kl", "the KL", lambda old, new: new > 2.0 and new > 3 * old),
        change("completions/repeated_ratio", "the repeated share", lambda old, new: new >= old + 0.3),
        change("completions/clipped_ratio", "the truncated share", lambda old, new: new >= old + 0.5),
        change("thinking/closed_ratio", "the closed share", lambda old, new: new <= old - 0.5),
    ]


def _gradient_spike(seen: Series, context: Context, window: int) -> Evidence | None:
    norms = [point for point in seen.all("grad_norm")[-50:] if point.value > 0]
    if len(norms) < 9 or norms[-1].step != seen.step:
        return None
    last, median = norms[-1], statistics.median(point.value for point in norms[:-1])
    if last.value <= max(10 * median, context.rloo.get("max_grad_norm") or 1.0, 1.0):
        return None
    return Evidence(last.step, f"the gradient norm was {last.value:.3g}, {last.value / median:.0f} times its median")


def _kl_explosion(seen: Series, context: Context, window: int) -> Evidence | None:
    assert KL.alarm_high is not None
    limit = KL.alarm_high
    found = seen.lasting("kl", lambda kl: kl > limit, window)
    if found is None:
        return None
    return Evidence(found.step, f"the KL is {mean(seen.last('kl', window)):.3g} nats a token")


def _entropy_collapse(seen: Series, context: Context, window: int) -> Evidence | None:
    low = seen.lasting("entropy", lambda entropy: entropy < (ENTROPY.alarm_low or 0), window)
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
    return Evidence(same.step, f"{text}, and {share} of the completions, of all prompts, are one and the same")


def _entropy_explosion(seen: Series, context: Context, window: int) -> Evidence | None:
    now, begun = seen.last("entropy", window), seen.first("entropy", 5)
    if len(seen.all("entropy")) < 10 or not now or has_risen(seen, "reward"):
        return None
    limit = max(2 * mean(begun), mean(begun) + 0.5)
    if mean(now) < limit:
        return None
    since = seen.begun("entropy", lambda entropy: entropy >= limit)
    return Evidence(since, f"the entropy rose from {mean(begun):.3g} to {mean(now):.3g} and the reward did not rise")


# ------------------------------------------------------------------------------------------------ completions


def _length_explosion(seen: Series, context: Context, window: int) -> Evidence | None:
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
    return Evidence(since, f"{text}, and {cut:.0%} are cut off" if into_limit else f"{text} and no more are right")


def _length_collapse(seen: Series, context: Context, window: int) -> Evidence | None:
    answers = answer_metric(seen, context)
    limit = 0.5 if answers else 0.33  # where right answers are not counted, brevity may be what is wanted
    if answers and has_risen(seen, answers):
        return None
    for name, what in (("completions/mean_length", "completions"), ("thinking/mean_length", "thoughts")):
        now, begun = seen.last(name, window), mean(seen.first(name, 5) or [0.0])
        if len(seen.all(name)) >= 10 and now and mean(now) <= limit * begun:
            since = seen.begun(name, lambda length, begun=begun: length <= 0.75 * begun)  # type: ignore[misc]
            return Evidence(since, f"{what} shrank from {begun:.0f} to {mean(now):.0f} tokens and no more are right")
    return None


def _repetition(seen: Series, context: Context, window: int) -> Evidence | None:
    name = "completions/repeated_ratio"
    now = seen.last(name, window)
    if not now:
        return None
    share, begun = mean(now), mean(seen.first(name, 3))
    assert REPEATED.high is not None and REPEATED.alarm_high is not None
    if share <= REPEATED.alarm_high and (share <= REPEATED.high or share < begun + 0.2):
        return None
    since = seen.begun(name, lambda value: value >= min((begun + share) / 2, REPEATED.high or 1))
    return Evidence(since, f"{share:.0%} of the tokens of a completion stand in it before (begun at {begun:.0%})")


def _never_closed(seen: Series, context: Context, window: int) -> Evidence | None:
    name = "thinking/closed_ratio"
    now, begun = seen.last(name, window), mean(seen.first(name, 3) or [0.0])
    if not now:
        return None
    share = mean(now)
    cut = mean(last_of(seen, "completions/clipped_ratio", window))
    fell = begun >= 0.5 and share < 0.5 * begun
    if 1 - share - cut < 0.3 or not (fell or max(now) < (CLOSED.alarm_low or 0)):  # what is cut off had no room
        return None
    since = seen.begun(name, lambda value: value < max(0.75 * begun, CLOSED.alarm_low or 0))
    return Evidence(since, f"{share:.0%} of the completions close their thinking (begun at {begun:.0%})")


# ------------------------------------------------------------------------------------------------ what is learnt


def _reward_hacking(seen: Series, context: Context, window: int) -> Evidence | None:
    """What counts (held-out accuracy, the answers' reward) falls from its best, while the reward does not fall and one
    of its parts rises."""
    answers = answer_metric(seen, context)
    for truth, margin in (("eval/accuracy", 0.05), (answers, 0.1)):
        count = 1 if truth == "eval/accuracy" else window
        now, best = seen.last(truth, count), seen.best_mean(truth, count, count)
        if len(seen.all(truth)) < 2 * count or not now or best is None:
            continue
        high, at = best
        error = 0.0 if count == 1 else 4 * seen.noise(truth) * (2 / count) ** 0.5
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
    """The reward that rose most since step `at`, in words; empty where the whole reward fell or none rose."""

    def rise(name: str, spread: str) -> float:
        """In units of the standard deviation over completions; -1 where it is within the noise."""
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


def _no_movement(seen: Series, context: Context, window: int) -> Evidence | None:
    moved = seen.all("policy/moved")
    if len(moved) < window or max(point.value for point in moved[-500:]) >= MOVED:
        return None
    if not any(norm > 0 for norm in last_of(seen, "grad_norm", window)):
        return None
    text = f"after {seen.step} steps with a gradient the trained weights are {moved[-1].value:.1g} of their norm away"
    return Evidence(moved[0].step, text)


def _nothing_learnt(seen: Series, context: Context, window: int) -> Evidence | None:
    points = seen.all("reward")
    planned = context.max_steps
    if planned is None or len(points) < window or seen.step < planned / 2 or is_solved(seen, context):
        return None
    held_out = seen.all("eval/accuracy")
    if len(held_out) > 1 and max(point.value for point in held_out) - held_out[0].value >= 0.03:
        return None
    resampled = bool(seen.all("rollout/resampled_groups"))  # dynamic sampling keeps the reward where it is
    trends = {name: seen.trend(name) for name in ("reward", answer_metric(seen, context)) if name}
    if resampled or any(abs(trend) >= 2 for trend in trends.values()):
        return None
    gone = f"{seen.step / planned:.0%} of the planned steps are gone"
    values = f"the reward was {mean(seen.first('reward', 5)):.3g} and is {mean(seen.last('reward', 5)):.3g}"
    return Evidence(points[0].step, f"{values}, within its noise, and {gone}")


def _sampler_gap(seen: Series, context: Context, window: int) -> Evidence | None:
    limit = GAP.alarm_high or 0
    found = seen.lasting("sampling/logp_difference_mean", lambda gap: gap > limit, window)
    if found is None:
        return None
    gap = mean(seen.last("sampling/logp_difference_mean", window))
    return Evidence(found.step, f"log-probabilities of trainer and sampler are {gap:.2g} nats apart, on average")


def _ratio(seen: Series, context: Context, window: int) -> Evidence | None:
    if not context.on_policy:
        return None
    found = seen.lasting("clip_ratio/region_mean", lambda share: share > 0, window)
    return None if found is None else Evidence(found.step, f"{_share(seen, 'clip_ratio/region_mean')} are clipped")


# ------------------------------------------------------------------------------------------------ the table

NOTHING_SCORED = ("all_none", "reward_failures")
BREAKS = ("broken_policy",)

RULES: tuple[Rule, ...] = (
    Rule(
        "broken_policy",
        ("reward", "reward_std", "entropy", "kl", "completions/repeated_ratio", "completions/clipped_ratio"),
        3,
        _broken_policy,
        "Updates were too large and destroyed the policy: rloo.learning_rate ({learning_rate}) is too high",
        "lower rloo.learning_rate ten times (currently {learning_rate}), keep rloo.max_grad_norm at 1.0, and start "
        "again, or from a checkpoint before that step",
        follows=(*NOTHING_SCORED, "reward_hacking"),
    ),
    Rule(
        "all_none",
        ("rewards/unscored_ratio", "rewards/failed_ratio"),
        None,
        _all_none,
        "Every reward returned None, as one does that misses its column",
        "check rewards and data.answer_column",
        follows=("reward_failures",),
    ),
    Rule(
        "reward_failures",
        ("rewards/failed_ratio",),
        2,
        _reward_failures,
        "A reward raises, runs into its time limit or returns what is no number",
        "fix the reward: the run's output names it and the first sample it failed on",
        level="watch",  # alarming by its share; too many stop the run anyway
        thresholds=(FAILED,),
    ),
    Rule(
        "truncation",
        ("completions/clipped_ratio", "thinking/closed_ratio"),
        None,
        _truncation,
        "The limit is too short to think and answer, so what ends is chance",
        "raise rloo.max_completion_length (currently {max_completion_length}), and model.max_seq_length with it",
        follows=(*BREAKS, "length_explosion", "never_closed", "repetition"),
        thresholds=(CLIPPED,),
    ),
    Rule(
        "cold_start",
        ("rewards/answer_reward/mean",),
        None,
        _cold_start,
        "The model does not solve these prompts at all, so there is nothing to reinforce, or the reward never matches",
        "score gold answers by hand; easier prompts (data.source), rollout.difficulty_samples, rloo-kit sft first, or "
        "a graded reward",
        follows=(*NOTHING_SCORED, "truncation"),
    ),
    Rule(
        "no_signal",
        ("frac_score_zero_std", "frac_reward_zero_std", "reward_std"),
        None,
        _no_signal,
        "The rewards cannot tell the completions of a prompt apart, so every advantage is zero",
        "prompts that are solved sometimes (data.source), a reward with grades between its extremes (rewards), more "
        "completions a prompt (rloo.num_generations, currently {num_generations}) or a higher rloo.temperature "
        "(currently {temperature})",
        follows=(*NOTHING_SCORED, *BREAKS, "truncation", "cold_start", "entropy_collapse", "never_closed"),
        thresholds=(TIED,),
    ),
    Rule(
        "zero_gradient",
        ("grad_norm",),
        None,
        _zero_gradient,
        "Rewards differ and no weight moves",
        "see that something is trainable (model.lora) and that not everything is masked",
        follows=(*NOTHING_SCORED, *BREAKS, "truncation", "cold_start", "no_signal", "entropy_collapse"),
    ),
    Rule(
        "gradient_spike",
        ("grad_norm",),
        1,
        _gradient_spike,
        "One batch pulled much harder than the others; clipped by rloo.max_grad_norm it may be harmless",
        "if it comes again or the reward falls, lower rloo.learning_rate (currently {learning_rate})",
        follows=BREAKS,
        level="watch",
        thresholds=(GRADIENT,),
    ),
    Rule(
        "kl_explosion",
        ("kl",),
        3,
        _kl_explosion,
        "The policy runs away from its reference",
        "raise rloo.beta (currently {beta}) or lower rloo.learning_rate (currently {learning_rate})",
        follows=BREAKS,
        thresholds=(KL,),
    ),
    Rule(
        "kl_outweighs",
        ("kl/spread_ratio",),
        None,
        _kl_outweighs,
        "The policy learns to stay near its reference rather than to earn rewards",
        "lower rloo.beta (currently {beta})",
        follows=(*NOTHING_SCORED, *BREAKS, "kl_explosion", "no_signal", "cold_start", "entropy_collapse"),
        level="watch",
        thresholds=(SPREAD,),
    ),
    Rule(
        "entropy_collapse",
        ("entropy", "completions/most_common_ratio"),
        5,
        _entropy_collapse,
        "The policy has settled on one answer and explores no more",
        "see what the rewards pay for; lower rloo.learning_rate (currently {learning_rate}), raise rloo.beta "
        "(currently {beta}) or rloo.temperature (currently {temperature})",
        follows=(*BREAKS, "reward_hacking", "repetition", "length_collapse", "length_explosion", "never_closed"),
        thresholds=(ENTROPY,),
    ),
    Rule(
        "entropy_explosion",
        ("entropy", "reward"),
        5,
        _entropy_explosion,
        "The policy is falling apart: it samples more and more at random",
        "lower rloo.learning_rate (currently {learning_rate}) or rloo.temperature (currently {temperature})",
        follows=(*BREAKS, "kl_explosion"),
    ),
    Rule(
        "length_explosion",
        ("completions/mean_length", "completions/clipped_ratio"),
        5,
        _length_explosion,
        "Completions grow without more of them being right: a reward pays for length, or nothing for ending",
        "see what the rewards pay for; add soft_overlong_penalty or thinking_budget_reward to rewards, or raise "
        "rloo.max_completion_length (currently {max_completion_length}) if the thoughts are good",
        follows=(*BREAKS, "never_closed"),
    ),
    Rule(
        "length_collapse",
        ("completions/mean_length", "thinking/mean_length"),
        5,
        _length_collapse,
        "A reward or the KL sum pays for brevity",
        "see what the rewards pay for; with rloo.beta (currently {beta}) set rloo.kl_form=length_normalized "
        "(currently {kl_form}), and lower the weight of a penalty on length",
        follows=(*BREAKS, "entropy_collapse"),
    ),
    Rule(
        "repetition",
        ("completions/repeated_ratio",),
        5,
        _repetition,
        "Completions go in circles: a reward pays for it, or updates are too large",
        "read rollouts.jsonl; see what the rewards pay for; lower rloo.learning_rate (currently {learning_rate})",
        follows=BREAKS,
        thresholds=(REPEATED,),
    ),
    Rule(
        "never_closed",
        ("thinking/closed_ratio", "completions/clipped_ratio"),
        5,
        _never_closed,
        "Nothing pays for closing the thought, or something pays for leaving it open",
        "add think_format_reward to rewards, see what the others pay for, and set rloo.thinking_budget if thoughts "
        "only run out of room",
        follows=(*BREAKS, "truncation", "length_explosion", "repetition"),
        thresholds=(CLOSED,),
    ),
    Rule(
        "reward_hacking",
        ("reward", "rewards/answer_reward/mean", "eval/accuracy"),
        5,
        _reward_hacking,
        "The policy earns reward in a way that was not meant",
        "read the best completions (scripts/inspect_completions.py), close the way or change the weights of rewards",
    ),
    Rule(
        "no_movement",
        ("policy/moved", "grad_norm"),
        10,
        _no_movement,
        "The steps are too small to move the weights",
        "raise rloo.learning_rate (currently {learning_rate}): 1e-5 and above for an adapter; see rloo.warmup_steps",
        follows=(*NOTHING_SCORED, "no_signal", "truncation", "cold_start", "zero_gradient"),
    ),
    Rule(
        "nothing_learnt",
        ("reward", "eval/accuracy"),
        15,
        _nothing_learnt,
        "Neither the reward nor held-out accuracy has left its band",
        "see that the rewards pay for what is asked; raise rloo.learning_rate (currently {learning_rate}) two to five "
        "times, or rloo.num_generations (currently {num_generations}) against noise",
        follows=(*NOTHING_SCORED, *BREAKS, "no_signal", "truncation", "cold_start", "zero_gradient", "no_movement",
                 "kl_outweighs", "sampler_gap"),
        level="watch",
    ),
    Rule(
        "sampler_gap",
        ("sampling/logp_difference_mean",),
        3,
        _sampler_gap,
        "Sampler and trainer are two policies (4-bit kernels, vLLM, another precision)",
        "set rloo.sampler_correction=token (currently {sampler_correction}), or rollout.engine=native",
        follows=BREAKS,
        thresholds=(GAP,),
    ),
    Rule(
        "ratio",
        ("clip_ratio/region_mean",),
        3,
        _ratio,
        "A bug on-policy: the ratio has to be exactly 1",
        "see references/troubleshooting.md",
        thresholds=(RATIO,),
    ),
)  # fmt: skip

THRESHOLDS: tuple[Threshold, ...] = tuple(one for rule in RULES for one in rule.thresholds)
