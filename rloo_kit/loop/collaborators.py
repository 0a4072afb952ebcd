"""What the step works with: the sampler, the rewarder, the reservoir of fresh prompts, and a count of failures.

Shapes: B completions of this process, A of all processes (prompts x K, group by group), F reward functions.
"""

import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import trl

from rloo_kit.errors import DataError, RewardError, RlooKitError, ToolError
from rloo_kit.gradient.advantages import RunningMoments, combine_rewards, standardize, tied_groups
from rloo_kit.loop.records import Completions, Judged
from rloo_kit.models.parallel import Parallel
from rloo_kit.rewarding.guard import GuardedReward
from rloo_kit.rewarding.signature import overflowing
from rloo_kit.rollout.engine import Engine, Progress
from rloo_kit.rollout.episodes import Episode, Episodes, ToolUse, episode_columns
from rloo_kit.rollout.types import FOREIGN, Limits, Rollout, Span, split_turns
from rloo_kit.tools.toolbox import Toolbox


class Sampler:
    """Completions of prompts, from an engine through TRL's own code around generation.

    The way of the ids: `sample` calls TRL's `_generate`, which renders and tokenizes the prompts and calls the
    trainer's `_generate_single_turn`; that calls `complete`, which calls the engine. TRL's methods hand back ids and
    texts only, so `complete` keeps the engine's `Rollout` in `_rollout`, where `sample` finds the forced spans and the
    log-probabilities. It stays None if a subclass samples by itself.

    `limits`: of a completion's length; `parallel` gathers sharded weights for sampling.
    """

    def __init__(self, trainer: Any, engine: Engine, limits: Limits, parallel: Parallel, tools: ToolUse | None = None):
        self.trainer, self.engine, self.limits, self.parallel = trainer, engine, limits, parallel
        self.tools = tools
        self.failures = FailureCount(trainer.args.reward_failure_steps)  # of tools
        self.end_ids = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}  # another last token: it was cut off
        self.on_progress: Progress | None = None  # see `Engine.sample`
        self._rollout: Rollout | None = None
        self._episodes: Episodes | None = None
        self._lengths: dict[int, float] = {}  # expected completion lengths, by the prompt's hash

    def sample(self, rows: list[dict[str, Any]]) -> Completions:
        """A completion for each row of the dataset; neighbours with equal prompts are a group."""
        if any(column in rows[0] for column in ("image", "images")):
            raise DataError("the dataset has an image column; the kit trains text models only: drop the column")
        self._rollout, self._episodes = None, None
        prompts = [row["prompt"] for row in rows]
        if self.tools is not None:
            self._episodes = self.tools.begin(rows)
            prompts = self._episodes.prompts
        prompt_ids, completion_ids, texts = self.trainer._generate(prompts)
        nothing: list[list[Span]] = [[] for _ in rows]
        rollout = self._rollout or Rollout(completion_ids, nothing, None, nothing)
        found = Completions(
            rows=rows,
            prompts=prompts,
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            texts=texts,
            truncated=[not ids or ids[-1] not in self.end_ids for ids in completion_ids],
            forced=rollout.forced,
            sampler_logps=rollout.sampler_logps or [None] * len(rows),
            context=rollout.context,
            episodes=[None] * len(rows),
        )
        return found if self._episodes is None else self._with_episodes(found, self._episodes.finish(rollout))

    def _with_episodes(self, found: Completions, episodes: list[Episode]) -> Completions:
        """Completions with their episodes. The text is the last turn's, or all messages if the prompt has messages; a
        limit that ended an episode has cut it off. TRL has counted the tools' tokens as the completion's: corrected."""
        decode = self.trainer._tokenizer.decode
        texts: list[Any] = [episode.messages for episode in episodes]
        if isinstance(found.prompts[0], str):
            turns = [split_turns(*one)[-1] for one in zip(found.completion_ids, found.context, strict=True)]
            texts = [decode(ids, skip_special_tokens=True) for ids in turns]
        truncated = [cut or one.cut is not None for cut, one in zip(found.truncated, episodes, strict=True)]
        own = [sum(map(len, split_turns(*one))) for one in zip(found.completion_ids, found.context, strict=True)]
        device = self.parallel.accelerator.device
        lengths = self.parallel.gather(torch.tensor(own, device=device)).float()  # (A,)
        cut = self.parallel.gather(torch.tensor(truncated, device=device))
        metrics = self.trainer._metrics["train" if self.trainer.model.training else "eval"]
        ended = lengths[~cut] if not cut.all() else lengths.new_zeros(1)
        for kind, values in (("", lengths), ("terminated_", ended)):
            for name in ("mean", "min", "max"):
                metrics[f"completions/{name}_{kind}length"][-1] = getattr(values, name)().item()
        metrics["completions/clipped_ratio"][-1] = cut.float().mean().item()
        return found._replace(texts=texts, truncated=truncated, episodes=episodes)

    def watch(self, found: Completions) -> None:
        """Report tools that failed in a training rollout.

        Raises ToolError if more calls failed than `max_reward_failure_share` in too many rollouts in a row; a
        checkpoint is saved first."""
        kinds = self.parallel.gather_list([kind for one in found.episodes if one is not None for _, kind in one.calls])
        share = kinds.count("failed") / max(1, len(kinds))
        messages = list(dict.fromkeys(text for one in found.episodes if one is not None for text in one.failures))[:3]
        how = f"{share:.0%} of this rollout's calls failed; the model gets the error"
        lines = [f"tool {message} ({how})" for message in messages]
        reason, what = " | ".join(messages) or "in another process", f"{share:.0%} of the tools' calls failed"
        watch_failures(self.trainer, self.failures, share, reason, lines, ToolError, what, "tool")

    def complete(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """Completion ids from the engine.

        If not all rows fit at once, prompts with long completions so far start first, which shortens the tail."""
        if not all(prompt_ids):
            raise DataError(f"prompt {prompt_ids.index([])} of a rollout has no tokens; there is nothing to continue")
        waits = self.engine.rows is not None and self.engine.rows < len(prompt_ids)
        keys = [hash(tuple(ids)) for ids in prompt_ids]
        usual = sum(self._lengths.values()) / max(len(self._lengths), 1)
        expected = [self._lengths.get(key, usual) for key in keys] if waits else None
        with ExitStack() as stack:
            if self.engine.name not in FOREIGN:  # those have their own base and precision
                stack.enter_context(self.parallel.whole_weights(self.trainer.model_wrapped))
                stack.enter_context(self.parallel.accelerator.autocast())
            more: dict[str, Any] = {} if self._episodes is None else {"dialogue": self._episodes}
            self._rollout = self.engine.sample(prompt_ids, self.limits, expected, self.on_progress, **more)
        for key, ids in zip(keys, self._rollout.completion_ids, strict=True):
            self._lengths[key] = (self._lengths.get(key, len(ids)) + len(ids)) / 2
        return self._rollout.completion_ids


class Rewarder:
    """Scores completions: rewards, their weighted sum, penalties, normalisation, and failing rewards.

    The `_calculate_rewards` of TRL's trainer calls them, models and async ones too; `tells_forced`: whether they get
    the column `thinking_forced`; `toolbox`: has the environments that rewards may look into.
    """

    def __init__(self, trainer: Any, parallel: Parallel, tells_forced: bool = False, toolbox: Toolbox | None = None):
        self.trainer, self.parallel, self.tells_forced, self.toolbox = trainer, parallel, tells_forced, toolbox
        self.missing_eos_penalty = trainer.args.missing_eos_penalty
        self.form = trainer.args.normalize_rewards
        self.failures = FailureCount(trainer.args.reward_failure_steps)
        self.moments = RunningMoments()  # of `normalize_rewards: running`; part of a checkpoint

    def judge(self, found: Completions) -> Judged:
        """Rewards and scores; a sample with any failed reward is not scored."""
        rows = found.rows
        if self.tells_forced:
            rows = [row | {"thinking_forced": bool(spans)} for row, spans in zip(rows, found.forced, strict=True)]
        if self.toolbox is not None:
            columns = episode_columns(found.completion_ids, found.context, found.episodes, self.toolbox)
            rows = [row | more for row, more in zip(rows, columns, strict=True)]
        failures: list[str] = []
        for guarded in self.trainer.reward_funcs:
            if isinstance(guarded, GuardedReward):
                guarded.report = failures.append
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices), _mute("All reward functions returned None"):  # a reward may seed
            rewards = self.trainer._calculate_rewards(rows, found.prompts, found.texts, found.completion_ids)  # (A, F)
        failed = rewards.isinf()
        rewards = rewards.masked_fill(failed.any(dim=1, keepdim=True), torch.nan)
        weights = self.trainer.reward_weights.to(rewards.device)
        raw_scores = combine_rewards(rewards, weights)  # (A,)
        over = ~raw_scores.isfinite() & ~rewards[:, weights != 0].isnan().all(dim=1)
        if over.any():
            failures += overflowing(rewards.tolist(), weights.tolist(), self.trainer.reward_func_names)[:1]
            failed, rewards = failed | over[:, None], rewards.masked_fill(over[:, None], torch.nan)
        raw_scores = scores = raw_scores.masked_fill(failed.any(dim=1), torch.nan)
        if self.missing_eos_penalty is not None:
            cut = torch.tensor(found.truncated, device=scores.device)
            scores = raw_scores - self.missing_eos_penalty * self.parallel.gather(cut).float()
        return Judged(found, rewards, failed, raw_scores, scores, failures)

    def normalize(self, scores: torch.Tensor, training: bool) -> torch.Tensor:
        """Scores (A,) after `normalize_rewards` and `reward_clip_range`."""
        if self.form == "running":
            if training:
                self.moments.update(scores)
            scores = self.moments.normalize(scores, eps=1e-8)
        elif self.form:
            scores = standardize(scores, eps=1e-8)
        clip = self.trainer.reward_clip_range
        return scores.clamp(*clip) if clip else scores

    def watch(self, share: float, failures: list[str]) -> None:
        """Report rewards that failed in a training rollout, for a `share` (0 to 1) of all processes' samples.

        Raises RewardError if too many failed in too many rollouts in a row; a checkpoint is saved first."""
        if share and not failures:
            failures = ["a reward model returned infinity, or a reward failed in another process"]
        lines = [f"{message} ({share:.0%} of the samples of this rollout are not scored)" for message in failures]
        reason, what = " | ".join(failures), f"rewards failed for {share:.0%} of the samples"
        watch_failures(self.trainer, self.failures, share, reason, lines, RewardError, what, "reward")


