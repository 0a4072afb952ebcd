"""Which engine samples, with which cache, and completions as texts for evaluation, the report and notebooks.

Every engine samples from the policy's whole distribution (unless `Filters` cut it), keeps the same budget rules and
returns the model's own ids.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from rloo_kit.config.schema import CACHES, ENGINES
from rloo_kit.errors import BackendError, ConfigError, DataError
from rloo_kit.models.policy import Policy, inference_mode_of
from rloo_kit.rollout.generate import GenerateEngine
from rloo_kit.rollout.native import NativeEngine
from rloo_kit.rollout.own_generate import find_own_generate
from rloo_kit.rollout.thinking_budget import close_ids_for
from rloo_kit.rollout.types import WHOLE, Engine, Filters, Limits, Progress

if TYPE_CHECKING:
    from rloo_kit.rollout.server import ServerSettings

ALIBI = ("bloom", "mpt")
MASKED_ATTENTION = ("sdpa", "eager", "rloo_packed")  # these take the native loop's 4-D mask

_PLAIN = "set rollout.cache=plain (rollout.rows lowers what is held at once)"
_OTHER_CACHES = {
    "vllm": f"vLLM sizes its own pool of keys and values, and makes them 8-bit by its own kv_cache_dtype: {_PLAIN}",
    "server": f"the server holds the keys and values (vllm serve --kv-cache-dtype fp8 makes them 8-bit): {_PLAIN}",
}


@dataclass(frozen=True)
class Completion:
    """One completion.

    Attributes:
        prompt_index: which of the prompts it answers.
        ids: token ids, forced ones and the end token included.
        text: the ids decoded without special tokens; the thinking tags stay.
        ended: the model ended it itself; False if it was truncated.
        thinking_tokens: tokens before the first `</think>`; None if it is not closed.
        forced: the thinking budget was spent and closed it.
    """

    prompt_index: int
    ids: list[int]
    text: str
    ended: bool
    thinking_tokens: int | None
    forced: bool = False

    @property
    def closed(self) -> bool:
        """Whether it holds `</think>`."""
        return self.thinking_tokens is not None


def choose_engine(wanted: str, backend: str, model: Any) -> tuple[str, str]:
    """The engine's name and the reason for it, for `rollout.engine` = `wanted`.

    Args:
        backend: "unsloth" or "transformers". model: the policy's.

    Raises:
        ConfigError: no such engine. BackendError: an engine that cannot be used here.
    """
    if wanted not in ENGINES:
        raise ConfigError(f"rollout.engine is {wanted!r}; it is one of {', '.join(ENGINES)}")
    is_unsloth = backend == "unsloth"
    own = None if is_unsloth else find_own_generate(model)  # Unsloth's is a patch itself
    has_vllm = getattr(model, "vllm_engine", None) is not None
    if wanted == "auto":
        if is_unsloth:
            if has_vllm:
                return "vllm", "the model was loaded with Unsloth's fast_inference"
            return "generate", "Unsloth's fast inference runs inside generate"
        if own is not None:
            return "generate", f"the model's own generate ({own}) is called"
        obstacle = _native_obstacle(model)
        return ("generate", obstacle) if obstacle else ("native", "no padding, and rows that have ended are dropped")
    if wanted == "native" and (is_unsloth or _native_obstacle(model)):
        why = "Unsloth replaces the attention that it runs" if is_unsloth else _native_obstacle(model)
        raise BackendError(f"rollout.engine is native, but {why}: set rollout.engine=generate")
    if wanted == "vllm" and find_spec("vllm") is None:
        raise BackendError(
            "rollout.engine is vllm, but vLLM is not installed: pip install vllm (it needs CUDA), or set "
            "rollout.engine=auto"
        )
    bypassed = f"; the model's own generate ({own}) is not called" if own and wanted != "generate" else ""
    return wanted, f"rollout.engine asks for it{bypassed}"


def _native_obstacle(model: Any) -> str | None:
    """Why `kv_cache` cannot hold this model's keys and values; None if it can."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None) is not None:
        return f"{config.model_type} has layers that do not look at all tokens"
    if model.config.is_encoder_decoder:
        return f"{config.model_type} has an encoder"
    if config.model_type in ALIBI or getattr(config, "alibi", False):
        return f"{config.model_type} reads positions off a mask of its own"
    attention = model.config._attn_implementation
    if attention not in MASKED_ATTENTION:
        return f"its attention, {attention}, does not take a mask for each row's own length"
    return None


