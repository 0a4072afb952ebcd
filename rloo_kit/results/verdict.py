"""A run's result, as `train` returns it or as read from its folder, and the verdict on it."""

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from rloo_kit.config.run import RunConfig, load_config
from rloo_kit.errors import ConfigError, RunNotFoundError
from rloo_kit.health.rules import ANSWERS, REWARD_MEAN, TRUNCATED, Context, Finding
from rloo_kit.health.series import CEILING, Series, at_ceiling
from rloo_kit.health.watch import examine
from rloo_kit.results.changes import Change, change_of
from rloo_kit.results.evaluation import (
    MEASURES,
    THINKING,
    Evaluation,
    named_sides,
    rewards_differ,
    setting_differences,
    shared_measures,
)
from rloo_kit.results.samples import FRAMED
from rloo_kit.runs.files import is_number, read_object
from rloo_kit.runs.folder import RunDir
from rloo_kit.runs.reader import RunReader
from rloo_kit.system.console import fill_text, plain_prompt

Kind = Literal["learnt", "no evidence", "no signal", "broken", "gamed"]
EARLY = "early"  # `TrainResult.stopped` of a run that eval.patience stopped
NO_SIGNAL = ("no_signal", "truncation", "cold_start", "no_movement", "reward_failures")
BY_SUCCESS = ("no_signal", "no_movement")  # what a solved task shows too
LONGEST_QUESTION = 60  # characters of an example in a command
# Of accuracy that shorter thinking may cost: the first, or what the prompts can resolve, up to the second.
MARGIN, WIDEST_MARGIN = 0.03, 0.1
CLOSE = 0.02  # half width of an interval that settles whether a run of moderate size learnt


