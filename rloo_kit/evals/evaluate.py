"""Measures a policy on held-out prompts: accuracy, the run's rewards, greedy decoding, thinking budgets."""

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from transformers import TrainerState

from rloo_kit.collective import gather_lists, gather_objects, share, share_of
from rloo_kit.completion import Completion, list_episodes, measure_calls
from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import RewardSection
from rloo_kit.data.answers import (
    EXACT,
    GYM_REWARD,
    REWARDS_WITH_ANSWERS,
    GymRow,
    find_judge,
    gold_answers,
    task_of,
)
from rloo_kit.data.chat import template_options, thinks
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.evals.win_rate import measure_win_rate
from rloo_kit.models.policy import Policy
from rloo_kit.results.evaluation import THINKING, Budget, Evaluation, digest_prompt
from rloo_kit.results.intervals import Measured, Scores, clustered, mean_of_completions, pass_at_k
from rloo_kit.results.verdict import load_evaluation
from rloo_kit.rewarding.guard import GuardedReward, guard, is_relative, log_names, reward_name
from rloo_kit.rewarding.registry import build_reward, make_rewards
from rloo_kit.rewarding.score import make_columns, score
from rloo_kit.rewarding.signature import weighted_sum
from rloo_kit.rewarding.worker import close_worker, read_sources
from rloo_kit.rewards.answer import has_no_answer
from rloo_kit.rollout.completions import generate_completions
from rloo_kit.rollout.thinking_budget import limits_of, make_budget_limits
from rloo_kit.rollout.types import Limits
from rloo_kit.system.console import format_seconds
from rloo_kit.system.processes import count_processes, is_distributed, is_main_process, process_index, say
from rloo_kit.system.user_code import digest_texts
from rloo_kit.tasks.gym import GYM_COLUMN
from rloo_kit.think_tags import opens_thinking, split_thinking
from rloo_kit.tools.episodes import ToolUse, make_tool_use
from rloo_kit.tools.toolbox import open_toolbox

_Value = TypeVar("_Value")


