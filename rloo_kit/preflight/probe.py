"""The probe rollout of a preflight: a few groups, sampled and judged as in the run and scored by the trainer, and the
problems that would keep the run from learning."""

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rloo_kit.checks.preflight_result import Measures, RewardFound, Spread
from rloo_kit.completion import Episode, list_episodes, measure_calls
from rloo_kit.config.run import RunConfig
from rloo_kit.data.chat import thinks
from rloo_kit.data.load import Data
from rloo_kit.errors import RlooKitError, shorten
from rloo_kit.gradient.advantages import tied_groups
from rloo_kit.health.series import at_ceiling
from rloo_kit.loop.metrics import find_answer_column
from rloo_kit.loop.records import RolloutBatch, pick
from rloo_kit.loop.trainer import RLOOTrainer
from rloo_kit.models.policy import Policy
from rloo_kit.preflight.trial_steps import Tell, make_trainer
from rloo_kit.results.intervals import clustered
from rloo_kit.results.samples import list_steps
from rloo_kit.rewarding.registry import REGISTRY
from rloo_kit.rewarding.worker import end_workers
from rloo_kit.rollout.types import FOREIGN, Limits
from rloo_kit.system.console import format_seconds
from rloo_kit.system.memory import is_out_of_memory
from rloo_kit.system.problems import Problem
from rloo_kit.think_tags import THINK_START
from rloo_kit.tools.toolbox import tool_schemas

LEAST_GROUPS, LEAST_COMPLETIONS = 4, 32  # of a probe; with fewer, nothing is refused
WIDER = 4  # times as many if few groups have a signal: 32 wrong answers are not rare in a run that learns
TRUNCATED, CLOSED = 0.95, 0.05  # least share cut off, largest share closed: the thinking does not fit
LONG_TOKENS = 4096  # limit of the search for a length that the thinking fits into
ROOM = 1.25  # factor on the longest of a few completions
# Mean gap between sampler and trainer, nats per token. Rounding alone gives about 1e-6 in float32, 0.002 in float16 and
# 0.01 in bfloat16 and 4 bit (docs/metrics.md); ten times that or more means two policies.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
FEW, MANY = 0.25, 0.3  # warning: at most this share of groups with a signal, above this share cut off
NEVER, ALWAYS = 0.05, 0.95  # pass rates near 0 and near 1
SHOWN = 160  # characters of a message in the episode that is shown


@dataclass(frozen=True)
class Probe:
    """A probe rollout: a `batch` of whole groups, seconds of sampling and judging, the names of its rewards."""

    batch: RolloutBatch
    sample_s: float
    judge_s: float
    rewards: list[str]


def run_probe(
    run: RunConfig,
    policy: Policy,
    data: Data,
    rewards: list[Any],
    faults: list[Problem],
    measures: Measures,
    tell: Tell,
) -> Probe | None:
    """The probe rollout, its problems into `faults` and its numbers into `measures`; None if it ran out of memory."""
    try:
        with make_trainer(policy, run, rewards, data.train) as trainer:
            probe = roll_out(trainer, draw_rows(run, data.train), run, tell)
            describe_probe(run, policy, probe, measures)
            wider = draw_rows(run, data.train, WIDER) if is_unsure(probe, measures) else []
            if len(wider) > len(probe.batch):
                expected = format_seconds((probe.sample_s + probe.judge_s) * len(wider) / len(probe.batch))
                tell(f"{measures.signal} of {measures.prompts} groups have a signal; a wider probe, about {expected}")
                probe = roll_out(trainer, wider, run, tell)
                describe_probe(run, policy, probe, measures)
            tell(f"log-probs of {len(probe.batch)} completions, compared with the sampler's")
            measures.logp_gap = measure_gap(trainer, probe)
            faults += find_logp_faults(trainer, measures.logp_gap)
            if is_short(measures):
                tell("thinking is cut off: one completion per prompt at the model's full length shows how long it is")
            faults += find_rollout_faults(run, policy, trainer, probe, measures)
            return probe
    except RuntimeError as error:
        if isinstance(error, RlooKitError) or not is_out_of_memory(error):
            raise
    finally:
        end_workers()  # training starts its own: a reward may count its calls
    faults.append(Problem("memory", "a rollout of a few groups ran out of memory", "set rollout.rows=1"))
    return None


