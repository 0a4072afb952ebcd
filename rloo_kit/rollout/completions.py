"""From prompts to completions: `complete`, the one way for training, evaluation, preflight and `ask`, and
`generate_completions`, which calls it with the policy's own engine."""

import os
import socket
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from rloo_kit.completion import Completion, split_turns
from rloo_kit.config.schema import RolloutSection
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.models.adapters import ADAPTER_ALONE, NO_ADAPTER, follow_umask, is_switched_off
from rloo_kit.models.policy import Policy
from rloo_kit.rollout.choice import build_engine
from rloo_kit.rollout.engine import Engine, Episodes, OnTokens, Progress, ToolUse
from rloo_kit.rollout.types import FOREIGN, Limits, Rollout
from rloo_kit.seams import part
from rloo_kit.system.processes import is_distributed
from rloo_kit.think_tags import count_closing, count_thinking

# Samples a completion of each prompt's ids. Also TRL's hook, of which a subclass may return the ids alone.
Sample = Callable[[list[list[int]], Episodes | None], Sequence[list[int]]]


def complete(
    rows: Sequence[dict[str, Any]],
    sample: Sample,
    tokenizer: Any,
    *,
    end_ids: Collection[int],
    think_end_id: int | None,
    tools: ToolUse | None = None,
    tokenize: Callable[[list[Any]], list[list[int]]] | None = None,
) -> list[Completion]:
    """A completion for each row of the dataset; neighbours with equal prompts are a group.

    Args:
        rows: dicts with a `prompt`: a text with the chat template applied, or messages, which `tokenize` renders.
        sample: called once, with the prompts' ids and, with tools, what answers their turns.
        tokenizer: decodes completions. end_ids: a completion with another last token was cut off.
        think_end_id: of `</think>`; None if the tokenizer has none.
        tools: what completions may call, from `make_tool_use`.
        tokenize: from prompts to ids; None: the tokenizer.

    Raises:
        DataError: a prompt without tokens, or one that an environment's observation does not fit.
    """
    episodes = None if tools is None else tools.begin(rows)
    prompts = [row["prompt"] for row in rows] if episodes is None else episodes.prompts
    if tokenize is None:  # the samples of a prompt share its ids
        distinct = list(dict.fromkeys(prompts))
        ids_of = dict(zip(distinct, tokenizer(distinct)["input_ids"], strict=True))
        prompt_ids = [ids_of[prompt] for prompt in prompts]
    else:
        prompt_ids = tokenize(prompts)
    if not all(prompt_ids):
        raise DataError(f"prompt {prompt_ids.index([])} has no tokens; there is nothing to continue")
    sampled = sample(prompt_ids, episodes)
    rollout = sampled if isinstance(sampled, Rollout) else Rollout.of(sampled)
    played = [None] * len(rows) if episodes is None else episodes.finish(rollout)
    completions = []
    for number, (row, prompt, ids, episode) in enumerate(zip(rows, prompts, rollout, played, strict=True)):
        forced, context = rollout.forced[number], rollout.context[number]
        turns = split_turns(ids, context)
        text: Any = tokenizer.decode(turns[-1], skip_special_tokens=True)
        if not isinstance(prompt, str):
            text = [{"role": "assistant", "content": text}] if episode is None else episode.messages
        completion = Completion(
            ids=ids,
            text=text,
            ended=bool(ids) and ids[-1] in end_ids and (episode is None or episode.cut is None),
            thinking_tokens=count_thinking(turns, think_end_id) - count_closing(ids, forced, think_end_id),
            closed=think_end_id is not None and think_end_id in turns[-1],
            forced=forced,
            context=context,
            logps=None if rollout.sampler_logps is None else rollout.sampler_logps[number],
            episode=episode,
            prompt_ids=prompt_ids[number],
            prompt=prompt,
            row=row,
        )
        completions.append(completion)
    return completions


def generate_completions(
    policy: Policy,
    prompts: Sequence[str | dict[str, Any]],
    limits: Limits | int,
    *,
    num_samples: int = 1,
    temperature: float = 1.0,
    batch_size: int = 128,
    seed: int = 0,
    engine: str | RolloutSection | None = None,
    tools: ToolUse | None = None,
    on_batch: Progress | None = None,
    on_tokens: OnTokens | None = None,
) -> list[Completion]:
    """Completions of rendered prompts: len(prompts) x num_samples, prompt by prompt.

    Args:
        policy: from `load_policy`.
        prompts: texts with the chat template applied (`data.train["prompt"]`), or rows of the dataset with a `prompt`.
        limits: tokens of a completion at most; with a thinking budget from `make_limits` or `make_budget_limits`.
        num_samples: completions of each prompt. temperature: 0 is greedy decoding.
        batch_size: completions generated at once.
        seed: fixes the samples for a given batch size; the global random state is restored afterwards.
        engine: as `rollout.engine`, or the `rollout` of a run; None: that of the run that `load_policy` read.
        tools: what completions may call, from `make_tool_use`.
        on_batch: called now and then with the number of completions done so far and in total.
        on_tokens: called with a completion's index in the result and its ids so far while it grows; see
            docs/rollout.md for how often each engine calls it.

    Raises:
        ConfigError: a value out of range, more tokens than the model has positions.
        DataError: a prompt without tokens.
    """
    limits = Limits(limits) if isinstance(limits, int) else limits
    at_least_one = {"max_completion_length": limits.max_completion_length, "num_samples": num_samples}
    for name, value in (at_least_one | {"batch_size": batch_size}).items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it has to be at least 1")
    if temperature < 0:
        raise ConfigError(f"temperature is {temperature}; it has to be 0 (greedy) or more")
    if not prompts:
        return []
    rollout, end_ids = _choose_rollout(policy, engine), find_end_ids(policy)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []

    def sample(prompt_ids: list[list[int]], episodes: Episodes | None) -> Rollout:
        _check_lengths(policy, prompt_ids, limits.max_completion_length)
        with (
            _open_engine(policy, rollout, temperature, end_ids, batch_size) as opened,
            torch.random.fork_rng(devices=devices),
        ):
            torch.manual_seed(seed)
            return opened.sample(prompt_ids, limits, on_progress=on_batch, on_tokens=on_tokens, dialogue=episodes)

    rows = [{"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in prompts]
    return complete(
        [row for row in rows for _ in range(num_samples)],
        sample,
        policy.tokenizer,
        end_ids=end_ids,
        think_end_id=policy.tags.end_id,
        tools=tools,
    )


def _choose_rollout(policy: Policy, engine: str | RolloutSection | None) -> RolloutSection:
    if isinstance(engine, str):
        settings = {"engine": engine, "server_url": getattr(policy.rollout, "server_url", None)}
        return RolloutSection.model_validate(settings)
    rollout = engine or policy.rollout or RolloutSection()
    # A server needs the adapter from all processes together; each calls as often as it has prompts, and samples itself.
    return RolloutSection() if rollout.engine == "server" and is_distributed() else rollout


@contextmanager
def _open_engine(
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
        yield part("engines").ServerSettings(str(rollout.server_url), Path(folder), hand_over, name, vocabulary)


def find_end_ids(policy: Policy) -> list[int]:
    """Ids that end a completion: the tokenizer's end token and those of the model's generation config."""
    declared = policy.model.generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return list(dict.fromkeys([policy.tokenizer.eos_token_id, *declared]))


def _check_lengths(policy: Policy, prompt_ids: list[list[int]], completion_length: int) -> None:
    longest = max(map(len, prompt_ids))
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
