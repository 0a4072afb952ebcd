"""Pass rates of training prompts: selects those that the initial policy solves sometimes, and measures whether RLOO has
a signal.

Pass rates at or outside `rollout.min_pass_rate` and `rollout.max_pass_rate` are skipped. The selection is stored in the
run's folder for a resume.
"""

import hashlib
import json
import time
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rloo_kit.collective import gather_lists, gather_objects, share, share_of
from rloo_kit.config.run import RunConfig
from rloo_kit.data.answers import answer_reward_of, gold_answers
from rloo_kit.data.load import Data
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.evals.evaluate import AnswerJudge, by_prompt, digest_prompts, open_tools
from rloo_kit.models.policy import Policy
from rloo_kit.results.intervals import Measured, wilson
from rloo_kit.rewards.answer import has_no_answer
from rloo_kit.rollout.completions import generate_completions
from rloo_kit.rollout.thinking_budget import limits_of
from rloo_kit.runs.files import is_count, read_object
from rloo_kit.runs.folder import RunDir
from rloo_kit.system.processes import is_distributed, say

SELECTION = "prompts.json"
BATCHES_AT_ONCE = 4  # in one call: an engine that refills its rows benefits from long lists
ENOUGH = 0.2  # share of prompts with a signal; below it most of a rollout is wasted


def select_prompts(run: RunConfig, policy: Policy, dataset: Any, run_dir: RunDir) -> Any:
    """The prompts of `dataset` to train on, in order; all of them unless `rollout.difficulty_samples` is above 0.

    Args:
        run: reads `rollout`, `rloo`, `rewards`, `model`, `eval.batch_size` and `run`.
        policy: the initial policy. dataset: `load_data(...).train`, with `prompt` and `answer`.
        run_dir: the run's open folder; a resumed run reads its selection from it, a new one writes it.

    Raises:
        ConfigError: there are no answers to judge with.
        DataError: fewer prompts remain than a rollout takes; a resumed run's selection is damaged.
    """
    if not run.rollout.difficulty_samples:
        return dataset
    digest = digest_prompts(dataset)
    selection = share(_read_selection(run_dir) if run_dir.resumed else None)
    if selection is None or selection["digest"] != digest:  # `check_inputs` has refused or accepted other prompts
        selection = {"digest": digest} | _choose(run, policy, dataset)
        run_dir.write_json(SELECTION, selection)
    return dataset.select(selection["kept"])


def _read_selection(run_dir: RunDir) -> dict[str, Any] | None:
    """The selection that the run in the folder made; None if it has not trained yet and may select again."""
    found = read_object(run_dir / SELECTION)
    kept = found.get("kept")
    if isinstance(kept, list) and kept and all(is_count(row) for row in kept) and isinstance(found.get("digest"), str):
        return found
    if run_dir.resumes_from is None:
        return None
    raise DataError(
        f"{run_dir / SELECTION}, the prompts that the run trains on, is missing or damaged: restore it from a copy, or "
        "start over with --overwrite or run.name=..."
    )


def measure_pass_rates(run: RunConfig, policy: Policy, dataset: Any, answers: list[Any], samples: int) -> list[float]:
    """The share of right ones among `samples` completions of each row's rendered prompt; equal prompts are measured
    once, or equal rows if an environment starts from them."""
    tools = open_tools(run, policy)
    has_environment = tools is not None and tools.toolbox.environment is not None
    rows = list(dataset) if has_environment else [{"prompt": prompt} for prompt in dataset["prompt"]]
    texts = [json.dumps(row, sort_keys=True, default=str) for row in rows]
    keys = list(zip(texts, answers, strict=True))
    row_of = dict(zip(keys, rows, strict=True))
    judge = AnswerJudge(run, policy.tokenizer, answers)
    try:
        todo = [(row, answer) for (_, answer), row in row_of.items()]
        own = [todo[place] for place in share_of(todo)]
        measured = gather_lists(_measure(run, policy, judge, own, samples))
        judge.unscored = sum(gather_objects(judge.unscored))
    finally:
        judge.close()
    if judge.unscored:
        say(f"difficulty: {judge.unscored} completions could not be judged; they count as wrong")
    rights = dict(zip(row_of, measured, strict=True))
    return [rights[key] / samples for key in keys]


