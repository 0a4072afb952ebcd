"""Metrics of a rollout and of a step by name, the rows of `rollouts/`, and the recorder that logs them.

Names are TRL's where TRL has one (`kl`, `entropy`, `clip_ratio/*`), those of its older trainer for `objective/*`,
`policy/*`, `val/*`, `eps`, `lr` and `episode`, and the kit's own for `thinking/*`; docs/metrics.md explains each.

Shapes: B completions of this process, A of all processes, F reward functions.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rloo_kit.completion import Completion, list_episodes, measure_calls
from rloo_kit.data.answers import GYM_REWARD, REWARDS_WITH_ANSWERS, ROW_REWARDS, task_of
from rloo_kit.gradient.advantages import AdvantageSettings, kl_charge, scale_by_group, tied_groups
from rloo_kit.gradient.objective import sum_rows
from rloo_kit.loop.records import Judged, RolloutBatch, StepStats, pick
from rloo_kit.models.parallel import Parallel
from rloo_kit.think_tags import ThinkTags, answer_offset, span_offsets

# The columns of `Recorder._describe`, one row of numbers for each completion.
COLUMNS = (
    "tokens", "eos_tokens", "thinks", "closed", "thinking_tokens", "forced", "repeated", "print", "kl", "kl_tokens",
    "penalty",
)  # fmt: skip
OLD_NAMES = {  # of TRL's older trainer, for numbers that are logged under today's name too
    "policy/entropy_avg": "entropy",
    "policy/clipfrac_avg": "clip_ratio/region_mean",
    "lr": "learning_rate",
}
REPEATED_TOKENS = 8  # length of the token runs that are counted as repeated within a completion


class Recorder:
    """Writes a step's metrics to the log of TRL's trainer, which averages them, and calls the listeners.

    Attributes:
        listeners: called once a generation batch with one dict for each completion of this process.
        episodes: completions so far, of all processes.
        seconds: of this process since the last log, by part of a step.
    """

    def __init__(
        self, trainer: Any, parallel: Parallel, tags: ThinkTags, settings: AdvantageSettings, has_budget: bool
    ):
        self.trainer, self.parallel, self.settings = trainer, parallel, settings
        self.tags, self.end_ids, self.has_budget = tags, set(trainer.eos_token_ids), has_budget
        self.listeners: list[Callable[[list[dict[str, Any]]], None]] = []
        self.episodes = 0
        self._drawn = self._decoded = 0  # tokens and token steps since the last log
        self.seconds = {"rollout": 0.0, "reward": 0.0, "gradient": 0.0}
        self._begun: tuple[float, int] | None = None  # start time, and episodes before it (resumed run)

    @property
    def _is_training(self) -> bool:
        return bool(self.trainer.model.training)

    @property
    def _metrics(self) -> Any:
        return self.trainer._metrics["train" if self._is_training else "eval"]

    def begin(self) -> None:
        """Start the clock of completions per second at the first rollout."""
        if self._begun is None:
            self._begun = time.monotonic(), self.episodes

    def leave_out(self, seconds: float) -> None:
        """Exclude the last `seconds`, which an evaluation took, from completions per second."""
        self.seconds["evaluation"] = self.seconds.get("evaluation", 0.0) + seconds
        if self._begun is not None:
            self._begun = self._begun[0] + seconds, self._begun[1]

    def count(self, name: str, value: float) -> None:
        """Record one number of a step."""
        self._metrics[name].append(float(value))

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count a block's seconds as a part of the step, in training."""
        started = time.monotonic()
        yield
        if self._is_training:
            self.seconds[part] += time.monotonic() - started

    # ------------------------------------------------------------------------------------------------ a rollout

    def sampled(self, completions: list[Completion], token_steps: int) -> None:
        """TRL's metrics of lengths, over all processes; in training also the tokens drawn and the engine's steps."""
        device, metrics = self.parallel.accelerator.device, self._metrics
        columns = [[len(done.prompt_ids), len(done.ids), done.tokens, done.ended] for done in completions]
        prompts, whole, tokens, ended = self.parallel.gather(torch.tensor(columns, device=device)).T  # (A,) each
        state = self.trainer.state
        if self._is_training:
            state.num_input_tokens_seen += (prompts.sum() + whole.sum()).item()
            forced = sum(end - start for completion in completions for start, end in completion.forced)
            self._drawn += sum(completion.tokens for completion in completions) - forced
            self._decoded += token_steps
        metrics["num_tokens"] = [state.num_input_tokens_seen]
        finished = tokens[ended.bool()] if ended.any() else tokens.new_zeros(1)
        for kind, lengths in (("", tokens.float()), ("terminated_", finished.float())):
            for name in ("mean", "min", "max"):
                metrics[f"completions/{name}_{kind}length"].append(getattr(lengths, name)().item())
        metrics["completions/clipped_ratio"].append((1 - ended).float().mean().item())

    def rollout(self, batch: RolloutBatch) -> None:
        """Metrics, TRL's table of completions, and the rows for the listeners."""
        described = self._describe(batch)
        everywhere = self.parallel.gather(described)  # (A, columns)
        for name, value in self._measure(batch, everywhere).items():
            # an evaluation's last batch may be smaller: a value for each completion
            self._metrics[name] += [value] * (1 if self._is_training else len(everywhere))
        self._fill_table(batch)
        if self._is_training:
            self.episodes += len(everywhere)
            rows = self._make_rows(batch, described) if self.listeners else []
            for listener in self.listeners:
                listener(rows)

    def _describe(self, batch: RolloutBatch) -> torch.Tensor:
        """One row of numbers per completion, (B, len(COLUMNS)) float32; `penalty` is the KL charge before beta."""
        tags, columns = self.tags, []
        for completion in batch.judged.completions:
            written = [token for turn in completion.turns for token in turn]
            opened = tags.start_id is not None and (
                tags.start_id in completion.prompt_ids[-3:]  # templates may end in "<think>\n"
                or tags.start_id in written
            )
            columns.append([
                len(written),
                sum(token in self.end_ids for token in written),
                completion.closed or (tags.end_id is not None and opened),
                completion.closed,
                completion.thinking_tokens,
                bool(completion.forced),
                repeated_share(written),
                hash(tuple(completion.ids)) % 2**24,  # exact in float32; the same in every process
            ])  # fmt: skip
        rows = torch.tensor(columns, dtype=torch.float32, device=batch.scores.device)
        kl, mask, lengths = pick(batch.kl), pick(batch.mask), batch.lengths
        penalty = kl_charge(kl, mask, lengths, self.settings.kl_form)
        charged = [sum_rows(kl, lengths), sum_rows(mask.float(), lengths), penalty]
        return torch.cat([rows, torch.stack([column.float() for column in charged], dim=1)], dim=1)

    def _measure(self, batch: RolloutBatch, described: torch.Tensor) -> dict[str, float]:
        """Metrics by name of one generation batch, over all processes; `described` is (A, len(COLUMNS))."""
        column = dict(zip(COLUMNS, described.T, strict=True))
        judged, rewards, scores = batch.judged, batch.advantages.rewards, batch.scores
        names, metrics = self.trainer.reward_func_names, {}
        for index, name in enumerate(names):
            metrics[f"rewards/{name}/mean"] = mean(judged.rewards_per_func[:, index])
            metrics[f"rewards/{name}/std"] = std(judged.rewards_per_func[:, index])
        metrics |= {
            "reward": mean(judged.raw_scores),
            "reward_std": std(judged.raw_scores),
            "frac_reward_zero_std": tied_groups(rewards, batch.group_size).float().mean().item(),
            # before the KL penalty, which by itself makes the rewards of a group differ
            "frac_score_zero_std": tied_groups(scores, batch.group_size).float().mean().item(),
            "rewards/unscored_ratio": judged.raw_scores.isnan().float().mean().item(),
            "objective/scores": mean(scores),
            "objective/rlhf_reward": mean(rewards),
            "objective/non_score_reward": mean(rewards - scores),
            "val/num_eos_tokens": column["eos_tokens"].sum().item(),
            "completions/repeated_ratio": column["repeated"].mean().item(),
        }
        if len(described) > batch.group_size:  # if there is one prompt and it is solved, all completions may be equal
            most = column["print"].unique(return_counts=True)[1].max().item()
            metrics["completions/most_common_ratio"] = most / len(described)
        if (beta := self.settings.beta) != 0.0:
            if self.settings.scale_rewards == "group":  # the scale the penalty is compared with
                scores = scale_by_group(scores, scores, batch.group_size)
            metrics["kl"] = (column["kl"].sum() / column["kl_tokens"].sum().clamp(min=1)).item()
            metrics["objective/kl"] = column["kl"].mean().item()
            metrics["kl/share_of_reward"] = kl_share(column["penalty"], scores, beta)
            if (ratio := kl_spread_ratio(column["penalty"], scores, beta, batch.group_size)) is not None:
                metrics["kl/spread_ratio"] = ratio
        thinks = column["thinks"].bool()
        if thinks.any():
            metrics["thinking/mean_length"] = column["thinking_tokens"][thinks].mean().item()
            metrics["thinking/closed_ratio"] = (column["closed"] * (1 - column["forced"]))[thinks].mean().item()
        if self.has_budget:
            metrics |= thinking_metrics(column["forced"], find_answer_column(judged.rewards_per_func, names))
        return metrics | self._measure_tasks(judged) | self._measure_tools(judged.completions)

    def _measure_tasks(self, judged: Judged) -> dict[str, float]:
        """The weighted sum and the share of the completions by task; none if the rows do not name their rewards."""
        if ROW_REWARDS not in judged.completions[0].row:
            return {}
        tasks = self.parallel.gather_list([task_of(completion.row) for completion in judged.completions])
        metrics = {}
        for name in sorted({task for task in tasks if task is not None}):
            is_task = torch.tensor([task == name for task in tasks], device=judged.raw_scores.device)
            metrics[f"tasks/{name}/reward"] = mean(judged.raw_scores[is_task])
            metrics[f"tasks/{name}/share"] = is_task.float().mean().item()
        return metrics

    def _measure_tools(self, completions: list[Completion]) -> dict[str, float]:
        """Metrics of the tools in one generation batch, over all processes; none in a run without tools."""
        episodes = list_episodes(completions)
        if not episodes:
            return {}
        gather_list = self.parallel.gather_list
        calls = gather_list([call for episode in episodes for call in episode.calls])
        turns = gather_list([len(completion.turns) for completion in completions])
        results = gather_list([len(completion.ids) - completion.tokens for completion in completions])
        cut = gather_list([episode.cut is not None for episode in episodes])
        metrics = {f"tools/{name}": value for name, value in measure_calls(calls, turns).items()}
        metrics["tools/result_tokens"] = sum(results) / len(results)
        metrics["tools/cut_ratio"] = sum(cut) / len(cut)
        for name in sorted({name for name, kind in calls if kind != "invalid"}):
            kinds = [kind for called, kind in calls if called == name]
            metrics[f"tools/{name}/call_frequency"] = len(kinds) / len(turns)
            metrics[f"tools/{name}/failure_frequency"] = kinds.count("failed") / len(kinds)
        return metrics

    def _make_rows(self, batch: RolloutBatch, described: torch.Tensor) -> list[dict[str, Any]]:
        """One plain dict per completion of this process; unscored values are None.

        `step`: optimizer steps done before. `group`: of the prompts of the step, from 1. `answer_start` and
        `forced_chars` are offsets into the text, so that a reader needs no tokenizer."""
        rows, tokenizer = [], self.trainer.processing_class
        for index, (completion, numbers) in enumerate(zip(batch.judged.completions, described.tolist(), strict=True)):
            column = dict(zip(COLUMNS, numbers, strict=True))
            among_all = batch.first + index
            values = batch.judged.rewards_per_func[among_all].tolist()
            rewards = zip(self.trainer.reward_func_names, values, strict=True)
            text, episode = completion.text, completion.episode
            plain = text if isinstance(text, str) else str(text[-1]["content"])  # a message, if the prompt is one
            ids = completion.turns[-1]
            first = len(completion.ids) - len(ids)
            spans = [(start - first, end - first) for start, end in completion.forced if start >= first]
            turns: dict[str, Any] = {}
            if episode is not None:
                turns = {"turns": episode.messages, "tool_calls": len(episode.calls)}
                turns |= {"tool_failures": episode.count("failed"), "cut_by": episode.cut}
            rows.append(
                {
                    "step": self.trainer.state.global_step,
                    "group": among_all // batch.group_size + 1,
                    "prompt": completion.prompt,
                    "completion": text,
                    "completion_ids": completion.ids,
                    "answer_start": answer_offset(plain, ids, tokenizer, self.tags),
                    "prompt_tokens": len(completion.prompt_ids),
                    "completion_tokens": completion.tokens,
                    "thinking_tokens": completion.thinking_tokens if completion.closed else None,
                    "closed": completion.closed,
                    "truncated": not completion.ended,
                    "forced": bool(completion.forced),
                    **({"forced_chars": span_offsets(spans[0], ids, tokenizer)} if spans else {}),
                    **turns,
                    "kl": column["kl"],
                    "rewards": {name: _or_none(value) for name, value in rewards},
                    "reward": _or_none(batch.judged.raw_scores[among_all].item()),
                    "advantage": batch.advantages.per_row[among_all].item(),
                    "columns": {name: value for name, value in completion.row.items() if name != "prompt"},
                }
            )
        return rows

    def _fill_table(self, batch: RolloutBatch) -> None:
        """Fill TRL's table of completions and flush what rewards logged, in the same order on all processes."""
        trainer, completions, gather_list = self.trainer, batch.judged.completions, self.parallel.gather_list
        logs = trainer._logs
        logs["prompt"].extend(gather_list([completion.prompt for completion in completions]))
        logs["completion"].extend(gather_list([completion.text for completion in completions]))
        for index, name in enumerate(trainer.reward_func_names):
            logs["rewards"][name].extend(batch.judged.rewards_per_func[:, index].tolist())
        logs["advantages"].extend(batch.advantages.per_row.tolist())
        for column in sorted(set(gather_list(list(trainer._pending_extra_logs)))):
            mine = trainer._pending_extra_logs.get(column, [None] * len(completions))
            logs["extra"][column].extend(gather_list(mine))
        trainer._pending_extra_logs.clear()
        for name in sorted(set(gather_list(list(trainer._pending_metrics)))):
            values = gather_list(trainer._pending_metrics.get(name, []))
            self.count(name, sum(values) / len(values))
        trainer._pending_metrics.clear()

    # ------------------------------------------------------------------------------------------------ a step

    def step(self, stats: StepStats, on_policy: bool) -> None:
        """Record one step, over all processes. `on_policy`: a ratio that was not computed is 1 by definition."""
        accelerator = self.parallel.accelerator
        per_row = accelerator.pad_across_processes(stats.per_row[stats.rows], dim=0, pad_index=torch.nan)
        sums = [stats.policy_loss, stats.entropy, stats.approx_kl, stats.gap[:2], stats.weight, stats.aux_loss]
        loss, *pairs = accelerator.reduce(torch.cat(sums), reduction="sum").tolist()
        entropy, tokens, approx_kl, compared, gap, gap_tokens, weight, weight_tokens, aux, balanced = pairs
        largest_gap, rows = self.parallel.gather(stats.gap[2:]).max().item(), self.parallel.gather(per_row)
        computed, surprise = rows[~rows[:, 0].isnan()], rows[~rows[:, -1].isnan(), -1]
        metrics = {"rollout/skipped_rows_ratio": 1 - len(computed) / max(len(rows), 1)}
        metrics["loss/policy_avg"] = loss / max(len(rows), 1)
        if on_policy and not len(computed):
            computed = rows.new_tensor([[1.0, 0.0, 0.0, 0.0]])
        if len(computed):
            ratios, lows, highs, _ = computed.unbind(dim=1)
            metrics |= {
                "clip_ratio/low_mean": lows.mean().item(),
                "clip_ratio/low_min": lows.min().item(),
                "clip_ratio/high_mean": highs.mean().item(),
                "clip_ratio/high_max": highs.max().item(),
                "clip_ratio/region_mean": (lows + highs).mean().item(),
                "policy/approxkl_avg": approx_kl / max(compared, 1),
                "val/ratio": ratios.mean().item(),
                "val/ratio_var": ratios.var(unbiased=False).item(),
            }
        if tokens:
            metrics |= {"entropy": entropy / tokens, "objective/entropy": surprise.mean().item()}
        if gap_tokens:
            metrics["sampling/logp_difference_mean"] = gap / gap_tokens
            metrics["sampling/logp_difference_max"] = largest_gap
        if weight_tokens:
            metrics["sampling/importance_weight_mean"] = weight / weight_tokens
        if balanced:
            metrics["aux_loss"] = aux / balanced
        for name, value in metrics.items():
            self._metrics[name].append(value)

    def log(self, logs: dict[str, float]) -> dict[str, float]:
        """TRL's logs, without the non-finite gradient norm of a skipped step, plus times, episodes and older names."""
        if self._is_training and self._begun is not None and self._metrics:
            elapsed = max(time.monotonic() - self._begun[0], 1e-9)
            self._metrics["eps"] = [(self.episodes - self._begun[1]) / elapsed]
            self._metrics["episode"] = [float(self.episodes)]
            if steps := len(self._metrics.get("steps/skipped", ())):  # since the last log
                for part, seconds in self.seconds.items():
                    self._metrics[f"time/{part}_s"] = [seconds / steps]
                if self._decoded:
                    self._metrics["time/decode_ms_per_token_step"] = [1000 * self.seconds["rollout"] / self._decoded]
                if self.seconds["rollout"]:
                    self._metrics["time/tokens_per_s"] = [self._drawn / self.seconds["rollout"]]
                self.seconds, self._drawn, self._decoded = dict.fromkeys(self.seconds, 0.0), 0, 0
        norm = logs.get("grad_norm")
        if norm is not None and not torch.isfinite(torch.as_tensor(norm)):
            logs = {name: value for name, value in logs.items() if name != "grad_norm"}
        for old, today in OLD_NAMES.items():
            if today in self._metrics:
                self._metrics[old] = self._metrics[today]
            elif today in logs:
                logs = logs | {old: logs[today]}
        return logs


