"""Samples a rollout with an engine, through TRL's own code around generation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rloo_kit.errors import DataError
from rloo_kit.loop.records import Completions
from rloo_kit.models.parallel import Parallel
from rloo_kit.rollout.types import FOREIGN, Engine, Limits, Progress, Rollout


class Sampler:
    """Completions of prompts.

    Args:
        trainer: TRL's. Its `_generate` renders templates, decodes and counts, and calls back `complete` for the ids.
        engine: samples. limits: of a completion's length.
        parallel: gathers sharded weights for sampling. end_ids: a completion that ends in none of them is truncated.
    """

    def __init__(self, trainer: Any, engine: Engine, limits: Limits, parallel: Parallel, end_ids: set[int]):
        self.trainer, self.engine, self.limits = trainer, engine, limits
        self.parallel, self.end_ids = parallel, end_ids
        self.on_progress: Progress | None = None  # see `Engine.sample`
        self._found: Rollout | None = None
        self._lengths: dict[int, float] = {}  # expected completion lengths, by the prompt's hash

    def sample(self, rows: list[dict[str, Any]]) -> Completions:
        """A completion for each row of the dataset; neighbours with equal prompts are a group."""
        if any(column in rows[0] for column in ("image", "images")):
            raise DataError("the dataset has an image column; the kit trains text models only: drop the column")
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
        """Completion ids from the engine.

        If not all rows fit at once, prompts with long completions so far start first, which shortens the tail."""
        waits = self.engine.rows is not None and self.engine.rows < len(prompt_ids)
        keys = [hash(tuple(ids)) for ids in prompt_ids]
        usual = sum(self._lengths.values()) / max(len(self._lengths), 1)
        expected = [self._lengths.get(key, usual) for key in keys] if waits else None
        with self._weights():
            self._found = self.engine.sample(prompt_ids, self.limits, expected, self.on_progress)
        for key, ids in zip(keys, self._found.completion_ids, strict=True):
            self._lengths[key] = (self._lengths.get(key, len(ids)) + len(ids)) / 2
        return self._found.completion_ids

    @contextmanager
    def _weights(self) -> Iterator[None]:
        """The whole policy in the trainer's precision; a foreign engine has its own base and precision."""
        if self.engine.name in FOREIGN:
            yield
            return
        with self.parallel.whole_weights(self.trainer.model_wrapped), self.parallel.accelerator.autocast():
            yield


def check_prompts(prompt_ids: list[list[int]]) -> None:
    """Raise DataError for a prompt without tokens."""
    if not all(prompt_ids):
        raise DataError(f"prompt {prompt_ids.index([])} of a rollout has no tokens; there is nothing to continue")
