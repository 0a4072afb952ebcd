"""Sampling through `model.generate` (with Unsloth, its fast inference).

A batch has prompts of one length if that needs no extra batch; otherwise prompts are padded on the left, unless the
model samples otherwise then. Log-probabilities are read from the scores one step late, so only one (B, V) tensor is
kept. Thinking is closed within the call, because a second call would prefill whole rows.

Shapes: B rows, P prompt, C completion tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from typing import Any

import torch

from rloo_kit.errors import BackendError
from rloo_kit.models.policy import is_coarse
from rloo_kit.rollout.filters import Cut, make_cut
from rloo_kit.rollout.thinking_budget import CompletionState, collect_rollout
from rloo_kit.rollout.types import WHOLE, Filters, Limits, OnTokens, Progress, Rollout
from rloo_kit.system.memory import is_out_of_memory

# Every option that reshapes the distribution, at its neutral value: `generate` takes missing ones from the checkpoint's
# generation config. `_Steering` applies temperature and filters, so it sees the sampled distribution.
WHOLE_DISTRIBUTION = {
    "temperature": 1.0,
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
PAD_CHECK = ((2, 6), 3)  # prompt lengths, and tokens after them
PAD_TOLERANCE, PAD_TOLERANCE_16_BITS = 1e-3, 0.1  # largest sum of probabilities that padding may move to other tokens
NO_PENALTIES = {key: WHOLE_DISTRIBUTION[key] for key in ("repetition_penalty", "no_repeat_ngram_size", "num_beams")}


class GenerateEngine:
    """See `engine.build_engine` for the arguments, `types.Engine` for the rest."""

    name = "generate"

    def __init__(
        self,
        model: Any,
        mode: Callable[[], AbstractContextManager[None]],
        reason: str,
        temperature: float,
        end_ids: Sequence[int],
        pad_id: int,
        rows: int | None,
        say: Callable[[str], None],
        filters: Filters = WHOLE,
    ) -> None:
        self._cut = make_cut(filters)
        self.reason, self.rows = reason, rows
        self._model, self._mode, self._say = model, mode, say
        self._temperature, self._end_ids, self._pad_id = temperature, list(end_ids), pad_id
        self._options: dict[str, Any] = {"do_sample": False, **NO_PENALTIES}
        if temperature > 0:
            self._options = {"do_sample": True, **WHOLE_DISTRIBUTION}
            if model.generation_config.min_p is None:
                del self._options["min_p"]  # 0.0 removes nothing, but costs a softmax over the vocabulary per token
        self._fault: str | None = None  # of padded prompts; None until checked, empty without

    def sample(
        self,
        prompt_ids: list[list[int]],
        limits: Limits,
        expected_lengths: Sequence[float] | None = None,
        on_progress: Progress | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Rollout:
        """See `types.Engine`."""
        states = [CompletionState(limits, self._end_ids) for _ in prompt_ids]
        order = [row for row, state in enumerate(states) if not state.finished]
        order.sort(key=lambda row: -len(prompt_ids[row]))  # longest first: if it fits, all fit
        if expected_lengths is not None:
            order.sort(key=lambda row: -expected_lengths[row])
        total, lengths = len(order), list(map(len, prompt_ids))
        while order:
            batch = next_batch(order, lengths, self.rows or len(order))
            if len({lengths[row] for row in batch}) > 1 and self.check_padding():
                batch = next_batch(order, lengths, self.rows or len(order), pads=False)
            begun = [CompletionState(limits, self._end_ids) for _ in batch]
            watch = None if on_tokens is None else _watch(on_tokens, batch)
            with self._mode(), torch.no_grad():  # left after each batch: Unsloth keeps the buffers of two sizes
                fits = self._generate([prompt_ids[row] for row in batch], begun, watch)
            if not fits:
                self._halve(len(batch), len(order))
                continue
            for row, state in zip(batch, begun, strict=True):
                states[row] = state
            order = [row for row in order if row not in batch]
            if on_progress is not None:
                on_progress(total - len(order), total)
        return collect_rollout(states, self._temperature)

    def _generate(
        self, prompts: list[list[int]], states: list[CompletionState], on_tokens: OnTokens | None = None
    ) -> bool:
        """Complete the states; returns False if memory ran out and they have to start over."""
        prefixes = [prompt + state.ids for prompt, state in zip(prompts, states, strict=True)]
        padded = self._pad(prefixes)
        rows, width = padded["input_ids"].shape
        cut = self._cut_behind(prefixes, padded["input_ids"].device)
        steering = _Steering(self._temperature, states, self._end_ids[0], cut, on_tokens)
        try:
            output = self._model.generate(
                **padded,
                max_new_tokens=max(state.room for state in states),
                eos_token_id=self._end_ids,
                pad_token_id=self._pad_id,
                use_cache=True,
                logits_processor=[steering],
                **self._cache_options(rows, width),
                **self._options,
            )
        except RuntimeError as error:
            if len(states) == 1 or not is_out_of_memory(error):
                raise
            return False
        steering.finish(output)
        return True

    def check_padding(self) -> str | None:
        """What is wrong with prompts padded on the left, which are then sampled one length after another; None if
        nothing is. Compares greedy continuations of a random prompt, padded and alone, at the first call."""
        if self._fault is None:
            generator, rows = torch.Generator().manual_seed(0), self._model.config.get_text_config().vocab_size
            drawn = torch.randint(rows, (2, max(PAD_CHECK[0])), generator=generator).tolist()
            prompts = [ids[:length] for ids, length in zip(drawn, PAD_CHECK[0], strict=True)]
            with self._mode(), torch.no_grad():
                steps = zip(self._continue(prompts), self._continue(prompts[:1]), strict=False)
            same = takewhile(lambda step: step[0][0] == step[1][0], steps)  # then the two continue other texts
            gaps = [(mine - other).abs().sum().item() / 2 for (_, mine), (_, other) in same]
            moved = max(gaps, default=0.0)  # none: a generate without logits_processor, which `_Steering` reports
            self._fault = ""
            if not moved <= (PAD_TOLERANCE_16_BITS if is_coarse(self._model) else PAD_TOLERANCE):
                self._fault = (
                    f"{self._model.config.model_type} continues a prompt that is padded on the left otherwise than the "
                    f"prompt alone ({moved:.0%} of the probability goes to other tokens), so prompts of different "
                    "lengths are sampled one length after another"
                )
                self._say(f"rollout: {self._fault}")
        return self._fault or None

    def _continue(self, prompts: list[list[int]]) -> list[tuple[int, torch.Tensor]]:
        """Greedy tokens after the first prompt: for each, the id before it, and the probabilities (V,)."""
        seen = list[tuple[int, torch.Tensor]]()

        def note(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append((int(ids[0, -1]), scores[0].float().softmax(-1)))
            return scores

        options = {"do_sample": False, **NO_PENALTIES, "max_new_tokens": PAD_CHECK[1], "logits_processor": [note]}
        self._model.generate(**self._pad(prompts), pad_token_id=self._pad_id, use_cache=True, **options)
        return seen

    def _pad(self, prefixes: list[list[int]]) -> dict[str, torch.Tensor]:
        """`generate`'s arguments for prefixes: ids and mask, (B, P), padded on the left."""
        width = max(len(ids) for ids in prefixes)
        padded = [[self._pad_id] * (width - len(ids)) + ids for ids in prefixes]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prefixes]
        device = self._model.get_input_embeddings().weight.device
        rows = {"input_ids": padded, "attention_mask": mask}
        return {name: torch.tensor(values, device=device) for name, values in rows.items()}

    def _cut_behind(self, prefixes: list[list[int]], device: torch.device) -> Cut | None:
        """The filters, reading a row's own tokens instead of its padding."""
        cut, width = self._cut, max(len(ids) for ids in prefixes)
        if cut is None:
            return None
        own = torch.tensor([ids[:1] * (width - len(ids)) + ids for ids in prefixes], device=device)  # (B, P)
        return lambda ids, scores: cut(torch.cat([own, ids[:, width:]], dim=1), scores)

    def _cache_options(self, rows: int, width: int) -> dict[str, Any]:
        """Arguments of `generate` for the cache of (B, P) prefixes; `measure` passes a full one."""
        return {}

    def _halve(self, rows: int, left: int) -> None:
        self.rows = max(1, rows // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._say(
            f"rollout: out of memory with {rows} completions at once; the {left} unfinished ones start over, "
            f"{self.rows} at once (rollout.rows={self.rows} starts with that)"
        )