@dataclass
class TrainResult:
    """The result of a run.

    Attributes:
        adapter_folder: the trained adapter (or the whole model, with `model.lora=null`).
        steps: optimizer steps done; seconds: of training. Both with the earlier sessions of a resumed run.
        metrics: the rows of `metrics.jsonl`, one per logged step.
        stopped: None if it ran to its end, else "early" (`eval.patience`; the run is finished), "interrupted" or the
            rule of `health:` that stopped it ("no signal"); if read from a folder also "failed" and "running".
        adapter_step: the step of the adapter's weights: the last, or with `eval.every_steps` the best evaluation's;
            None if unknown.
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
    run_dir = RunReader(Path(run.folder))
    status = run_dir.status()
    if not status:
        raise RunNotFoundError(
            f"{run_dir.folder} is not a run's folder: it has no status.json. rloo-kit train writes runs to "
            "OUTPUT_DIR/NAME; a batch writes them to BATCH/NAME/run"
        )
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
    run_dir = RunReader(Path(run.folder))
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
    """The verdict on a run: the first of OUTCOMES that is true of it, with what else was measured. `before`, `after`:
    evaluations of the same prompts; None if the run was not evaluated."""
    facts = _Facts(run, result, before, after)
    outcome = next(one for one in OUTCOMES if facts.meet(one.when))
    kind, cause = outcome.kind, facts.findings.get(outcome.cause)
    sentence = "".join([outcome.sentence.format_map(facts.texts), *facts.list_more(outcome)])
    advice = cause.fix if cause is not None else _advise(kind, facts)
    is_tied = kind in ("no evidence", "no signal") and (cause is None or cause.name in BY_SUCCESS)
    if facts.solved and is_tied and result.stopped in (None, EARLY, "no signal"):
        advice = f"it was solved before training{facts.solved}: use harder prompts (data.source)"
    place = shlex.quote(str(result.folder))
    commands: tuple[str, ...] = (f"rloo-kit show {place}",)
    if kind == "learnt":
        question = plain_prompt(after.samples[0]["prompt"]) if after is not None and after.samples else "..."
        question, images = FRAMED.subn("", question)
        if len(question) > LONGEST_QUESTION or not question.isprintable():
            question = "..."
        quoted = shlex.quote(question) if set(question) & set('"$`\\!') else f'"{question}"'
        commands = (f"rloo-kit ask {place} {quoted}{' --image FILE' * images}", f"rloo-kit export {place} --to merged")
    rule, first = None if cause is None else cause.name, sentence[:1].upper()
    return Verdict(kind, f"{first}{sentence[1:]}.", f"{advice}." if advice else "", commands, facts.change, rule)


def record_verdict(folder: Path, verdict: Verdict) -> None:
    """Write the verdict into `status.json` of a run that has ended."""
    run_dir = RunDir(folder)
    state = run_dir.status().get("state", "running")
    if state != "running":
        run_dir.set_status(state, verdict=verdict.to_dict())


class Outcome(NamedTuple):
    """A row of the table of verdicts: the facts that have to be true ("not ...": false), the sentence, and the finding
    whose fix is the advice, if there is one."""

    kind: Kind
    when: str
    sentence: str
    cause: str = ""


# The first row that is true counts. lead: a reward that rose without deciding; also: the change of what decides.
OUTCOMES = (
    Outcome("gamed", "hacked, not right", "the policy earns reward in an unintended way: {hacked}{also}", "hacked"),
    Outcome("learnt", "rose", "{change}{yet}", "alarm"),
    Outcome("learnt", "shorter", "{shorter}{yet}", "alarm"),
    Outcome("gamed", "fell, paid", "{lead}{change}"),
    Outcome("broken", "fell", "{change}", "worst"),
    Outcome("broken", "broken", "{lead}the policy broke: {broken}{also}", "broken"),
    Outcome("no evidence", "blind, lead", "{lead}{blind}{also}", "blind"),
    Outcome("no signal", "blind", "nothing could be learnt since step {since}: {blind}{also}", "blind"),
    Outcome("no evidence", "running", "the run has not ended; it is at step {steps}", "first"),
    Outcome("no signal", "tied, not lead", "in every step all completions of a prompt earned the same reward{also}"),
    Outcome("no evidence", "cut", "{lead}{ended}{also}"),
    Outcome("no evidence", "change", "{lead}{change}", "first"),
    Outcome("no evidence", "", "{lead}{why}", "first"),
)


class _Facts:
    """What OUTCOMES read of a run: `findings` and `texts` by name, and the names in `true`."""

    def __init__(
        self, run: RunConfig, result: TrainResult, before: Evaluation | None, after: Evaluation | None
    ) -> None:
        self.run, self.result, self.before, self.after, self.sides = run, result, before, after, None
        if before is not None and after is not None and not setting_differences(before, after):
            is_edited = rewards_differ(before, after) and "reward" in (before.leading, after.leading)
            self.sides = None if is_edited else (before, after)
        self.change = change = self.change_of(*shared_measures(before, after))
        self.solved = self._describe_solved()
        lasting = {finding.name: finding for finding in result.lasting}
        errors = [finding for finding in result.lasting if finding.level == "error"]
        blind = next((finding for name in NO_SIGNAL for finding in errors if finding.name == name), None)
        alarm = next((finding for finding in errors if finding.name not in BY_SUCCESS), None)
        broken, first = lasting.get("broken_policy"), next(iter(result.lasting), None)
        self.findings = {"hacked": lasting.get("reward_hacking"), "broken": broken, "blind": blind, "alarm": alarm}
        self.findings |= {"first": first, "worst": broken or first}
        text, paid, risen = _lower(str(change or "")), self.change_of("reward"), self._describe_risen()
        self.texts = {name: finding.found if finding else "" for name, finding in self.findings.items()} | {
            "lead": f"{risen}, but " if risen else "",
            "change": text,
            "also": f"; {text}" if text else "",
            "yet": f", but {alarm.found}" if alarm is not None else "",
            "shorter": self._describe_shorter(),
            "why": _lower(_why_not_compared(before, after)),
            "steps": f"{result.steps:,}",
            "ended": f"the run ended early, at step {result.steps} ({result.stopped})",
            "since": str(blind.since) if blind is not None else "",
        }
        tied = [row.get("frac_score_zero_std", row.get("frac_reward_zero_std")) for row in result.metrics]
        facts: dict[str, Any] = self.texts | {
            "rose": change is not None and change.rose,
            "fell": change is not None and change.fell,
            "right": change is not None and change.rose and not change.is_reward,
            "paid": paid is not None and paid.rose,
            "running": result.stopped == "running",
            "cut": result.stopped not in (None, EARLY, "running"),
            "tied": tied and not self.solved and all(share == 1.0 for share in tied),
        }
        self.true = {name for name, value in facts.items() if value}

    def meet(self, when: str) -> bool:
        """Whether a row's facts are true."""
        names = filter(None, when.split(", "))
        return all((name.removeprefix("not ") in self.true) != name.startswith("not ") for name in names)

    def change_of(self, *names: str) -> Change | None:
        """The change of the first of these measures that both evaluations have."""
        if self.sides is None:
            return None
        return next(filter(None, (change_of(name, *self.sides) for name in names)), None)

    def _describe_risen(self) -> str:
        """The weighted sum, a reward in it or a measure that rose on the held-out prompts without deciding; where
        nothing was compared, or "nothing could be learnt" is near, the reward in training."""
        change, weights = self.change, self.run.reward_weights
        if change is not None:
            others = ["reward", *(name for name, weight in weights.items() if weight > 0), *MEASURES]
            changes = (self.change_of(name) for name in others if name != change.measure)
            if (risen := next((one for one in changes if one is not None and one.rose), None)) is not None:
                return _lower(str(risen))
        seen = Series()
        for row in self.result.metrics:
            seen.add(row)
        values = [point.value for point in seen.all("reward")]
        count = min(len(values) // 2, 5)
        is_asked = change is None or (self.findings["blind"] is not None and not change.fell)
        if not is_asked or count < 2:
            return ""
        old, new = fmean(values[:count]), fmean(values[-count:])
        if new - old <= 2 * seen.noise("reward") * (2 / count) ** 0.5:  # about a 95 % interval
            return ""
        return f"the reward in training rose from {old:.2f} to {new:.2f} (means of the first and the last {count} rows)"

    def _describe_shorter(self) -> str:
        """By how much the thinking fell without a loss, in a run that asks for that; else empty.

        The change has to be flat, of a measure in [0, 1], and the low end of its interval within the margin."""
        change, thinking = self.change, self.change_of(THINKING)
        if change is None or change.rose or thinking is None or not thinking.fell or not self.wants_shorter:
            return ""
        value, low, _ = change.difference.ends
        ends = [*change.before.ends, *change.after.ends]
        margin = min(max(MARGIN, value - low), WIDEST_MARGIN)
        if change.fell or low < -margin or any(not 0 <= end <= 1 for end in ends):
            return ""
        old, new = thinking.before.value, thinking.after.value
        fell = "{:,.0f} to {:,.0f}".format(*thinking.difference.ends[1:])
        points = math.ceil(100 * margin - 1e-9)
        loss = f"{points / 100:.2f}" if change.is_reward else f"{points} points"
        text = f"As {'good' if change.is_reward else 'right'} with {100 * new / old:.0f} % of the thinking, {new:,.0f}"
        text += f" for {old:,.0f} tokens (95 % CI of the change {fell}): {_lower(str(change))}"
        return f"{text}; a loss of {loss} is ruled out"

    def _describe_solved(self) -> str:
        """By how much the task was solved before training, so that equal rewards are no fault; empty if it was not.

        The answers were right, or, if the reward leads, each reward with a weight was at its ceiling (`at_ceiling`)."""
        change, before, metrics, weights = self.change, self.before, self.result.metrics, self.run.reward_weights
        if change is not None and not change.is_reward:
            return f" ({100 * change.before.value:.0f} %)" if change.before.value >= CEILING else ""
        if before is not None and before.leading == "reward":
            sides = [
                {name: [mean for mean in reward.per_prompt or () if mean is not None] for name, reward in rewards}
                for rewards in (side.rewards.items() for side in named_sides(before, self.after).values())
            ]
            return f" (reward {before.value('reward'):.2f})" if at_ceiling(weights, *sides) else ""
        names = list(dict.fromkeys(name for row in metrics for name in row if REWARD_MEAN.fullmatch(name)))
        means = {name.split("/")[1]: [row[name] for row in metrics if is_number(row.get(name))] for name in names}
        answers = {name: values for name, values in means.items() if name in ANSWERS}
        return " (on the training prompts)" if at_ceiling({} if answers else weights, answers or means) else ""

    @property
    def wants_shorter(self) -> bool:
        """Whether the run asks for less thinking (`Context.wants_shorter`)."""
        return self.before is not None and Context.of(self.run).wants_shorter(self.before.forced_share or 0.0)

    @property
    def is_cut_off(self) -> bool:
        """Whether nearly all held-out completions reach the limit, in a run too short for the health rule, too."""
        return self.sides is not None and self.sides[1].truncated_share > TRUNCATED

    def list_more(self, outcome: Outcome) -> Iterator[str]:
        """What else was measured, to follow the row's sentence."""
        result, change, reward, thinking = self.result, self.change, self.change_of("reward"), self.change_of(THINKING)
        if change is not None and self.sides is not None:
            if words := measured_words(*self.sides, change.measure):
                yield f", {words}"
            # sampled accuracy rises with a sharper policy, too
            greedy = self.change_of(f"greedy_{change.measure}", "greedy_accuracy", "greedy_reward")
            is_named = "{lead}" in outcome.sentence and self.texts["lead"].startswith("greedy")
            if greedy is not None and greedy.measure != change.measure and not is_named:
                (old, new), form = (greedy.before.value, greedy.after.value), ".2f" if greedy.is_reward else ".0%"
                yield f"; greedy from {old:{form}} to {new:{form}}".replace("%", " %")
            if reward is not None and reward.fell and change.measure != "reward":
                yield f"; {_lower(str(reward))}"
            is_worth = thinking is not None and (outcome.kind == "learnt" or thinking.fell)
            if thinking is not None and is_worth and "{shorter}" not in outcome.sentence:
                yield f"; thinking from {thinking.before.value:,.0f} to {thinking.after.value:,.0f} tokens"
            if self.is_cut_off and not any("truncated" in text for text in self.texts.values()):
                yield f"; {self.sides[1].truncated_share:.0%} of the held-out completions are truncated"
        if outcome.kind == "learnt" and result.adapter_step not in (None, result.steps):
            yield f"; the weights are the best evaluation's, of step {result.adapter_step}, so part of it is luck"
        if "cut" in self.true and "{ended}" not in outcome.sentence:
            yield f"; {self.texts['ended']}"
        if accepted := read_object(result.folder / "status.json").get("changed"):
            yield f"; the run continued {accepted}"


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


ADVICE = {
    "learnt": "",
    "gamed": "read the best completions, then fix the reward or change the weights of rewards",
    "no signal": "use prompts that are solved sometimes (data.source), demonstrations first (rloo-kit sft), or a "
    "graded reward",
}


def _advise(kind: Kind, facts: _Facts) -> str:
    """What to do, for a verdict without a finding that says it."""
    run, result, change = facts.run, facts.result, facts.change
    section: Any = run.rloo if result.method == "rloo" else run.sft
    longer = f"{result.method}.{'num_train_epochs' if section.max_steps is None else 'max_steps'}"
    longer = "eval.patience" if result.stopped == EARLY else longer
    if kind in ADVICE:
        return ADVICE[kind]
    if kind == "broken":
        if result.method != "rloo":
            return f"lower sft.learning_rate or {longer}"
        keep = "" if run.eval.every_steps else ", and keep the best weights with eval.every_steps"
        return f"lower rloo.learning_rate{keep}"
    if result.stopped == "running":
        return ""
    if result.stopped not in (None, EARLY):
        return "continue with --resume" if result.method == "rloo" else "start again with --overwrite"
    if change is None or facts.sides is None:
        return "evaluate it: run.evaluate=true, with the same eval.* and rewards before and after"
    if facts.is_cut_off:
        limit = run.rloo.max_completion_length
        return f"raise rloo.max_completion_length (currently {limit}), and model.max_seq_length with it"
    thinking, measured = facts.change_of(THINKING), facts.sides[1].num_prompts
    if thinking is not None and thinking.fell and facts.wants_shorter:
        return f"evaluate on more prompts ({_find_more(run, measured, None)}): if it is as right is still open"
    value, low, _ = change.difference.ends
    if value > 0 and value - low > CLOSE:
        count = change.difference.count * ((value - low) / max(value, CLOSE)) ** 2
        more = max(-(-int(1.2 * count) // 100) * 100, change.difference.count + 100)
        where = _find_more(run, measured, more)
        return f"train longer ({longer}), or evaluate on about {more:,} prompts ({where}) to resolve such a change"
    return f"train longer ({longer})" + (f" or with a higher {result.method}.learning_rate" if value >= 0 else "")


def _find_more(run: RunConfig, measured: int, wanted: int | None) -> str:
    """The keys with which more prompts than the `measured` ones are held out and evaluated; `wanted`: so many."""
    limit, data = run.eval.num_prompts, run.data
    rows = "more rows in data.test_source or data.test_split" if data.separate_test else "data.test_size"
    if limit is None or limit > measured:  # all that are held out were measured
        return rows if limit is None or (wanted or measured) <= limit else f"{rows}, eval.num_prompts"
    enough = isinstance(data.test_size, int) and wanted is not None and data.test_size >= wanted
    return "eval.num_prompts" if enough else f"eval.num_prompts, {rows}"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
