"""What a run prints and writes during training: trainer callbacks, and a listener for its rollouts.

With several processes the main one prints and writes, and a stop in one stops all after the same step.
"""

import math
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from operator import itemgetter
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from rloo_kit.collective import any_of, gather_lists, share
from rloo_kit.config.run import RunConfig
from rloo_kit.data.answers import REWARDS_WITH_ANSWERS
from rloo_kit.errors import HealthError, NoSignalError, shorten
from rloo_kit.health.rules import Context, Finding
from rloo_kit.health.watch import HealthWatch
from rloo_kit.results.evaluation import CLOSED_BY_THE_BUDGET
from rloo_kit.results.plots import tokens_per_second
from rloo_kit.results.samples import list_steps, split_completion
from rloo_kit.rewarding.guard import PENDING
from rloo_kit.runs.folder import RunDir
from rloo_kit.runs.rollouts import Rollouts
from rloo_kit.system.console import format_seconds, picture_controls, plain_prompt, print_table
from rloo_kit.system.problems import warn
from rloo_kit.system.processes import ENDING, handle_signals, is_distributed, say

SECONDS_FOR_REWARDS = 5.0  # that a step which is to be the last one waits for async rewards, such as a judge that hangs
SECONDS_OF_ONE_SIGNAL = 1.0  # a terminal and a launcher may both pass the same Ctrl-C on to a process


def is_step_row(logs: dict[str, Any] | None) -> bool:
    """Whether logs belong to a training step; the trainer also logs a summary at the end."""
    return logs is not None and "loss" in logs


