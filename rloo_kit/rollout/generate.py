"""Sampling through `model.generate` (with Unsloth, its fast inference).

A batch has prompts of one length if that needs no extra batch; otherwise prompts are padded on the left, unless the
model samples otherwise then. Log-probabilities are read from the scores one step late, so only one (B, V) tensor is
kept. Thinking is closed within the call, because a second call would prefill whole rows.

Shapes: B rows, P prompt, C completion tokens, V vocabulary.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from copy import deepcopy
from itertools import takewhile
from typing import Any

import torch

from rloo_kit.errors import BackendError
from rloo_kit.models.backends import is_coarse
from rloo_kit.rollout.engine import Call, Engine, Sampling
from rloo_kit.rollout.types import CompletionState
from rloo_kit.system.memory import is_out_of_memory

# Every option that reshapes the distribution, at its neutral value: `generate` takes missing ones from the checkpoint's
# generation config. `_Steering` applies temperature and filters, so it sees the sampled distribution.
NO_PENALTIES = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1}
WHOLE_DISTRIBUTION = NO_PENALTIES | {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "num_return_sequences": 1, "min_new_tokens": 0,
}  # fmt: skip
PAD_CHECK = ((2, 6), 3)  # prompt lengths, and tokens after them
PAD_TOLERANCE, PAD_TOLERANCE_16_BITS = 1e-3, 0.1  # largest sum of probabilities that padding may move to other tokens


class GenerateEngine(Engine):
    """See `choice.build_engine` for the arguments."""

    name = "generate"

    def __init__(
        self, model: Any, mode: Callable[[], AbstractContextManager[None]], reason: str, sampling: Sampling, pad_id: int
    ) -> None:
        super().__init__(reason, sampling)
        self._model, self._mode, self._pad_id = model, mode, pad_id
        self._options: dict[str, Any] = {"do_sample": False, **NO_PENALTIES}
        if sampling.temperature > 0:
            self._options = {"do_sample": True, **WHOLE_DISTRIBUTION}
            if model.generation_config.min_p is None:
                del self._options["min_p"]  # 0.0 removes nothing, but costs a softmax over the vocabulary per token
        self._pads: bool | None = None  # whether prompts may be padded; None until checked

    def _finish(self, call: Call) -> None:
        lengths = [len(state.prompt) for state in call.states]
        expected = call.expected_lengths or [0.0] * len(lengths)
        order = sorted(call.order, key=lambda row: (-expected[row], -lengths[row]))  # if the longest fits, all fit
        total = len(order)
        with ExitStack() as mode:
            entered = 0  # for so many rows: Unsloth keeps the buffers of two sizes, and captures graphs in each mode
            while order or call.away:
                for state in call.come_back(None if not order else 0.0):
                    order.append(state.number)
                    lengths[state.number] = len(state.prompt) + len(state.ids)
                if not order:
                    continue
                batch = next_batch(order, lengths, self.rows or len(order))
                if len({lengths[row] for row in batch}) > 1 and not self.check_padding():
                    batch = next_batch(order, lengths, self.rows or len(order), pads=False)
                if len(batch) != entered:
                    mode.close()
                    mode.enter_context(self._mode())
                    entered = len(batch)
                if not self._generate(call, batch):
                    mode.close()
                    self._halve(len(batch), f"the {len(order)} unfinished ones start over")
                    continue
                order = [row for row in order if row not in batch]
                for row in batch:
                    call.send_away(call.states[row])
                call.report(total - len(order) - len(call.away))

    @torch.no_grad()
    def _generate(self, call: Call, batch: list[int]) -> bool:
        """Complete the call's rows in `batch`; returns False if memory ran out and they have to start over."""
        states = [deepcopy(call.states[row]) for row in batch]
        padded = self._pad([state.prompt + state.ids for state in states])
        width = padded["input_ids"].size(1)
        steering = _Steering(self.sampling, states)
        try:
            output = self._model.generate(
                **padded,
                max_new_tokens=max(state.room for state in states),
                eos_token_id=list(self.sampling.end_ids),
                pad_token_id=self._pad_id,
                use_cache=True,
                logits_processor=[steering],
                **self._options,
            )
        except RuntimeError as error:
            if len(states) == 1 or not is_out_of_memory(error):
                raise
            return False
        self.token_steps += output.size(1) - width
        steering.finish(output)
        for state in states:
            call.states[state.number] = state
        return True

    def check_padding(self) -> bool:
        """Whether the model samples the same from prompts padded on the left; else one length after another is sampled.
        Compares greedy continuations of a random prompt, padded and alone, at the first call."""
        if self._pads is None:
            generator, rows = torch.Generator().manual_seed(0), self._model.config.get_text_config().vocab_size
            drawn = torch.randint(rows, (2, max(PAD_CHECK[0])), generator=generator).tolist()
            prompts = [ids[:length] for ids, length in zip(drawn, PAD_CHECK[0], strict=True)]
            with self._mode(), torch.no_grad():
                steps = zip(self._continue(prompts), self._continue(prompts[:1]), strict=False)
            same = takewhile(lambda step: step[0][0] == step[1][0], steps)  # up to where the texts diverge
            gaps = [(mine - other).abs().sum().item() / 2 for (_, mine), (_, other) in same]
            moved = max(gaps, default=0.0)  # none: a generate without logits_processor, which `_Steering` reports
            self._pads = moved <= (PAD_TOLERANCE_16_BITS if is_coarse(self._model) else PAD_TOLERANCE)
            if not self._pads:
                self.sampling.say(
                    f"rollout: {self._model.config.model_type} continues a prompt that is padded on the left otherwise "
                    f"than the prompt alone ({moved:.0%} of the probability goes to other tokens), so prompts of "
                    "different lengths are sampled one length after another"
                )
        return self._pads

    def _continue(self, prompts: list[list[int]]) -> list[tuple[int, torch.Tensor]]:
        """Greedy tokens after the first prompt: for each, the id before it, and the probabilities (V,)."""
        seen = list[tuple[int, torch.Tensor]]()

        def note(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append((int(ids[0, -1]), scores[0].float().softmax(-1)))
            return scores

        options = {"do_sample": False, **NO_PENALTIES, "max_new_tokens": PAD_CHECK[1], "logits_processor": [note]}
        self._model.generate(**self._pad(prompts), pad_token_id=self._pad_id, use_cache=True, **options)
        return seen

    def _pad(self, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
        """`generate`'s arguments for prompts: ids and mask, (B, P), padded on the left."""
        width = max(map(len, prompts))
        padded = [[self._pad_id] * (width - len(ids)) + ids for ids in prompts]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        device = self._model.get_input_embeddings().weight.device
        rows = {"input_ids": padded, "attention_mask": mask}
        return {name: torch.tensor(values, device=device) for name, values in rows.items()}


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


class _Steering:
    """A logits processor: divides by the temperature, filters, records the previous token's log-probability, closes
    thinking.

    With a budget, each token goes to its row's `CompletionState` as soon as it is drawn, and the state gives the id
    that is forced next; a finished row gets the end token. Without one, all tokens go to the states at the end.

    Shapes: (B, P + C so far) ids, (B, V) scores.
    """

    def __init__(self, sampling: Sampling, states: list[CompletionState]) -> None:
        self.temperature, self.end_id = sampling.temperature, sampling.end_ids[0]
        self.states = states
        self.cut = sampling.filters.make_cut()
        self.has_budget = any(state.has_budget for state in states)
        self.before: torch.Tensor | None = None  # (B, V), log-probabilities that the next token is drawn from
        self.noted: list[torch.Tensor] = []  # (B,) per token
        self.first = self.width = 0  # column of the first token that the states do not have; columns at the last call

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.before is None:
            self.first = input_ids.size(1)
        else:
            self._note(input_ids)
        self.width = input_ids.size(1)
        scaled = scores.float()
        if self.temperature > 0:
            scaled = scaled / self.temperature
            if self.cut is not None:
                scaled = self.cut(scaled)
        self.before = torch.log_softmax(scaled, dim=-1) if self.temperature > 0 else scaled
        if self.has_budget:  # leave only the forced token in rows that have one
            given = [self.end_id if state.finished else state.next_forced for state in self.states]
            if rows := [row for row, token in enumerate(given) if token is not None]:
                scaled[rows] = -torch.inf
                scaled[rows, [given[row] for row in rows]] = 0.0
        return scaled

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
        if (grown := input_ids.size(1) - self.width) != 1:
            raise BackendError(
                f"the model's generate went on by {grown} tokens instead of one, so log-probabilities would be wrong: "
                "set rollout.engine=native, or install the transformers of the kit's constraints.txt"
            )
        self.noted.append(self.before.gather(1, input_ids[:, -1:]).squeeze(1))
        if not self.has_budget and not is_last:
            return
        ids = input_ids[:, self.first :].tolist()
        logps = torch.stack(self.noted, dim=1).tolist()
        for state, row, scores in zip(self.states, ids, logps, strict=True):
            for token, logp in zip(row, scores, strict=True):
                if not state.finished:
                    state.take(token, logp)
        self.first, self.noted = input_ids.size(1), []
