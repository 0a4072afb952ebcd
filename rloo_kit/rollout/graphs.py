"""One token of all live rows as one fixed sequence of operations on fixed buffers, replayed as a CUDA graph.

A graph is captured at the second step of its shape; the first one warms up. Rows are rounded up to a bucket, the length
to a block, and masks and rotations are by position, so few graphs serve a rollout. Random numbers are inputs: the
draws are those of a step without a graph.

Shapes: R live rows, S slots, L tokens, V vocabulary.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from rloo_kit.rollout.decoders import ModuleDecoder, SlotCache
from rloo_kit.rollout.draw import draw
from rloo_kit.rollout.types import CompletionState

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # rows of a graph; then multiples of 64
LENGTH_BLOCK = 256  # tokens of a graph; from 2,048 on an eighth to a quarter of the length


def round_rows(rows: int) -> int:
    """The bucket of so many rows.

    >>> [round_rows(rows) for rows in (1, 3, 9, 32, 130)]
    [1, 4, 12, 32, 192]
    """
    return next((bucket for bucket in BUCKETS if bucket >= rows), -(-rows // 64) * 64)


def round_length(tokens: int) -> int:
    """The length of a graph for so many tokens.

    >>> [round_length(tokens) for tokens in (1, 256, 257, 2047, 2049, 5000)]
    [256, 256, 512, 2048, 2560, 5120]
    """
    block = max(LENGTH_BLOCK, 1 << max(0, tokens.bit_length() - 3))
    return -(-tokens // block) * block


def capture(function: Callable[[], None], pool: Any) -> Callable[[], None]:
    """A CUDA graph of what `function` does to fixed tensors; calling it does that again."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        function()
    return graph.replay


class TokenSteps:
    """Draws one more token for each live row.

    Args:
        engine: the `NativeEngine`, whose counts grow and which uses no graphs after a failed capture.
        longest: the longest row that may come, in tokens, for CUDA graphs, whose cache does not grow; None without.
    """

    def __init__(self, engine: Any, decoder: ModuleDecoder, cache: SlotCache, longest: int | None = None) -> None:
        self.engine, self.decoder, self.cache = engine, decoder, cache
        self.temperature, self.cut = engine.sampling.temperature, engine.sampling.filters.make_cut()
        self.replays: dict[tuple[int, int], Callable[[], None] | None] = {}  # by bucket and length; None: not captured
        self.is_static, self._bucket = longest is not None, 0
        if longest is not None:
            cache.reserve(longest)
            decoder.prepare(cache.capacity)
            device, slots = decoder.device, cache.slots
            self._inputs = torch.zeros(2, slots, dtype=torch.long, device=device)  # tokens and positions
            self._uniform = torch.zeros(slots, 1, dtype=torch.float64, device=device)
            self._drawn = torch.zeros(2, slots, dtype=torch.float64, device=device)
            self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def draw(self, live: list[CompletionState], uniform: torch.Tensor | None) -> tuple[list[float], list[float]]:
        """Tokens and their log-probabilities. `uniform`: random numbers (R, 1) in float64; None: new ones."""
        device, rows = self.decoder.device, len(live)
        positions = [row.position for row in live]
        longest = max(positions) + 1
        length = min(round_length(longest), self.cache.capacity) if self.is_static else longest
        inputs = torch.tensor([[row.last for row in live], positions], device=device)
        if uniform is None and self.temperature > 0:
            uniform = torch.rand(rows, 1, dtype=torch.float64, device=device)
        if not self.is_static:
            self.engine.counts["eager"] += 1
            drawn = self.compute(inputs, uniform, length, min(positions) == max(positions))
        else:
            self._inputs[:, :rows] = inputs
            if uniform is not None:
                self._uniform[:rows] = uniform
            self._run(rows, length)
            drawn = self._drawn[:, :rows]
        tokens, logps = drawn.tolist()  # one transfer
        return tokens, logps

    def compute(
        self, inputs: torch.Tensor, uniform: torch.Tensor | None, length: int, is_even: bool = False
    ) -> torch.Tensor:
        """Tokens and log-probabilities (2, R) in float64, from tokens and positions (2, R)."""
        tokens, positions = inputs
        self.cache.begin(positions, length, is_even)
        logits = self.decoder.decode(tokens, positions, self.cache)
        drawn, logps = draw(logits, self.temperature, self.cut, uniform)
        return torch.stack((drawn.double(), logps.double()))

    def _checked(self, replay: Callable[[], None], step: Callable[[], None], rows: int) -> Callable[[], None]:
        """The replay; the engine's first one has to draw for most rows what the step draws: rounding moves a few."""
        if not self.engine.counts["replays"]:
            replay()
            drawn = self._drawn[0, :rows].clone()
            step()
            if (drawn == self._drawn[0, :rows]).double().mean() < 0.5:
                raise RuntimeError("its first replay draws other tokens than the step from Python")
        return replay

    def _run(self, rows: int, length: int) -> None:
        """The step on the fixed buffers: eagerly for the first time, then from a graph."""
        if not self._bucket // 2 < rows <= self._bucket:  # few buckets, so few captures, while rows end one by one
            self._bucket = min(round_rows(rows), self._drawn.size(1))
        bucket, counts = self._bucket, self.engine.counts

        def step() -> None:
            self._drawn[:, :bucket] = self.compute(self._inputs[:, :bucket], self._uniform[:bucket], length)

        key = (bucket, length)
        if key in self.replays and self.replays[key] is None and self.engine.uses_graphs:
            started = time.perf_counter()
            try:
                self.replays[key] = self._checked(capture(step, self._pool), step, rows)
            except RuntimeError as error:
                self.engine.uses_graphs = False
                self.replays = dict.fromkeys(self.replays)
                self.engine.sampling.say(
                    f"rollout: no CUDA graph of a token step ({str(error).splitlines()[0]}); the steps are launched "
                    "from Python, several times slower"
                )
            counts["captures"] += 1
            counts["capture_s"] += time.perf_counter() - started
        replay = self.replays.setdefault(key, None)
        counts["eager" if replay is None else "replays"] += 1
        (replay or step)()
