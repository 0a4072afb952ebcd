"""A run's result, as `train` returns it or as read from its folder, and the verdict on it."""

import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rloo_kit.config.run import RunConfig, load_config
from rloo_kit.errors import ConfigError, RunNotFoundError
from rloo_kit.health.rules import ANSWERS, REWARD_MEAN, Context, Finding
from rloo_kit.health.series import CEILING, at_ceiling, is_number
from rloo_kit.health.watch import examine
from rloo_kit.results.changes import Change, change_of
from rloo_kit.results.evaluation import THINKING, Evaluation, rewards_differ, setting_differences, shared_measures
from rloo_kit.runs.files import read_object
from rloo_kit.runs.folder import RunDir
from rloo_kit.system.console import fill_text, plain_prompt

Kind = Literal["learnt", "no evidence", "no signal", "broken", "gamed"]
EARLY = "early"  # `TrainResult.stopped` of a run that eval.patience stopped
NO_SIGNAL = ("no_signal", "truncation", "cold_start", "no_movement", "all_none", "reward_failures")
BY_SUCCESS = ("no_signal", "no_movement")  # what a solved task shows too
LONGEST_QUESTION = 60  # characters of an example in a command
# Of accuracy that shorter thinking may cost: the first, or what the prompts can resolve, up to the second.
MARGIN, WIDEST_MARGIN = 0.03, 0.1
CLOSE = 0.02  # half width of an interval that settles whether a run of moderate size learnt


@dataclass
class TrainResult:
    """The result of a run.

    Attributes:
        folder: the run's. adapter_folder: the trained adapter (or the whole model, with `model.lora=null`).
        steps: optimizer steps done, those before a resume included.
        metrics: the rows of `metrics.jsonl`, one per logged step.
        seconds: of training, earlier sessions of a resumed run included.
        stopped: None if it ran to its end, else "early" (`eval.patience`; the run is finished), "interrupted" or the
            rule of `health:` that stopped it ("no signal"); if read from a folder also "failed" and "running".
        adapter_step: the step of the adapter's weights: the last, or with `eval.save_best` the best evaluation's; None
            if unknown.
        findings: of the rules in `health/rules.py`, the causes in step order.
        method: "rloo", or "sft" for the supervised training before it.
    """

    folder: Path
    adapter_folder: Path
    steps: int
    metrics: list[dict[str, Any]] = field(repr=False)
    seconds: float
    stopped: str | None = None
    adapter_step: int | None = None
    findings: list[Finding] = field(default_factory=list, repr=False)
    method: str = "rloo"

    @property
    def lasting(self) -> list[Finding]:
        """The findings that were true of the last logged step."""
        last = max((row["step"] for row in self.metrics), default=self.steps)
        return [one for one in self.findings if one.last >= last]

    @property
    def kept_step(self) -> int:
        """The step of the weights in the adapter, which the evaluation after training measures."""
        return self.steps if self.adapter_step is None else self.adapter_step


def load_result(run: RunConfig) -> TrainResult:
    """The result of a run from its folder, finished or not. Raises RunNotFoundError if there is no run."""
    run_dir = RunDir(Path(run.folder))
    status = run_dir.status()
    if not status:
        raise RunNotFoundError(f"there is no run in {run_dir.folder}; rloo-kit train writes one")
    metrics = run_dir.read_metrics()
    known: list[Any] = [status.get("seconds"), *(row.get("seconds") for row in metrics[-1:])]  # killed: the second
    seconds = next(filter(is_number, known), 0.0)
    state, rule = status.get("state"), status.get("stopped_by")
    ended = EARLY if status.get("stopped_early") else None
    return TrainResult(
        run_dir.folder,
        run_dir / "adapter",
        status.get("step", 0),
        metrics,
        seconds,
        stopped=ended if state == "finished" else rule if isinstance(rule, str) else state,
        adapter_step=status.get("adapter_step"),
        findings=examine(metrics, Context.of(run)),
        method="sft" if status.get("method") == "sft" else "rloo",
    )