@contextmanager
def _mute(beginning: str) -> Iterator[None]:
    """Drop TRL's warning about unscored samples, which prints a whole completion each rollout; `rewards/unscored_ratio`
    counts them, and failures have their own line."""
    logger = logging.getLogger(trl.RLOOTrainer._calculate_rewards.__module__)

    def keep(record: logging.LogRecord) -> bool:
        return beginning not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


class FailureCount:
    """Counts steps with a NaN, or rollouts with failed rewards; too many in a row end the run.

    Attributes:
        patience: failures in a row that end the run. total: all failures. reason: of the last one.

    >>> count = FailureCount(patience=2)
    >>> [count.add(reason) for reason in ("the KL", None, "the KL", "the gradient")]
    [True, False, True, True]
    >>> count.exceeded, count.total, count.reason
    (True, 3, 'the gradient')
    """

    def __init__(self, patience: int) -> None:
        self.patience, self.total, self.in_a_row, self.reason = patience, 0, 0, ""
        self._reports_at = 1

    @property
    def exceeded(self) -> bool:
        return self.in_a_row >= self.patience

    def add(self, reason: str | None, counts: bool = True) -> bool:
        """Count a step or rollout that failed for a reason (None: it did not); returns whether to report it: the 1st,
        2nd, 4th, 8th ... and the one that ends the run. `counts`: whether it is one of those in a row."""
        self.in_a_row = self.in_a_row + 1 if counts and reason is not None else 0
        if reason is None:
            return False
        self.total, self.reason = self.total + 1, reason
        reports = self.total >= self._reports_at or self.exceeded
        self._reports_at = 2 * self.total if reports else self._reports_at
        return reports