class HeldOutRewards:
    """The rewards of a run behind separate guards, with the names that training logs.

    A reward is called as in a rollout, with as many completions per call as one process has of a rollout. Two things
    differ: its log calls are dropped, and `trainer_state` is always that of the run's last step, so that all
    evaluations measure the same.

    Args:
        run: reads `rloo`; its tools are opened.
        rewards: in the form that `train` takes; with a model that only TRL's trainer can call (a name, an `nn.Module`)
            no rewards are measured. Those that rank the completions of a prompt are left out: their mean is constant.
    """

    def __init__(self, run: RunConfig, rewards: Sequence[Any]) -> None:
        guarded = self._rewards = [guard(reward) for reward in rewards if not is_relative(reward)]
        self.names = log_names([reward_name(reward) for reward in guarded], guarded)
        self.is_callable = bool(guarded) and all(isinstance(reward, GuardedReward) for reward in guarded)
        self._weights = [getattr(reward, "weight", 1.0) for reward in guarded]
        self._has_budget, self._toolbox = run.rloo.thinking_budget is not None, open_toolbox(run)
        self._size = max(1, run.rloo.generation_batch_size // count_processes())
        steps = run.rloo.max_steps or 1
        self._constant = {"trainer_state": TrainerState(global_step=steps, max_steps=steps)}
        self._constant |= dict.fromkeys(("log_extra", "log_metric"), lambda *_: None)

    def measure(self, completions: list[Completion], measured: Evaluation) -> None:
        """Write the mean rewards of `completions` into `measured`; each process scores a part.

        Args:
            completions: of all prompts, in order, equally many for each.
        """
        if not self.is_callable:
            return
        measured.take_rewards(*self.score(completions, measured.num_samples))
        sources = sorted(read_sources(self._rewards).items())
        measured.sources = digest_texts(map(str, sources)) if sources else ""

    def score(self, completions: list[Completion], size: int) -> tuple[Scores, dict[str, Scores]]:
        """The weighted sum of each completion of each prompt (`size` of them), and each reward by name; None where
        nothing was scored. Each process scores a part: with an environment, its own episodes of the last batch."""
        own = share_of(range(len(completions) // size))  # whole prompts: a reward may compare siblings
        parts = gather_objects(self._score_own(completions[own.start * size : own.stop * size], size))
        rows = [row for part, _ in parts for row in part]
        failures = [message for _, part in parts for message in part]
        total = [weighted_sum(row, self._weights) for row in rows]
        if failures:
            share = total.count(None) / len(rows)
            say(f"WARNING: {failures[0]} ({share:.0%} of the held-out completions have no reward)")
        single: dict[str, Scores] = {}
        for name, column in zip(self.names, zip(*rows, strict=True), strict=True):
            known = [value if value is not None and math.isfinite(value) else None for value in column]
            single[name] = by_prompt(known, size)
        tasks = [task_of(completion.row) for completion in completions]
        for task in sorted(set(filter(None, tasks))):
            of_task = [value if name == task else None for name, value in zip(tasks, total, strict=True)]
            single[f"task {task}"] = by_prompt(of_task, size)
        return by_prompt(total, size), single

    def _score_own(self, completions: list[Completion], size: int) -> tuple[list[list[float | None]], list[str]]:
        """Every reward of each completion (None: does not apply, NaN: failed), and messages."""
        rows, messages = list[list[float | None]](), list[str]()
        if not completions:
            return rows, messages
        columns = make_columns(completions, self._has_budget, self._toolbox)
        at_once = max(1, self._size // size) * size
        for start in range(0, len(completions), at_once):
            batch = {name: values[start : start + at_once] for name, values in columns.items()}
            scored = score(self._rewards, batch, **self._constant)
            messages += [message for reward in scored for message in reward.failures[:1]]
            rows += map(list, zip(*(reward.marked for reward in scored), strict=True))
        return rows, messages


def open_tools(run: RunConfig, policy: Policy) -> ToolUse | None:
    """What completions of the policy may call, for `generate_completions`; None if the run has no tools. Raises
    ConfigError as `open_toolbox` and `make_tool_use` do."""
    toolbox, options = open_toolbox(run), template_options(run)
    limits, name = run.rloo, run.model.name
    return None if toolbox is None else make_tool_use(toolbox, policy.tokenizer, limits, name, **options)


def by_prompt(values: Sequence[_Value], size: int) -> list[Sequence[_Value]]:
    """The values of each prompt's completions, `size` of them."""
    return [values[start : start + size] for start in range(0, len(values), size)]


JUDGED_AT_ONCE = 32  # completions per call of the answer reward, whose time limit applies to a call
SHOWN = 10  # prompts in `Evaluation.samples`: as many as one reads
SAMPLE_CHARS = 4_000_000  # of text in `Evaluation.more_samples`: 1,000 short completions, or 120 of 8,000 tokens


def evaluate(
    run: RunConfig,
    policy: Policy,
    dataset: Any,
    label: str = "",
    *,
    reward_funcs: list[Any] | None = None,
    base: Evaluation | None = None,
) -> Evaluation:
    """Measure a policy on held-out prompts.

    Args:
        run: reads `eval`, `rewards`, `rloo`, `model` and `run.seed`.
        policy: from `load_policy`, trained or not.
        dataset: `load_data(...).test`: rendered prompts, with or without an `answer` column. The first
            `eval.num_prompts` are used, so that two evaluations use the same prompts.
        label: a word for the table's title; by default "after N steps" for a policy that `train` has trained.
        reward_funcs: rewards to measure, in the form that `train` takes; None: `run.rewards`, built for this call.
        base: the evaluation before training, whose answers `eval.judge` compares with; None: that in the run's folder.

    Raises:
        DataError: no prompts.
        ConfigError: thinking budgets for a model that does not think, or that exceed its positions; a trained policy as
            "before".
    """
    if label == "before":
        policy.refuse_trained("it is not the policy before training", "RLOO")
    label = label or (f"after {policy.trained['RLOO']} steps" if "RLOO" in policy.trained else "")
    if run.eval.thinking_budgets and not thinks(policy.family, run.model.enable_thinking):
        raise ConfigError(
            f"eval.thinking_budgets is {run.eval.thinking_budgets}, but this model does not think (family "
            f"{policy.family}). Set eval.thinking_budgets: []"
        )
    dataset = _first_prompts(dataset, run.eval.num_prompts)
    judge = AnswerJudge(run, policy.tokenizer, gold_answers(dataset), reward_funcs)
    made: list[Any] = []
    try:
        made += make_rewards(run, policy.tokenizer) if reward_funcs is None else []
        rewards = HeldOutRewards(run, made if reward_funcs is None else reward_funcs)
        measured = evaluate_with(run, policy, dataset, judge, rewards, label)
        if run.eval.judge is not None and is_main_process():
            measure_win_rate(run, dataset, measured, base or load_evaluation(run, "before"))
        return share(measured)
    finally:
        judge.close()
        for reward in made:
            close_worker(reward.reward)


def evaluate_with(
    run: RunConfig,
    policy: Policy,
    dataset: Any,
    judge: "AnswerJudge",
    rewards: HeldOutRewards,
    label: str = "",
    keeps_samples: bool = True,
) -> Evaluation:
    """`evaluate` on all of `dataset` with a judge and rewards that stay open for reuse."""
    started = time.monotonic()
    dataset = _first_prompts(dataset, None)
    judge.unscored = 0
    greedy = run.eval.greedy and run.eval.temperature != 0 and (judge.gold is not None or rewards.is_callable)
    passes = run.eval.num_samples + greedy + len(run.eval.thinking_budgets)
    generate = _Generator(run, policy, dataset, label, passes)
    with policy.whole_weights():
        completions = generate("sampled", run.eval.temperature, num_samples=run.eval.num_samples)
        measured = _measure_sampled(generate, judge, completions, keeps_samples)
        rewards.measure(completions, measured)
        if run.eval.greedy:
            _measure_greedy(generate, judge, rewards, measured)
        measured.budgets = [_measure_budget(generate, judge, budget) for budget in run.eval.thinking_budgets]
    measured.unscored = judge.unscored
    measured.seconds = time.monotonic() - started
    return share(measured)


class AnswerJudge:
    """Judges completions with the run's answer reward, or by exact match (`answer_reward`) if it has none; rows of
    reasoning-gym with the task's verifier, whose score has to be 1.

    Args:
        run: reads `rewards`, `model` and `rloo`. tokenizer: the policy's.
        gold: the right answer of each prompt, from `gold_answers`; None if there are none.
        reward_funcs: in place of `run.rewards`, as `train` takes them; None: those.

    Attributes:
        judged_by: from `find_judge`. weight: the reward's, 1 for exact match.
        unscored: completions so far that the reward could not judge; they count as wrong.
    """

    def __init__(
        self, run: RunConfig, tokenizer: Any, gold: list[Any] | None, reward_funcs: Sequence[Any] | None = None
    ) -> None:
        self.unscored = 0
        given = {reward_name(reward): reward for reward in reward_funcs or ()}
        weights = run.reward_weights
        if reward_funcs is not None:
            weights = {name: getattr(one, "weight", 1.0) for name, one in given.items()}
        self.judged_by = find_judge(gold, weights)
        self.weight = weights.get(self.judged_by or "", 1.0)
        self.gold = None if self.judged_by is None else gold
        forms = {isinstance(answer, GymRow) for answer in self.gold or ()}
        own = given.get(self.judged_by) if self.judged_by in REWARDS_WITH_ANSWERS else None
        self._built: list[Any] = []
        self.reward: Any = None
        if own is not None or False in forms:
            self.reward = guard(own or self._build(run, tokenizer, REWARDS_WITH_ANSWERS))
        self.gym_reward: Any = guard(self._build(run, tokenizer, (GYM_REWARD,))) if True in forms else None

    def _build(self, run: RunConfig, tokenizer: Any, names: tuple[str, ...]) -> Any:
        """The run's first reward with one of `names`, or the first of these; a verifier without its threshold."""
        entry = next((entry for entry in run.rewards if entry.name in names), None) or RewardSection(name=names[0])
        if entry.name == GYM_REWARD:
            params = {name: value for name, value in entry.params.items() if name != "threshold"}
            entry = entry.model_copy(update={"params": params})
        self._built.append(build_reward(run, tokenizer, entry))
        return self._built[-1]

    def judge(self, completions: list[Completion]) -> list[bool | None] | None:
        """One verdict per completion, equally many of each prompt of `gold` (None if that has no answer); None without
        any answers."""
        if self.gold is None:
            return None
        verdicts: list[bool | None] = [None] * len(completions)
        size = len(completions) // len(self.gold)
        gold = [answer for answer in self.gold for _ in range(size)]
        for column, reward in (("answer", self.reward), (GYM_COLUMN, self.gym_reward)):
            judged = [place for place, one in enumerate(gold) if isinstance(one, GymRow) == (column == GYM_COLUMN)]
            judged = [place for place in judged if not has_no_answer(gold[place])]
            for start in range(0, len(judged), JUDGED_AT_ONCE):
                places = judged[start : start + JUDGED_AT_ONCE]
                batch = [replace(completions[place], row={column: gold[place]}) for place in places]
                (scored,) = score([reward], make_columns(batch, has_budget=True, toolbox=None))
                self.unscored += scored.values.count(None)
                for place, value in zip(places, scored.values, strict=True):
                    verdicts[place] = value == 1.0
        return verdicts

    def close(self) -> None:
        """End the processes of rewards that were built here, if they have any."""
        for reward in self._built:
            close_worker(reward)


class _Generator:
    """Samples the held-out prompts under the run's thinking budget, a part in each process, with progress over all
    `passes`; all get all, in order."""

    def __init__(self, run: RunConfig, policy: Policy, dataset: Any, label: str, passes: int) -> None:
        self.run, self.policy, self.dataset, self.label = run, policy, dataset, label
        self.tools = open_tools(run, policy)
        longest = run.eval.max_completion_length or run.rloo.max_completion_length
        self.limits = Limits(longest)
        if thinks(policy.family, run.model.enable_thinking):
            self.limits = replace(limits_of(run.rloo, policy.tokenizer, policy.tags), max_completion_length=longest)
        self.own = share_of(range(len(dataset)))
        self.done, self.total = 0, passes * len(self.own)
        self.begun = self.printed_at = time.monotonic()
        self.each = " by each process" if is_distributed() else ""

    def __call__(
        self, what: str, temperature: float, num_samples: int = 1, limits: Limits | None = None
    ) -> list[Completion]:
        def report(done: int, total: int) -> None:
            now, done = time.monotonic(), self.done + done
            if now - self.printed_at >= max(self.run.run.progress_every_s, 0.1) and 0 < done < self.total:
                left = format_seconds((now - self.begun) / done * (self.total - done))
                eta = f" | eta {left}" if done >= 0.1 * self.total else ""  # the first to end are few, and say nothing
                name = f"evaluation {self.label}".strip()
                say(f"{name}: {done}/{self.total} completions{self.each} ({what}){eta}")
                self.printed_at = now

        completions = generate_completions(
            self.policy,
            [self.dataset[place] for place in self.own],
            limits or self.limits,
            num_samples=num_samples,
            temperature=temperature,
            batch_size=self.run.eval.batch_size,
            seed=self.run.run.seed + process_index(),
            engine=self.run.rollout,
            tools=self.tools,
            on_batch=report,
        )
        self.done += len(completions)
        return gather_lists(completions)


def _measure_sampled(
    generate: _Generator, judge: AnswerJudge, completions: list[Completion], keeps_samples: bool
) -> Evaluation:
    run, policy, dataset = generate.run, generate.policy, generate.dataset
    num_samples = run.eval.num_samples
    verdicts = _judge(judge, completions)
    own = verdicts if judge.judged_by != EXACT else None  # "wrong" next to a reward of 1 would mislead
    samples = _samples(generate, completions, own) if keeps_samples else []
    is_thinking, limits = thinks(policy.family, run.model.enable_thinking), generate.limits
    measured = Evaluation(
        label=generate.label,
        num_prompts=len(dataset),
        num_samples=num_samples,
        temperature=run.eval.temperature,
        max_completion_length=limits.max_completion_length,
        thinking_budget=limits.thinking_budget,
        closed_share=_mean([completion.closed for completion in completions]) if is_thinking else None,
        forced_share=_mean([bool(completion.forced) for completion in completions]) if limits.close_ids else None,
        truncated_share=_mean([not completion.ended for completion in completions]),
        mean_tokens=_mean([completion.tokens for completion in completions]),
        tools=_measure_tools(completions),
        samples=samples[:SHOWN],
        more_samples=samples[SHOWN:],
        prompts_digest=digest_prompts(dataset),
        prompt_digests=list(map(digest_prompt, dataset["prompt"])),
    )
    if is_thinking:
        thinking = by_prompt([float(completion.thinking_tokens) for completion in completions], num_samples)
        if (found := mean_of_completions(thinking, num_samples)) is not None:
            measured.measures[THINKING] = found
    if verdicts is not None and (accuracy := mean_of_completions(by_prompt(verdicts, num_samples), num_samples)):
        measured.judged_by, measured.judge_weight = judge.judged_by, judge.weight
        measured.measures["accuracy"] = accuracy
        rights = [round(share * num_samples) for share in accuracy.per_prompt or () if share is not None]
        measured.pass_at_k = {
            k: _mean([pass_at_k(right, num_samples, k) for right in rights]) for k in sorted(set(run.eval.pass_at_k))
        }
    return measured


def _measure_tools(completions: list[Completion]) -> dict[str, float]:
    """`Evaluation.tools`, with a warning if a tool failed."""
    episodes = list_episodes(completions)
    if failures := [text for one in episodes for text in one.failures]:
        say(f"WARNING: tool {failures[0]} ({len(failures)} calls failed; the model gets the error)")
    calls = [call for one in episodes for call in one.calls]
    return measure_calls(calls, [len(completion.turns) for completion in completions]) if episodes else {}


def _measure_greedy(generate: _Generator, judge: AnswerJudge, rewards: HeldOutRewards, measured: Evaluation) -> None:
    by_reward = measured.leading == "reward"
    found: dict[str, Measured | None] = {}
    if measured.temperature == 0:
        found = {"accuracy": measured.measure("accuracy"), "reward": measured.measure("reward") if by_reward else None}
    elif judge.gold is not None or by_reward:
        completions = generate("greedy", 0.0)
        if (verdicts := _judge(judge, completions)) is not None:
            found["accuracy"] = mean_of_completions([[one] for one in verdicts], 1)
        if by_reward:
            found["reward"] = mean_of_completions(rewards.score(completions, 1)[0], 1)
    measured.measures |= {f"greedy_{name}": one for name, one in found.items() if one is not None}


def _measure_budget(generate: _Generator, judge: AnswerJudge, budget: int) -> Budget:
    run = generate.run
    limits = make_budget_limits(
        generate.policy.tokenizer,
        generate.policy.tags,
        generate.limits.max_completion_length,
        budget,
        run.forced_answer,
        run.rloo.thinking_close,
        has_turns=generate.tools is not None,
    )
    completions = generate(f"budget {budget}", run.eval.temperature, limits=limits)
    forced = [bool(completion.forced) for completion in completions]
    verdicts = _judge(judge, completions) or [None] * len(forced)

    def accuracy(*sides: bool) -> Measured | None:
        pairs = zip(verdicts, forced, strict=True)
        chosen = [float(verdict) for verdict, closed in pairs if closed in sides and verdict is not None]
        return clustered(chosen, 1) if chosen else None

    return Budget(budget, _mean(forced), accuracy(True, False), forced=accuracy(True), unforced=accuracy(False))


def _samples(
    generate: _Generator, completions: list[Completion], verdicts: list[bool | None] | None
) -> list[dict[str, Any]]:
    """Each prompt's first completion: of SHOWN prompts, then up to SAMPLE_CHARS of text."""
    run, policy, dataset = generate.run, generate.policy, generate.dataset
    samples, left = list[dict[str, Any]](), SAMPLE_CHARS
    for index in range(len(dataset)):
        number, prompt = index * run.eval.num_samples, dataset[index]["prompt"]
        completion = completions[number]
        turns = {} if completion.episode is None else {"turns": completion.episode.messages}
        if index >= SHOWN:
            left -= len(prompt) + len(completion.text) + len(str(turns))
            if left < 0:
                break
        opened = begins_thinking(completion, policy.tokenizer)
        thinking, answer = split_thinking(completion.turns[-1], policy.tokenizer, policy.tags, opened)
        sample = {
            "prompt": prompt,
            "thinking": thinking,
            "answer": answer,
            "gold": completion.row.get("answer"),
            "correct": None if verdicts is None else verdicts[number],
            "ended": completion.ended,
            "closed": completion.closed,
            "tokens": completion.tokens,
            "thinking_tokens": completion.thinking_tokens if completion.closed else None,
            "forced": bool(completion.forced),
        }
        samples.append(sample | turns)
    return samples


def begins_thinking(completion: Completion, tokenizer: Any) -> bool:
    """Whether a completion's last turn begins inside a thought."""
    context = completion.context
    before = tokenizer.decode(completion.ids[slice(*context[-1])]) if context else completion.prompt
    return opens_thinking(before)


def digest_prompts(dataset: Any) -> str:
    """A digest of the rendered prompts in order: 16 hexadecimal digits."""
    return hashlib.sha256("\0".join(dataset["prompt"]).encode()).hexdigest()[:16]


def _first_prompts(dataset: Any, num_prompts: int | None) -> Any:
    if "prompt" not in dataset.column_names:
        raise DataError(
            f"the dataset has no column 'prompt' (found: {', '.join(dataset.column_names)}); pass load_data(...).test"
        )
    if not len(dataset):
        raise DataError("there are no held-out prompts to evaluate on; set data.test_size above 0")
    return dataset if num_prompts is None else dataset.select(range(min(num_prompts, len(dataset))))


def _judge(judge: AnswerJudge, completions: list[Completion]) -> list[bool | None] | None:
    """One verdict per completion. Only the main process judges, because a time limit may expire in one alone."""
    return share(judge.judge(completions) if is_main_process() else None)


def _mean(values: list[Any]) -> float:
    return math.fsum(values) / len(values)