def check_cache(cache: str, engine: str, backend: str, on_cuda: bool) -> None:
    """Refuse a cache that the engine cannot keep: native keeps all; generate int8 and offloaded with transformers only.

    Args:
        cache: `rollout.cache`. engine: the chosen one's name. backend: "unsloth" or "transformers".
        on_cuda: whether the model is on a GPU.

    Raises:
        ConfigError: no such cache. BackendError: not with this engine, or a library is missing.

    >>> check_cache("int8", "native", "transformers", on_cuda=False)
    """
    if cache not in CACHES:
        raise ConfigError(f"rollout.cache is {cache!r}; it is one of {', '.join(CACHES)}")
    if cache == "plain" or engine == "native":
        return
    obstacle = _OTHER_CACHES.get(engine) or _generate_obstacle(cache, backend, on_cuda)
    if obstacle:
        raise BackendError(f"rollout.cache is {cache}, but {obstacle}")


def _generate_obstacle(cache: str, backend: str, on_cuda: bool) -> str | None:
    if backend == "unsloth":
        return (
            f"Unsloth decodes from 16-bit buffers of its own on the GPU: {_PLAIN}, or model.backend=transformers, "
            "whose native engine has this cache"
        )
    if cache == "int8" and find_spec("hqq") is None:
        return (
            "the generate engine uses the 8-bit cache of hqq, which is not installed: pip install hqq, or set "
            "rollout.engine=native, which has its own, if the model allows it"
        )
    if cache == "offloaded" and not on_cuda:
        return "the model is not on a GPU, so its cache is in main memory already: set rollout.cache=plain"
    return None


