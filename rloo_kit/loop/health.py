"""Health of a run during training: the callback that checks the rules of package `health`, and weight movement."""

from collections.abc import Iterable
from operator import itemgetter
from typing import Any

import torch
from transformers import TrainerCallback

from rloo_kit.collective import share
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import HealthError, NoSignalError
from rloo_kit.health.rules import Context, Finding
from rloo_kit.health.watch import HealthWatch
from rloo_kit.loop.callbacks import is_step_row
from rloo_kit.runs.folder import RunDir
from rloo_kit.system.problems import warn
from rloo_kit.system.processes import say

SAMPLED = 2**16  # trained parameters whose movement is measured


class HealthGuard(TrainerCallback):
    """Prints each finding of the rules once and writes it to `health.jsonl` and `status.json`.

    Saves and stops if `health:` says so.

    Args:
        rows: the lines of `metrics.jsonl`, which grow during the run. Existing ones belong to an earlier part of the
            run, and their findings are not printed again.

    Attributes:
        findings: the causes found so far in the whole run. stopped_by: the rule that stopped it; None if none did.
    """

    def __init__(self, run: RunConfig, run_dir: RunDir, rows: list[dict[str, Any]]):
        self.run, self.run_dir, self.rows = run, run_dir, rows
        self.stopped_by: str | None = None
        self._cause: Finding | None = None
        self._start(None)

    def _start(self, max_steps: int | None) -> None:
        self._watch = HealthWatch(Context.of(self.run, max_steps), self.rows)
        self._observed = len(self.rows)

    @property
    def findings(self) -> list[Finding]:
        return self._watch.findings

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._start(state.max_steps)
        self._write()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> Any:
        if not is_step_row(logs):
            return control
        found, self.stopped_by, self._cause = share((self._observe(), self._watch.stopped_by, self._watch.stop))
        warn(found)
        if self.stopped_by is not None:
            control.should_save = control.should_training_stop = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        warn(self._observe())  # a measurement after the last step
        self._write()

    def _observe(self) -> list[Finding]:
        rows, self._observed = self.rows[self._observed :], len(self.rows)
        found = [finding for row in rows for finding in self._watch.observe(row)]
        if found:
            self._write()
        return found

    def _write(self) -> None:
        causes = [one.to_dict() for one in self.findings]
        rows = [{"step": one["step"], **one, "run": self.run_dir.id} for one in causes]
        self.run_dir.replace_jsonl("health.jsonl", sorted(rows, key=itemgetter("step")))
        brief = [{key: one[key] for key in ("rule", "since", "evidence", "fix")} for one in causes]
        self.run_dir.set_status("running", health=brief)

    def make_error(self, where: str) -> HealthError:
        """The error of a run that a rule stopped; `where`: "at step 3 of 20"."""
        kind = NoSignalError if self.stopped_by == "no_signal" else HealthError
        return kind(f"stopped {where} (health.{self.stopped_by}=stop): {self._cause}")


def say_findings(findings: Iterable[Finding], steps: int) -> None:
    """Print a run's findings at its end, after `steps` steps; nothing if there are none."""
    for finding in findings:
        over = f" (it was over after step {finding.last})" if finding.last < steps else ""
        say(f"health: {finding}{over}")


class Movement(TrainerCallback):
    """Logs `policy/moved`: how far the trained weights are from the initial ones.

    Initial means before the trainer loads a checkpoint, so a resumed run logs the same values. It is the norm of the
    difference over the initial norm, on a sample of about SAMPLED entries of all trained tensors. Nothing is logged
    for sharded weights.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        is_whole = trainer.rloo.parallel.kind != "shards"
        self._begun = self._sample() if is_whole and self._trained() else None

    def _trained(self) -> list[torch.Tensor]:
        return [one for one in self.trainer.model.parameters() if one.requires_grad]

    def _sample(self) -> torch.Tensor:
        tensors = self._trained()
        stride = max(sum(one.numel() for one in tensors) // SAMPLED, 1)
        return torch.cat([one.detach().reshape(-1)[::stride].float() for one in tensors])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._begun is not None:
            moved = (self._sample() - self._begun).norm() / self._begun.norm().clamp(min=1e-12)
            self.trainer.rloo.recorder.count("policy/moved", moved.item())
