"""What the trainer reads from a checkpoint and writes into one, beyond what TRL does.

A mixin of `RLOOTrainer`. The state of the loop itself (`loop_state.json`) is that of the running rewards and of the
prompts that are drawn again. Left out: the run's own folder (`run_dir`, `training`).
"""

import os
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model

from rloo_kit.gradient.advantages import RunningMoments
from rloo_kit.runs.files import saving
from rloo_kit.runs.run_dir import read_json, write_json

LOOP_STATE = "loop_state.json"  # in a checkpoint


class TrainerFiles:
    """The checkpoints of `RLOOTrainer`."""

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the adapter and its reference as they were.

        transformers loads the adapters in a checkpoint's subfolders or the one beside them, not both; and a run that
        is resumed in the process it was cut in has a trained adapter, which TRL has just copied as the reference.
        """
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_loop_state(resume_from_checkpoint)
        policy = self.accelerator.unwrap_model(self.model)
        if not is_peft_model(policy):
            return
        if os.path.isdir(os.path.join(resume_from_checkpoint, "ref")):
            policy.load_adapter(resume_from_checkpoint, "default", is_trainable=True)
            policy.set_adapter("default")
        elif "ref" in policy.peft_config:
            policy.delete_adapter("ref")

    def _load_loop_state(self, folder: str) -> None:
        state = read_json(Path(folder) / LOOP_STATE)
        if state is None:
            return  # written by TRL's trainer, or by the kit before its loop had a state
        self._running = RunningMoments.from_dict(state["rewards"])
        if self._reservoir is not None and state["reservoir"] is not None:
            self._reservoir.load_state_dict(state["reservoir"])

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        with saving(folder):
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                reservoir = None if self._reservoir is None else self._reservoir.state_dict()
                write_json(folder / LOOP_STATE, {"rewards": self._running.to_dict(), "reservoir": reservoir})

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """TRL's; whoever ends the process waits for it (`rloo_kit.runs.files`)."""
        with saving(output_dir or self.args.output_dir):
            super().save_model(output_dir, _internal_call)