def _choose(run: RunConfig, policy: Policy, dataset: Any) -> dict[str, Any]:
    """The rows to keep, and how many were too hard or too easy; prints both."""
    samples = run.rollout.difficulty_samples
    asked, off = f"rollout.difficulty_samples is {samples}, but ", "or set rollout.difficulty_samples=0"
    if answer_reward_of(entry.name for entry in run.rewards) is None:
        found = f"{asked}no reward compares with answers, so nothing judges completions"
        raise ConfigError(f"{found}: add {{name: answer_reward, weight: 0}} to rewards, {off}")
    answers = gold_answers(dataset) or []
    judged = [row for row, answer in enumerate(answers) if answer is not None]  # the others are always kept
    if not judged:
        found = f"{asked}the training prompts have no column 'answer' with answers to judge completions with"
        raise ConfigError(f"{found}: name it in data.answer_column, {off}")
    low, high = run.rollout.min_pass_rate, run.rollout.max_pass_rate
    rates = measure_pass_rates(run, policy, dataset.select(judged), [answers[row] for row in judged], samples)
    skipped = {row for row, rate in zip(judged, rates, strict=True) if not low < rate < high}
    kept = [row for row in range(len(dataset)) if row not in skipped]
    hard, easy = (sum(rate <= low for rate in rates), sum(rate >= high for rate in rates))
    which = "training prompts with an answer" if len(rates) < len(dataset) else "training prompts"
    found = (
        f"of {len(rates)} {which}, {hard} have a pass rate of at most {low:g} (rollout.min_pass_rate) and "
        f"{easy} of at least {high:g} (rollout.max_pass_rate), {samples} completions each"
    )
    needed = run.rloo.prompts_per_generation
    if len(kept) < needed:
        raise DataError(
            f"{found}: {len(kept)} are left, and a rollout takes {needed}. Use other prompts (data.source), raise "
            f"rollout.difficulty_samples or rloo.max_completion_length, widen the two rates, {off} to train on all"
        )
    say(f"difficulty: {found}: {len(kept)} are trained on")
    mean = sum(rates) / len(rates)
    return {"prompts": len(rates), "too_hard": hard, "too_easy": easy, "mean_pass_rate": mean, "kept": kept}


def _measure(
    run: RunConfig, policy: Policy, judge: AnswerJudge, todo: list[tuple[dict[str, Any], Any]], samples: int
) -> list[int]:
    """The number of right ones among `samples` completions of each row of `todo`, by its answer."""
    measured = list[int]()
    prompts_at_once = max(1, BATCHES_AT_ONCE * (run.rollout.rows or run.eval.batch_size) // samples)
    printed_at = time.monotonic()
    each = " by each process" if is_distributed() else ""
    for start in range(0, len(todo), prompts_at_once):
        chunk = todo[start : start + prompts_at_once]
        rows = [row for row, _ in chunk]
        judge.gold = [answer for _, answer in chunk]

        def report(done: int, total: int, start: int = start) -> None:
            nonlocal printed_at
            if time.monotonic() - printed_at >= max(run.run.progress_every_s, 0.1):
                say(f"difficulty: {start + done // samples}/{len(todo)} prompts measured{each}")
                printed_at = time.monotonic()

        # a seed for each chunk, the same in each run, so that two chunks draw independently
        seed = int.from_bytes(hashlib.sha256(f"{run.run.seed} {rows[0]['prompt']}".encode()).digest()[:4], "big")
        completions = generate_completions(
            policy,
            rows,
            limits_of(run.rloo, policy.tokenizer, policy.tags),
            num_samples=samples,
            temperature=run.rloo.temperature,
            batch_size=run.rollout.rows or run.eval.batch_size,
            seed=seed,
            engine=run.rollout,
            tools=open_tools(run, policy),
            on_batch=report,
        )
        verdicts = judge.judge(completions) or []
        measured += [sum(map(bool, of_prompt)) for of_prompt in by_prompt(verdicts, samples)]
    return measured


@dataclass(frozen=True)
class Signal:
    """Pass rates of training prompts.

    Attributes:
        rates: for each prompt, the share of its `num_generations` completions that are right.
    """

    rates: list[float]
    num_generations: int

    @property
    def num_mixed(self) -> int:
        """Number of prompts with right and wrong completions; for all others every advantage is 0."""
        return sum(0.0 < rate < 1.0 for rate in self.rates)

    @property
    def share(self) -> Measured:
        """Their share, with its 95 % interval."""
        return wilson(self.num_mixed / len(self.rates), len(self.rates))

    @property
    def verdict(self) -> str:
        """ "enough", "too low" (too little is solved) or "too easy" (too little is left to learn)."""
        if self.share.value >= ENOUGH:
            return "enough"
        return "too easy" if fmean(self.rates) > 0.5 else "too low"

    def __str__(self) -> str:
        found = f"{self.num_mixed} ({self.share:.0%})"
        meaning = {
            "enough": "enough signal for RLOO",
            "too low": f"still too low for RLOO, which needs {ENOUGH:.0%}: use more or better demonstrations "
            "(sft.source), more steps (sft.max_steps, sft.num_train_epochs), a higher sft.learning_rate, or easier "
            "prompts (data.source)",
            "too easy": "nearly everything is solved, so little is left for RLOO: use harder prompts (data.source) or "
            "fewer steps (sft.max_steps)",
        }[self.verdict]
        return (
            f"signal: of {len(self.rates)} training prompts {found} have right and wrong among {self.num_generations} "
            f"completions, mean pass rate {fmean(self.rates):.0%}: {meaning}"
        )


def measure_signal(run: RunConfig, policy: Policy, data: Data, num_prompts: int = 64) -> Signal | None:
    """The pass rates of the first `num_prompts` training prompts with an answer, from `rloo.num_generations`
    completions each, sampled as RLOO samples; None if no prompt has an answer or no reward compares answers."""
    if answer_reward_of(entry.name for entry in run.rewards) is None:
        return None
    answers = gold_answers(data.train) or []
    rows = [row for row, answer in enumerate(answers) if not has_no_answer(answer)][:num_prompts]
    if not rows:
        return None
    samples, gold = run.rloo.num_generations, [answers[row] for row in rows]
    return Signal(measure_pass_rates(run, policy, data.train.select(rows), gold, samples), samples)
