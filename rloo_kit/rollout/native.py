"""The kit's own generation loop: no padding, no repeated prefills, no finished rows.

- A group's prompt is prefilled once and its keys and values are copied to the group's rows.
- The cache holds live rows only: a row that ends is overwritten, a waiting one takes its place.
- When memory runs out, the number of rows is halved and every row continues from its tokens so far.

A prompt is prefilled without its last token, which goes through the first decoding step, so all logits come from the
same code.
"""

import math
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any

import torch

from rloo_kit.errors import BackendError
from rloo_kit.rollout.decoders import FusedDecoder, ModuleDecoder, NotPlainError, SlotCache
from rloo_kit.rollout.types import Call, CompletionState, Cut, Engine, Sampling
from rloo_kit.system.memory import is_out_of_memory

PREFILL_TOKENS = 16384  # of one prefill, padding included
ADMIT_SHARE = 8  # waiting rows enter when 1/8 of the slots is free: a prefill costs as much as a few steps
CHECK_PROMPT = (3, 1, 2, 0)
TOLERANCE = 1e-4  # of a logit, relative to the largest
BLOCK_ENTRIES = 128  # vocabulary entries per block of the two-level draw


class NativeEngine(Engine):
    """See `engine.build_engine` for the arguments."""

    name = "native"

    def __init__(
        self, model: Any, mode: Callable[[], AbstractContextManager[None]], reason: str, sampling: Sampling
    ) -> None:
        super().__init__(reason, sampling)
        self._cut = sampling.filters.make_cut()
        self._model, self._mode = model, mode
        self._decoder: type[ModuleDecoder] | None = None  # chosen in the first rollout

    def _finish(self, call: Call) -> None:
        with self._mode(), torch.no_grad():
            decoder = make_decoder(self._model, self._decoder)
            self._decoder = type(decoder)
            waiting = deque(call.states[number] for number in call.order)
            # With tools, when a row comes back depends on the clock: its random numbers must not.
            uniform = None
            if call.dialogue is not None:
                shape = len(call.states), call.limits.max_completion_length
                uniform = torch.rand(*shape, dtype=torch.float64, device=decoder.device)
            while waiting:
                self._run(decoder, waiting, call, uniform)

    def _run(
        self, decoder: ModuleDecoder, waiting: deque[CompletionState], call: Call, uniform: torch.Tensor | None
    ) -> None:
        """Generate until no row waits, or until memory runs out: unfinished rows then wait again."""
        slots = min(self.rows or len(waiting), len(waiting) + len(call.away))
        live: list[CompletionState] = []
        entering: list[CompletionState] = []
        cache = SlotCache(slots)
        try:
            while waiting or live or call.away:
                waiting.extend(call.come_back(None if not (waiting or live) else 0.0))
                if not (waiting or live):
                    continue
                free = slots - len(live)
                if waiting and (not live or free * ADMIT_SHARE >= slots):
                    entering = [waiting.popleft() for _ in range(min(free, len(waiting)))]
                    self._fill(decoder, cache, entering, len(live))
                    live, entering = live + entering, []
                self._step(decoder, cache, live, uniform)
                self.token_steps += 1
                if call.on_tokens is not None:
                    for row in live:
                        call.on_tokens(row.number, row.ids)
                if any(row.finished for row in live):
                    for row in live:
                        call.send_away(row)
                    live = _compact(cache, live)
                    if not waiting and not call.away:
                        cache.shrink(len(live))
                    call.report(len(call.states) - len(waiting) - len(live) - len(call.away))
            return
        except RuntimeError as error:
            tried = len(live) + len(entering)
            if tried == 1 or not is_out_of_memory(error):
                raise
        del cache
        waiting.extendleft(reversed([row for row in (*live, *entering) if not row.finished]))
        self._halve(tried, f"{len(waiting)} continue from their tokens so far")

    def _fill(self, decoder: ModuleDecoder, cache: SlotCache, rows: list[CompletionState], first: int) -> None:
        """Fill the slots from `first` on with what comes before the last token; neighbours share what is equal."""
        groups = []
        for prefix, members in groupby(rows, key=lambda row: (row.prompt + row.ids)[:-1]):
            count = len(list(members))
            groups.append((prefix, first, count))
            first += count
        groups = [group for group in groups if group[0]]
        while groups:
            size = width = 0
            while size < len(groups) and (size == 0 or (size + 1) * max(width, len(groups[size][0])) <= PREFILL_TOKENS):
                width = max(width, len(groups[size][0]))
                size += 1
            decoder.prefill([prefix for prefix, _, _ in groups[:size]], cache, [group[1:] for group in groups[:size]])
            groups = groups[size:]

    def _step(
        self, decoder: ModuleDecoder, cache: SlotCache, live: list[CompletionState], uniform: torch.Tensor | None
    ) -> None:
        """One more token for each live row. `uniform`: (B, C) of all rows, by number and place; None: any."""
        tokens = torch.tensor([row.last for row in live], device=decoder.device)
        positions = cache.begin([row.position for row in live], decoder.device)
        logits = decoder.decode(tokens, positions, cache)  # (R, V)
        ids = None
        if self.sampling.filters.repetition_penalty != 1.0:  # (R, L), a row's tokens so far, padded with its last one
            rows = [row.prompt + row.ids for row in live]
            width = max(map(len, rows))
            ids = torch.tensor([row + row[-1:] * (width - len(row)) for row in rows], device=decoder.device)
        if uniform is not None:
            uniform = uniform[[row.number for row in live], [len(row.ids) for row in live]][:, None]
        drawn, logps = draw(logits, self.sampling.temperature, self._cut, ids, uniform)
        new, scores = torch.stack((drawn.double(), logps.double())).tolist()  # one transfer
        if math.isnan(sum(scores)):
            raise BackendError(
                "the model's logits contain a NaN or an infinity: its weights are broken (a learning rate too high?); "
                "resume from an earlier checkpoint with a lower rloo.learning_rate"
            )
        for row, token, logp in zip(live, new, scores, strict=True):
            row.take(int(token), logp)