def is_over(run: RunConfig) -> bool:
    """Whether a run is complete: it finished with this configuration (except `run.*` and `health.*`), and its weights
    and the evaluations and report it asks for exist."""
    run_dir = RunDir(Path(run.folder))
    if run_dir.status().get("state") != "finished":
        return False
    try:
        saved = load_config(run_dir / "config.yaml")
    except ConfigError:
        return False
    made = (["before.json", "after.json"] if run.run.evaluate else []) + (["report.html"] if run.run.report else [])
    aside = {"run", "health"}
    is_same = saved.model_dump(exclude=aside) == run.model_dump(exclude=aside)
    has_weights = any((run_dir / "adapter").glob("*.safetensors"))
    return is_same and has_weights and all((run_dir / name).is_file() for name in made)


def load_evaluation(run: RunConfig, when: str) -> Evaluation | None:
    """The evaluation "before" or "after" training from the run's folder; None without one."""
    return Evaluation.read(run.folder / f"{when}.json")


@dataclass(frozen=True)
class Verdict:
    """The outcome of a run.

    Attributes:
        kind: "learnt" (the interval of the change is above 0; or the run asks for less thinking, and that fell without
            a loss beyond the margin in the sentence), "no evidence", "no signal" (nothing could be learnt),
            "broken" (worse than before, or the policy broke), "gamed" (reward earned in an unintended way).
        sentence: by how much, with the interval, on how many held-out prompts. next: what to do, without commands.
        commands: the next ones, in order of use. change: the numbers; None if nothing can be compared.
        rule: the health finding that explains it; None without one.
    """

    kind: Kind
    sentence: str
    next: str = ""
    commands: tuple[str, ...] = ()
    change: Change | None = None
    rule: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `status.json`."""
        change = None if self.change is None else self.change.to_dict()
        return vars(self) | {"commands": list(self.commands), "change": change}

    def __str__(self) -> str:
        words = [f"{self.kind}: {self.sentence}", *([f"  to do: {self.next}"] if self.next else [])]
        return "\n".join([*map(fill_text, words), *(f"  {command}" for command in self.commands)])


def judge_run(
    run: RunConfig, result: TrainResult, before: Evaluation | None = None, after: Evaluation | None = None
) -> Verdict:
    """The verdict on a run.

    Args:
        result: its folder, steps, stopped, adapter_step, metrics, method and findings are read.
        before, after: evaluations of the same prompts; None if the run was not evaluated.
    """
    change = None
    if before is not None and after is not None and not setting_differences(before, after):
        change = next((change_of(name, before, after) for name in shared_measures(before, after)), None)
    solved = _was_solved(run, result, before, after, change)
    shorter, is_open = _describe_shorter(run, before, after, change), False
    kind, sentence, cause = _decide(result, before, after, change, solved, shorter)
    if change is not None and before is not None and after is not None:
        words = measured_words(before, after, change.measure)
        sentence += f", {words}" if words else ""
        if kind == "learnt":
            greedy = change_of(f"greedy_{change.measure}", before, after)  # a sharper policy does not raise it
            if greedy is not None:
                old, new = greedy.before.value, greedy.after.value
                shares = f"{100 * old:.0f} % to {100 * new:.0f} %"
                sentence += f"; greedy from {f'{old:.2f} to {new:.2f}' if greedy.is_reward else shares}"
        thinking = change_of(THINKING, before, after)
        is_asked = Context.of(run).wants_shorter(before.forced_share)
        is_open = kind == "no evidence" and thinking is not None and thinking.fell and is_asked
        if thinking is not None and (kind == "learnt" or thinking.fell) and not (shorter and shorter in sentence):
            sentence += f"; thinking from {thinking.before.value:,.0f} to {thinking.after.value:,.0f} tokens"
        if kind == "learnt" and result.adapter_step not in (None, result.steps):
            step = result.adapter_step
            sentence += f"; the weights are the best evaluation's, of step {step}, so part of it is luck"
    if accepted := read_object(result.folder / "status.json").get("changed"):
        sentence += f"; the run continued {accepted}"
    advice = cause.fix if cause is not None else _advise(kind, result, change)
    is_tied = kind in ("no evidence", "no signal") and (cause is None or cause.name in BY_SUCCESS)
    if solved and is_tied and result.stopped in (None, EARLY, "no signal"):
        advice = f"it was solved before training{solved}: use harder prompts (data.source)"
    if is_open and cause is None and result.stopped in (None, EARLY):
        advice = "evaluate on more prompts (eval.num_prompts, data.test_size): if it is as right is still open"
    place = shlex.quote(str(result.folder))
    commands: tuple[str, ...] = (f"rloo-kit show {place}",)
    if kind == "learnt":
        question = plain_prompt(after.samples[0]["prompt"]) if after is not None and after.samples else "..."
        if len(question) > LONGEST_QUESTION or not question.isprintable():
            question = "..."
        quoted = shlex.quote(question) if set(question) & set('"$`\\!') else f'"{question}"'
        commands = (f"rloo-kit ask {place} {quoted}", f"rloo-kit export {place} --to merged")
    rule = None if cause is None else cause.name
    return Verdict(kind, f"{sentence}.", f"{advice}." if advice else "", commands, change, rule)


def record_verdict(folder: Path, verdict: Verdict) -> None:
    """Write the verdict into `status.json` of a run that has ended."""
    run_dir = RunDir(folder)
    state = run_dir.status().get("state", "running")
    if state != "running":
        run_dir.set_status(state, verdict=verdict.to_dict())


def _decide(
    result: TrainResult,
    before: Evaluation | None,
    after: Evaluation | None,
    change: Change | None,
    solved: str,
    shorter: str,
) -> tuple[Kind, str, Finding | None]:
    """Kind, sentence, and the finding that explains them."""
    lasting = {one.name: one for one in result.lasting}
    fallen = lasting.get("broken_policy")
    blind = next((lasting[name] for name in NO_SIGNAL if name in lasting and lasting[name].level == "alarming"), None)
    measured = "" if change is None else f"; {_lower(str(change))}"
    gamed = lasting.get("reward_hacking")
    if gamed is not None and not (change is not None and not change.is_reward and change.rose):
        return "gamed", f"The policy earns reward in an unintended way: {gamed.found}{measured}", gamed
    if change is not None and change.rose:
        return "learnt", str(change), None
    if shorter:
        return "learnt", shorter, None
    if change is not None and change.fell:
        reward = None if before is None or after is None else change_of("reward", before, after)
        if reward is not None and reward.rose and not change.is_reward:
            return "gamed", f"{reward}, but {_lower(str(change))}", None
        return "broken", str(change), fallen or next(iter(result.findings), None)
    if fallen is not None:
        return "broken", f"The policy broke: {fallen.found}{measured}", fallen
    if blind is not None:
        return "no signal", f"Nothing could be learnt since step {blind.since}: {blind.found}{measured}", blind
    first = next(iter(result.lasting), None)
    if result.stopped == "running":
        return "no evidence", f"The run has not ended; it is at step {result.steps}", first
    tied = [row.get("frac_score_zero_std", row.get("frac_reward_zero_std")) for row in result.metrics]
    if tied and not solved and all(one == 1.0 for one in tied):  # in a run too short for the health rule, too
        return "no signal", f"In every step all completions of a prompt earned the same reward{measured}", None
    if result.stopped not in (None, EARLY):
        return "no evidence", f"The run ended early, at step {result.steps} ({result.stopped})", None
    return "no evidence", _why_not_compared(before, after) if change is None else str(change), first


def _describe_shorter(
    run: RunConfig, before: Evaluation | None, after: Evaluation | None, change: Change | None
) -> str:
    """By how much the thinking fell without a loss, in a run that asks for that; else empty.

    `change` has to be flat, of a measure in [0, 1], and the low end of its interval within the margin."""
    if before is None or after is None or change is None or change.rose:
        return ""
    if not Context.of(run).wants_shorter(before.forced_share):
        return ""
    thinking, (value, low, _) = change_of(THINKING, before, after), change.difference.ends
    ends = [*change.before.ends, *change.after.ends]
    if thinking is None or not thinking.fell:
        return ""
    margin = min(max(MARGIN, value - low), WIDEST_MARGIN)
    if change.fell or low < -margin or any(not 0 <= end <= 1 for end in ends):
        return ""
    old, new = thinking.before.value, thinking.after.value
    fell = "{:,.0f} to {:,.0f}".format(*thinking.difference.ends[1:])
    points = math.ceil(100 * margin - 1e-9)
    loss = f"{points / 100:.2f}" if change.is_reward else f"{points} points"
    return (
        f"As {'good' if change.is_reward else 'right'} with {100 * new / old:.0f} % of the thinking, {new:,.0f} for "
        f"{old:,.0f} tokens (95 % CI of the change {fell}): {_lower(str(change))}; a loss of {loss} is ruled out"
    )


def measured_words(before: Evaluation, after: Evaluation, name: str) -> str:
    """The caveat for two evaluations that are comparable but were not made alike; empty without one."""
    words, found = [], change_of(name, before, after)
    if before.prompts_digest != after.prompts_digest and found is not None:
        shared = f"the {found.difference.count:,} prompts that both measured"
        words.append(f"on {shared if found.paired else 'different prompts'}")
    if before.num_samples != after.num_samples:
        words.append(f"from {before.num_samples} and {after.num_samples} completions per prompt")
    if rewards_differ(before, after):
        words.append("without the rewards, which were edited in between")
    return f"measured {' and '.join(words)}" if words else ""


def _was_solved(
    run: RunConfig, result: TrainResult, before: Evaluation | None, after: Evaluation | None, change: Change | None
) -> str:
    """By how much the task was solved before training, so that equal rewards are no fault; empty if it was not.

    The answers were right, or, if the reward leads, each reward with a weight was at its ceiling (`at_ceiling`)."""
    if change is not None and not change.is_reward:
        return f" ({100 * change.before.value:.0f} %)" if change.before.value >= CEILING else ""
    if before is not None and before.leading == "reward":
        entries = [one.rewards.items() for one in (before, after) if one is not None]
        sides = [{name: [v for v in one.per_prompt or () if v is not None] for name, one in found} for found in entries]
        return f" (reward {before.value('reward'):.2f})" if at_ceiling(run.reward_weights, *sides) else ""
    names = list(dict.fromkeys(name for row in result.metrics for name in row if REWARD_MEAN.fullmatch(name)))
    means = {name.split("/")[1]: [row[name] for row in result.metrics if is_number(row.get(name))] for name in names}
    answers = {name: values for name, values in means.items() if name in ANSWERS}
    return " (on the training prompts)" if at_ceiling({} if answers else run.reward_weights, answers or means) else ""


def _why_not_compared(before: Evaluation | None, after: Evaluation | None) -> str:
    if before is None and after is None:
        return "The run was not evaluated on held-out prompts (run.evaluate)"
    if before is None or after is None:
        missing = "before" if before is None else "after"
        return f"There is no evaluation {missing} training to compare with"
    if apart := setting_differences(before, after):
        return f"The evaluations before and after differ in settings ({'; '.join(apart)}), so they are not compared"
    if rewards_differ(before, after):
        return "A reward was edited between the evaluations before and after, so they are not compared"
    return "The evaluations have neither an accuracy nor a reward (data.answer_column, rewards)"


def _advise(kind: Kind, result: TrainResult, change: Change | None) -> str:
    """What to do, for a verdict without a finding that says it."""
    if kind == "gamed":
        return "read the best completions, then fix the reward or change the weights of rewards"
    if kind == "no signal":
        return (
            "use prompts that are solved sometimes (data.source), demonstrations first (rloo-kit sft), or a graded "
            "reward"
        )
    if kind == "broken":
        keep = ", and keep the best weights with eval.every_steps and eval.save_best"
        return f"lower {result.method}.learning_rate{keep if result.method == 'rloo' else ' or sft.max_steps'}"
    if kind == "learnt" or result.stopped == "running":
        return ""
    if result.stopped not in (None, EARLY):
        return "continue with --resume"
    if change is None:
        return "evaluate it: run.evaluate=true, with the same eval.* before and after"
    value, low, _ = change.difference.ends
    if value > 0 and value - low > CLOSE:
        count = change.difference.count * ((value - low) / max(value, CLOSE)) ** 2
        more = max(-(-int(1.2 * count) // 100) * 100, change.difference.count + 100)
        return (
            f"train longer ({result.method}.max_steps), or evaluate on about {more:,} prompts (eval.num_prompts) to "
            "resolve a change of this size"
        )
    return f"train longer ({result.method}.max_steps) or with a higher {result.method}.learning_rate"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