def draw_rows(run: RunConfig, dataset: Any, times: int = 1) -> list[dict[str, Any]]:
    """Rows of the training set for the probe, each repeated K times; `times` multiplies the minimum of groups."""
    generations = run.rloo.num_generations
    groups = min(times * max(LEAST_GROUPS, -(-LEAST_COMPLETIONS // generations)), len(dataset))
    places = random.Random(f"preflight-{run.run.seed}").sample(range(len(dataset)), groups)
    return [row for place in places for row in [dataset[place]] * generations]


def roll_out(trainer: RLOOTrainer, rows: list[dict[str, Any]], run: RunConfig, tell: Tell) -> Probe:
    """Sample completions with the run's engine and judge them with its rewards; `tell` gets lines of progress."""
    step = trainer.rloo
    trainer.model.train()
    tell(f"probe rollout: {len(rows)} completions of at most {step.sampler.limits.max_completion_length} tokens")
    started = told_at = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= run.run.progress_every_s and done < total:
            tell(f"probe rollout: {done} of {total} completions")
            told_at = time.monotonic()

    completions = step.sampler.sample(rows, on_progress=progress)
    sampled = time.monotonic()
    judged = step.rewarder.reward(completions)
    judge_s = time.monotonic() - sampled
    return Probe(step.lay_out(judged, training=True), sampled - started, judge_s, list(trainer.reward_func_names))


def describe_probe(run: RunConfig, policy: Policy, probe: Probe, measures: Measures) -> None:
    """Fill `measures` from the probe: lengths, thinking, rewards, signal, pass rate."""
    batch, judged = probe.batch, probe.batch.judged
    completions, size = judged.completions, probe.batch.group_size
    measures.generations, measures.prompts = size, len(batch) // size
    measures.completion_tokens = Spread.of([completion.tokens for completion in completions])
    measures.truncated = sum(not completion.ended for completion in completions) / len(batch)
    end_id = policy.tags.end_id
    if thinks(policy.family, run.model.enable_thinking) and end_id is not None:
        closed = [end_id in completion.ids and not completion.forced for completion in completions]
        measures.closed, measures.think_end_id = sum(closed) / len(closed), end_id
        measures.forced = sum(bool(completion.forced) for completion in completions) / len(closed)
        measures.thinking_tokens = Spread.of([completion.thinking_tokens for completion in completions])
    if played := list_episodes(completions):
        calls = [call for episode in played for call in episode.calls]
        measures.episodes = measure_calls(calls, [len(completion.turns) for completion in completions])
        shown = max(played, key=lambda episode: (bool(episode.calls), episode.cut is None)).messages
        measures.episode = [f"{kind}: {_one_line(text)}" for kind, text in list_steps([*shown, {}])]
    for column, name in enumerate(probe.rewards):
        rewards = judged.rewards_per_func[:, column]
        differs = int((~tied_groups(rewards, size)).sum())
        measures.rewards[name] = RewardFound(rewards.nanmean().item(), differs, int(judged.failed[:, column].sum()))
    is_trained = torch.tensor([bool(mask.any()) for mask in batch.mask], device=batch.scores.device)
    measures.signal = int((~tied_groups(batch.scores, size) & is_trained.view(-1, size).any(dim=1)).sum())
    answers = find_answer_column(judged.rewards_per_func, probe.rewards)
    if answers is not None:
        shares = (answers == 1.0).view(-1, size).float().mean(dim=1).tolist()
        measures.pass_rate, measures.pass_low, measures.pass_high = clustered(shares, size).ends


def is_unsure(probe: Probe, measures: Measures) -> bool:
    """Whether few groups have a signal, or no answer is right, by chance: not if all are cut off or unscored."""
    assert measures.signal is not None and measures.prompts is not None
    few = measures.signal <= FEW * measures.prompts or measures.pass_rate == 0.0
    return few and not is_short(measures) and not bool(probe.batch.scores.isnan().all())


def is_short(measures: Measures) -> bool:
    """Whether the model's thinking does not fit into a completion."""
    assert measures.truncated is not None
    return measures.closed is not None and measures.truncated >= TRUNCATED and measures.closed <= CLOSED


# ------------------------------------------------------------------------------------------------ faults of the rollout


def find_rollout_faults(
    run: RunConfig, policy: Policy, trainer: RLOOTrainer, probe: Probe, measures: Measures
) -> Iterator[Problem]:
    """Problems of the completions and their rewards; errors only for what few completions cannot show by chance."""
    count, failed = len(probe.batch), probe.batch.judged.failed.any(dim=1).float().mean().item()
    if failed:
        limit = run.run.max_reward_failure_share
        found = f"rewards failed for {failed:.0%} of {count} completions"
        fix = f"fix the reward. A failure: {' | '.join(probe.batch.judged.failures) or 'infinity'}"
        level = "error" if failed > limit else "warning"
        yield Problem("rewards", found, fix, f"run.max_reward_failure_share={limit:g}", level)
    completions, end_id = probe.batch.judged.completions, policy.tags.end_id
    closed = sum(end_id in completion.ids for completion in completions) / count
    if policy.family == "instruct" and closed > CLOSED:
        found = f"{closed:.0%} of {count} completions close a thought, and the family is instruct"
        yield Problem("rollout", found, "set model.family: thinking", level="warning")
    if played := list_episodes(completions):
        yield from _find_call_faults(run, played, bool(tool_schemas(run)))
    assert measures.truncated is not None and measures.signal is not None and measures.prompts is not None
    few = measures.signal <= FEW * measures.prompts and failed < 1
    # Of a probe without a signal: too few completions do not rule out chance.
    level = "error" if measures.prompts >= LEAST_GROUPS and count >= LEAST_COMPLETIONS else "warning"
    if few and is_short(measures):
        yield Problem("rollout", _explain_short(run, policy, trainer, probe, measures), level=level)
        return
    if few and measures.signal == 0:
        yield _find_silence(run, probe, measures, level)
        return
    if measures.truncated > MANY and run.rloo.thinking_budget is None:
        found = f"{measures.truncated:.0%} of {count} completions are cut off"
        fix = f"set {_longer(run, 2 * run.rloo.max_completion_length)}"
        fix += f", or raise rloo.max_turns ({run.rloo.max_turns})" if played else ""
        yield Problem("rollout", found, fix, level="warning")
    if form := find_form_fault(run, measures):
        yield form
    elif few:
        usual = "rollout.difficulty_samples=8 skips prompts that are always or never solved"
        fix = _advise(measures.pass_rate) or usual
        rate = "" if measures.pass_rate is None else f" (pass rate {measures.pass_rate:.2f})"
        found = f"{measures.signal} of {measures.prompts} groups have a signal; in the others all completions earn the "
        yield Problem("rollout", f"{found}same reward{rate}", fix, level="warning")


def _advise(rate: float | None) -> str:
    """What to change if almost nothing or almost everything is solved; empty in between."""
    if rate is None or NEVER < rate < ALWAYS:
        return ""
    easier = "take easier prompts (data.source), train on demonstrations first (rloo-kit sft)"
    return f"{easier}, or add a graded reward to rewards" if rate <= NEVER else "take harder prompts (data.source)"


def find_form_fault(run: RunConfig, measures: Measures) -> Problem | None:
    """A warning where no answer is right, and the only rewards that differ do not depend on the task."""
    found = {name: one for name, one in measures.rewards.items() if run.reward_weights.get(name, 1)}
    blind = {name for name, one in REGISTRY.items() if "answer" not in getattr(one, "needs", ("answer",))}
    paid, own = ([name for name in found if found[name].differs and name not in left] for left in ((), blind))
    others = [one.mean for name, one in found.items() if not one.differs and name not in blind]
    is_wrong = measures.pass_rate == 0.0
    if measures.pass_rate is None:  # the user's own rewards judge
        is_wrong = not own and bool(others) and not any(others)
    if not paid or not is_wrong or REGISTRY.keys() & own:
        return None
    unless = f", unless {' and '.join(own)} grades how nearly right it is" if own else ""
    text = f"no answer is right, and {' and '.join(paid)} alone gives different rewards: the run would learn form, not "
    return Problem("rewards", f"{text}the task{unless}", _advise(0.0), level="warning")


def _find_silence(run: RunConfig, probe: Probe, measures: Measures, level: str) -> Problem:
    """Why no group has a signal."""
    count, rate = len(probe.batch), measures.pass_rate
    name, fix = "rollout", _advise(rate)
    columns = zip(probe.rewards, probe.batch.judged.rewards_per_func.T.tolist(), strict=True)
    earned = {reward: [value for value in values if value == value] for reward, values in columns}
    if probe.batch.scores.isnan().all():
        name, why, fix = "rewards", f"no reward scored any of {count} completions", "fix rewards"
    elif rate == 0.0:
        why = f"0 of {count} answers are correct"
    elif rate == 1.0:
        why = f"all of {count} answers are correct"
    elif rate is None and at_ceiling(run.reward_weights, earned):
        why, fix = f"the rewards of {count} completions cannot rise", _advise(1.0)
    else:
        means = ", ".join(f"{reward} {found.mean:.3g}" for reward, found in measures.rewards.items())
        masked = ", or all of its tokens are masked (rloo.mask_truncated_completions)" if measures.truncated else ""
        why = f"all completions of a group earn the same reward{masked} (means: {means})"
        fix = "raise rloo.temperature, add a graded reward to rewards, or take other prompts (data.source)"
        if str(probe.batch.judged.completions[0].prompt).rstrip().endswith(THINK_START):
            fix += f". A pattern that wants {THINK_START} never matches: the prompt opens it"
    silence = f"none of {measures.prompts} groups of {measures.generations} has a signal, so all advantages are "
    return Problem(name, f"{silence}zero and the run trains nothing: {why}", fix, level=level)


def _explain_short(run: RunConfig, policy: Policy, trainer: RLOOTrainer, probe: Probe, measures: Measures) -> str:
    """The fault of the published recipe, with a length that this model's thinking fits into."""
    limit, batch = run.rloo.max_completion_length, probe.batch
    earned = batch.judged.raw_scores.nanmedian().item()
    cut = sum(not completion.ended for completion in batch.judged.completions)
    nearly = "nearly " if measures.signal else ""
    found = (
        f"rloo.max_completion_length={limit} with a reward of {earned:.1f} for a missing </think> gives {nearly}every "
        f"completion the same reward, {nearly}all advantages are zero, the run trains nothing: {cut} of {len(batch)} "
        "completions are cut off in their thinking"
    )
    lengths, longest = measure_long(run, policy, trainer, batch)
    if lengths:
        keys = _longer(run, math.ceil(ROOM * max(lengths)))
        return f"{found}. Left alone, {len(lengths)} of them ended within {max(lengths)} tokens: set {keys}"
    fixes = [f"rloo.thinking_budget={limit // 2}, which closes them"] if limit >= 3 else []
    if run.data.max_prompt_length + 2 * longest <= _positions(policy):
        fixes.append(_longer(run, 2 * longest))
    return f"{found}, and few end within {longest} tokens: set {' or '.join(fixes or ['another model.name'])}"


def measure_long(run: RunConfig, policy: Policy, trainer: RLOOTrainer, batch: RolloutBatch) -> tuple[list[int], int]:
    """(lengths of completions that end by themselves, one per prompt, none if fewer than half do; their limit)."""
    sampler, firsts = trainer.rloo.sampler, batch.judged.completions[:: batch.group_size]
    prompt = max(map(len, batch.prompts))
    positions = _positions(policy)
    if policy.backend == "unsloth" or sampler.engine.name in FOREIGN:  # their position tables end at the run's length
        positions = min(positions, run.model.max_seq_length)
    longest = min(positions - prompt, LONG_TOKENS)
    if longest <= run.rloo.max_completion_length:
        return [], run.rloo.max_completion_length
    completions = sampler.sample([completion.row for completion in firsts], Limits(longest))
    ended = [len(completion.ids) for completion in completions if completion.ended]
    return (ended if 2 * len(ended) >= len(firsts) else []), longest


def _positions(policy: Policy) -> int:
    return getattr(policy.model.config.get_text_config(), "max_position_embeddings", None) or LONG_TOKENS


def _longer(run: RunConfig, tokens: int) -> str:
    """Keys that allow completions of so many tokens, rounded up."""
    unit = 8 if tokens < 256 else 256
    value = -(-tokens // unit) * unit
    needed = run.data.max_prompt_length + value
    more = f" model.max_seq_length={needed}" if needed > run.model.max_seq_length else ""
    return f"rloo.max_completion_length={value}{more}"


def _one_line(text: str) -> str:
    return shorten(" ".join(text.split()), SHOWN)


def _find_call_faults(run: RunConfig, episodes: list[Episode], may_call: bool) -> Iterator[Problem]:
    """Problems shown by the calls of the probe rollout."""
    kinds, limit = [kind for one in episodes for _, kind in one.calls], run.run.max_reward_failure_share
    if failures := [text for one in episodes for text in one.failures]:
        share = len(failures) / len(kinds)
        found, fix = f"{share:.0%} of {len(kinds)} calls of tools failed", f"fix the tool. A failure: {failures[0]}"
        level = "error" if share > limit else "warning"
        yield Problem("tools", found, fix, f"run.max_reward_failure_share={limit:g}", level)
    if may_call and kinds.count("invalid") >= MANY * len(kinds):
        found = f"none of {len(episodes)} completions calls a tool, and RLOO cannot learn to call what is never sampled"
        if kinds:
            found = f"{kinds.count('invalid')} of {len(kinds)} calls name no tool, or arguments that do not fit"
        fix = "train on worked calls first (rloo-kit sft), or say more in data.system_prompt and the tools' docstrings"
        yield Problem("tools", found, fix, level="warning")


# ------------------------------------------------------------------------------------------------ log-probabilities


def measure_gap(trainer: RLOOTrainer, probe: Probe) -> float | None:
    """Mean absolute difference of the trainer's and the sampler's log-probabilities; None if the sampler has none."""
    scorer, batch, places = trainer.rloo.scorer, probe.batch, range(len(probe.batch))
    if batch.sampler_logps is None:
        return None
    gap, tokens = 0.0, 0.0
    scorer.choose_layout(batch.groups(places))
    with torch.no_grad():
        for rows in batch.passes(places, scorer.tokens, trainer.rloo.settings.tokens_per_pass, whole_groups=False):
            logps = scorer.score(trainer.model, batch.groups(rows), need_entropy=False).logps
            sampled = pick(batch.sampler_logps, rows)
            known = ~sampled.isnan()
            gap += (logps - sampled).abs()[known].sum().item()
            tokens += known.sum().item()
    return gap / tokens if tokens else None


def find_logp_faults(trainer: RLOOTrainer, gap: float | None) -> Iterator[Problem]:
    """A problem if sampler and trainer differ when a run begins."""
    model, settings = trainer.accelerator.unwrap_model(trainer.model), trainer.rloo.settings
    dtype = torch.float32  # the coarsest number format that the policy computes in; 4 bit counts as bfloat16
    if trainer.args.bf16 or model.dtype == torch.bfloat16 or getattr(model, "is_loaded_in_4bit", False):
        dtype = torch.bfloat16
    elif trainer.args.fp16 or model.dtype == torch.float16:
        dtype = torch.float16
    limit, name = TOLERANCES[dtype], str(dtype).removeprefix("torch.")
    if gap is None or gap <= limit or settings.filters.active:
        return
    engine, correction = trainer.rloo.sampler.engine.name, settings.sampler_correction
    other = "model.dtype=float32" if engine == "generate" else "rollout.engine=generate"
    fix = f"set rloo.sampler_correction=token, or {other}"
    if correction != "none":
        fix = f"rloo.sampler_correction={correction} corrects for it; {other} avoids it"
    if math.isnan(gap):
        fix = "set model.dtype=float32"
    found = f"the log-probs of the engine {engine} and of the trainer differ by {gap:.2g} nats per token, above "
    level = "error" if correction == "none" or math.isnan(gap) else "warning"
    yield Problem("log-probs", f"{found}{limit:g} for {name}: two policies", fix, level=level)
