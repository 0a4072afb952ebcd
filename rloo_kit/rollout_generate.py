"""Sampling through `model.generate`: left-padded batches, sorted by length; under Unsloth its fast inference.

The policy samples from its whole distribution: the top-k, top-p and penalties that many checkpoints carry in their
generation config are switched off, because RLOO trains the distribution itself. What comes back is the model's own ids,
cut after the first end token. The log-probability of each token is taken from the scores that it was drawn from, one
step behind, so that a single (B, V) tensor is kept.

Left out: dropping rows that have ended (`rollout_native` does it), beams.

Shapes: B rows of a batch, V vocabulary.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from rloo_kit.process_memory import is_out_of_memory
from rloo_kit.rollout_cache import generate_options
from rloo_kit.rollout_types import Limits, Progress, Rollout
from rloo_kit.thinking_budget import Continued, think_then_answer

# Every option that narrows or bends the distribution, at the value that leaves it alone. All are given, because
# `generate` fills what is missing from the checkpoint's own generation config. The temperature is applied by
# `_Recorder`, which sees the same scores that are sampled from.
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
NO_PENALTIES = {key: WHOLE_DISTRIBUTION[key] for key in ("repetition_penalty", "no_repeat_ngram_size", "num_beams")}


class GenerateEngine:
    """See `rloo_kit.rollout.build_engine`.

    Attributes:
        rows: completions at once; None for all. Halved for good when the device runs out of memory.
        cache: "plain", or the library's "int8" or "offloaded" one, see `rollout_cache`.
    """

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
        cache: str = "plain",
    ) -> None:
        self.reason, self.rows, self.cache = reason, rows, cache
        self._model, self._mode, self._say = model, mode, say
        self._temperature, self._end_ids, self._pad_id = temperature, list(end_ids), pad_id
        self._options: dict[str, Any] = {"do_sample": False, **NO_PENALTIES}
        if temperature > 0:
            self._options = {"do_sample": True, **WHOLE_DISTRIBUTION}
            if model.generation_config.min_p is None:
                del self._options["min_p"]  # 0.0 removes nothing, yet costs a softmax over the vocabulary a token

    def sample(
        self,
        prompt_ids: list[list[int]],
        limits: Limits,
        expected_lengths: Sequence[float] | None = None,
        on_progress: Progress | None = None,
    ) -> Rollout:
        """One completion for each prompt; see `rloo_kit.rollout.Engine`."""

        def extend(prefixes: list[list[int]], rooms: list[int], stop_ids: tuple[int, ...]) -> Continued:
            return self._extend(prefixes, rooms, [*self._end_ids, *stop_ids], expected_lengths, on_progress)

        with self._mode(), torch.no_grad():
            return think_then_answer(extend, prompt_ids, limits, self._end_ids)

    def _extend(
        self,
        prefixes: list[list[int]],
        rooms: list[int],
        stops: list[int],
        expected: Sequence[float] | None,
        on_progress: Progress | None,
    ) -> Continued:
        """At most `rooms[i]` new ids for each prefix, in batches: the longest first, for if it fits, all fit."""
        ids: list[list[int]] = [[] for _ in prefixes]
        logps: list[list[float]] = [[] for _ in prefixes]
        order = sorted((row for row in range(len(prefixes)) if rooms[row] > 0), key=lambda row: -len(prefixes[row]))
        if expected is not None and len(expected) == len(prefixes):
            order.sort(key=lambda row: -expected[row])
        start = 0
        while start < len(order):
            batch = order[start : start + (self.rows or len(order))]
            limit = max(rooms[row] for row in batch)
            try:
                new, scores = self._generate([prefixes[row] for row in batch], limit, stops)
            except RuntimeError as error:
                if len(batch) == 1 or not is_out_of_memory(error):
                    raise
                new = None
            if new is None:
                self._halve(len(batch), len(order) - start)
                continue
            for place, row in enumerate(batch):
                ids[row] = cut(new[place], stops)[: rooms[row]]
                logps[row] = scores[place][: len(ids[row])]
            start += len(batch)
            if on_progress is not None:
                on_progress(start, len(order))
        return Continued(ids, None if self._temperature == 0 else logps)

    def _generate(
        self, prefixes: list[list[int]], limit: int, stops: list[int]
    ) -> tuple[list[list[int]], list[list[float]]]:
        width = max(len(ids) for ids in prefixes)
        padded = [[self._pad_id] * (width - len(ids)) + ids for ids in prefixes]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prefixes]
        device = self._model.get_input_embeddings().weight.device
        recorder = _Recorder(self._temperature) if self._temperature > 0 else None
        output = self._model.generate(
            input_ids=torch.tensor(padded, device=device),  # (B, P)
            attention_mask=torch.tensor(mask, device=device),  # (B, P)
            max_new_tokens=limit,
            eos_token_id=stops,
            pad_token_id=self._pad_id,
            use_cache=True,
            **self._cache_options(len(prefixes), width),
            **({} if recorder is None else {"logits_processor": [recorder]}),
            **self._options,
        )
        new = output[:, width:]  # (B, C)
        scores = [[]] * len(prefixes) if recorder is None else recorder.finish(output).tolist()
        return new.tolist(), scores

    def _cache_options(self, rows: int, width: int) -> dict[str, Any]:
        """What `generate` is told of the cache, for (B, P) prefixes."""
        return generate_options(self.cache)

    def _halve(self, rows: int, left: int) -> None:
        self.rows = max(1, rows // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._say(
            f"rollout: out of memory with {rows} completions at once; the {left} that are not finished start again, "
            f"{self.rows} at once (rollout.rows={self.rows} starts with that)"
        )


class _Recorder:
    """A logits processor: divides by the temperature, and notes how likely the token before was."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.noted: list[torch.Tensor] = []  # (B,) a token
        self.before: torch.Tensor | None = None  # (B, V), log-probabilities that the coming token is drawn from

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._note(input_ids)
        scaled = scores.float() / self.temperature
        self.before = torch.log_softmax(scaled, dim=-1)
        return scaled

    def finish(self, output: torch.Tensor) -> torch.Tensor:
        """(B, C) log-probabilities of all new tokens; those behind an end mean nothing."""
        self._note(output)
        return torch.stack(self.noted, dim=1)

    def _note(self, input_ids: torch.Tensor) -> None:
        if self.before is not None:
            self.noted.append(self.before.gather(1, input_ids[:, -1:]).squeeze(1))


def cut(ids: list[int], stops: Collection[int]) -> list[int]:
    """The ids up to and with the first stop."""
    end = next((position for position, token in enumerate(ids) if token in stops), len(ids) - 1)
    return ids[: end + 1]
