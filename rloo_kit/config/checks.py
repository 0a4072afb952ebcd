"""Checks across the keys of the loop, shared by a run's file and `RLOOConfig`; each error names the key to change."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from rloo_kit.errors import excerpt

# Values that leave the model's distribution unchanged; -1 is how vLLM writes "all tokens".
SAMPLING_FILTERS: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0, None),
    "top_k": (0, -1, None),
    "min_p": (None, 0.0),
    "repetition_penalty": (1.0, None),
}
# The same for other arguments of `generate` that `generation_kwargs` may contain.
_OTHER_FILTERS: dict[str, tuple[Any, ...]] = {
    "top_h penalty_alpha exponential_decay_length_penalty watermarking_config": (None,),
    "typical_p encoder_repetition_penalty guidance_scale": (1.0, None),
    "epsilon_cutoff eta_cutoff presence_penalty frequency_penalty": (0.0, None),
    "no_repeat_ngram_size min_length min_new_tokens min_tokens": (0, None),
    "bad_words_ids bad_words suppress_tokens begin_suppress_tokens": (None, []),
    "sequence_bias logit_bias": (None, {}),
    "do_sample": (True, None),
    "num_beams num_beam_groups": (1, None),
    "remove_invalid_values": (False, None),
    "forced_bos_token_id forced_eos_token_id prefix_allowed_tokens_fn constraints force_words_ids": (None,),
    "allowed_token_ids structured_outputs": (None,),
    "logits_processors": (None, []),
}
HIDDEN_FILTERS = SAMPLING_FILTERS | {name: _OTHER_FILTERS[names] for names in _OTHER_FILTERS for name in names.split()}
# Arguments of `generate` that change neither the sampled tokens nor where a completion ends.
_HARMLESS = frozenset({
    "use_cache", "disable_compile", "compile_config", "low_memory", "return_dict_in_generate", "output_scores",
    "output_logits", "output_attentions", "output_hidden_states", "pad_token_id", "bos_token_id",
    "renormalize_logits", "length_penalty", "early_stopping",
})  # fmt: skip
# What to set instead of an argument that the engines ignore.
_INSTEAD = {
    "max_new_tokens max_tokens": "Set max_completion_length={value} instead",
    "max_length": "Set max_completion_length instead, which does not count the prompt",
    "num_return_sequences n": "Set num_generations={value} instead",
    "seed": "Set seed={value} instead",
    "eos_token_id stop stop_strings stop_token_ids": "Set tokenizer.eos_token instead, where completions end",
    "cache_implementation": "Remove it: each engine has its own KV cache",
}
_ADVICE = {name: _INSTEAD[names] for names in _INSTEAD for name in names.split()}
# Number of tokens that close a thought in Qwen3's vocabulary: the tag alone; or the sentence of Qwen3's report, the tag
# and a blank line.
CLOSE_TOKENS = {"tag": 1, "sentence": 23}

FILE_KINDS = (".jsonl", ".csv", ".parquet")  # extensions of data files
GYM_PREFIX = "reasoning_gym/"  # prefix of a source that is a reasoning-gym task

VLLM_TEMPERATURE = 2.0  # the highest that vLLM accepts
VLLM_LEAST_TEMPERATURE = 0.01  # above 0; vLLM raises lower values to this one
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # maximum ranks of adapters that vLLM offers

_WHY_REFUSED = (
    "tokens would be sampled from a filtered distribution but scored under the full one, so the gradient would be "
    "that of another policy"
)


def find_sampling_problems(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Settings that sample from a distribution other than the scored one; `temperature` is part of both.

    >>> find_sampling_problems({"top_p": 0.9}, "rloo.")[0].split(",")[0]
    'rloo.top_p is 0.9: tokens would be sampled from a filtered distribution but scored under the full one'
    >>> find_sampling_problems({"top_p": 1.0, "temperature": 0.7})
    []

    Args:
        values: the keys of the loop by name, `generation_kwargs` included. prefix: put before a key in messages.
    """
    accepted = values.get("accept_truncated_sampling", False)
    problems = [
        f"{prefix}{name} is {values[name]}: {_WHY_REFUSED}. Set {prefix}{name}={_written(neutral[0])}; to sharpen "
        f"sampling, lower {prefix}temperature, which is scored too; or set {prefix}accept_truncated_sampling=true, "
        "which corrects for it in part"
        for name, neutral in SAMPLING_FILTERS.items()
        if name in values and values[name] not in neutral and not accepted
    ]
    problems += [
        f"{prefix}{name} is {value}, which leaves one token: a group's completions are all equal and teach nothing. "
        f"Set {prefix}{name}={_written(SAMPLING_FILTERS[name][0])}"
        for name, value in (("top_k", 1), ("top_p", 0.0), ("min_p", 1.0))
        if accepted and values.get(name) == value
    ]
    if regex := values.get("vllm_structured_outputs_regex"):
        problems.append(f"{prefix}vllm_structured_outputs_regex is {regex!r}: {_WHY_REFUSED}. Remove it")
    return [*problems, *_find_hidden_problems(values, prefix)]