class RolloutLog:
    """A rollout listener: writes every completion to `rollouts/` and keeps the last batch, of all processes in order.

    A row carries the step that it trains, as in `metrics.jsonl`."""

    def __init__(self, run_dir: RunDir):
        self.run_dir = run_dir
        self.files = Rollouts(run_dir.folder)
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
        self._started: float | None = None

    @property
    def seconds(self) -> float:
        return self._earlier + (0.0 if self._started is None else time.monotonic() - self._started)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started = time.monotonic()
        self.run_dir.set_status("running", step=state.global_step, max_steps=state.max_steps)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._earlier, self._started = self.seconds, None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.run_dir.set_status("running", step=state.global_step, max_steps=state.max_steps)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.run_dir.set_status("running", saved=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if is_step_row(logs):
            row = {"step": state.global_step, **logs, "seconds": round(self.seconds, 3), "run": self.run_dir.id}
            self.rows.append(row)
            self.run_dir.append_jsonl("metrics.jsonl", [row])


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


class ProgressLine(TrainerCallback):
    """Prints one flushed progress line, at most every `every_s` seconds, and at the first and last step.

    The writer has written its row before. `after_s`: duration of what follows the steps; `evaluations`: those during
    training, whose time counts towards the time left; None without any. The first step, which also warms up, does not.
    """

    def __init__(self, writer: MetricsWriter, every_s: float, after_s: float = 0.0):
        self.writer, self.every_s, self.after_s = writer, every_s, after_s
        self.evaluations: Any = None
        self._begun = self._printed_at = 0.0
        self._first_step = 0
        self._warm: tuple[int, float] | None = None  # the first logged step, and the seconds until its end
        self._printed_step: int | None = None
        self._logs: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._begun = self._printed_at = time.monotonic()
        self._first_step = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not is_step_row(logs) or not state.is_world_process_zero:
            return
        self._logs = self._logs | logs  # a step that reuses a rollout logs nothing about it
        due = time.monotonic() - self._printed_at >= self.every_s
        if due or self._printed_step is None or state.global_step >= state.max_steps:
            self._print(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._printed_step != state.global_step and state.is_world_process_zero and self._logs:
            self._print(state)

    def _print(self, state: Any) -> None:
        now, step = time.monotonic(), state.global_step
        evaluated_s, left_s = 0.0, self.after_s
        if self.evaluations is not None:
            evaluated_s = self.evaluations.seconds
            left_s += self.evaluations.seconds_left(step, state.max_steps)
        stepped_s = now - self._begun - evaluated_s
        warm_step, warm_s = self._warm = self._warm or (step, stepped_s)
        if step == warm_step:
            warm_step, warm_s = self._first_step, 0.0
        left_s += (stepped_s - warm_s) / max(step - warm_step, 1) * (state.max_steps - step)
        say(self._line(state, left_s, now - self._printed_at))
        self._printed_at, self._printed_step = now, step

    def _line(self, state: Any, left_s: float, _since_s: float) -> str:
        held_out = None if self.evaluations is None else self.evaluations.history.value
        per_second = tokens_per_second(self.writer.rows, after=self._printed_step or self._first_step)
        logs = self._logs
        means = [logs.get(f"rewards/{name}/mean") for name in REWARDS_WITH_ANSWERS]  # of 0/1 rewards, so the accuracy
        values = {
            "reward {:.3f}": logs.get("reward"),
            "accuracy {:.3f}": next((value for value in means if value is not None), None),
            "held-out {:.3f}": held_out,
            "think {:.0f}": logs.get("thinking/mean_length"),
            "kl {:.4f}": logs.get("kl"),
            "{:.0f} tok/s": per_second,
        }
        shown = [text.format(value) for text, value in values.items() if value is not None]
        return " | ".join([f"step {state.global_step}/{state.max_steps}", *shown, f"eta {format_seconds(left_s)}"])


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


class SampleTable(TrainerCallback):
    """Prints a table of two completions after the first step and every `every_steps` (0: never), thinking and answer
    separated; with tools the last turn's, and the calls with their results."""

    def __init__(self, rollouts: RolloutLog, every_steps: int):
        self.rollouts, self.every_steps = rollouts, every_steps
        self._shown: int | None = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not is_step_row(logs) or not state.is_world_process_zero or not self.every_steps:
            return
        period = state.global_step // self.every_steps
        if self.rollouts.rows and period != self._shown:
            self._shown = period
            print_table(self.table(f"Completions of step {state.global_step}"))

    def table(self, title: str) -> Table:
        """Completions of the last batch, one of each prompt first, as a rich table."""
        table = Table(title=title, title_justify="left", show_lines=True)
        has_tools = any("turns" in row for row in self.rollouts.rows)
        for name, ratio in (("prompt", 2), *[("calls", 3)] * has_tools, ("thinking", 4), ("answer", 2), ("reward", 1)):
            table.add_column(name, ratio=ratio, overflow="fold")
        firsts = {str(row["prompt"]): row for row in reversed(self.rollouts.rows)}
        others = [row for row in self.rollouts.rows if row is not firsts[str(row["prompt"])]]
        for row in [*reversed(firsts.values()), *others][:2]:
            prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
            segments, answer = split_completion(row)
            thinking = "\n".join(text for text, _ in segments)
            reward = "not scored" if row["reward"] is None else f"{row['reward']:.2f}\nadv. {row['advantage']:+.2f}"
            if row["truncated"]:
                answer += "\n(cut off)"
            shown = shorten(thinking, 480, tail=240) + (f"\n({CLOSED_BY_THE_BUDGET})" if row.get("forced") else "")
            steps = [step for step in list_steps(row.get("turns", ())) if step[0] not in ("thinking", "text")]
            lines = [text if kind == "call" else f"-> {shorten(text, 60)}" for kind, text in steps]
            calls = [shorten("\n".join(lines), 240, tail=120)] * has_tools
            cells = (shorten(plain_prompt(prompt), 160, tail=80), *calls, shown, shorten(answer, 240, 120), reward)
            table.add_row(*(Text(picture_controls(cell)) for cell in cells))
        return table


class HealthGuard(TrainerCallback):
    """Prints each finding of the rules once and writes it to `health.jsonl` and `status.json`.

    Saves and stops if `health:` says so. What `rows` show at the start has been printed by an earlier part of the run.

    Attributes:
        findings: the causes found so far in the whole run. stopped_by: the rule that stopped it; None if none did.
    """

    def __init__(self, run: RunConfig, run_dir: RunDir, rows: list[dict[str, Any]]):
        self.run_dir, self.rows = run_dir, rows
        self.stopped_by: str | None = None
        self._cause: Finding | None = None
        self._watch, self._observed = HealthWatch(Context.of(run), rows), len(rows)

    @property
    def findings(self) -> list[Finding]:
        return self._watch.findings

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
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
        causes = [cause.to_dict() for cause in self.findings]
        rows = [{"step": cause["step"], **cause, "run": self.run_dir.id} for cause in causes]
        self.run_dir.replace_jsonl("health.jsonl", sorted(rows, key=itemgetter("step")))
        brief = [{key: cause[key] for key in ("rule", "since", "evidence", "fix")} for cause in causes]
        self.run_dir.set_status("running", health=brief)

    def make_error(self, where: str) -> HealthError:
        """The error of a run that a rule stopped; `where`: "at step 3 of 20"."""
        kind = NoSignalError if self.stopped_by == "no_signal" else HealthError
        return kind(f"stopped {where} (health.stop=[{self.stopped_by}]): {self._cause}")


def say_findings(findings: Iterable[Finding], steps: int) -> None:
    """Print a run's findings at its end, after `steps` steps; nothing if there are none."""
    for finding in findings:
        over = f" (it was over after step {finding.last})" if finding.last < steps else ""
        say(f"health: {finding}{over}")


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
