"""Sampling completions from a policy: one interface for training and evaluation, several engines behind it.

`build_engine` chooses the engine (`rollout.engine`) and says why; `generate_completions` samples texts with it for
evaluation, the report and a look in a notebook. Every engine samples from the policy's whole distribution, because RLOO
trains the distribution itself and an evaluation is to measure the same one, and every engine keeps the same rules for a
thinking budget (`thinking_budget`). What comes back is the model's own ids; nothing is decoded and encoded again.

Left out: beams. vLLM is TRL's or a server (`rollout_server`), and only training uses it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from rloo_kit import _stack
from rloo_kit.config.checks import ENGINES
from rloo_kit.errors import BackendError, ConfigError, DataError
from rloo_kit.models.policy import inference_mode
from rloo_kit.rollout.cache_options import check_cache
from rloo_kit.rollout.thinking_budget import close_ids_for, make_limits
from rloo_kit.rollout.types import Limits, Progress, Rollout

if TYPE_CHECKING:
    from rloo_kit.rollout.server import ServerSettings

__all__ = [
    "Completion", "Engine", "Limits", "Rollout", "build_engine", "choose_engine", "find_end_ids",
    "generate_completions", "make_limits",
]  # fmt: skip

ALIBI = ("bloom", "mpt")
MASKED_ATTENTION = ("sdpa", "eager", "rloo_packed")  # those that take the native loop's mask as it is


class Engine(Protocol):
    """Samples completions of prompts.

    Attributes:
        name: native, generate, continuous or server. reason: why that one, one line for people.
        rows: completions at once; None for all of a call. Halved for good when the device runs out of memory.
    """

    name: str
    reason: str
    rows: int | None

    def sample(
        self,
        prompt_ids: list[list[int]],
        limits: Limits,
        expected_lengths: Sequence[float] | None = None,
        on_progress: Progress | None = None,
    ) -> Rollout:
        """One completion for each prompt; neighbours with equal prompts are a group.

        Args:
            prompt_ids: token ids, at least one each.
            limits: on the completions' lengths, see `make_limits`.
            expected_lengths: one number a prompt; where not all rows fit at once, the longest start first.
            on_progress: called with the completions done so far and their number in all.

        The model is in evaluation mode meanwhile, and as it was afterwards. Random numbers are torch's global ones.
        """
        ...


@dataclass(frozen=True)
class Completion:
    """One completion.

    Attributes:
        prompt_index: which of the prompts it answers.
        ids: token ids, the end token included where there is one, forced ones too.
        text: the ids decoded without special tokens; the thinking tags stay.
        ended: the model ended it itself; False means that it was truncated.
        closed: it holds `</think>`.
        thinking_tokens: tokens before the first `</think>`; None if it is not closed.
        forced: the thinking was closed by force because the thinking budget was spent.
    """

    prompt_index: int
    ids: list[int]
    text: str
    ended: bool
    closed: bool
    thinking_tokens: int | None
    forced: bool = False


def choose_engine(wanted: str, backend: str, model: Any) -> tuple[str, str]:
    """The engine's name and why, for `rollout.engine` = `wanted`.

    Args:
        backend: "unsloth" or "transformers". model: the policy's model.

    Raises:
        ConfigError: no such engine. BackendError: an engine that cannot be used here.
    """
    if wanted not in ENGINES:
        raise ConfigError(f"rollout.engine is {wanted!r}; it is one of {', '.join(ENGINES)}")
    is_unsloth = backend == "unsloth"
    has_vllm = getattr(model, "vllm_engine", None) is not None
    if wanted == "auto":
        if is_unsloth:
            if has_vllm:
                return "vllm", "the model was loaded with Unsloth's fast_inference"
            return "generate", "Unsloth's fast inference runs inside generate"
        obstacle = _native_obstacle(model)
        return ("generate", obstacle) if obstacle else ("native", "no padding, and rows that have ended are dropped")
    if wanted == "native" and (is_unsloth or _native_obstacle(model)):
        why = "Unsloth replaces the attention that it goes through" if is_unsloth else _native_obstacle(model)
        raise BackendError(f"rollout.engine is native, but {why}: set rollout.engine=generate")
    if wanted == "continuous" and is_unsloth:
        raise BackendError(
            "rollout.engine is continuous, but Unsloth replaces the attention that it pages: set rollout.engine=auto, "
            "or model.backend=transformers"
        )
    if wanted == "vllm" and find_spec("vllm") is None:
        raise BackendError(
            "rollout.engine is vllm, but vLLM is not installed: pip install vllm (it needs CUDA), or set "
            "rollout.engine=auto"
        )
    return wanted, "rollout.engine asks for it"


def _native_obstacle(model: Any) -> str | None:
    """Why the model's own keys and values cannot be kept by `slot_cache`; None if they can."""
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
    say: Callable[[str], None] = print,
) -> Engine:
    """The engine that samples from `model`.

    Args:
        model: a PeftModel or a causal language model, without DDP or accelerate around it; in any mode.
        engine: `rollout.engine`: auto, native, generate, continuous or server (vllm is TRL's, see `choose_engine`).
        backend: "unsloth" or "transformers", whichever loaded the model.
        temperature: 0 takes the likeliest token each time.
        end_ids: ids that end a completion. pad_id: what pads rows; it never reaches a result.
        rows: completions at once at most; None for all.
        cache: `rollout.cache`: plain, int8 or offloaded; not every engine can, see `rollout_cache`.
        server: where the engine "server" samples, and how it gets the adapter.
        say: gets one line when rows are halved because memory ran out.

    Raises:
        ConfigError, BackendError: as `choose_engine` and `check_cache`.
    """
    name, reason = choose_engine(engine, backend, model)
    check_cache(cache, name, backend, on_cuda=model.device.type == "cuda")
    if cache != "plain":
        reason = f"{reason}; its cache is {cache} (rollout.cache)"

    def mode() -> Any:
        return inference_mode(backend, model)

    if name == "native":
        from rloo_kit.rollout.native import NativeEngine

        return NativeEngine(model, mode, reason, temperature, end_ids, rows, say, cache)
    if name == "generate":
        from rloo_kit.rollout.generate import GenerateEngine

        return GenerateEngine(model, mode, reason, temperature, end_ids, pad_id, rows, say, cache)
    if name == "continuous":
        from rloo_kit.rollout.continuous import ContinuousEngine

        return ContinuousEngine(model, mode, reason, temperature, end_ids, pad_id, rows)
    if name == "server" and server is not None:
        from rloo_kit.rollout.server import ServerEngine

        return ServerEngine(server, reason, temperature, end_ids, rows, say)
    raise BackendError(f"rollout.engine is {name}, which samples inside the trainer only: set rollout.engine=auto")


