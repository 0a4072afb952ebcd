"""What a run prints during training, and the health rules that may stop it: trainer callbacks."""

import time
from collections.abc import Iterable
from itertools import islice
from operator import itemgetter
from typing import Any

from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from rloo_kit.collective import share
from rloo_kit.config.run import RunConfig
from rloo_kit.data.answers import REWARDS_WITH_ANSWERS
from rloo_kit.errors import HealthError, NoSignalError, shorten
from rloo_kit.health.rules import Context, Finding
from rloo_kit.health.watch import HealthWatch
from rloo_kit.loop.callbacks import MetricsWriter, RolloutLog, is_step_row
from rloo_kit.results.evaluation import CLOSED_BY_THE_BUDGET
from rloo_kit.results.plots import tokens_per_second
from rloo_kit.results.samples import PICTURES, REFERENCE, join_parts, list_steps, plain, split_completion
from rloo_kit.runs.folder import RunDir
from rloo_kit.system.console import format_seconds, picture_controls, print_table
from rloo_kit.system.problems import warn
from rloo_kit.system.processes import say

MOST_IMAGES = 1000  # kept as small pictures in a run's folder, about 4 kB each


class ProgressLine(TrainerCallback):
    """Prints one flushed progress line, at most every `every_s` seconds, and at the first and last step.

    `after_s`: duration of what follows the steps. `evaluations`: those during training, which count towards the time
    left. The first step, which also warms up, does not.
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


class SampleTable(TrainerCallback):
    """Prints a table of `num_samples` completions after the first step and every `every_steps` (0: never), thinking and
    answer separated; with tools the last turn's, and the calls with their results."""

    def __init__(self, rollouts: RolloutLog, every_steps: int, num_samples: int):
        self.rollouts, self.every_steps, self.num_samples = rollouts, every_steps, num_samples
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
        for row in [*reversed(firsts.values()), *others][: self.num_samples]:
            prompt = row["prompt"] if isinstance(row["prompt"], str) else join_parts(row["prompt"][-1]["content"])
            segments, answer = split_completion(row)
            thinking = "\n".join(text for text, _ in segments)
            reward = "not scored" if row["reward"] is None else f"{row['reward']:.2f}\nadv. {row['advantage']:+.2f}"
            if row["truncated"]:
                answer += "\n(cut off)"
            shown = shorten(thinking, 480, tail=240) + (f"\n({CLOSED_BY_THE_BUDGET})" if row.get("forced") else "")
            steps = [step for step in list_steps(row.get("turns", ())) if step[0] not in ("thinking", "text")]
            lines = [text if kind == "call" else f"-> {shorten(text, 60)}" for kind, text in steps]
            calls = [shorten("\n".join(lines), 240, tail=120)] * has_tools
            cells = (shorten(plain(prompt), 160, tail=80), *calls, shown, shorten(answer, 240, 120), reward)
            table.add_row(*(Text(picture_controls(cell)) for cell in cells))
        return table


class PictureLog:
    """A rollout listener, after `rollouts`: keeps small pictures of the images in prompts in `images.jsonl`, for pages
    that are written where the data has not been read. `prompts`: the held-out ones."""

    def __init__(self, rollouts: RolloutLog, prompts: Iterable[str]):
        self.rollouts, self.run_dir = rollouts, rollouts.run_dir
        self._kept = {row["image"] for row in self.run_dir.read_jsonl(PICTURES)}
        self._keep(islice(prompts, MOST_IMAGES // 2))

    def __call__(self, rows: list[dict[str, Any]]) -> None:
        self._keep(str(row["prompt"]) for row in self.rollouts.rows)

    def _keep(self, prompts: Iterable[str]) -> None:
        from rloo_kit.images.files import thumbnail
        from rloo_kit.images.tokens import find_picture

        if not self.run_dir.writes:
            return
        found = [digest for digest in REFERENCE.findall("".join(prompts)) if digest not in self._kept]
        found = list(dict.fromkeys(found))[: MOST_IMAGES - len(self._kept)]
        pictures = [{"image": digest, "uri": thumbnail(find_picture(digest))} for digest in found]
        self._kept.update(found)
        if pictures:
            self.run_dir.append_jsonl(PICTURES, pictures)


class HealthGuard(TrainerCallback):
    """Prints each finding of the rules once, writes it to `health.jsonl` and `status.json`, and saves and stops if
    `health:` says so. What `rows` show at the start has been printed by an earlier part of the run.

    `findings`: the causes so far in the whole run. `stopped_by`: the rule that stopped it; None if none did.
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
