"""What the step works with: the sampler, the rewarder, the reservoir of fresh prompts, and a count of failures.

Shapes: B completions of this process, A of all processes (prompts x K, group by group), F reward functions.
"""

import math
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from trl.data_utils import apply_chat_template

from rloo_kit.completion import Completion, Tools, list_episodes
from rloo_kit.data.sources import IMAGE_COLUMNS
from rloo_kit.errors import DataError, RewardError, RlooKitError, ToolError
from rloo_kit.gradient.advantages import combine_rewards, standardize, tied_groups
from rloo_kit.loop.records import Judged
from rloo_kit.models.parallel import Parallel
from rloo_kit.rewarding.guard import GuardedReward, reward_name
from rloo_kit.rewarding.score import make_columns, score
from rloo_kit.rewarding.signature import overflowing
from rloo_kit.rollout.completions import complete
from rloo_kit.rollout.engine import Engine, Episodes, Progress, ToolUse
from rloo_kit.rollout.types import FOREIGN, Limits, Rollout
from rloo_kit.seams import part


class Sampler:
    """Completions of the dataset's rows, from an engine.

    Prompts are tokenized by TRL's `_tokenize_prompts`, and completions sampled through the trainer's
    `_generate_single_turn`, which a subclass may override; the trainer's own calls `draw`.

    `limits`: of a completion's length; `parallel` gathers sharded weights for sampling.
    """

    def __init__(self, trainer: Any, engine: Engine, limits: Limits, parallel: Parallel, tools: ToolUse | None = None):
        self.trainer, self.engine, self.limits, self.parallel = trainer, engine, limits, parallel
        self.tools = tools
        self.failures = FailureCount()  # of tools
        self.end_ids = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        self._lengths: dict[int, float] = {}  # expected completion lengths, by the prompt's hash

    def sample(
        self, rows: list[dict[str, Any]], limits: Limits | None = None, on_progress: Progress | None = None
    ) -> list[Completion]:
        """A completion for each row of the dataset; neighbours with equal prompts are a group. `limits`: in place of
        the run's; `on_progress`: see `Engine.sample`."""
        if any(column in rows[0] for column in IMAGE_COLUMNS):
            rows = part("image_rows").write_rows(rows)

        def generate(prompt_ids: list[list[int]], episodes: Episodes | None) -> Any:
            options = {"dialogue": episodes, "limits": limits, "on_progress": on_progress}
            given = {name: value for name, value in options.items() if value is not None}  # mostly none, as in TRL
            return self.trainer._generate_single_turn(prompt_ids, None, given)

        return complete(
            rows,
            generate,
            self.trainer._tokenizer,
            end_ids=self.end_ids,
            think_end_id=self.trainer.think_tags.end_id,
            tools=self.tools,
            tokenize=lambda prompts: self.trainer._tokenize_prompts(prompts)[0],
        )

    def draw(
        self,
        prompt_ids: list[list[int]],
        *,
        dialogue: Episodes | None = None,
        limits: Limits | None = None,
        on_progress: Progress | None = None,
    ) -> Rollout:
        """Completions of prompts in ids, from the engine.

        If not all rows fit at once, prompts with long completions so far start first, which shortens the tail."""
        waits = self.engine.rows is not None and self.engine.rows < len(prompt_ids)
        keys = [hash(tuple(ids)) for ids in prompt_ids]
        usual = sum(self._lengths.values()) / max(len(self._lengths), 1)
        expected = [self._lengths.get(key, usual) for key in keys] if waits else None
        with ExitStack() as stack:
            if self.engine.name not in FOREIGN:  # those have their own base and precision
                stack.enter_context(self.parallel.whole_weights(self.trainer.model_wrapped))
                stack.enter_context(self.parallel.accelerator.autocast())
            rollout = self.engine.sample(
                prompt_ids, limits or self.limits, expected, on_progress=on_progress, dialogue=dialogue
            )
        for key, ids in zip(keys, rollout, strict=True):
            self._lengths[key] = (self._lengths.get(key, len(ids)) + len(ids)) / 2
        return rollout

    def watch(self, completions: list[Completion]) -> None:
        """Report tools that failed in a training rollout.

        Raises ToolError if more calls failed than `max_reward_failure_share` in too many rollouts in a row; a
        checkpoint is saved first."""
        episodes = list_episodes(completions)
        kinds = self.parallel.gather_list([kind for episode in episodes for _, kind in episode.calls])
        share = kinds.count("failed") / max(1, len(kinds))
        messages = list(dict.fromkeys(text for episode in episodes for text in episode.failures))[:3]
        how = f"{share:.0%} of this rollout's calls failed; the model gets the error"
        lines = [f"tool {message} ({how})" for message in messages]
        reason, what = " | ".join(messages) or "in another process", f"{share:.0%} of the tools' calls failed"
        watch_failures(self.trainer, self.failures, share, reason, lines, ToolError, what, "tool")


