"""The probe rollout of a preflight: a few groups, sampled and judged as in the run and scored by the trainer, and the
problems that would keep the run from learning."""

import math
import operator
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
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
from rloo_kit.loop.options import loaded_engine
from rloo_kit.loop.records import RolloutBatch, pick
from rloo_kit.loop.trainer import RLOOTrainer
from rloo_kit.models.backends import load_backend
from rloo_kit.models.policy import Policy
from rloo_kit.preflight.trial_steps import Tell, make_trainer
from rloo_kit.results.intervals import clustered
from rloo_kit.results.samples import describe_call, list_steps
from rloo_kit.rewarding.registry import REGISTRY, find_factory
from rloo_kit.rewarding.worker import end_workers
from rloo_kit.rollout.choice import prefer_engine
from rloo_kit.rollout.engine import Engine
from rloo_kit.rollout.generate import GenerateEngine
from rloo_kit.rollout.types import FOREIGN, Limits
from rloo_kit.system.console import format_seconds
from rloo_kit.system.memory import is_out_of_memory
from rloo_kit.system.problems import Problem
from rloo_kit.think_tags import THINK_START
from rloo_kit.tools.toolbox import Toolbox
from rloo_kit.tools.turns import make_call

LEAST_GROUPS, LEAST_COMPLETIONS = 4, 32  # of a probe; with fewer, nothing is refused
WIDER = 4  # times as many if few groups have a signal: 32 wrong answers are not rare in a run that learns
TRUNCATED, CLOSED = 0.95, 0.05  # least share cut off, largest share closed: the thinking does not fit
LONG_TOKENS = 4096  # limit of the search for a length that the thinking fits into
ROOM = 1.25  # factor on the longest of a few completions
# Mean gap between sampler and trainer, nats per token. Rounding alone gives about 1e-6 in float32, 0.002 in float16 and
# 0.01 in bfloat16 and 4 bit (docs/metrics.md); ten times that or more means two policies. Also for the KL at the start.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
FEW, MANY = 0.25, 0.3  # warning: at most this share of groups with a signal, above this share cut off
NEVER, ALWAYS = 0.05, 0.95  # pass rates near 0 and near 1
TIMED = 16  # token steps
NO_END = 10**7  # an id that no model has
SHOWN = 160  # characters of a message in the episode that is shown


@dataclass(frozen=True)
class Probe:
    """A probe rollout: a `batch` of whole groups, seconds of sampling and judging, the names of its rewards.

    Attributes:
        token_s: seconds of a token step of one row and of `rows`, from `time_tokens`; None if only `sample_s` tells.
        pads: a batch runs until its longest completion ends; else an ended row is refilled.
    """

    batch: RolloutBatch
    sample_s: float
    judge_s: float
    rewards: list[str]
    rows: int = 1
    token_s: tuple[float, float] | None = None
    pads: bool = False

    def seconds(self, completions: int, at_once: int, of_a_prompt: int, forward_s: float) -> float:
        """Seconds to sample and judge so many completions as long as these. `forward_s`: of a token of a prompt."""
        lengths, size, judged_s = self.batch.lengths, len(self.batch), self.judge_s / len(self.batch) * completions
        if self.token_s is None:
            return self.sample_s / size * completions + judged_s
        at_once = min(at_once, completions)
        if self.pads:
            mean = statistics.mean(max(lengths[first : first + at_once]) for first in range(0, size, at_once))
            steps, prompts = math.ceil(completions / at_once) * mean, float(completions)
        else:
            mean, prompts = statistics.mean(lengths), completions / of_a_prompt
            steps = max(completions * mean / at_once, max(lengths))
        one, most = self.token_s
        of_a_row = (most - one) / max(self.rows - 1, 1)
        prefill_s = prompts * sum(map(len, self.batch.prompts)) / size * forward_s
        return steps * (one - of_a_row) + completions * mean * of_a_row + prefill_s + judged_s


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
            starts_there = compare_logps(trainer, probe, measures)
            faults += find_logp_faults(trainer, measures, starts_there)
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


