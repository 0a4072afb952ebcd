"""Sampling completions from a policy outside the training loop: for evaluation, the report and a look in a notebook.

Generation is `model.generate` on left-padded batches, sorted by prompt length. What comes back is the model's own ids,
cut after the first end token; nothing is decoded and encoded again. The policy samples from its whole distribution:
the top-k, top-p and penalties that many checkpoints carry in their generation config are switched off, because RLOO
trains the distribution itself and an evaluation is to measure the same one.

With a thinking budget the thinking of a completion that is still open after so many tokens is closed for the model
(the id of `</think>` is appended, nothing else) and it answers; a completion that closed in time answers under the same
limit, so all answers have the same room.

Left out: beams, several devices, vLLM; the training loop has its own generation.
Source of the budget: s1, https://arxiv.org/abs/2501.19393; separate budgets: https://arxiv.org/abs/2505.05315.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rloo_kit import _stack
from rloo_kit.errors import ConfigError, DataError

# Every option that narrows or bends the distribution, at the value that leaves it alone. All are given, because
# `generate` fills what is missing from the checkpoint's own generation config.
WHOLE_DISTRIBUTION = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "min_new_tokens": 0,
}
NO_PENALTIES = {key: WHOLE_DISTRIBUTION[key] for key in ("repetition_penalty", "no_repeat_ngram_size", "num_beams")}


@dataclass(frozen=True)
class Completion:
    """One completion.

    Attributes:
        prompt_index: which of the prompts it answers.
        ids: token ids, the end token included where there is one, an appended `</think>` too.
        text: the ids decoded without special tokens; the thinking tags stay.
        ended: the model ended it itself; False means that it was truncated.
        closed: it holds `</think>`.
        thinking_tokens: tokens before the first `</think>`; None if it is not closed.
        forced: `</think>` was appended because the thinking budget was spent.
    """

    prompt_index: int
    ids: list[int]
    text: str
    ended: bool
    closed: bool
    thinking_tokens: int | None
    forced: bool = False


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
        on_batch: called after each batch with the completions done so far and their number in all; with a budget,
            once more from 0 on for the answers.

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
    torch = _stack.load_stack().torch
    prompt_ids = policy.tokenizer(list(prompts))["input_ids"]
    budget = max_completion_length if thinking_budget is None else thinking_budget
    answer = 0 if thinking_budget is None else answer_budget or max(1, max_completion_length - thinking_budget - 1)
    _check_lengths(policy, prompt_ids, budget + answer)
    prefixes = [ids for ids in prompt_ids for _ in range(num_samples)]  # prompt-major
    sampler = _Sampler(policy, temperature, batch_size, on_batch)
    with policy.inference_mode(), torch.no_grad(), _seeded(torch, seed):
        if thinking_budget is None:
            rows, forced = sampler.extend(prefixes, max_completion_length), [False] * len(prefixes)
        else:
            rows, forced = _think_then_answer(sampler, prefixes, thinking_budget, answer, policy.tags.end_id)
    return [
        _completion(policy, number // num_samples, ids, sampler.end_ids, was_forced)
        for number, (ids, was_forced) in enumerate(zip(rows, forced, strict=True))
    ]


def find_end_ids(policy: Any) -> list[int]:
    """Ids that end a completion: the tokenizer's end token and all that the model's generation config names."""
    declared = policy.model.generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return list(dict.fromkeys([policy.tokenizer.eos_token_id, *declared]))


class _Sampler:
    """Extends lists of ids by what the model generates."""

    def __init__(
        self, policy: Any, temperature: float, batch_size: int, on_batch: Callable[[int, int], None] | None = None
    ) -> None:
        self.on_batch = on_batch or (lambda done, total: None)
        self.model = policy.model
        self.end_ids = find_end_ids(policy)
        pad = policy.tokenizer.pad_token_id
        self.pad_id = self.end_ids[0] if pad is None else pad
        self.batch_size = batch_size
        self.options: dict[str, Any] = {"do_sample": False, **NO_PENALTIES}
        if temperature > 0:
            self.options = {"do_sample": True, "temperature": temperature, **WHOLE_DISTRIBUTION}
            if self.model.generation_config.min_p is None:
                del self.options["min_p"]  # 0.0 removes nothing, yet costs a softmax over the vocabulary a token

    def extend(self, prefixes: list[list[int]], limit: int, stop_ids: tuple[int, ...] = ()) -> list[list[int]]:
        """At most `limit` new ids for each prefix, up to and with the first end id (or one of `stop_ids`)."""
        rows: list[list[int]] = [[] for _ in prefixes]
        stops = [*self.end_ids, *stop_ids]
        order = sorted(range(len(prefixes)), key=lambda row: -len(prefixes[row]))  # the longest first: it fits, all fit
        for start in range(0, len(order) if limit > 0 else 0, self.batch_size):
            batch = order[start : start + self.batch_size]
            for row, ids in zip(batch, self._generate([prefixes[row] for row in batch], limit, stops), strict=True):
                rows[row] = _cut(ids, stops)
            self.on_batch(start + len(batch), len(order))
        return rows

    def _generate(self, prefixes: list[list[int]], limit: int, stops: list[int]) -> list[list[int]]:
        torch = _stack.load_stack().torch
        width = max(len(ids) for ids in prefixes)
        padded = [[self.pad_id] * (width - len(ids)) + ids for ids in prefixes]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prefixes]
        device = next(self.model.parameters()).device
        output = self.model.generate(
            input_ids=torch.tensor(padded, device=device),  # (batch, P)
            attention_mask=torch.tensor(mask, device=device),  # (batch, P)
            max_new_tokens=limit,
            eos_token_id=stops,
            pad_token_id=self.pad_id,
            use_cache=True,
            **self.options,
        )
        return output[:, width:].tolist()  # (batch, C)


def _think_then_answer(
    sampler: _Sampler, prefixes: list[list[int]], thinking_budget: int, answer_budget: int, end_id: int
) -> tuple[list[list[int]], list[bool]]:
    """Ids of each completion, and whether its thinking was closed for it."""
    rows = sampler.extend(prefixes, thinking_budget, stop_ids=(end_id,))
    over = [bool(ids) and ids[-1] in sampler.end_ids for ids in rows]  # ended inside its thinking: left as it is
    forced = [not ended and ids[-1:] != [end_id] for ids, ended in zip(rows, over, strict=True)]
    rows = [[*ids, end_id] if close else ids for ids, close in zip(rows, forced, strict=True)]
    going_on = [number for number, ended in enumerate(over) if not ended]
    answers = sampler.extend([prefixes[number] + rows[number] for number in going_on], answer_budget)
    for number, answer in zip(going_on, answers, strict=True):
        rows[number] = rows[number] + answer
    return rows, forced


def _cut(ids: list[int], stops: list[int]) -> list[int]:
    end = next((position for position, token in enumerate(ids) if token in stops), len(ids) - 1)
    return ids[: end + 1]


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
    if positions is not None and longest + completion_length > positions:
        raise ConfigError(
            f"the longest prompt has {longest} tokens and {completion_length} more are to be generated, but the model "
            f"has {positions} positions. Lower eval.max_completion_length, eval.thinking_budgets or "
            "data.max_prompt_length"
        )
