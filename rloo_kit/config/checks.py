"""What keys mean together: contradictions between options of the loop, whole groups, RLOO's relatives, data sources.

Messages name the keys of a run's file; `loop/options.py` renames them for `RLOOConfig`.
"""

from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from rloo_kit.system.processes import count_processes

# Values that leave the model's distribution unchanged; -1 is how vLLM writes "all tokens".
SAMPLING_FILTERS: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0, None),
    "top_k": (0, -1, None),
}
# TRL's further ones, without a choice: `rloo.top_p` cuts off a tail as min_p does, and a penalty teaches to repeat.
REFUSED_FILTERS: dict[str, tuple[Any, ...]] = {"min_p": (None, 0.0), "repetition_penalty": (1.0, None)}
# Number of tokens that close a thought in Qwen3's vocabulary: the tag alone; or the sentence of Qwen3's report, the tag
# and a blank line.
CLOSE_TOKENS = {"tag": 1, "sentence": 23}
GENERATIONS, PROMPTS = 8, 4  # defaults: completions per prompt, prompts per step

FILE_KINDS = (".jsonl", ".csv", ".parquet")  # extensions of data files
GYM_PREFIX = "reasoning_gym/"  # prefix of a source that is a reasoning-gym task
VERIFIERS_PREFIX = "verifiers/"  # of sources and environments of the package `verifiers`

HealthRule = Literal[
    "broken_policy", "reward_failures", "truncation", "cold_start", "no_signal", "kl_explosion",
    "entropy_collapse", "length_explosion", "length_collapse", "never_closed", "reward_hacking", "no_movement",
    "sampler_gap",
]  # fmt: skip

VLLM_TEMPERATURE = 2.0  # the highest that vLLM accepts
VLLM_LEAST_TEMPERATURE = 0.01  # above 0; vLLM raises lower values to this one

WHY_REFUSED = (
    "tokens would be sampled from a filtered distribution but scored under the full one, so the gradient would be "
    "that of another policy"
)


# ------------------------------------------------------------------------------------------------ options of the loop


def find_option_problems(values: Mapping[str, Any]) -> list[str]:
    """Contradictions between options of the loop. A missing option is not set; a check without its options finds
    nothing, so that a section of a file is checked as a whole `RLOOConfig` is.

    >>> find_option_problems({"top_k": 1, "accept_truncated_sampling": True})[0][:44]
    'rloo.top_k is 1, which leaves one token: a g'

    Args:
        values: options by their name in `RLOOConfig`.
    """
    engine = values.get("rollout_engine")
    problems = [
        *_find_sampling_problems(values),
        *_find_loss_problems(values),
        *_find_thinking_problems(values),
        *_find_server_problems(engine, values.get("rollout_server_url")),
    ]
    if engine and "temperature" in values:
        problems += find_temperature_problems(engine, {"rloo.temperature": values["temperature"]})
    rounds = values.get("resample_rounds")
    if rounds and values.get("baseline") == "none":
        problems.append(
            f"rollout.resample_rounds is {rounds}, which replaces groups with equal scores, but rloo.baseline is none, "
            "which trains on them too; set rollout.resample_rounds=0, or rloo.baseline=group_mean"
        )
    return problems


def _find_sampling_problems(values: Mapping[str, Any]) -> list[str]:
    """Filters, which sample from a distribution other than the scored one; `temperature` is part of both."""
    accepted = values.get("accept_truncated_sampling", False)
    problems = [
        f"{name} is {values[name]}: {WHY_REFUSED}. Set {name}={neutral[0]}"
        for name, neutral in REFUSED_FILTERS.items()
        if name in values and values[name] not in neutral
    ]
    for name, neutral in SAMPLING_FILTERS.items():
        off, value = neutral[0], values.get(name)
        if value not in neutral and not accepted:
            problems.append(
                f"rloo.{name} is {value}: {WHY_REFUSED}. Set rloo.{name}={off}; to sharpen sampling, lower "
                "rloo.temperature, which is scored too; or set rloo.accept_truncated_sampling=true, which corrects for "
                "it in part"
            )
        elif accepted and (name, value) in (("top_k", 1), ("top_p", 0.0)):
            problems.append(
                f"rloo.{name} is {value}, which leaves one token: a group's completions are all equal and teach "
                f"nothing. Set rloo.{name}={off}"
            )
    return problems