def time_tokens(run: RunConfig, policy: Policy, data: Data, rewards: list[Any], probe: Probe, tell: Tell) -> Probe:
    """The probe with the seconds of a token step, the median of `TIMED` from the middle of completions. On a GPU
    `rollout.engine: auto` then takes the faster one of the native engine and `generate`."""
    if run.rloo.has_tools or loaded_engine(run, policy) in FOREIGN:  # episodes wait for tools
        return probe
    with make_trainer(policy, run, rewards, data.train) as trainer:
        engine = trainer.rloo.sampler.engine
        most = run.rloo.generation_batch_size
        rows, engines = min(engine.rows or most, most), [engine]
        if run.rollout.engine == "auto" and engine.name == "native" and on_gpu(policy):
            pad_id = policy.tokenizer.pad_token_id
            mode = partial(load_backend(policy.backend).inference_mode, policy.model)
            engines.append(GenerateEngine(policy.model, mode, "timed", engine.sampling, pad_id))
        found = dict[str, tuple[float, float]]()
        for one in engines:
            tell(f"{TIMED} tokens of {rows} completions by {one.name}")
            one.sampling = replace(one.sampling, end_ids=(NO_END,))
            try:
                with trainer.accelerator.autocast():
                    times = time_step(one, probe.batch, 1, run), time_step(one, probe.batch, rows, run)
            except Exception as error:  # of a model's own code; what samples the run has worked in the probe
                tell(f"{one.name} could not be timed: {shorten(str(error))}")
                continue
            if one is engine or one.rows is None or one.rows >= rows:  # fewer: memory ran out
                found[one.name] = times
        if not found:
            return probe
        name = min(found, key=lambda name: found[name][1])
        if len(found) > 1:
            both = " and ".join(f"{1e3 * found[name][1]:.1f} ms by {name}" for name in sorted(found, reverse=True))
            reason = f"a token step of {rows} rows took {both} in the preflight"
            prefer_engine(policy.model, name, reason)
            tell(f"rollout.engine: {name}, {reason}")
        return replace(probe, rows=rows, token_s=found[name], pads=name == "generate")


def on_gpu(policy: Policy) -> bool:
    """Whether the policy is on a CUDA GPU."""
    return bool(policy.model.device.type == "cuda")


