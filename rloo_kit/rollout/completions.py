"""Completions as texts, for evaluation, the report and notebooks, sampled by the engine that the run trains with."""

import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rloo_kit.config.schema import RolloutSection
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.models.adapters import ADAPTER_ALONE, NO_ADAPTER, follow_umask, is_switched_off
from rloo_kit.models.policy import Policy
from rloo_kit.rollout.choice import build_engine
from rloo_kit.rollout.engine import Engine, OnTokens, Progress
from rloo_kit.rollout.episodes import Episode, ToolUse
from rloo_kit.rollout.thinking_budget import close_ids_for
from rloo_kit.rollout.types import FOREIGN, Limits, Span, split_turns
from rloo_kit.system.processes import is_distributed
from rloo_kit.think_tags import count_closing, count_thinking


@dataclass(frozen=True)
class Completion:
    """One completion.

    Attributes:
        prompt_index: which of the prompts it answers.
        ids: token ids, forced ones and the end token included.
        text: the ids decoded without special tokens; the thinking tags stay.
        ended: the model ended it itself; False if it was truncated.
        thinking_tokens: tokens before the first `</think>` of each turn, without a forced sentence; None if the last
            turn's is not closed.
        forced: the thinking budget was spent, which closed the thinking.
        context: spans of the tools' results. episode: with tools, what happened; the text is then the last turn's.
    """

    prompt_index: int
    ids: list[int]
    text: str
    ended: bool
    thinking_tokens: int | None
    forced: bool = False
    context: list[Span] = field(default_factory=list)
    episode: Episode | None = None

    @property
    def closed(self) -> bool:
        """Whether it contains `</think>`."""
        return self.thinking_tokens is not None


def generate_completions(
    policy: Policy,
    prompts: list[str],
    *,
    max_completion_length: int,
    num_samples: int = 1,
    temperature: float = 1.0,
    batch_size: int = 128,
    seed: int = 0,
    thinking_budget: int | None = None,
    answer_budget: int | None = None,
    thinking_close: str = "tag",
    limits: Limits | None = None,
    engine: str | RolloutSection | None = None,
    on_batch: Progress | None = None,
    on_tokens: OnTokens | None = None,
    tools: ToolUse | None = None,
    rows: Sequence[dict[str, Any]] | None = None,
) -> list[Completion]:
    """Completions of rendered prompts: len(prompts) x num_samples, prompt by prompt.

    Args:
        policy: from `load_policy`. prompts: texts with the chat template applied (`data.train["prompt"]`).
        max_completion_length: limit in tokens, at least 1. num_samples: completions of each prompt.
        temperature: 0 is greedy decoding. batch_size: completions generated at once.
        seed: fixes the samples for a given batch size; the global random state is restored afterwards.
        thinking_budget: tokens after which open thinking is closed; None for no budget.
        answer_budget: with a thinking budget, limit in tokens after `</think>`; None for what the budget leaves of
            `max_completion_length` (at least 1).
        thinking_close: what closes open thinking: "tag" for `</think>` alone, "sentence" for the Qwen3 report's
            sentence with `</think>`.
        limits: as in training, from `make_limits`: in place of the budgets and `max_completion_length`.
        engine: as `rollout.engine`, or the `rollout` of a run; None: that of the run that `load_policy` read.
        on_batch: called now and then with the number of completions done so far and in total.
        on_tokens: called with a completion's index in the result and its ids so far while it grows; see
            docs/rollout.md for how often each engine calls it.
        tools: what completions may call, from `make_tool_use`. rows: of the dataset, one per prompt, for environments.

    Raises:
        ConfigError: a value out of range, a budget for a model without `</think>`, more tokens than the model has
            positions.
        DataError: a prompt without tokens.
    """
    at_least_one = {"max_completion_length": max_completion_length, "num_samples": num_samples}
    at_least_one |= {"batch_size": batch_size, "answer_budget": 1 if answer_budget is None else answer_budget}
    for name, value in at_least_one.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it has to be at least 1")
    if temperature < 0:
        raise ConfigError(f"temperature is {temperature}; it has to be 0 (greedy) or more")
    if limits is None and thinking_budget is not None:
        # It may exceed the limit, which then counts only for what is left to answer.
        if thinking_budget < 0:
            raise ConfigError(f"thinking_budget is {thinking_budget}; it has to be 0 or more tokens")
        close_ids = close_ids_for(policy.tokenizer, policy.tags, thinking_close)
        asked = Limits(max_completion_length, thinking_budget, answer_budget, close_ids, policy.tags.end_id)
        length = thinking_budget + len(close_ids) + asked.answer_limit
        if tools is not None:  # the budgets are a turn's, and the limit is the episode's
            length = max(length, max_completion_length)
        limits = replace(asked, max_completion_length=length, answer_budget=asked.answer_limit)
    limits = limits or Limits(max_completion_length)
    if isinstance(engine, str):
        settings = {"engine": engine, "server_url": getattr(policy.rollout, "server_url", None)}
        rollout = RolloutSection.model_validate(settings)
    else:
        rollout = engine or policy.rollout or RolloutSection()
        if rollout.engine == "server" and is_distributed():  # it needs the adapter from all processes together, but
            rollout = RolloutSection()  # each calls as often as it has prompts, and samples from its own copy
    if not prompts:
        return []
    episodes, repeats = None, num_samples
    if tools is not None:
        pairs = zip(rows or [{}] * len(prompts), prompts, strict=True)
        given = [dict(row) | {"prompt": prompt} for row, prompt in pairs for _ in range(num_samples)]
        episodes, repeats = tools.begin(given), 1
        prompts = episodes.prompts
    prompt_ids = policy.tokenizer(list(prompts))["input_ids"]
    _check_lengths(policy, prompt_ids, limits.max_completion_length)
    prefixes = [ids for ids in prompt_ids for _ in range(repeats)]  # prompt-major
    end_ids, end_id = find_end_ids(policy), policy.tags.end_id
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with (
        _sampler(policy, rollout, temperature, end_ids, batch_size) as sampler,
        torch.random.fork_rng(devices=devices),
    ):
        torch.manual_seed(seed)
        sampled = sampler.sample(prefixes, limits, on_progress=on_batch, on_tokens=on_tokens, dialogue=episodes)
    finished = [None] * len(prefixes) if episodes is None else episodes.finish(sampled)
    completions = []
    for number, (ids, context, episode) in enumerate(
        zip(sampled.completion_ids, sampled.context, finished, strict=True)
    ):
        turns = split_turns(ids, context)
        is_closed, spans = end_id is not None and end_id in turns[-1], sampled.forced[number]
        completions.append(
            Completion(
                prompt_index=number // num_samples,
                ids=ids,
                text=policy.tokenizer.decode(turns[-1], skip_special_tokens=True),
                ended=bool(ids) and ids[-1] in end_ids and (episode is None or episode.cut is None),
                thinking_tokens=count_thinking(turns, end_id) - count_closing(ids, spans, end_id)
                if is_closed
                else None,
                forced=bool(spans),
                context=context,
                episode=episode,
            )
        )
    return completions