def _find_loss_problems(values: Mapping[str, Any]) -> list[str]:
    """A mean or penalty per token with one ratio per completion, two scales, unknown counts."""
    problems = []
    form, whole = values.get("ratio_form"), ", one ratio for a whole completion"
    if values.get("kl_form") == "per_token" and form not in (None, "per_token"):
        found = "rloo.kl_form is per_token, which gives every token its own advantage, but rloo.ratio_form is "
        problems.append(f"{found}{form}{whole}; set rloo.ratio_form=per_token (or null), or another rloo.kl_form")
    if values.get("scale_rewards") == "group" and values.get("normalize_advantages"):
        found = "rloo.scale_rewards is group and rloo.normalize_advantages is true, two scales for one advantage"
        problems.append(f"{found}; set rloo.scale_rewards=none or rloo.normalize_advantages=false")
    mean = values.get("token_mean", "none")
    if mean != "none" and form in ("sum", "length_normalized"):
        found = f"rloo.token_mean is {mean}, a mean over tokens, but rloo.ratio_form is {form}{whole}"
        problems.append(f"{found}; set rloo.ratio_form=per_token (or null), or rloo.token_mean=none")
    steps, passes = values.get("gradient_accumulation_steps", 1), values.get("steps_per_generation")
    if mean == "batch" and passes and passes % steps:
        problems.append(
            f"rloo.token_mean is batch, but rloo.steps_per_generation ({passes}) is not a multiple of "
            f"rloo.gradient_accumulation_steps ({steps}): the tokens of a step come from several rollouts, and the "
            "first is trained before they can be counted; set rloo.steps_per_generation=null or "
            "rloo.token_mean=completion"
        )
    return problems


def _find_thinking_problems(values: Mapping[str, Any]) -> list[str]:
    thinking, answer = values.get("thinking_budget"), values.get("answer_budget")
    if thinking is None:
        found = f"rloo.answer_budget is {answer}, but rloo.thinking_budget is null, so no thinking is cut short"
        return [] if answer is None else [f"{found}; set rloo.thinking_budget or rloo.answer_budget=null"]
    closing = CLOSE_TOKENS.get(values.get("thinking_close", "tag"), 1)
    limit, needed = values.get("max_completion_length"), thinking + closing + (answer or 1)
    if limit is None or needed <= limit:
        return []
    last = f"rloo.answer_budget ({answer})" if answer else "an answer of 1 token"
    return [
        f"rloo.thinking_budget ({thinking}) + its closing ({closing}) + {last} = {needed} tokens, more than "
        f"rloo.max_completion_length ({limit}); raise it to {needed} or lower rloo.thinking_budget"
    ]


def _find_server_problems(engine: str | None, url: str | None) -> list[str]:
    if url is None:
        found = "rollout.engine is server, but rollout.server_url is null; set rollout.server_url=http://host:port, "
        return [f"{found}where vllm serve listens"] if engine == "server" else []
    if set("@?#") & set(url):  # not printed: it may contain a password or a token
        return [
            "rollout.server_url has more than a host and a port; set VLLM_API_KEY for an API key, and "
            "rollout.server_url=http://host:port"
        ]
    try:
        parts = urlsplit(url)
        is_plain = parts.port != 0 and url.isascii() and url.isprintable() and not set(" \\") & set(url)
    except ValueError:
        is_plain = False
    if is_plain and parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/"):
        return []
    return [f"rollout.server_url is {url!r}; it takes http://host:port, without a path (no /v1)"]


def find_tool_problems(values: Mapping[str, Any]) -> list[str]:
    """Names in a file that cannot be tools; `values` as in `find_option_problems`."""
    names = [*values["tools"], *filter(None, [values["environment"]])]
    forms = "module:function, path/to/file.py:Class or, as an environment, verifiers/NAME"
    wrong = [name for name in names if not all(name.rpartition(":")) and not name.startswith("verifiers/")]
    return [f"rloo.tools, rloo.environment: {name} is not of the form {forms}" for name in wrong]


def find_temperature_problems(engine: str, temperatures: Mapping[str, float]) -> list[str]:
    """Temperatures, by key, outside the engine's range.

    >>> find_temperature_problems("server", {"rloo.temperature": 2.5})
    ['rloo.temperature is 2.5, and vLLM samples at 0.01 to 2; set rloo.temperature=2 or lower, or rollout.engine=auto']
    """
    if engine not in ("server", "vllm"):
        return []
    low, high = VLLM_LEAST_TEMPERATURE, VLLM_TEMPERATURE
    return [
        f"{key} is {value:g}, and vLLM samples at {low:g} to {high:g}; set {key}="
        f"{f'{high:g} or lower' if value > high else f'{low:g} or higher'}, or rollout.engine=auto"
        for key, value in temperatures.items()
        if value > high or 0 < value < low
    ]


