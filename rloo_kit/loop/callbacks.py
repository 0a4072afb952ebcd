"""What a run writes during training and how it is stopped: trainer callbacks, and a listener for its rollouts.

With several processes the main one prints and writes, and a stop in one stops all after the same step.
"""

import math
import signal
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

import torch
from transformers import TrainerCallback

from rloo_kit.collective import any_of, gather_lists, share
from rloo_kit.rewarding.guard import PENDING
from rloo_kit.runs.folder import RunDir
from rloo_kit.runs.rollouts import Rollouts
from rloo_kit.system.gpu import read_energy
from rloo_kit.system.processes import ENDING, handle_signals, is_distributed, say

SECONDS_FOR_REWARDS = 5.0  # that a step which is to be the last one waits for async rewards, such as a judge that hangs
SECONDS_OF_ONE_SIGNAL = 1.0  # a terminal and a launcher may both pass the same Ctrl-C on to a process


def is_step_row(logs: dict[str, Any] | None) -> bool:
    """Whether logs belong to a training step; the trainer also logs a summary at the end."""
    return logs is not None and "loss" in logs


class RolloutLog:
    """A rollout listener: writes every completion to `rollouts/` and keeps the last batch, of all processes in order.

    A row carries the step that it trains, as in `metrics.jsonl`. `keep_gib`: `run.rollouts_gib`."""

    def __init__(self, run_dir: RunDir, keep_gib: float | None = None):
        self.run_dir = run_dir
        self.files = Rollouts(run_dir.folder, keep_gib)
        self.rows: list[dict[str, Any]] = []

    def __call__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = [row | {"step": row["step"] + 1} for row in gather_lists(rows)]
        if self.run_dir.writes:
            self.run_dir.check_there()
            self.files.append(self.rows)


class MetricsWriter(TrainerCallback):
    """Writes a line of `metrics.jsonl` per logged step, with the run's id, and `status.json` after every step.

    Attributes:
        rows: the lines of the whole run, those from before a resume included.
        seconds: training time so far, including the time before a resume.
    """

    def __init__(self, run_dir: RunDir):
        self.run_dir = run_dir
        self.rows = run_dir.read_metrics()
        self._earlier = (self.rows[-1].get("seconds") or 0.0) if self.rows else 0.0
        self._earlier_wh = run_dir.status().get("energy_wh")
        self._started: float | None = None
        self._joules: float | None = None

    @property
    def seconds(self) -> float:
        return self._earlier + (0.0 if self._started is None else time.monotonic() - self._started)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started, self._joules = time.monotonic(), read_energy()
        self.run_dir.set_status("running", step=state.global_step, max_steps=state.max_steps)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._earlier, self._started = self.seconds, None
        self.run_dir.set_status("running", **self._energy())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.run_dir.set_status("running", step=state.global_step, max_steps=state.max_steps)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.run_dir.set_status("running", saved=state.global_step, **self._energy())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if is_step_row(logs):
            row = {"step": state.global_step, **logs, "seconds": round(self.seconds, 3), "run": self.run_dir.id}
            self.rows.append(row)
            self.run_dir.append_jsonl("metrics.jsonl", [row])

    def _energy(self) -> dict[str, float]:
        now = read_energy()
        if now is None or self._joules is None:
            return {}
        return {"energy_wh": round((self._earlier_wh or 0.0) + (now - self._joules) / 3600, 3)}


class TimedSaves(TrainerCallback):
    """Saves a checkpoint `minutes` after the last one (None: never); `rloo.save_steps` applies too."""

    def __init__(self, run_dir: RunDir, minutes: float | None):
        self.run_dir = run_dir
        self.every_s = math.inf if minutes is None else minutes * 60
        self._saved_at = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._saved_at = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if share(time.monotonic() - self._saved_at >= self.every_s):
            control.should_save = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._saved_at = time.monotonic()


class Interrupts(TrainerCallback):
    """Ctrl-C (SIGINT), SIGTERM and SIGHUP end the run after the current step and save `saved`; at once if a second one
    comes, or, in one process, if the step waits for async rewards longer than `SECONDS_FOR_REWARDS`.

    A context manager that handles the signals inside its block, in the main thread only.

    Attributes:
        requested: whether a signal came.
        between_steps: whether weights, optimizer and step counter are consistent, so that they can be saved.
    """

    def __init__(self, saved: str = "a checkpoint") -> None:
        self.saved = saved
        self.requested = False
        self.between_steps = True
        self._came_at = 0.0
        self._signals = ExitStack()
        self._over = threading.Event()

    def __enter__(self) -> "Interrupts":
        self._signals.enter_context(handle_signals(ENDING, self._handle))
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for call in list(PENDING):  # nobody waits for it any more
            call.cancel()
        self._signals.close()

    def _handle(self, number: signal.Signals) -> None:
        if self.requested:
            if is_distributed() and time.monotonic() - self._came_at < SECONDS_OF_ONE_SIGNAL:
                return
            self._over.set()  # no third one while the state is saved
            raise KeyboardInterrupt
        self.requested, self._came_at = True, time.monotonic()
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        with suppress(RuntimeError):  # the signal came in the middle of another print
            say(f"{name}: stopping after this step, with {self.saved}; a second one stops at once")
        if not is_distributed():  # where it would end without a checkpoint
            threading.Thread(target=self._watch, args=(number,), name="rloo-kit-interrupts", daemon=True).start()

    def _watch(self, number: signal.Signals) -> None:
        """Send the signal again once the step has waited for async rewards for `SECONDS_FOR_REWARDS`."""
        checks = 0
        while checks < 10 and not self._over.wait(SECONDS_FOR_REWARDS / 10):
            checks = checks + 1 if PENDING else 0
        if checks == 10:
            signal.pthread_kill(threading.main_thread().ident or 0, number)
            say(f"no reward came in {SECONDS_FOR_REWARDS:g} s: stopping at once")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.between_steps = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self.between_steps = True
        self.stop_if_requested(control)
        return control

    def stop_if_requested(self, control: Any) -> None:
        """Ask the trainer to save and stop in all processes if one of them has received a signal."""
        if any_of(self.requested):
            self.requested = True
            control.should_save = control.should_training_stop = control.should_log = True


class Movement(TrainerCallback):
    """Logs `policy/moved`: how far the trained weights are from the initial ones.

    The norm of the difference over the initial norm, that before a checkpoint is loaded, on a sample of about 2**16
    entries. Nothing is logged for sharded weights."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self._begun = None if trainer.rloo.parallel.kind == "shards" else self._sample()

    def _sample(self) -> torch.Tensor | None:
        tensors = [value.detach() for value in self.trainer.model.parameters() if value.requires_grad]
        stride = max(sum(value.numel() for value in tensors) // 2**16, 1)
        return torch.cat([value.reshape(-1)[::stride].float() for value in tensors]) if tensors else None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._begun is not None and (now := self._sample()) is not None:
            moved = (now - self._begun).norm() / self._begun.norm().clamp(min=1e-12)
            self.trainer.rloo.recorder.count("policy/moved", moved.item())
