"""Sampling through `model.generate`: left-padded batches, sorted by length; under Unsloth its fast inference.

The policy samples from its whole distribution: the top-k, top-p and penalties that many checkpoints carry in their
generation config are switched off, because RLOO trains the distribution itself. What comes back is the model's own ids,
cut after the first end token. The log-probability of each token is taken from the scores that it was drawn from, one
step behind, so that a single (B, V) tensor is kept. A thought is closed within the call, by scores that leave one
token: a second call would prefill whole rows, which takes more memory than all of decoding.

Left out: dropping rows that have ended (`rollout_native` does it), beams.

Shapes: B rows of a batch, V vocabulary.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from rloo_kit.rollout.cache_options import generate_options
from rloo_kit.rollout.thinking_budget import Turn
from rloo_kit.rollout.types import Limits, Progress, Rollout
from rloo_kit.system.memory import is_out_of_memory

# Every option that narrows or bends the distribution, at the value that leaves it alone. All are given, because
# `generate` fills what is missing from the checkpoint's own generation config. The temperature is applied by
# `_Steering`, which sees the same scores that are sampled from.
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
    """See `rloo_kit.rollout.engine.build_engine`.

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
        """One completion for each prompt; see `rloo_kit.rollout.engine.Engine`."""
        turns = [Turn(limits, self._end_ids) for _ in prompt_ids]
        order = [row for row, turn in enumerate(turns) if not turn.finished]
        order.sort(key=lambda row: -len(prompt_ids[row]))  # the longest first, for if it fits, all fit
        if expected_lengths is not None:
            order.sort(key=lambda row: -expected_lengths[row])
        start = 0
        with self._mode(), torch.no_grad():
            while start < len(order):
                batch = order[start : start + (self.rows or len(order))]
                begun = [self._begin(row, limits) for row in batch]
                if not self._generate([prompt_ids[row] for row in batch], begun):
                    self._halve(len(batch), len(order) - start)
                    continue
                for row, turn in zip(batch, begun, strict=True):
                    turns[row] = turn
                start += len(batch)
                if on_progress is not None:
                    on_progress(start, len(order))
        logps = None if self._temperature == 0 else [turn.logps for turn in turns]
        return Rollout([turn.ids for turn in turns], [turn.forced for turn in turns], logps)

    def _begin(self, _row: int, limits: Limits) -> Turn:
        """The completion of a prompt before its first token."""
        return Turn(limits, self._end_ids)

    def _generate(self, prompts: list[list[int]], turns: list[Turn]) -> bool:
        """Take the turns to their end; False where memory ran out, and they are to begin anew."""
        prefixes = [prompt + turn.ids for prompt, turn in zip(prompts, turns, strict=True)]
        width = max(len(ids) for ids in prefixes)
        padded = [[self._pad_id] * (width - len(ids)) + ids for ids in prefixes]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prefixes]
        device = self._model.get_input_embeddings().weight.device
        steering = _Steering(self._temperature, turns, self._end_ids[0])
        try:
            output = self._model.generate(
                input_ids=torch.tensor(padded, device=device),  # (B, P)
                attention_mask=torch.tensor(mask, device=device),  # (B, P)
                max_new_tokens=max(turn.room for turn in turns),
                eos_token_id=self._end_ids,
                pad_token_id=self._pad_id,
                use_cache=True,
                logits_processor=[steering],
                **self._cache_options(len(prefixes), width),
                **self._options,
            )
        except RuntimeError as error:
            if len(turns) == 1 or not is_out_of_memory(error):
                raise
            return False
        steering.finish(output)
        return True

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


class _Steering:
    """A logits processor: divides by the temperature, notes how likely the token before was, closes thoughts.

    Where there is a budget, every token goes to its row's `Turn` as soon as it is drawn, and the turn says what comes
    next; a row that may take no more tokens gets its end. Without a budget they all go there at the end.

    Shapes: (B, P + C so far) ids, (B, V) scores.
    """

    def __init__(self, temperature: float, turns: list[Turn], end_id: int) -> None:
        self.temperature, self.turns, self.end_id = temperature, turns, end_id
        self.has_budget = any(turn.has_budget for turn in turns)
        self.before: torch.Tensor | None = None  # (B, V), log-probabilities that the coming token is drawn from
        self.noted: list[torch.Tensor] = []  # (B,) a token
        self.first = 0  # column of the first token that no turn has

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.before is None:
            self.first = input_ids.size(1)
        else:
            self._note(input_ids)
        scaled = scores.float()
        if self.temperature > 0:
            scaled = scaled / self.temperature
        self.before = torch.log_softmax(scaled, dim=-1) if self.temperature > 0 else scaled
        return self._force(scaled) if self.has_budget else scaled

    def finish(self, output: torch.Tensor) -> None:
        """Hand the turns what they do not have yet of (B, P + C)."""
        self._note(output, is_last=True)

    def _note(self, input_ids: torch.Tensor, is_last: bool = False) -> None:
        assert self.before is not None
        self.noted.append(self.before.gather(1, input_ids[:, -1:]).squeeze(1))
        if not self.has_budget and not is_last:
            return
        ids = input_ids[:, self.first :].tolist()
        logps = torch.stack(self.noted, dim=1).tolist()
        for turn, row, scores in zip(self.turns, ids, logps, strict=True):
            for token, logp in zip(row, scores, strict=True):
                if not turn.finished:
                    turn.take(token, logp)
        self.first, self.noted = input_ids.size(1), []

    def _force(self, scores: torch.Tensor) -> torch.Tensor:
        """Rows whose next token is given keep that one alone."""
        given = [self.end_id if turn.finished else turn.next_forced for turn in self.turns]
        rows = [row for row, token in enumerate(given) if token is not None]
        if rows:
            scores[rows] = -torch.inf
            scores[rows, [given[row] for row in rows]] = 0.0
        return scores


def cut(ids: list[int], stops: Collection[int]) -> list[int]:
    """The ids up to and with the first stop."""
    end = next((position for position, token in enumerate(ids) if token in stops), len(ids) - 1)
    return ids[: end + 1]