# ------------------------------------------------------------------------------------------------ whole groups


def usual_batch(num_generations: int | None) -> int:
    """Default number of completions per step: `PROMPTS` groups of `num_generations`; None means `GENERATIONS`.

    >>> usual_batch(None), usual_batch(6)
    (32, 24)
    """
    return PROMPTS * (num_generations or GENERATIONS)


def find_batch_problems(values: Mapping[str, Any]) -> list[str]:
    """Why a rollout does not consist of whole groups.

    >>> find_batch_problems({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 4})
    []

    Args:
        values: options by their name in `RLOOConfig`; a generation_batch_size, which a file has not, is TRL's to check.
    """
    group = values["num_generations"]
    if group < 2:
        return [f"num_generations is {group}; set it to 2 or more: a completion is compared with its siblings"]
    completions, arithmetic = _rollout(values)
    if values.get("generation_batch_size") is not None or completions % group == 0:
        return []
    return [
        f"a rollout has {arithmetic}, which does not divide into whole groups of {group} (num_generations): change one "
        "of them so that it does"
    ]


def find_eval_problem(per_device: int, num_generations: int) -> str | None:
    """Why an evaluation's batch of `RLOOTrainer` does not consist of whole groups; None if it does."""
    total = per_device * count_processes()
    if total % num_generations == 0:
        return None
    return (
        f"an evaluation has batches of {per_device} completions (per_device_eval_batch_size) x "
        f"{_count(count_processes(), 'process')} = {total}, which does not divide into whole groups of "
        f"{num_generations} (num_generations_eval, or num_generations): change one of them so that it does"
    )