def next_batch(order: list[int], lengths: list[int], rows: int, pads: bool = True) -> list[int]:
    """The rows to sample next: of one prompt length, if that does not increase the number of batches, or if not `pads`.

    A padded row needs a mask, and with a mask Unsloth copies keys and values for every query head, in each layer for
    each token. An extra batch reads all weights again (and dequantises them in 4-bit), which may cost more.

    Args:
        order: waiting rows, the longest first. lengths: of all prompts. rows: at most this many.

    >>> next_batch([0, 1, 2, 3, 4, 5], [9, 7, 7, 7, 7, 5], rows=4)     # two batches with any grouping
    [1, 2, 3, 4]
    >>> next_batch([0, 1, 2], [9, 9, 7], rows=4)                       # one batch
    [0, 1, 2]
    """
    for length in dict.fromkeys(lengths[row] for row in order):
        alone = [row for row in order if lengths[row] == length][:rows]
        if not pads or math.ceil((len(order) - len(alone)) / rows) < math.ceil(len(order) / rows):
            return alone
    return order[:rows]


def _watch(on_tokens: OnTokens, batch: list[int]) -> OnTokens:
    """`on_tokens` for a batch: maps its rows to the call's completions, `batch`."""
    return lambda row, ids: on_tokens(batch[row], ids)


