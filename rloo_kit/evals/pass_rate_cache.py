"""Pass rates on disk: how many completions of a prompt were right, kept for the next run with the same model.

One file of JSON lines for each set of conditions (the model, how it samples, what judges), named after their digest;
its first line says them in full. A line is appended in one piece as soon as a prompt is measured, so a measuring that
is cut off goes on where it was, and two processes may measure at once. Left out: removing old files (100 bytes a
prompt) and the seed, of which a pass rate is an estimate and not a property.
"""

import hashlib
import json
import os
from typing import Any

from rloo_kit.errors import SetupError
from rloo_kit.system.environment import CACHE_VARIABLE, cache_folder

FOLDER = "difficulty"


class PassRateCache:
    """The pass rates that were measured under the same conditions.

    Args:
        conditions: everything that a pass rate depends on, but for the prompt and its right answer, as JSON takes it.

    Attributes:
        path: the file; it is made with the first entry.

    Raises:
        SetupError: from `add`, when the file cannot be written.
    """

    def __init__(self, conditions: dict[str, Any]) -> None:
        self.conditions = conditions
        text = json.dumps(conditions, sort_keys=True)
        self.path = cache_folder() / FOLDER / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
        self._right = self._read()

    @staticmethod
    def key(prompt: str, answer: Any) -> str:
        """What a prompt and its right answer are known by."""
        return hashlib.sha256(f"{prompt}\0{answer}".encode()).hexdigest()[:32]

    def get(self, prompt: str, answer: Any) -> int | None:
        """How many completions of the prompt were right; None where it was not measured."""
        return self._right.get(self.key(prompt, answer))

    def add(self, measured: list[tuple[str, Any, int]]) -> None:
        """Keep what was measured: prompt, right answer, number of right completions."""
        found = self.take(measured)
        lines = [{"prompt": key, "right": right} for key, right in found.items()]
        try:
            self._append(lines)
        except OSError as error:
            raise SetupError(
                f"pass rates cannot be kept in {self.path}: {error.strerror or error}. Set {CACHE_VARIABLE} to a "
                "folder that can be written, or rollout.difficulty_samples=0"
            ) from error

    def take(self, measured: list[tuple[str, Any, int]]) -> dict[str, int]:
        """As `add`, but only for this process: another one has written it. Returns them by their keys."""
        found = {self.key(prompt, answer): right for prompt, answer, right in measured}
        self._right |= found
        return found

    def _append(self, lines: list[dict[str, Any]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size == 0:
                lines = [{"conditions": self.conditions}, *lines]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a crash cut the last line off
                text = "\n" + text
            os.write(descriptor, text.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _read(self) -> dict[str, int]:
        try:
            lines = self.path.read_text(encoding="utf-8").split("\n")
        except OSError:
            return {}
        right = {}
        for line in lines:
            try:
                entry = json.loads(line)
                right[str(entry["prompt"])] = int(entry["right"])
            except (ValueError, KeyError, TypeError):  # the conditions, or a line that a crash cut off
                continue
        return right