def find_prompt_problem(prompts: int, values: Mapping[str, Any]) -> str | None:
    """Why `prompts` do not fill one rollout, so that no step could run; `values` as in `find_batch_problems`."""
    completions, arithmetic = _rollout(values)
    group = values["num_generations"]
    if prompts >= (needed := completions // group):
        return None
    return (
        f"the training set has {_count(prompts, 'prompt')}, but a rollout needs {needed}: it has {arithmetic}, in "
        f"groups of {group} (num_generations), one for each prompt. Train on more prompts, or lower "
        "per_device_train_batch_size"
    )


def _rollout(values: Mapping[str, Any]) -> tuple[int, str]:
    """The completions of a rollout, and their arithmetic in words."""
    steps, accumulated = values.get("steps_per_generation"), values["gradient_accumulation_steps"]
    key = "gradient_accumulation_steps" if steps in (None, accumulated) else "steps_per_generation"
    per_device, processes, passes = values["per_device_train_batch_size"], count_processes(), steps or accumulated
    total = per_device * processes * passes
    return total, (
        f"{per_device} completions a pass (per_device_train_batch_size) x {_count(processes, 'process')} x "
        f"{_count(passes, 'pass')} ({key}) = {total} completions"
    )


def _count(number: int, word: str) -> str:
    plural = f"{word}es" if word.endswith("s") else f"{word}s"
    return f"{number} {word if number == 1 else plural}"


# ------------------------------------------------------------------------------------------------ methods

# The keys that define a method, apart from penalty, clip range and learning rate. Defaults are RLOO's.
METHOD_DEFAULTS: dict[str, Any] = {
    "baseline": "leave_one_out",
    "scale_rewards": "none",
    "normalize_advantages": False,
    "token_mean": "none",
    "ratio_form": None,
}
METHODS: dict[str, dict[str, Any]] = {
    "RLOO": {},
    "GRPO": {"baseline": "group_mean", "scale_rewards": "group", "token_mean": "completion"},
    "Dr. GRPO": {"baseline": "group_mean", "ratio_form": "per_token"},
    "DAPO": {"baseline": "group_mean", "scale_rewards": "group", "token_mean": "batch", "epsilon_high": 0.28},
    "REINFORCE++": {"baseline": "none", "normalize_advantages": True, "kl_form": "per_token"},
    "REINFORCE++-baseline": {"baseline": "group_mean", "normalize_advantages": True, "kl_form": "per_token"},
    "REINFORCE": {"baseline": "none"},
    "GSPO": {
        "baseline": "group_mean", "scale_rewards": "group", "ratio_form": "length_normalized",
        "epsilon": 3e-4, "epsilon_high": 4e-4,
    },
}  # fmt: skip


def name_method(rloo: Mapping[str, Any]) -> str | None:
    """The method of the `rloo:` keys, regardless of penalty and clip range; None if it has no name.

    `ratio_form` decides if two names fit (group mean alone: Dr. GRPO only with a ratio for each token).

    >>> name_method({"baseline": "group_mean", "scale_rewards": "group", "token_mean": "completion"})
    'GRPO'
    >>> name_method({"beta": 0.05}), name_method({"scale_rewards": "group"})
    ('RLOO', None)
    >>> name_method({"baseline": "group_mean"}), name_method({"baseline": "group_mean", "kl_form": "per_token"})
    (None, 'Dr. GRPO')
    """
    found = {name: rloo.get(name, default) for name, default in METHOD_DEFAULTS.items()}
    if found["ratio_form"] is None and rloo.get("kl_form") == "per_token":  # each token has its own ratio then
        found["ratio_form"] = "per_token"
    for method, keys in METHODS.items():
        wanted = {name: keys.get(name, default) for name, default in METHOD_DEFAULTS.items()}
        if wanted["ratio_form"] is None:  # any ratio form, unless the method requires one
            wanted["ratio_form"] = found["ratio_form"]
        if found == wanted:
            return method
    return None


def describe_method(rloo: Mapping[str, Any]) -> str:
    """The method in words: its name, if it has one, and how its advantage is computed.

    >>> describe_method({})
    'RLOO (reward minus the mean reward of the other completions of the prompt)'
    >>> describe_method({"scale_rewards": "group"})[:23]
    'a policy gradient (rewa'
    """
    found = {name: rloo.get(name, default) for name, default in METHOD_DEFAULTS.items()}
    words = ["reward" + {
        "leave_one_out": " minus the mean reward of the other completions of the prompt",
        "group_mean": " minus the mean reward of the prompt's completions",
        "none": " without a baseline",
    }[found["baseline"]]]  # fmt: skip
    if found["scale_rewards"] == "group":
        words.append("divided by the deviation of its group")
    if found["normalize_advantages"]:
        words.append("standardized over the batch")
    if found["token_mean"] != "none":
        whose = {"completion": "each completion's tokens", "batch": "all tokens of a step"}[found["token_mean"]]
        words.append(f"loss a mean over {whose}")
    return f"{name_method(rloo) or 'a policy gradient'} ({', '.join(words)})"


# ------------------------------------------------------------------------------------------------ data


def find_test_problem(source: str | None, test_source: str | None, split: str, test_split: str | None) -> str | None:
    """Why the held-out prompts cannot be read as configured; None if they can. `source` is None for a mix.

    >>> find_test_problem("rows.csv", None, "train", "test")
    "test_split is 'test', but rows.csv is a file and has no splits; set data.test_source to the file of the test set"
    """
    read = test_source or source
    if test_source is None and test_split is None:
        return None
    if read is None:
        return "test_split names a split of data.source, and data.sources is a mix; set data.test_source too"
    if read.startswith("embedded/"):
        name = "test_split" if test_source is None else "test_source"
        return f"{name} is set, but {read} has no separate test set; remove data.{name} and use data.test_size"
    found = f"test_split is {test_split!r}, but "
    if read.startswith(GYM_PREFIX):  # its test prompts are drawn from separate seeds
        return f"{found}{read} draws its prompts and has no splits; remove data.test_split" if test_split else None
    is_file = read.lower().endswith(FILE_KINDS)
    if is_file and test_source is None:
        return f"{found}{read} is a file and has no splits; set data.test_source to the file of the test set"
    if is_file and test_split is not None:
        return f"{found}test_source is the file {read}; remove data.test_split"
    if read == source and (is_file or split == (test_split or "test")):
        return (
            f"the held-out prompts would come from {read}, the training data; name another split, or remove "
            "data.test_source and data.test_split so that data.test_size splits prompts off"
        )
    return None


def find_gym_problem(sources: list[str], section: Any) -> str | None:
    """Why `sources` do not take the keys of `section` (data, or one source of a mix); None if they do."""
    are_tasks = [source.startswith(GYM_PREFIX) for source in sources]
    names = "subset", "split", "prompt_column", "answer_column", "answer_after"
    defaults = {name: type(section).model_fields[name].default for name in names}
    columns = [f"{name}={value}" for name, value in section if name in names and value != defaults[name]]
    if section.options is not None and not any(are_tasks):
        return f"options is set, but {', '.join(sources)} is not a {GYM_PREFIX}... task; remove it"
    if columns and all(are_tasks):
        return (
            f"{', '.join(columns)}: {', '.join(sources)} generates its rows and has neither splits nor columns; remove "
            f"{'them' if len(columns) > 1 else 'it'}"
        )
    return None
