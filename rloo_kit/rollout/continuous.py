"""Sampling through transformers' continuous batching (`generate_batch`): paged keys and values, rows that come and go.

TRL offers the same, but casts the model to bf16 in place first, adapter and all; here the model is left as it is. The
thinking budget takes two calls (`thinking_budget.think_then_answer`), as with `generate`.

Left out: everything that transformers' scheduler decides by itself (blocks, graphs); halving rows when memory runs out.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rloo_kit._stack import load_stack
from rloo_kit.errors import BackendError
from rloo_kit.gradient.packing import plain_attention
from rloo_kit.rollout.generate import NO_PENALTIES, WHOLE_DISTRIBUTION, cut
from rloo_kit.rollout.thinking_budget import Continued, think_then_answer
from rloo_kit.rollout.types import Limits, Progress, Rollout

BLOCK_TOKENS = 64
SHARE_OF_GPU = 0.5  # of free memory; transformers' own 0.9 leaves nothing for the backward pass


class ContinuousEngine:
    """See `rloo_kit.rollout.engine.build_engine`.

    Attributes:
        rows: completions at once at most; None leaves it to transformers.
    """

    name = "continuous"

    def __init__(
        self,
        model: Any,
        mode: Callable[[], AbstractContextManager[None]],
        reason: str,
        temperature: float,
        end_ids: Sequence[int],
        pad_id: int,
        rows: int | None,
    ) -> None:
        self.reason, self.rows = reason, rows
        self._model, self._mode = model, mode
        self._temperature, self._end_ids, self._pad_id = temperature, list(end_ids), pad_id

    def sample(
        self,
        prompt_ids: list[list[int]],
        limits: Limits,
        expected_lengths: Sequence[float] | None = None,
        on_progress: Progress | None = None,
    ) -> Rollout:
        """One completion for each prompt; see `rloo_kit.rollout.engine.Engine`. Transformers orders the rows itself."""

        def extend(prefixes: list[list[int]], rooms: list[int], stop_ids: tuple[int, ...]) -> Continued:
            done = self._extend(prefixes, rooms, [*self._end_ids, *stop_ids])
            if on_progress is not None:
                on_progress(len(prefixes), len(prefixes))
            return done

        base = self._model.get_base_model() if hasattr(self._model, "peft_config") else self._model
        with self._mode(), plain_attention(base), load_stack().torch.no_grad():
            return think_then_answer(extend, prompt_ids, limits, self._end_ids)

    def _extend(self, prefixes: list[list[int]], rooms: list[int], stops: list[int]) -> Continued:
        ids: list[list[int]] = [[] for _ in prefixes]
        logps: list[list[float]] = [[] for _ in prefixes]
        going = [row for row in range(len(prefixes)) if rooms[row] > 0]
        if going:
            limit = max(rooms[row] for row in going)
            results = self._generate([prefixes[row] for row in going], limit, stops)
            for row, result in zip(going, results, strict=True):
                ids[row] = cut(list(result.generated_tokens), stops)[: rooms[row]]
                logps[row] = list(result.logprobs)[: len(ids[row])]
        return Continued(ids, None if self._temperature == 0 else logps)

    def _generate(self, prefixes: list[list[int]], limit: int, stops: list[int]) -> list[Any]:
        stack = load_stack()
        options: dict[str, Any] = {"do_sample": False, **NO_PENALTIES}
        if self._temperature > 0:
            options = {"do_sample": True, **WHOLE_DISTRIBUTION, "temperature": self._temperature, "min_p": None}
        results = self._model.generate_batch(
            prefixes,
            generation_config=stack.transformers.GenerationConfig(
                max_new_tokens=limit, eos_token_id=stops, pad_token_id=self._pad_id, **options
            ),
            continuous_batching_config=self._batching(prefixes, limit),
            progress_bar=False,
        )
        found = list(results.values())
        errors = [str(result.error) for result in found if result.error is not None]
        if errors or len(found) != len(prefixes):
            raise BackendError(
                f"transformers' continuous batching returned {len(found) - len(errors)} of {len(prefixes)} completions"
                f"{': ' + errors[0] if errors else ''}; set rollout.engine=auto"
            )
        return found

    def _batching(self, prefixes: list[list[int]], limit: int) -> Any:
        from transformers.generation import ContinuousBatchingConfig

        options: dict[str, Any] = {"return_logprobs": self._temperature > 0, "max_requests_per_batch": self.rows}
        if next(self._model.parameters()).device.type == "cuda":
            return ContinuousBatchingConfig(max_memory_percent=SHARE_OF_GPU, **options)
        # without a GPU it would plan by the machine's memory: gigabytes of cache for a model of a megabyte
        rows = min(self.rows or len(prefixes), len(prefixes))
        blocks = rows * -(-(max(map(len, prefixes)) + limit + 1) // BLOCK_TOKENS)
        return ContinuousBatchingConfig(
            block_size=BLOCK_TOKENS, num_blocks=blocks + 1, max_batch_tokens=max(256, rows), **options
        )