# ------------------------------------------------------------------------------------------------ single metrics


def mean(values: torch.Tensor) -> float:
    """Mean over the entries that are not NaN; NaN if there is none (TRL's `log` leaves NaN out)."""
    return values.nanmean().item()


def std(values: torch.Tensor) -> float:
    """Sample standard deviation over the entries that are not NaN; 0 for a single one, NaN for none."""
    present = values[~values.isnan()]
    if present.numel() == 0:
        return float("nan")
    return present.std().item() if present.numel() > 1 else 0.0


def repeated_share(ids: Sequence[int]) -> float:
    """Share of a completion's runs of REPEATED_TOKENS tokens that occurred in it before; 0 for a shorter one.

    >>> repeated_share(range(50)), repeated_share([1, 2] * 25)
    (0.0, 0.9534883720930233)
    """
    runs = len(ids) - REPEATED_TOKENS + 1
    if runs < 1:
        return 0.0
    shifted = (ids[first : first + runs] for first in range(REPEATED_TOKENS))
    return 1 - len(set(zip(*shifted, strict=True))) / runs


def _or_none(value: float) -> float | None:
    return None if value != value else value


def kl_share(penalty: torch.Tensor, scores: torch.Tensor, beta: float) -> float:
    """`kl/share_of_reward`: mean |beta * penalty| over itself plus mean |score|, 0 to 1.

    >>> kl_share(torch.tensor([2.0, -2.0]), torch.tensor([1.0, 0.0]), beta=0.25)
    0.5

    `penalty`: (A,), `advantages.kl_charge`. `scores`: (A,), what is subtracted from; NaN leaves a sample out. 0 where
    both are 0, NaN where nothing is scored.
    """
    scored = ~scores.isnan()
    if not scored.any():
        return float("nan")
    charged, earned = (beta * penalty[scored]).abs().mean().item(), scores[scored].abs().mean().item()
    return charged / (charged + earned) if charged + earned != 0 else 0.0