def generate_completions(
    policy: Any,
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
    on_batch: Callable[[int, int], None] | None = None,
) -> list[Completion]:
    """Completions of rendered prompts, prompt by prompt, `num_samples` in a row for each.

    Args:
        policy: what `load_policy` returns.
        prompts: texts with the chat template applied (`data.train["prompt"]`).
        max_completion_length: tokens at most, at least 1.
        num_samples: completions of each prompt.
        temperature: 0 takes the likeliest token each time.
        batch_size: completions generated at once.
        seed: fixes the samples; the global random state is as before afterwards. Another batch size gives other ones.
        thinking_budget: tokens after which open thinking is closed; None lets the model think until it ends.
        answer_budget: with a thinking budget, tokens at most after `</think>`; None for what the budget leaves of
            `max_completion_length` (at least 1).
        thinking_close: what closes open thinking: "tag" for `</think>` alone, "sentence" for the Qwen3 report's.
        engine: as `rollout.engine`; auto, native or generate.
        on_batch: called now and then with the completions done so far and their number in all.

    Returns:
        len(prompts) x num_samples completions.

    Raises:
        ConfigError: a value out of range, a budget for a model without `</think>`, more tokens than the model has
            positions.
        DataError: a prompt without tokens.
    """
    _check(policy, max_completion_length, num_samples, temperature, batch_size, thinking_budget, answer_budget)
    if not prompts:
        return []
    limits = _limits(policy, max_completion_length, thinking_budget, answer_budget, thinking_close)
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
    with _seeded(_stack.load_stack().torch, seed):
        sampled = sampler.sample(prefixes, limits, on_progress=on_batch)
    return [
        _completion(policy, number // num_samples, ids, end_ids, was_forced)
        for number, (ids, was_forced) in enumerate(zip(sampled.completion_ids, sampled.thinking_forced, strict=True))
    ]


def _limits(
    policy: Any, max_completion_length: int, thinking_budget: int | None, answer_budget: int | None, close: str
) -> Limits:
    """A budget for thinking may go beyond `max_completion_length` here, which then only says what is left to answer."""
    if thinking_budget is None:
        return Limits(max_completion_length)
    close_ids = close_ids_for(policy.tokenizer, policy.tags, close)
    answer = answer_budget or max(1, max_completion_length - thinking_budget - len(close_ids))
    length = thinking_budget + len(close_ids) + answer
    return Limits(length, thinking_budget, answer, close_ids, policy.tags.end_id)


def find_end_ids(policy: Any) -> list[int]:
    """Ids that end a completion: the tokenizer's end token and all that the model's generation config names."""
    declared = policy.model.generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return list(dict.fromkeys([policy.tokenizer.eos_token_id, *declared]))


def _completion(policy: Any, prompt_index: int, ids: list[int], end_ids: list[int], forced: bool) -> Completion:
    end_id = policy.tags.end_id
    closed = end_id is not None and end_id in ids
    return Completion(
        prompt_index=prompt_index,
        ids=ids,
        text=policy.tokenizer.decode(ids, skip_special_tokens=True),
        ended=bool(ids) and ids[-1] in end_ids,
        closed=closed,
        thinking_tokens=ids.index(end_id) if closed else None,
        forced=forced,
    )


@contextmanager
def _seeded(torch: Any, seed: int) -> Iterator[None]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(seed)
        yield


def _check(
    policy: Any,
    max_completion_length: int,
    num_samples: int,
    temperature: float,
    batch_size: int,
    thinking_budget: int | None,
    answer_budget: int | None,
) -> None:
    at_least_one = {
        "max_completion_length": max_completion_length,
        "num_samples": num_samples,
        "batch_size": batch_size,
        "answer_budget": 1 if answer_budget is None else answer_budget,
    }
    for name, value in at_least_one.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it has to be at least 1")
    if temperature < 0:
        raise ConfigError(f"temperature is {temperature}; it has to be 0 (greedy) or more")
    if thinking_budget is None:
        return
    if thinking_budget < 0:
        raise ConfigError(f"thinking_budget is {thinking_budget}; it has to be 0 or more tokens")
    if policy.tags.end_id is None:
        raise ConfigError(
            "a thinking budget was asked for, but the tokenizer has no </think>, so there is no thinking to close. "
            "Set eval.thinking_budgets: []"
        )


def _check_lengths(policy: Any, prompt_ids: list[list[int]], completion_length: int) -> None:
    longest = max(map(len, prompt_ids))
    if not all(prompt_ids):
        raise DataError(
            f"prompt {[len(ids) for ids in prompt_ids].index(0)} has no tokens; there is nothing to continue"
        )
    positions = getattr(policy.model.config, "max_position_embeddings", None)
    loaded = getattr(policy.model, "max_seq_length", None)  # Unsloth's tables end there, with an error about shapes
    limits = [
        (loaded, f"was loaded for {loaded}: raise model.max_seq_length, or lower"),
        (positions, f"has {positions} positions. Lower"),
    ]
    for limit, cure in limits:
        if limit is not None and longest + completion_length > limit:
            raise ConfigError(
                f"the longest prompt has {longest} tokens and {completion_length} more are to be generated, but the "
                f"model {cure} eval.max_completion_length, eval.thinking_budgets or data.max_prompt_length"
            )