def measure_calls(calls: Sequence[tuple[str, str]], turns: Sequence[int]) -> dict[str, float]:
    """Means of a run with tools: call_frequency and turns (per completion), failure_frequency and invalid_frequency
    (shares of the calls). `calls`: of all episodes, as in `Episode`; `turns`: of each completion."""
    kinds = [kind for _, kind in calls]
    found = {"call_frequency": len(kinds) / len(turns), "turns": sum(turns) / len(turns)}
    found["failure_frequency"] = kinds.count("failed") / max(1, len(kinds))
    return found | {"invalid_frequency": kinds.count("invalid") / max(1, len(kinds))}


@contextmanager
def _sampler(
    policy: Policy, rollout: RolloutSection, temperature: float, end_ids: list[int], rows: int
) -> Iterator[Engine]:
    """The engine for one call; a server unloads the adapter afterwards."""
    pad_id = policy.tokenizer.pad_token_id
    with _server_settings(policy, rollout) if rollout.engine == "server" else nullcontext() as server:
        engine = build_engine(
            policy.model,
            rollout.engine,
            backend=policy.backend,
            temperature=temperature,
            end_ids=end_ids,
            pad_id=end_ids[0] if pad_id is None else pad_id,
            rows=rows,
            server=server,
        )
        try:
            with policy.autocast() if engine.name not in FOREIGN else nullcontext():
                yield engine
        finally:
            engine.close()


@contextmanager
def _server_settings(policy: Policy, rollout: RolloutSection) -> Iterator[Any]:
    """Where the engine "server" samples, with a folder for this call's adapter."""
    from rloo_kit.rollout.vllm_engines import ServerSettings  # loads an HTTP client

    if not hasattr(policy.model, "peft_config"):
        raise ConfigError(NO_ADAPTER)

    def hand_over(target: Path) -> None:
        weights = {}
        if is_switched_off(policy.model):  # a request to a server always names an adapter: this one changes nothing
            lora = [(name, value) for name, value in policy.model.named_parameters() if "lora_" in name]
            weights = {"state_dict": {name: torch.zeros_like(value) for name, value in lora}}
        policy.model.save_pretrained(str(target), **ADAPTER_ALONE, **weights)
        follow_umask(target)

    vocabulary = policy.model.config.get_text_config().vocab_size
    shared, name = rollout.server_adapters, f"{socket.gethostname()}:{os.getpid()}"
    with nullcontext(shared) if shared is not None else tempfile.TemporaryDirectory(prefix="rloo-kit-") as folder:
        if shared is None:
            Path(folder).chmod(0o755)  # the server may run as another user
        yield ServerSettings(str(rollout.server_url), Path(folder), hand_over, name, vocabulary)


def find_end_ids(policy: Policy) -> list[int]:
    """Ids that end a completion: the tokenizer's end token and those of the model's generation config."""
    declared = policy.model.generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return list(dict.fromkeys([policy.tokenizer.eos_token_id, *declared]))


def _check_lengths(policy: Policy, prompt_ids: list[list[int]], completion_length: int) -> None:
    longest = max(map(len, prompt_ids))
    if not all(prompt_ids):
        raise DataError(f"prompt {list(map(len, prompt_ids)).index(0)} has no tokens; there is nothing to continue")
    positions = getattr(policy.model.config, "max_position_embeddings", None)
    loaded = getattr(policy.model, "max_seq_length", None)  # Unsloth's tables end there: an error about shapes
    fixes = [
        (loaded, f"was loaded for {loaded}: raise model.max_seq_length, or lower"),
        (positions, f"has {positions} positions. Lower"),
    ]
    for limit, fix in fixes:
        if limit is not None and longest + completion_length > limit:
            raise ConfigError(
                f"the longest prompt has {longest} tokens and {completion_length} more are to be generated, but the "
                f"model {fix} eval.max_completion_length, eval.thinking_budgets or data.max_prompt_length"
            )