def kl_spread_ratio(penalty: torch.Tensor, scores: torch.Tensor, beta: float, num_generations: int) -> float | None:
    """`kl/spread_ratio`: how much beta * penalty differs within a group, over how much the scores do.

    >>> penalty, scores = torch.tensor([1.0, 3.0, 5.0, 5.0]), torch.tensor([0.0, 1.0, 1.0, 1.0])
    >>> kl_spread_ratio(penalty, scores, beta=1.0, num_generations=2)
    2.0

    The mean standard deviation of a group's penalties over that of its scores, for groups with two scored samples.
    Infinity where penalties differ and scores do not; None where neither differs or nothing is compared.
    """
    grouped, charges = scores.view(-1, num_generations), (beta * penalty).view(-1, num_generations)
    spreads = [
        (charge[kept].std().item(), score[kept].std().item())
        for score, charge in zip(grouped, charges, strict=True)
        if (kept := ~score.isnan()).sum() >= 2
    ]
    of_penalty, of_scores = (sum(spread[part] for spread in spreads) for part in (0, 1))
    if of_scores == 0:
        return float("inf") if of_penalty > 0 else None
    return of_penalty / of_scores


def find_answer_column(rewards_per_func: torch.Tensor, names: list[str]) -> torch.Tensor | None:
    """The answer reward's values, (A,), or None if the run has no such reward; the verifier's if it has both.

    `rewards_per_func`: (A, F), unweighted, NaN where a reward does not apply; `names`: of the F reward functions.
    """
    index = next((index for index, name in enumerate(names) if name in REWARDS_WITH_ANSWERS), None)
    by_text = None if index is None else rewards_per_func[:, index]
    if GYM_REWARD not in names:
        return by_text
    by_verifier = rewards_per_func[:, names.index(GYM_REWARD)]
    return by_verifier if by_text is None else torch.where(by_verifier.isnan(), by_text, by_verifier)


def thinking_metrics(forced: torch.Tensor, answers: torch.Tensor | None) -> dict[str, float]:
    """`thinking/forced_ratio`; with answers also `thinking/forced_accuracy` and `thinking/unforced_accuracy`.

    `forced`: (A,) bool, whether the budget closed the thinking; `answers`: (A,), from `find_answer_column`, NaN where
    it does not apply. An accuracy over no completions at all is NaN, which TRL's log leaves out.

    >>> thinking_metrics(torch.tensor([True, False, False, False]), torch.tensor([0.0, 1.0, 1.0, float("nan")]))
    {'thinking/forced_ratio': 0.25, 'thinking/forced_accuracy': 0.0, 'thinking/unforced_accuracy': 1.0}
    """
    forced = forced.bool()
    metrics = {"thinking/forced_ratio": forced.float().mean().item()}
    if answers is not None:
        judged, right = ~answers.isnan(), (answers == 1.0).float()
        metrics["thinking/forced_accuracy"] = right[forced & judged].mean().item()
        metrics["thinking/unforced_accuracy"] = right[~forced & judged].mean().item()
    return metrics
