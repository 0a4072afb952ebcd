"""The kit's own generation loop: no padding, no repeated prefills, no finished rows.

- A group's prompt is prefilled once and its keys and values are copied to the group's rows.
- The cache holds live rows only: a row that ends is overwritten, a waiting one takes its place.
- When memory runs out, the number of rows is halved and every row continues from its tokens so far.
- On a GPU a token is a CUDA graph (`graphs.TokenSteps`), if `layers.DirectDecoder` supports the model.

A prompt is prefilled without its last token, which goes through the first decoding step, so all logits come from the
same code.
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch

from rloo_kit.errors import BackendError
from rloo_kit.models.backends import has_unsloths_layers, is_coarse
from rloo_kit.rollout.decoders import ModuleDecoder, SlotCache
from rloo_kit.rollout.engine import Call, Engine, Sampling
from rloo_kit.rollout.graphs import TokenSteps
from rloo_kit.rollout.layers import DirectDecoder, NotPlainError
from rloo_kit.rollout.types import CompletionState
from rloo_kit.sizes import GRAPH_CACHE_BLOCK
from rloo_kit.system.memory import is_out_of_memory

PREFILL_TOKENS = 16384  # of one prefill, padding included
ADMIT_SHARE = 8  # waiting rows enter when 1/8 of the slots is free: a prefill costs as much as a few steps
CHECKED = (48, 31)  # tokens of the rows whose last logits are compared
TOLERANCE, TOLERANCE_16_BITS = 1e-4, 0.05  # root mean square of the difference over the logits' spread


class NativeEngine(Engine):
    """See `choice.build_engine` for the arguments.

    Attributes:
        uses_graphs: on a GPU, until a capture fails. counts: token steps that were "replays" and "eager", "captures",
            and their seconds, "capture_s".
    """

    name = "native"

    def __init__(
        self, model: Any, mode: Callable[[], AbstractContextManager[None]], reason: str, sampling: Sampling
    ) -> None:
        super().__init__(reason, sampling)
        self.uses_graphs = model.device.type == "cuda"
        self.counts: Counter[str] = Counter()
        self._model, self._mode = model, mode
        self.decoder: type[ModuleDecoder] | None = None  # chosen in the first rollout

    def _finish(self, call: Call) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._mode())
            stack.enter_context(torch.no_grad())
            decoder = make_decoder(self._model, self.decoder)
            self.decoder = type(decoder)
            if decoder.replayable:  # it knows its precision
                stack.enter_context(torch.autocast(decoder.device.type, enabled=False))
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
        longest = call.limits.longest if call.dialogue is None else call.limits.max_completion_length
        longest += max(len(state.prompt) for state in call.states)
        graphs = self.uses_graphs and decoder.replayable
        cache = steps = None
        try:
            cache = SlotCache(slots, GRAPH_CACHE_BLOCK if graphs else None)
            steps = TokenSteps(self, decoder, cache, longest if graphs else None)
            while waiting or live or call.away:
                waiting.extend(call.come_back(None if not (waiting or live) else 0.0))
                if not (waiting or live):
                    continue
                free = slots - len(live)
                if waiting and (not live or free * ADMIT_SHARE >= slots):
                    entering = [waiting.popleft() for _ in range(min(free, len(waiting)))]
                    self._fill(decoder, cache, entering, len(live))
                    live, entering = live + entering, []
                self._step(steps, live, uniform)
                self.token_steps += 1
                if any(row.finished for row in live):
                    for row in live:
                        call.send_away(row)
                    live = _compact(cache, live)
                    if not waiting and not call.away:
                        cache.shrink(len(live))
                    call.report(len(call.states) - len(waiting) - len(live) - len(call.away))
            return
        except RuntimeError as error:
            tried = len(live) + len(entering) or slots
            if tried == 1 or not is_out_of_memory(error):
                raise
        del cache, steps
        waiting.extendleft(reversed([row for row in (*live, *entering) if not row.finished]))
        self._halve(tried, f"{len(waiting)} continue from their tokens so far")

    def _fill(self, decoder: ModuleDecoder, cache: SlotCache, rows: list[CompletionState], first: int) -> None:
        """Fill the slots from `first` on with what comes before the last token; neighbours share what is equal."""
        groups = []
        for prefix, members in groupby(rows, key=lambda row: (row.prompt + row.ids)[:-1]):
            count = len(list(members))
            if prefix:
                groups.append((prefix, first, count))
            first += count
        while groups:
            size = width = 0
            while size < len(groups) and (size == 0 or (size + 1) * max(width, len(groups[size][0])) <= PREFILL_TOKENS):
                width = max(width, len(groups[size][0]))
                size += 1
            decoder.prefill([prefix for prefix, _, _ in groups[:size]], cache, [group[1:] for group in groups[:size]])
            groups = groups[size:]

    def _step(self, steps: TokenSteps, live: list[CompletionState], uniform: torch.Tensor | None) -> None:
        """One more token for each live row. `uniform`: (B, C) of all rows, by number and place; None: any."""
        if uniform is not None:
            uniform = uniform[[row.number for row in live], [len(row.ids) for row in live]][:, None]
        new, scores = steps.draw(live, uniform)
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
    """The decoder for a causal language model, plain or with an adapter, in evaluation mode: `DirectDecoder`, if its
    logits for a few tokens are those of the model's own forward. `choice`: the class that an earlier call chose."""
    is_unsloths = has_unsloths_layers(model)  # which a step through the modules would not fit
    is_mixed = torch.is_autocast_enabled(model.device.type) and model.get_input_embeddings().weight.itemsize == 4
    if choice is not ModuleDecoder and (is_unsloths or not is_mixed):
        with suppress(NotPlainError, AttributeError):  # another kind of layer
            decoder = DirectDecoder(model)
            if choice is DirectDecoder or _agrees(decoder):
                return decoder
    if is_unsloths:
        raise BackendError("the kit's decoder does not support this model any more: set rollout.engine=generate")
    return ModuleDecoder(model)