def build_engine(
    model: Any,
    engine: str = "auto",
    *,
    backend: str = "transformers",
    temperature: float,
    end_ids: Sequence[int],
    pad_id: int,
    rows: int | None = None,
    cache: str = "plain",
    server: "ServerSettings | None" = None,
    filters: Filters = WHOLE,
    say: Callable[[str], None] = print,
) -> Engine:
    """The engine that samples from `model`; raises as `choose_engine` and `check_cache` do.

    Args:
        model: a PeftModel or a causal language model, without DDP or accelerate around it; in any mode.
        engine: `rollout.engine`: auto, native, generate or server; vllm samples through TRL only.
        backend: "unsloth" or "transformers", whichever loaded the model.
        temperature: 0 takes the likeliest token each time.
        end_ids: ids that end a completion. pad_id: pads rows; it never reaches a result.
        rows: at most so many completions at once; None for all.
        cache: `rollout.cache`: plain, int8 or offloaded, see `check_cache`.
        server: where the engine "server" samples, and how it gets the adapter.
        filters: of the distribution that is sampled from.
        say: gets one line when rows are halved because memory ran out.
    """
    name, reason = choose_engine(engine, backend, model)
    check_cache(cache, name, backend, on_cuda=model.device.type == "cuda")
    if cache != "plain":
        reason = f"{reason}; its cache is {cache} (rollout.cache)"
    mode = partial(inference_mode_of(backend), model)
    if name == "native":
        return NativeEngine(model, mode, reason, temperature, end_ids, rows, say, cache, filters)
    if name == "generate":
        return GenerateEngine(model, mode, reason, temperature, end_ids, pad_id, rows, say, cache, filters)
    if filters.active:
        raise ConfigError(
            f"rollout.engine is {name}, which samples from the whole distribution only: set rollout.engine=auto, or "
            "leave top_p, top_k, min_p and repetition_penalty out"
        )
    if name == "server" and server is not None:
        from rloo_kit.rollout.server import ServerEngine  # loads an HTTP client

        return ServerEngine(server, reason, temperature, end_ids, rows, say)
    raise BackendError(f"rollout.engine is {name}, which samples inside the trainer only: set rollout.engine=auto")


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
    engine: str = "auto",
    on_batch: Progress | None = None,
) -> list[Completion]:
    """Completions of rendered prompts: len(prompts) x num_samples, prompt by prompt.

    Args:
        policy: from `load_policy`.
        prompts: texts with the chat template applied (`data.train["prompt"]`).
        max_completion_length: limit in tokens, at least 1.
        num_samples: completions of each prompt.
        temperature: 0 takes the likeliest token each time.
        batch_size: completions generated at once.
        seed: fixes the samples for a batch size; the global random state is restored afterwards.
        thinking_budget: tokens after which open thinking is closed; None for no budget.
        answer_budget: with a thinking budget, limit in tokens after `</think>`; None for what the budget leaves of
            `max_completion_length` (at least 1).
        thinking_close: what closes open thinking: "tag" for `</think>` alone, "sentence" for the Qwen3 report's.
        engine: as `rollout.engine`; auto, native or generate.
        on_batch: called now and then with the number of completions done so far and in total.

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
    limits = _limits(policy, max_completion_length, thinking_budget, answer_budget, thinking_close)
    if not prompts:
        return []
    prompt_ids = policy.tokenizer(list(prompts))["input_ids"]
    _check_lengths(policy, prompt_ids, limits.max_completion_length)
    prefixes = [ids for ids in prompt_ids for _ in range(num_samples)]  # prompt-major
    end_ids, pad_id = find_end_ids(policy), policy.tokenizer.pad_token_id
    sampler = build_engine(
        policy.model,
        engine,
        backend=policy.backend,
        temperature=temperature,
        end_ids=end_ids,
        pad_id=end_ids[0] if pad_id is None else pad_id,
        rows=batch_size,
    )
    with _seeded(seed):
        sampled = sampler.sample(prefixes, limits, on_progress=on_batch)
    return [
        _completion(policy, number // num_samples, ids, end_ids, was_forced)
        for number, (ids, was_forced) in enumerate(zip(sampled.completion_ids, sampled.thinking_forced, strict=True))
    ]


def _limits(
    policy: Policy, max_completion_length: int, thinking_budget: int | None, answer_budget: int | None, close: str
) -> Limits:
    """Here a thinking budget may exceed `max_completion_length`, which then only gives what is left to answer."""
    if thinking_budget is None:
        return Limits(max_completion_length)
    if thinking_budget < 0:
        raise ConfigError(f"thinking_budget is {thinking_budget}; it has to be 0 or more tokens")
    close_ids = close_ids_for(policy.tokenizer, policy.tags, close)
    asked = Limits(max_completion_length, thinking_budget, answer_budget, close_ids, policy.tags.end_id)
    length = thinking_budget + len(close_ids) + asked.answer_limit
    return replace(asked, max_completion_length=length, answer_budget=asked.answer_limit)


def find_end_ids(policy: Policy) -> list[int]:
    """Ids that end a completion: the tokenizer's end token and those of the model's generation config."""
    declared = policy.model.generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return list(dict.fromkeys([policy.tokenizer.eos_token_id, *declared]))


def _completion(policy: Policy, prompt_index: int, ids: list[int], end_ids: list[int], forced: bool) -> Completion:
    end_id = policy.tags.end_id
    return Completion(
        prompt_index=prompt_index,
        ids=ids,
        text=policy.tokenizer.decode(ids, skip_special_tokens=True),
        ended=bool(ids) and ids[-1] in end_ids,
        thinking_tokens=ids.index(end_id) if end_id is not None and end_id in ids else None,
        forced=forced,
    )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(seed)
        yield


def _check_lengths(policy: Policy, prompt_ids: list[list[int]], completion_length: int) -> None:
    longest = max(map(len, prompt_ids))
    if not all(prompt_ids):
        raise DataError(
            f"prompt {[len(ids) for ids in prompt_ids].index(0)} has no tokens; there is nothing to continue"
        )
    positions = getattr(policy.model.config, "max_position_embeddings", None)
    loaded = getattr(policy.model, "max_seq_length", None)  # Unsloth's tables end there, with an error about shapes
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
