"""What samples a rollout: the kit's engine, or vLLM through TRL's own code."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from rloo_kit.errors import DataError
from rloo_kit.loop.records import Completions
from rloo_kit.models.parallel import Parallel
from rloo_kit.rollout.types import Engine, Limits, Rollout


class Sampler:
    """Completions of prompts.

    Args:
        trainer: TRL's. Its `_generate` renders templates, decodes and counts, and comes back for the ids alone: to
            `complete`.
        engine: what samples; None where TRL's code does (vLLM). limits: of a completion's length.
        parallel: gathers sharded weights to sample from. end_ids: of a completion; one without is truncated.
    """

    def __init__(self, trainer: Any, engine: Engine | None, limits: Limits, parallel: Parallel, end_ids: set[int]):
        self.trainer, self.engine, self.limits = trainer, engine, limits
        self.parallel, self.end_ids = parallel, end_ids
        self._found: Rollout | None = None
        self._lengths: dict[int, float] = {}  # of completions, by their prompt's hash: what is expected the next time

    def sample(self, rows: list[dict[str, Any]]) -> Completions:
        """A completion for each row of the data set; neighbours with equal prompts are a group."""
        if any(column in rows[0] for column in ("image", "images")):
            raise DataError("the data set has an image column; the kit trains text models only: drop the column")
        prompts = [row["prompt"] for row in rows]
        self._found = None
        prompt_ids, completion_ids, texts = self.trainer._generate(prompts)
        return Completions(
            rows=rows,
            prompts=prompts,
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            texts=texts,
            truncated=[not ids or ids[-1] not in self.end_ids for ids in completion_ids],
            forced=[None] * len(rows) if self._found is None else self._found.forced,
            sampler_logps=None if self._found is None else self._found.sampler_logps,
        )

    def complete(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """Completion ids by the engine. Where not all rows fit at once, those of prompts that took long before start
        first: the tail gets shorter."""
        assert self.engine is not None
        waits = self.engine.rows is not None and self.engine.rows < len(prompt_ids)
        keys = [hash(tuple(ids)) for ids in prompt_ids]
        usual = sum(self._lengths.values()) / max(len(self._lengths), 1)
        expected = [self._lengths.get(key, usual) for key in keys] if waits else None
        is_here = self.engine.name != "server"  # which gets the adapter alone, and samples elsewhere
        weights = self.parallel.whole_weights(self.trainer.model_wrapped) if is_here else nullcontext()
        with weights, self.parallel.accelerator.autocast():
            self._found = self.engine.sample(prompt_ids, self.limits, expected)
        for key, ids in zip(keys, self._found.completion_ids, strict=True):
            self._lengths[key] = (self._lengths.get(key, len(ids)) + len(ids)) / 2
        return self._found.completion_ids

    def listen(self, generation: Any, generate: Callable[[], list[list[int]]]) -> list[list[int]]:
        """Completion ids by `generate`, TRL's code around vLLM; its log-probabilities, which TRL drops, are kept.

        Args:
            generation: TRL's `VLLMGeneration`, or what stands in its place and may have no `logprobs`.
        """
        if not hasattr(generation, "logprobs"):
            return generate()
        plain = generation.generate
        logps: list[Any] = []

        def listening(*arguments: Any, **keywords: Any) -> Any:
            found = plain(*arguments, **keywords)
            logps.extend(found[2] or [])
            return found

        generation.generate = listening
        try:
            completion_ids = generate()
        finally:
            generation.generate = plain
        if [len(row) for row in logps] == [len(ids) for ids in completion_ids]:
            known = [[math.nan if token[0] is None else token[0] for token in row] for row in logps]
            self._found = Rollout(completion_ids, [None] * len(completion_ids), known)
        return completion_ids


def check_prompts(prompt_ids: list[list[int]]) -> None:
    """Raise DataError for a prompt without tokens."""
    if not all(prompt_ids):
        raise DataError(f"prompt {prompt_ids.index([])} of a rollout has no tokens; there is nothing to continue")