_walked: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # by model


def walks_layers(model: Any, mode: Callable[[Any], AbstractContextManager[None]]) -> bool:
    """Whether a decoder of `layers` gives the logits of the model's own forward; computed once for a model."""
    if model not in _walked:
        _walked[model] = False
        with mode(model), torch.no_grad(), suppress(BackendError):
            _walked[model] = type(make_decoder(model)) is DirectDecoder
    return _walked[model]


def _agrees(decoder: ModuleDecoder) -> bool:
    """Whether a decoder's logits are those of the model's forward, for two random rows of unequal length. NaNs agree:
    the rollout says that the weights are broken."""
    generator, vocabulary = torch.Generator().manual_seed(0), decoder.model.config.get_text_config().vocab_size
    rows = [torch.randint(vocabulary, (length,), generator=generator) for length in CHECKED]
    cache = SlotCache(slots=2, block_tokens=max(CHECKED))
    tokens = torch.stack([row[-1] for row in rows]).to(decoder.device)
    positions = torch.tensor(CHECKED, device=decoder.device) - 1
    with torch.autocast(decoder.device.type, enabled=False):
        decoder.prefill([row[:-1].tolist() for row in rows], cache, [(0, 1), (1, 1)])
        cache.begin(positions, max(CHECKED))
        logits = decoder.decode(tokens, positions, cache).float()
    own = [decoder.model(input_ids=row[None].to(decoder.device)).logits[0, -1] for row in rows]
    expected = torch.stack(own).float()
    is_rounded = is_coarse(decoder.model) or torch.is_autocast_enabled(decoder.device.type)
    tolerance = TOLERANCE_16_BITS if is_rounded else TOLERANCE
    return not bool((logits - expected).std() > tolerance * expected.std())