def _find_hidden_problems(values: Mapping[str, Any], prefix: str) -> list[str]:
    """Keys of `generation_kwargs` that filter the distribution, and those that would be ignored silently."""
    hidden = values.get("generation_kwargs")
    problems = []
    for name, value in hidden.items() if isinstance(hidden, Mapping) else ():
        found = f"{prefix}generation_kwargs has {name}={value}"
        if name == "temperature":
            if value not in (None, values.get("temperature", 1.0)):
                problems.append(
                    f"{found}, but {prefix}temperature, which is scored, is {values.get('temperature', 1.0)}; set "
                    f"{prefix}temperature={value} instead"
                )
        elif name in HIDDEN_FILTERS:
            if value not in HIDDEN_FILTERS[name]:
                advice = f"Remove it; {prefix}temperature is scored too and may be set"
                if name in SAMPLING_FILTERS:
                    advice += f", or {prefix}{name}={value} with {prefix}accept_truncated_sampling=true"
                problems.append(f"{found}: {_WHY_REFUSED}. {advice}")
        elif not _is_followed(name, value, values):
            advice = _ADVICE.get(name, "Remove it").format(value=value)
            problems.append(f"{found}, which the kit's engines do not read. {advice}")
    return problems


def _is_followed(name: str, value: Any, values: Mapping[str, Any]) -> bool:
    """Whether an argument of `generate` that filters nothing is respected, or states what is true anyway."""
    if value is None or name in _HARMLESS:
        return True
    if name in ("n", "num_return_sequences"):  # prompts are already repeated, one per completion
        return bool(value == 1)
    return name in ("max_new_tokens", "max_tokens") and value == values.get("max_completion_length")