class Rewarder:
    """Scores completions: rewards, their weighted sum, penalties, normalisation, and failing rewards.

    `has_budget`: rewards get the column `thinking_forced`; `toolbox`: has the environments that rewards may look into.
    """

    def __init__(self, trainer: Any, parallel: Parallel, has_budget: bool = False, toolbox: Tools | None = None):
        self.trainer, self.parallel, self.has_budget, self.toolbox = trainer, parallel, has_budget, toolbox
        pairs = zip(trainer.reward_funcs, trainer.reward_processing_classes, strict=True)
        self.rewards = [
            reward if isinstance(reward, GuardedReward) else GuardedReward(ModuleReward(trainer, reward, tokenizer))
            for reward, tokenizer in pairs
        ]
        self.missing_eos_penalty = trainer.args.missing_eos_penalty
        self.failures = FailureCount()

    def reward(self, completions: list[Completion]) -> Judged:
        """Rewards and scores; a completion with any failed reward is not scored."""
        trainer = self.trainer
        columns = make_columns(completions, self.has_budget, self.toolbox)
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):  # a reward may seed
            scored = score(
                self.rewards,
                columns,
                trainer_state=trainer.state,
                log_extra=trainer._log_completion_extra,
                log_metric=trainer._log_metric,
            )
        failures = [message for reward in scored for message in reward.failures[:1]]
        device = self.parallel.accelerator.device
        values = [[math.nan if value is None else value for value in reward.values] for reward in scored]
        rewards = self.parallel.gather(torch.tensor(values, dtype=torch.float32, device=device).T)  # (A, F)
        failed = self.parallel.gather(torch.tensor([reward.failed for reward in scored], device=device).T)
        rewards = rewards.masked_fill(failed.any(dim=1, keepdim=True), torch.nan)
        weights = trainer.reward_weights.to(device)
        raw_scores = combine_rewards(rewards, weights)  # (A,)
        over = ~raw_scores.isfinite() & ~rewards[:, weights != 0].isnan().all(dim=1)
        if over.any():
            failures += overflowing(rewards.tolist(), weights.tolist(), trainer.reward_func_names)[:1]
            failed, rewards = failed | over[:, None], rewards.masked_fill(over[:, None], torch.nan)
        raw_scores = scores = raw_scores.masked_fill(failed.any(dim=1), torch.nan)
        if self.missing_eos_penalty is not None:
            cut = torch.tensor([not completion.ended for completion in completions], device=device)
            scores = raw_scores - self.missing_eos_penalty * self.parallel.gather(cut).float()
        return Judged(completions, rewards, failed, raw_scores, scores, failures)

    def normalize(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores (A,) after `normalize_rewards` and `reward_clip_range`."""
        if self.trainer.args.normalize_rewards:
            scores = standardize(scores, eps=1e-8)
        clip = self.trainer.reward_clip_range
        return scores.clamp(*clip) if clip else scores

    def watch(self, share: float, failures: list[str]) -> None:
        """Report rewards that failed in a training rollout, for a `share` (0 to 1) of all processes' samples.

        Raises RewardError if too many failed in too many rollouts in a row; a checkpoint is saved first."""
        if share and not failures:
            failures = ["a reward failed in another process"]
        lines = [f"{message} ({share:.0%} of the samples of this rollout are not scored)" for message in failures]
        reason, what = " | ".join(failures), f"rewards failed for {share:.0%} of the samples"
        watch_failures(self.trainer, self.failures, share, reason, lines, RewardError, what, "reward")


class ModuleReward:
    """A sequence-classification model among TRL's `reward_funcs` as a reward: one score of prompt and completion."""

    def __init__(self, trainer: Any, model: torch.nn.Module, tokenizer: Any) -> None:
        self.trainer, self.model, self.tokenizer = trainer, model, tokenizer
        self.__name__ = reward_name(model)

    def __call__(self, prompts: list[Any], completions: list[Any]) -> list[float]:
        texts = [
            prompt + completion
            if isinstance(prompt, str)
            else apply_chat_template(
                {"messages": prompt + completion}, self.tokenizer, **self.trainer.chat_template_kwargs
            )["text"]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        inputs = self.tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        with torch.inference_mode():
            logits = self.model(**inputs.to(self.trainer.accelerator.device)).logits  # (B, 1)
        return list(logits[:, 0].tolist())


class FailureCount:
    """Counts steps with a NaN, or rollouts with failed rewards; too many in a row end the run.

    Attributes:
        patience: failures in a row that end the run. total: all failures. reason: of the last one.

    >>> count = FailureCount()
    >>> [count.add(reason) for reason in ("the KL", None, "the KL", "the KL", "the gradient")]
    [True, False, True, False, True]
    >>> count.exceeded, count.total, count.reason
    (True, 4, 'the gradient')
    """

    patience = 3  # one or two may be a service that restarts, or an outlier

    def __init__(self) -> None:
        self.total, self.in_a_row, self.reason = 0, 0, ""
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
    sample: Callable[[list[dict[str, Any]]], Judged],
    reservoir: "PromptReservoir",
    rounds: int,
    group_size: int,
    parallel: Parallel,
) -> tuple[Judged, int]:
    """Dynamic sampling (DAPO, section 3.2): groups without a signal, because all scores are equal or fewer than two
    completions are scored, give way to groups of fresh prompts that have one. The batch keeps its size; groups that are
    still tied after so many rounds of drawing stay. Returns the batch, and the number of groups that were replaced.
    """
    mine, processes, replaced = parallel.rows(len(judged.completions)), parallel.accelerator.num_processes, 0
    for _ in range(rounds):
        tied = tied_groups(judged.scores, group_size).nonzero().flatten().tolist()
        if not tied:
            break
        count = math.ceil(len(tied) / processes) * processes  # every process draws the same, and samples its share
        drawn = reservoir.draw(count, parallel.gather_list([done.prompt for done in judged.completions]))
        share = drawn[parallel.rows(len(drawn) // processes)]
        if not share:
            break
        fresh = sample([row for row in share for _ in range(group_size)])
        useful = (~tied_groups(fresh.scores, group_size)).nonzero().flatten().tolist()
        size, pairs = len(judged.scores), list(zip(tied, useful, strict=False))
        order = torch.arange(size, device=judged.scores.device)  # of the batch, with the rows of `fresh` behind them
        for out, into in pairs:
            first = size + into * group_size
            order[out * group_size : (out + 1) * group_size] = torch.arange(first, first + group_size)
        completions = [*parallel.gather_list(judged.completions), *parallel.gather_list(fresh.completions)]

        def exchange(name: str, now: Judged = judged, other: Judged = fresh, order: torch.Tensor = order) -> Any:
            old, new = getattr(now, name), getattr(other, name)
            return torch.cat([old, new.to(old)])[order]

        judged = Judged(
            [completions[row] for row in order.tolist()[mine]],
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