def time_step(engine: Engine, batch: RolloutBatch, rows: int, run: RunConfig) -> float:
    """Median seconds of a token step of so many rows, which continue completions of the batch."""
    prompts, times = list[list[int]](), list[float]()
    for row in range(rows):
        first = row // batch.group_size * batch.group_size % len(batch)  # siblings share a prefill
        half = batch.completions[first][: batch.lengths[first] // 2].tolist()
        prompts.append([*batch.prompts[first].tolist(), *half][TIMED - run.model.max_seq_length :])

    def note(number: int, _ids: list[int]) -> None:
        if number == 0:  # its tokens are on the CPU
            times.append(time.monotonic())

    engine.sample(prompts, Limits(TIMED), on_tokens=note)
    return statistics.median(map(operator.sub, times[1:], times))


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
        yield from _find_call_faults(run, played, bool(measures.tools))
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
        fix = _advise(measures.pass_rate) or "rollout.resample_rounds=2 samples fresh prompts in their place"
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
    blind = {name for name in REGISTRY if "answer" not in getattr(find_factory(name), "needs", ("answer",))}
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


# ------------------------------------------------------------------------------------------------ tools


def try_tools(toolbox: Toolbox, row: dict[str, Any], measures: Measures) -> Iterator[Problem]:
    """Call each tool once with made-up arguments in an episode of `row`; `measures` gets what it came to."""
    for schema in toolbox.schemas:
        name, arguments = schema["function"]["name"], make_value(schema["function"]["parameters"])
        toolbox.reset([0], [row])  # whatever the last call did to its process
        started = time.monotonic()
        (result,) = toolbox.call(0, [(name, arguments)]).result()
        took, call = time.monotonic() - started, describe_call(make_call(name, arguments))
        found = (result.detail or result.content).removeprefix(f"{name}: ")
        measures.tools[name] = f"{call} = {_one_line(found)} ({took:.2g} s)"
        if result.kind != "ok":
            fix = "the arguments are made up; fix the tool if they make sense (the model gets this as the result)"
            yield Problem("tools", f"rloo.tools: {call} failed: {found}", fix, level="warning")


def make_value(schema: dict[str, Any]) -> Any:
    """A made-up value of a JSON schema, with the required properties only.

    >>> make_value({"type": "object", "properties": {"city": {"type": "string"}, "n": {}}, "required": ["city"]})
    {'city': 'text'}
    """
    if "enum" in schema or "anyOf" in schema:
        return schema["enum"][0] if "enum" in schema else make_value(schema["anyOf"][0])
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {name: make_value(schema["properties"][name]) for name in schema.get("required", ())}
    if kind == "array":
        return list(map(make_value, schema.get("prefixItems", [schema["items"]] if "items" in schema else [])))
    return {"integer": 1, "number": 1, "boolean": True, "null": None}.get(kind, "text")


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


def compare_logps(trainer: RLOOTrainer, probe: Probe, measures: Measures) -> bool:
    """Measure the gap to the sampler and the KL; returns whether the reference is the policy at the start."""
    step, batch = trainer.rloo, probe.batch
    scorer, model = step.scorer, trainer.model
    has_kl = scorer.beta != 0.0
    starts_there = has_kl and (scorer.is_reference() or scorer.reference_model is not None)
    sums = {"gap": 0.0, "gap_tokens": 0.0, "kl": 0.0, "kl_tokens": 0.0}
    scorer.choose_layout(batch.groups(range(len(batch))))
    with torch.no_grad():
        for rows in batch.passes(range(len(batch)), scorer.tokens, step.settings.tokens_per_pass, whole_groups=False):
            groups, mask = batch.groups(rows), pick(batch.mask, rows)
            logps = scorer.score(model, groups, need_entropy=False).logps
            if batch.sampler_logps is not None:
                sampled = pick(batch.sampler_logps, rows)
                known = ~sampled.isnan()
                sums["gap"] += (logps - sampled).abs()[known].sum().item()
                sums["gap_tokens"] += known.sum().item()
            if has_kl:
                sums["kl"] += ((logps - scorer.score_reference(model, groups)) * mask).sum().item()
                sums["kl_tokens"] += mask.sum().item()
    if sums["gap_tokens"]:
        measures.logp_gap = sums["gap"] / sums["gap_tokens"]
    if sums["kl_tokens"]:
        measures.kl = sums["kl"] / sums["kl_tokens"]
    return starts_there


def find_logp_faults(trainer: RLOOTrainer, measures: Measures, starts_there: bool) -> Iterator[Problem]:
    """Problems if sampler and trainer, or policy and reference, differ when a run begins."""
    sampler = trainer.rloo.sampler.engine
    if isinstance(sampler, GenerateEngine) and (fault := sampler.check_padding()):
        text = f"{fault}: exact, and slower if prompts vary in length (a larger rloo.num_generations fills the batches)"
        yield Problem("log-probs", text, level="warning")
    model, settings = trainer.accelerator.unwrap_model(trainer.model), trainer.rloo.settings
    gap, kl = measures.logp_gap, measures.kl
    dtype = torch.float32  # the coarsest number format that the policy computes in; 4 bit counts as bfloat16
    if trainer.args.bf16 or model.dtype == torch.bfloat16 or getattr(model, "is_loaded_in_4bit", False):
        dtype = torch.bfloat16
    elif trainer.args.fp16 or model.dtype == torch.float16:
        dtype = torch.float16
    limit, name = TOLERANCES[dtype], str(dtype).removeprefix("torch.")
    if gap is not None and not gap <= limit and not settings.filters.active:
        engine = sampler.name
        other = "model.dtype=float32" if engine == "generate" else "rollout.engine=generate"
        fix = f"set rloo.sampler_correction=token, or {other}"
        if settings.sampler_correction != "none":
            fix = f"rloo.sampler_correction={settings.sampler_correction} corrects for it; {other} avoids it"
        if math.isnan(gap):
            fix = "set model.dtype=float32"
        found = f"the log-probs of the engine {engine} and of the trainer differ by {gap:.2g} nats per token, above "
        level = "error" if settings.sampler_correction == "none" or math.isnan(gap) else "warning"
        yield Problem("log-probs", f"{found}{limit:g} for {name}: two policies", fix, level=level)
    if starts_there and kl is not None and not abs(kl) <= limit:
        found = f"the KL of policy and reference is {kl:.2g} nats per token before the first step, above {limit:g} for "
        fix = "set model.dtype=float32, or rloo.beta=0.0"
        yield Problem("kl", f"{found}{name}, although their weights are equal", fix)