def watch_failures(
    trainer: Any,
    failures: FailureCount,
    share: float,
    reason: str,
    lines: Sequence[str],
    error: type[RlooKitError],
    what: str,
    thing: str,
) -> None:
    """Count a training rollout in which a `share` (0 to 1) of something failed, and print `lines` if it is reported.

    Raises `error` if the share was above `max_reward_failure_share` in too many rollouts in a row; a checkpoint is
    saved first. `what` failed, and the `thing` to fix, are for its text."""
    args = trainer.args
    if failures.add(reason if share else None, counts=share > args.max_reward_failure_share):
        for line in lines:
            print(f"WARNING: {line}", flush=True)
    if failures.exceeded:
        trainer._save_checkpoint(trainer.model, trial=None)
        raise error(
            f"{what}, more than max_reward_failure_share = {args.max_reward_failure_share:.0%} in {failures.patience} "
            f"generation batches in a row, so training stopped. The state is saved in {args.output_dir}; fix the "
            f"{thing} and resume. A failure: {failures.reason}"
        )


# ------------------------------------------------------------------------------------------------- dynamic sampling


def replace_tied_groups(
    judged: Judged,
    judge: Callable[[list[dict[str, Any]]], Judged],
    reservoir: "PromptReservoir",
    rounds: int,
    group_size: int,
    parallel: Parallel,
) -> tuple[Judged, int]:
    """Dynamic sampling (DAPO, section 3.2): groups without a signal, because all scores are equal or fewer than two
    completions are scored, give way to groups of fresh prompts that have one. The batch keeps its size; groups that are
    still tied after so many rounds of drawing stay. Returns the batch, and the number of groups that were replaced.
    """
    mine, processes, replaced = parallel.rows(len(judged.completions.rows)), parallel.accelerator.num_processes, 0
    for _ in range(rounds):
        tied = tied_groups(judged.scores, group_size).nonzero().flatten().tolist()
        if not tied:
            break
        count = math.ceil(len(tied) / processes) * processes  # every process draws the same, and samples its share
        drawn = reservoir.draw(count, parallel.gather_list(judged.completions.prompts))
        share = drawn[parallel.rows(len(drawn) // processes)]
        if not share:
            break
        fresh = judge([row for row in share for _ in range(group_size)])
        useful = (~tied_groups(fresh.scores, group_size)).nonzero().flatten().tolist()
        size, pairs = len(judged.scores), list(zip(tied, useful, strict=False))
        order = torch.arange(size, device=judged.scores.device)  # of the batch, with the rows of `fresh` behind them
        for out, into in pairs:
            first = size + into * group_size
            order[out * group_size : (out + 1) * group_size] = torch.arange(first, first + group_size)
        samples = [s for one in (judged, fresh) for s in parallel.gather_list(list(zip(*one.completions, strict=True)))]
        kept = [samples[row] for row in order.tolist()[mine]]

        def exchange(name: str, now: Judged = judged, other: Judged = fresh, order: torch.Tensor = order) -> Any:
            old, new = getattr(now, name), getattr(other, name)
            return torch.cat([old, new.to(old)])[order]

        judged = Judged(
            Completions(*map(list, zip(*kept, strict=True))),
            **{name: exchange(name) for name in ("rewards_per_func", "failed", "raw_scores", "scores")},
            failures=judged.failures or fresh.failures,
        )
        replaced += len(pairs)
    return judged, replaced


class PromptReservoir:
    """Training prompts in a separate shuffled order, for the groups that are replaced.

    Each pass over the dataset (rows by index, a dict with `prompt` each) has a different order, fixed by the seed;
    prompts that are currently in the batch are skipped. They come in addition to those of the trainer's own sampler.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self.passes = self.position = 0
        self._order = self._shuffled()

    def draw(self, count: int, in_use: Sequence[Any]) -> list[dict[str, Any]]:
        """At most `count` rows with different prompts, none of them `in_use`; fewer if none are left."""
        taken = {str(prompt) for prompt in in_use}
        drawn: list[dict[str, Any]] = []
        for _ in range(len(self._order)):  # each row once, so that the loop ends on a small dataset
            if len(drawn) == count:
                break
            if self.position == len(self._order):
                self.passes, self.position = self.passes + 1, 0
                self._order = self._shuffled()
            row = dict(self.dataset[self._order[self.position]])
            self.position += 1
            if str(row["prompt"]) not in taken:
                taken.add(str(row["prompt"]))
                drawn.append(row)
        return drawn

    def state_dict(self) -> dict[str, int]:
        """Its position, JSON-serialisable; a resumed run continues from it with `load_state_dict`."""
        return {"seed": self.seed, "passes": self.passes, "position": self.position, "size": len(self.dataset)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a checkpoint's state; raises DataError if that is of a dataset of another size."""
        if state["size"] != len(self.dataset):
            raise DataError(
                f"the checkpoint's reservoir has {state['size']} training prompts, and there are "
                f"{len(self.dataset)} now: resume with the data of the run (data.*), or start over"
            )
        self.seed, self.passes, self.position = state["seed"], state["passes"], state["position"]
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self.dataset)))
        random.Random(f"resample-{self.seed}-{self.passes}").shuffle(order)
        return order
