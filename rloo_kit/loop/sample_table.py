"""A table of sample completions while a run trains: what the policy thinks and answers, apart, and what it earned."""

from typing import Any

from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from rloo_kit.loop.callbacks import RolloutLog, is_step_row
from rloo_kit.results.samples import CLOSED_BY_THE_BUDGET, picture_controls, plain_prompt
from rloo_kit.system.text_tables import print_table
from rloo_kit.think_tags import ThinkTags, split_thinking


class SampleTable(TrainerCallback):
    """A table of sample completions after the first step and every `every_steps`, thinking and answer apart.

    Args:
        rollouts: has the last batch. tokenizer, tags, family: how a completion is split and decoded.
        every_steps: 0 for never. num_samples: rows of the table.
    """

    def __init__(
        self, rollouts: RolloutLog, tokenizer: Any, tags: ThinkTags, family: str, every_steps: int, num_samples: int
    ):
        self.rollouts = rollouts
        self.tokenizer, self.tags, self.family = tokenizer, tags, family
        self.every_steps, self.num_samples = every_steps, num_samples
        self._shown: int | None = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not is_step_row(logs) or not state.is_world_process_zero or not self.every_steps or not self.num_samples:
            return
        period = state.global_step // self.every_steps
        if self.rollouts.rows and period != self._shown:
            self._shown = period
            print_table(self.table(f"Completions of step {state.global_step}"))

    def table(self, title: str) -> Table:
        """Completions of the last batch, one of each prompt first, as a rich table."""
        table = Table(title=title, title_justify="left", show_lines=True)
        for name, ratio in (("prompt", 2), ("thinking", 4), ("answer", 2), ("reward", 1)):
            table.add_column(name, ratio=ratio, overflow="fold")
        firsts = {str(row["prompt"]): row for row in reversed(self.rollouts.rows)}
        others = [row for row in self.rollouts.rows if row is not firsts[str(row["prompt"])]]
        for row in [*reversed(firsts.values()), *others][: self.num_samples]:
            prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
            thinking, answer = split_thinking(
                row["completion_ids"], self.tokenizer, self.tags, self.family == "thinking"
            )
            reward = "not scored" if row["reward"] is None else f"{row['reward']:.2f}\nadv. {row['advantage']:+.2f}"
            if row["truncated"]:
                answer += "\n(cut off)"
            shown = _shorten(thinking, 480) + (f"\n({CLOSED_BY_THE_BUDGET})" if row.get("forced") else "")
            cells = (_shorten(plain_prompt(prompt), 160), shown, _shorten(answer, 240), reward)
            table.add_row(*(Text(picture_controls(cell)) for cell in cells))
        return table


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