def find_loop_problems(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Contradictions between the keys of the loop.

    >>> find_loop_problems({"delta": 1.1, "epsilon": 0.2})
    ['delta is 1.1; it bounds the ratio above the clip, so it must be above 1 + epsilon = 1.2']
    """
    return [
        *find_sampling_problems(values, prefix),
        *_find_ratio_problems(values, prefix),
        *_find_mean_problems(values, prefix),
        *_find_correction_problems(values, prefix),
        *_find_thinking_problems(values, prefix),
    ]


def find_resample_problems(rounds: int, baseline: str, rounds_key: str, baseline_key: str) -> list[str]:
    """Contradiction between resampling groups with equal scores and `baseline` none, which trains on them too.

    >>> find_resample_problems(2, "leave_one_out", "resample_rounds", "baseline")
    []
    """
    if not rounds or baseline != "none":
        return []
    return [
        f"{rounds_key} is {rounds}, which replaces groups with equal scores, but {baseline_key} is none, which "
        f"trains on them too; set {rounds_key}=0, or {baseline_key}=group_mean"
    ]


def find_server_problems(engine: str, url: str | None, engine_key: str, url_key: str) -> list[str]:
    """Problems with a rollout server's address; `engine_key` and `url_key` are the keys' names in messages.

    >>> find_server_problems("server", None, "engine", "url")
    ['engine is server, but url is null; set url=http://host:port, where vllm serve listens']
    """
    if url is None:
        if engine != "server":
            return []
        return [
            f"{engine_key} is server, but {url_key} is null; set {url_key}=http://host:port, where vllm serve listens"
        ]
    if set("@?#") & set(url):  # not printed: it may contain a password or a token
        return [
            f"{url_key} has more than a host and a port; set VLLM_API_KEY for an API key, and {url_key}=http://host:port"
        ]
    try:
        parts = urlsplit(url)
        is_plain = parts.port != 0 and url.isascii() and url.isprintable() and not set(" \\") & set(url)
    except ValueError:
        is_plain = False
    if is_plain and parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/"):
        return []
    return [f"{url_key} is {url!r}; it takes http://host:port, without a path (no /v1)"]


def find_temperature_problems(engine: str, temperatures: Mapping[str, float], engine_key: str) -> list[str]:
    """Temperatures, by key, outside the engine's range; `engine_key` is the engine's key in messages.

    >>> find_temperature_problems("server", {"temperature": 2.5}, "engine")
    ['temperature is 2.5, and vLLM samples at 0.01 to 2; set temperature=2 or lower, or engine=auto']
    """
    if engine not in ("server", "vllm"):
        return []
    low, high = VLLM_LEAST_TEMPERATURE, VLLM_TEMPERATURE
    return [
        f"{key} is {value:g}, and vLLM samples at {low:g} to {high:g}; set {key}="
        f"{f'{high:g} or lower' if value > high else f'{low:g} or higher'}, or {engine_key}=auto"
        for key, value in temperatures.items()
        if value > high or 0 < value < low
    ]


def find_test_problem(source: str | None, test_source: str | None, split: str, test_split: str | None) -> str | None:
    """Why the held-out prompts cannot be read as configured; None if they can. `source` is None for a mix.

    >>> find_test_problem("rows.csv", None, "train", "test")
    "test_split is 'test', but rows.csv is a file and has no splits; set data.test_source to the file of the test set"
    """
    if test_source is None and test_split is None:
        return None
    read = test_source or source
    if read is None:
        return "test_split names a split of data.source, and data.sources is a mix; set data.test_source too"
    if read.startswith("embedded/"):
        name = "test_split" if test_source is None else "test_source"
        return f"{name} is set, but {read} has no separate test set; remove data.{name} and use data.test_size"
    if read.startswith(GYM_PREFIX):
        if test_split is not None:
            return (
                f"test_split is {test_split!r}, but {read} draws its prompts and has no splits; remove data.test_split"
            )
        return None  # its test prompts are drawn from separate seeds
    if read.lower().endswith(FILE_KINDS):
        if test_source is None:
            return (
                f"test_split is {test_split!r}, but {read} is a file and has no splits; set data.test_source to the "
                "file of the test set"
            )
        if test_split is not None:
            return f"test_split is {test_split!r}, but test_source is the file {read}; remove data.test_split"
        same = read == source
    else:
        same = read == source and split == (test_split or "test")
    if same:
        return (
            f"the held-out prompts would come from {read}, the training data; name another split, or remove "
            "data.test_source and data.test_split so that data.test_size splits prompts off"
        )
    return None


def find_gym_problems(
    sources: list[str], options: Any, level: int | None, prefix: str, columns: Mapping[str, Any]
) -> list[str]:
    """Task options without a task, option values that cannot be valid, and keys that no task reads.

    >>> find_gym_problems(["rows.csv"], {"min_terms": 2}, None, "data.", {})
    ['data.options is set, but rows.csv is not a reasoning_gym/... task; remove it']

    Args:
        prefix: put before keys. columns: the keys that are set and control how a file or a hub id is read.
    """
    written = [name for name, value in (("options", options), ("curriculum_level", level)) if value is not None]
    are_tasks = [source.startswith(GYM_PREFIX) for source in sources]
    if written and not any(are_tasks):
        return [f"{prefix}{written[0]} is set, but {', '.join(sources)} is not a {GYM_PREFIX}... task; remove it"]
    problems = []
    if columns and all(are_tasks):
        listed = ", ".join(f"{prefix}{name}={value}" for name, value in columns.items())
        problems.append(
            f"{listed}: {', '.join(sources)} generates its rows and has neither splits nor columns; remove "
            f"{'them' if len(columns) > 1 else 'it'}"
        )
    for name, value in (options or {}).items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            problems.append(
                f"{prefix}options.{name} is {excerpt(value)}; an option is a finite number, text, true, false, null, "
                "or a list or mapping of these"
            )
    return problems


def _find_ratio_problems(values: Mapping[str, Any], prefix: str) -> list[str]:
    problems = []
    delta = values.get("delta")
    key = "epsilon" if values.get("epsilon_high") is None else "epsilon_high"
    if delta is not None and delta <= 1 + values.get(key, 0.2):
        problems.append(
            f"{prefix}delta is {delta}; it bounds the ratio above the clip, so it must be above 1 + {prefix}{key} = "
            f"{1 + values.get(key, 0.2):g}"
        )
    form = values.get("ratio_form")
    if values.get("kl_form") == "per_token" and form not in (None, "per_token"):
        problems.append(
            f"{prefix}kl_form is per_token, which gives every token its own advantage, but {prefix}ratio_form is "
            f"{form}, one ratio for a whole completion; set {prefix}ratio_form=per_token (or null), or another "
            f"{prefix}kl_form"
        )
    return problems


def _find_mean_problems(values: Mapping[str, Any], prefix: str) -> list[str]:
    """Two scales at once; a mean over tokens although a completion has one ratio, or although a step's token count is
    not known when its first rollout is trained."""
    problems = []
    if values.get("scale_rewards") == "group" and values.get("normalize_advantages"):
        problems.append(
            f"{prefix}scale_rewards is group and {prefix}normalize_advantages is true, two scales for one advantage; "
            f"set {prefix}scale_rewards=none or {prefix}normalize_advantages=false"
        )
    mean, form = values.get("token_mean", "none"), values.get("ratio_form")
    if mean != "none" and form in ("sum", "length_normalized"):
        problems.append(
            f"{prefix}token_mean is {mean}, a mean over tokens, but {prefix}ratio_form is {form}, one ratio for a "
            f"whole completion; set {prefix}ratio_form=per_token (or null), or {prefix}token_mean=none"
        )
    steps, passes = values.get("gradient_accumulation_steps", 1), values.get("steps_per_generation")
    if mean == "batch" and passes and passes % steps:
        problems.append(
            f"{prefix}token_mean is batch, but {prefix}steps_per_generation ({passes}) is not a multiple of "
            f"{prefix}gradient_accumulation_steps ({steps}): the tokens of a step come from several rollouts, and the "
            f"first is trained before they can be counted; set {prefix}steps_per_generation=null or "
            f"{prefix}token_mean=completion"
        )
    return problems


def _find_correction_problems(values: Mapping[str, Any], prefix: str) -> list[str]:
    form, floor = values.get("sampler_correction"), values.get("sampler_correction_floor")
    if not floor or form not in ("auto", "sequence", "token"):
        return []
    masking = f"{'token' if form == 'auto' else form}_mask"
    return [
        f"{prefix}sampler_correction_floor is {floor}, but {prefix}sampler_correction is {form}, which has no lower "
        f"bound; set {prefix}sampler_correction={masking} or {prefix}sampler_correction_floor=0"
    ]


def _find_thinking_problems(values: Mapping[str, Any], prefix: str) -> list[str]:
    thinking, answer = values.get("thinking_budget"), values.get("answer_budget")
    if thinking is None:
        if answer is None:
            return []
        return [
            f"{prefix}answer_budget is {answer}, but {prefix}thinking_budget is null, so thinking is never closed "
            f"by force; set {prefix}thinking_budget or {prefix}answer_budget=null"
        ]
    closing = CLOSE_TOKENS.get(values.get("thinking_close", "tag"), 1)
    needed = thinking + closing + (answer or 1)
    limit = values.get("max_completion_length")
    if limit is None or needed <= limit:
        return []
    parts = f"{prefix}thinking_budget ({thinking}) + its closing ({closing})"
    parts += f" + {prefix}answer_budget ({answer})" if answer else " + an answer of 1 token"
    return [
        f"{parts} = {needed} tokens, more than {prefix}max_completion_length ({limit}); raise it to {needed} or lower "
        f"{prefix}thinking_budget"
    ]


def _written(value: Any) -> str:
    """A value in YAML."""
    return "null" if value is None else str(value)