class _Steering:
    """A logits processor: divides by the temperature, filters, records the previous token's log-probability, closes
    thinking.

    With a budget, each token goes to its row's `CompletionState` as soon as it is drawn, and the state gives the id
    that is forced next; a finished row gets the end token. `on_tokens` is called one token late. With neither, all
    tokens go to the states at the end.

    Shapes: (B, P + C so far) ids, (B, V) scores.
    """

    def __init__(
        self,
        temperature: float,
        states: list[CompletionState],
        end_id: int,
        cut: Cut | None = None,
        on_tokens: OnTokens | None = None,
    ) -> None:
        self.temperature, self.states, self.end_id, self.cut = temperature, states, end_id, cut
        self.on_tokens = on_tokens
        self.has_budget = any(state.has_budget for state in states)
        self.before: torch.Tensor | None = None  # (B, V), log-probabilities that the next token is drawn from
        self.noted: list[torch.Tensor] = []  # (B,) per token
        self.first = 0  # column of the first token that the states do not have

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.before is None:
            self.first = input_ids.size(1)
        else:
            self._note(input_ids)
        scaled = scores.float()
        if self.temperature > 0:
            scaled = scaled / self.temperature
            scaled = scaled if self.cut is None else self.cut(input_ids, scaled)
        self.before = torch.log_softmax(scaled, dim=-1) if self.temperature > 0 else scaled
        return self._force(scaled) if self.has_budget else scaled

    def finish(self, output: torch.Tensor) -> None:
        """Give the states the tokens of (B, P + C) that they do not have yet."""
        if self.before is None:
            raise BackendError(
                "the model's generate did not call its logits_processor, so the sampled tokens have no "
                "log-probabilities: make it pass its arguments on, or set rollout.engine=native"
            )
        self._note(output, is_last=True)

    def _note(self, input_ids: torch.Tensor, is_last: bool = False) -> None:
        assert self.before is not None
        self.noted.append(self.before.gather(1, input_ids[:, -1:]).squeeze(1))
        if not self.has_budget and self.on_tokens is None and not is_last:
            return
        ids = input_ids[:, self.first :].tolist()
        logps = torch.stack(self.noted, dim=1).tolist()
        for number, (state, row, scores) in enumerate(zip(self.states, ids, logps, strict=True)):
            before = len(state.ids)
            for token, logp in zip(row, scores, strict=True):
                if not state.finished:
                    state.take(token, logp)
            if self.on_tokens is not None and len(state.ids) > before:
                self.on_tokens(number, state.ids)
        self.first, self.noted = input_ids.size(1), []

    def _force(self, scores: torch.Tensor) -> torch.Tensor:
        """Leave only the forced token in rows that have one."""
        given = [self.end_id if state.finished else state.next_forced for state in self.states]
        rows = [row for row, token in enumerate(given) if token is not None]
        if rows:
            scores[rows] = -torch.inf
            scores[rows, [given[row] for row in rows]] = 0.0
        return scores