def _compact(cache: SlotCache, live: list[CompletionState]) -> list[CompletionState]:
    """Drop the rows that have ended: the last live ones move into their slots."""
    alive = sum(not row.finished for row in live)
    holes = [slot for slot in range(alive) if live[slot].finished]
    movers = [slot for slot in range(alive, len(live)) if not live[slot].finished]
    if holes:
        cache.move(movers, holes, 1 + max(live[slot].position for slot in movers))
        for hole, mover in zip(holes, movers, strict=True):
            live[hole] = live[mover]
    return live[:alive]


def make_decoder(model: Any, choice: type[ModuleDecoder] | None = None) -> ModuleDecoder:
    """The decoder for a causal language model, plain or with an adapter, in evaluation mode.

    Args:
        choice: the class that an earlier call chose for the same model. None: choose, and compare the fused decoder
            with the modules on a few tokens before using it.
    """
    if choice is ModuleDecoder or torch.is_autocast_enabled(model.device.type):
        return ModuleDecoder(model)
    try:
        fused = FusedDecoder(model)
    except (NotPlainError, AttributeError):
        return ModuleDecoder(model)
    return fused if choice is FusedDecoder or _agree(fused, ModuleDecoder(model)) else ModuleDecoder(model)


def _agree(fused: ModuleDecoder, plain: ModuleDecoder) -> bool:
    """Whether two decoders give the same logits for two rows of unequal length."""
    found = []
    for decoder in (fused, plain):
        cache = SlotCache(slots=2, block_tokens=8)
        decoder.prefill([list(CHECK_PROMPT), list(CHECK_PROMPT[:2])], cache, [(0, 1), (1, 1)])
        tokens = torch.tensor(CHECK_PROMPT[:2], device=decoder.device)
        found.append(decoder.decode(tokens, cache.begin([4, 2], decoder.device), cache).float())
    return bool((found[0] - found[1]).abs().max() <= TOLERANCE * found[1].abs().max().clamp(min=1))


def draw(
    logits: torch.Tensor,
    temperature: float,
    cut: Cut | None = None,
    ids: torch.Tensor | None = None,
    uniform: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sampled tokens and their log-probabilities.

    Args:
        logits: (R, V), any floating type.
        temperature: 0 takes the likeliest token; else the logits are divided by it, in float32.
        cut: then filters the logits, see `Filters.make_cut`. ids: (R, L) so far, if `cut` reads them.
        uniform: (R, 1) float64, one random number for each row; None draws them.

    Returns:
        tokens (R,) and log-probabilities (R,) in float32, in nats; zeros at temperature 0. A row whose logits contain
        NaN or +infinity has a NaN log-probability and an arbitrary token.
    """
    if temperature == 0:
        return logits.argmax(dim=-1), logits.new_zeros(logits.size(0), dtype=torch.float32)
    scaled = logits.float() if temperature == 1 else logits.float() / temperature
    if cut is not None:
        scaled = cut(ids, scaled.clone())
    scaled = scaled - scaled.amax(dim=-1, keepdim=True)
    tokens, total = _invert(scaled.exp(), uniform)
    return tokens.squeeze(1), (scaled.gather(1, tokens).double() - total.log()).float().squeeze(1)


def _invert(weights: torch.Tensor, uniform: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (R, 1) from one uniform number per row, and the sums of the weights (R, 1) in float64."""
    rows, vocabulary = weights.shape
    if uniform is None:
        uniform = torch.rand(rows, 1, dtype=torch.float64, device=weights.device)
    if vocabulary <= 4 * BLOCK_ENTRIES:
        sums = weights.cumsum(1, dtype=torch.float64)
        return _pick(sums, uniform * sums[:, -1:]), sums[:, -1:]
    missing = -vocabulary % BLOCK_ENTRIES
    if missing:
        weights = torch.nn.functional.pad(weights, (0, missing))
    blocks = weights.view(rows, -1, BLOCK_ENTRIES)  # (R, N, W)
    sums = blocks.sum(2).cumsum(1, dtype=torch.float64)  # (R, N)
    total = sums[:, -1:]
    target = uniform * total
    block = _pick(sums, target)  # (R, 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK_ENTRIES)).squeeze(1).cumsum(1, dtype=torch.float64)
    share = (target - before) / (sums.gather(1, block) - before)  # of the block; its two sums differ by rounding
    token = block * BLOCK_ENTRIES + _pick(inside, share * inside[:, -1:])
    return token.clamp_(max=vocabulary - 1), total


def _pick(sums: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first entry whose cumulative sum exceeds the target, so an entry of probability 0 is never drawn."""
    return torch.searchsorted(sums, target, right=True).clamp_(max=sums.size(1) - 1)
