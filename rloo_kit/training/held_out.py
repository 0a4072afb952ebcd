"""Evaluation during training: every few steps on the same held-out prompts, with best weights and early stopping.

It does not affect training: random state and the model's mode are restored.
"""

import random
import shutil
import time
from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

from rloo_kit.collective import share, wait_for_all
from rloo_kit.config.run import RunConfig
from rloo_kit.data.answers import find_judge, gold_answers
from rloo_kit.errors import ConfigError, SetupError
from rloo_kit.evals.evaluate import AnswerJudge, HeldOutRewards, digest_prompts, evaluate_with
from rloo_kit.loop.callbacks import Interrupts
from rloo_kit.loop.saving import load_weights
from rloo_kit.models.policy import Policy, save_adapter
from rloo_kit.results.changes import (
    BEST,
    EVALUATIONS,
    RECORD,
    HeldOut,
    HeldOutHistory,
    parse_evaluations,
    read_best_step,
    read_evaluations,
)
from rloo_kit.results.evaluation import Evaluation, leading_measure
from rloo_kit.results.intervals import Measured
from rloo_kit.rewarding.guard import GuardedReward, guard, is_relative, log_names, reward_name
from rloo_kit.runs.checkpoints import UNFINISHED, publish
from rloo_kit.runs.files import saving, write_json
from rloo_kit.runs.folder import RunDir
from rloo_kit.system.processes import is_main_process, keep_random_numbers, say


def choose_measure(run: RunConfig, test: Any, reward_funcs: Sequence[Any]) -> str:
    """What `eval.measure` stands for: "accuracy", "reward" or the name of a reward; ConfigError if it cannot be
    measured. `test`: the held-out prompts; `reward_funcs`: as `train` takes them."""
    wanted = run.eval.measure
    guarded = [guard(reward) for reward in reward_funcs if not is_relative(reward)]
    names = log_names([reward_name(reward) for reward in guarded], guarded)
    foreign = [name for name, reward in zip(names, guarded, strict=True) if not isinstance(reward, GuardedReward)]
    judge = find_judge(gold_answers(test), names)
    known = [*(["accuracy"] if judge else []), *([] if foreign or not names else ["reward", *names])]
    if wanted == "auto":
        weight = next((reward.weight for name, reward in zip(names, guarded, strict=True) if name == judge), 1.0)
        wanted = leading_measure(judge is not None, judge, weight, not foreign or judge is None)
    for name in (wanted, wanted.rpartition(":")[2]):  # a module:function is logged under its function's name
        if name in known:
            return name
    cause = f"eval.measure is {run.eval.measure}"
    if foreign:
        cause += f", and {foreign[0]} is a model that only the trainer calls (name it as rewards: [name: reward_model])"
    if judge is None:
        cause += ", and the held-out prompts have no column 'answer' (data.answer_column)"
    options = f"set one of: auto, {', '.join(known)}" if known else "set eval.every_steps=0"
    raise ConfigError(f"{cause}: no evaluation during training (eval.every_steps) can measure that; {options}")


class BestWeights:
    """`best/` in a run's folder: the weights of its best evaluation; those of the step `staged` wait for its
    checkpoint. All processes call each method at once."""

    def __init__(self, policy: Policy, run_dir: RunDir) -> None:
        self.policy, self.run_dir = policy, run_dir
        self.folder, self._staging = run_dir / BEST, run_dir / UNFINISHED / BEST
        self.staged: int | None = None

    def are_of(self, step: int) -> bool:
        return share(read_best_step(self.run_dir.folder, self.run_dir.id)) == step

    def stage(self, step: int, record: dict[str, Any]) -> None:
        """Write the policy's weights, and the `record` of their evaluation, to the staging folder."""
        if is_main_process():
            shutil.rmtree(self._staging, ignore_errors=True)
        wait_for_all()
        save_adapter(self.policy, self._staging)
        if is_main_process():
            write_json(self._staging / RECORD, record)
        self.staged = step

    def publish(self, saved: int) -> None:
        """Move staged weights into place if the run's last checkpoint, `saved`, is at their step or later."""
        if self.staged is None or self.staged > saved:
            return
        if is_main_process() and self._staging.is_dir():
            with saving(self.folder):
                publish(self._staging, self.folder)
        self.staged = None


class Evaluations(TrainerCallback):
    """Evaluates before the first step, after every `eval.every_steps` and after the last one.

    Attributes:
        history: the evaluations so far, and the best of them. seconds: their total time in this process.
        stopped: why patience ran out, in words; None if it has not.
    """

    def __init__(
        self, run: RunConfig, policy: Policy, test: Any, rewards: Sequence[Any], run_dir: RunDir, interrupts: Interrupts
    ) -> None:
        alone: dict[str, Any] = {"num_prompts": None, "greedy": False, "pass_at_k": []}  # only sampled completions
        alone |= {"thinking_budgets": []}
        self.run, self.policy = run.model_copy(update={"eval": run.eval.model_copy(update=alone)}), policy
        self.run_dir, self.interrupts = run_dir, interrupts
        drawn = random.Random("eval-0").sample(range(len(test)), min(run.eval.every_prompts, len(test)))
        self.prompts = test.select(sorted(drawn))  # the same in all evaluations
        self.rewards = HeldOutRewards(run, rewards)
        self.judge = AnswerJudge(run, policy.tokenizer, gold_answers(self.prompts), rewards)
        self.history = HeldOutHistory(choose_measure(run, test, rewards), run.eval.patience)
        self.seconds = 0.0
        self.stopped: str | None = None
        self.trainer: Any = None
        self.weights = BestWeights(policy, run_dir)
        self._count = 0
        self.rows = share(read_evaluations(run_dir.folder, run_dir.id, every=True))
        self._restore()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step
        self._measure_best_again()
        measured = {row["step"] for row in self.rows}
        if not measured or (step not in measured and self._is_due(step, state.max_steps)):
            self._evaluate(state, control)
        self.settle(step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self.stopped is not None:  # by an evaluation that an interrupt had postponed
            control.should_save = control.should_training_stop = control.should_log = True
        step, last = state.global_step, state.max_steps
        if not self._is_due(step, last) or (self.interrupts.requested and step < last):
            return control
        held_out = self._evaluate(state, control)
        recorder = self.trainer.rloo.recorder
        shown = ("accuracy", "reward") if held_out.evaluation.leading == "accuracy" else ("reward",)
        for name in dict.fromkeys((*shown, self.history.measure)):
            for key, value in zip(("", "_low", "_high"), held_out.evaluation.ends(name), strict=True):
                if value is not None:
                    recorder.count(f"eval/{name}{key}", value)
        control.should_log = True
        self.interrupts.stop_if_requested(control)
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.weights.publish(state.global_step)

    def seconds_left(self, step: int, max_steps: int) -> float:
        """Estimated time of the evaluations after `step`, from those so far."""
        every = self.run.eval.every_steps
        left = max_steps // every - step // every + (max_steps % every != 0 and step < max_steps)
        return left * self.seconds / max(self._count, 1)

    def _is_due(self, step: int, max_steps: int) -> bool:
        return step % self.run.eval.every_steps == 0 or step >= max_steps

    def _evaluate(self, state: Any, control: Any) -> HeldOut:
        started, step = time.monotonic(), state.global_step
        held_out = HeldOut(step, self._measure(step))
        against = self.history.compare_with_best(held_out)
        is_best = self.history.observe(held_out)
        self._write(held_out, is_best, against)
        say(self.history.describe(held_out, against))
        if is_best and step > 0:
            self._stage(held_out)
            control.should_save = True
        if self.history.is_over and step < state.max_steps:
            self.stopped = self._why_over()
            control.should_save = control.should_training_stop = True
        self.seconds += (seconds := time.monotonic() - started)
        self.trainer.rloo.recorder.leave_out(seconds)
        self._count += 1
        return held_out

    def _measure(self, step: int) -> Evaluation:
        with keep_random_numbers():  # a reward may draw from them; sampling restores torch's
            label = f"at step {step}"
            return evaluate_with(
                self.run, self.policy, self.prompts, self.judge, self.rewards, label, keeps_samples=False
            )

    def _record(self, held_out: HeldOut) -> dict[str, Any]:
        measure = self.history.measure
        values = zip(("value", "low", "high"), held_out.evaluation.ends(measure), strict=True)
        return {"run": self.run_dir.id, "step": held_out.step, "measure": measure, **dict(values)}

    def _write(self, held_out: HeldOut, is_best: bool, against: Measured | None) -> None:
        best = None if self.history.best is None else self.history.best.step
        row = self._record(held_out) | {"is_best": is_best, "best_step": best}
        row |= {"against_best": against and list(against.ends), "inputs": self.run_dir.inputs}
        rest = held_out.evaluation.to_dict()
        del rest["prompt_digests"]  # the digest of all prompts is enough: they are the same in each row
        row["evaluation"] = {name: kept for name, kept in rest.items() if kept not in (None, [], {})}
        self.rows = sorted([*self.rows, row], key=lambda row: row["step"])
        self.run_dir.replace_jsonl(EVALUATIONS, self.rows)

    def settle(self, step: int) -> None:
        """Make `best/` match the best evaluation, or forget that evaluation; the policy has the weights of `step`,
        which also a run has that was killed between a checkpoint and `best/`."""
        best = self.history.best
        if best is None or best.step == 0:
            return
        if self.weights.staged is None and not self.weights.are_of(best.step):
            if best.step == step:
                self._stage(best)
            else:
                say(
                    f"WARNING: {self.weights.folder} does not hold the weights of step {best.step}, the best "
                    "evaluation so far: the next one is the best"
                )
                self.history.best, self.history.since = None, 0
        self.weights.publish(step)

    def load_best(self) -> int | None:
        """Load the best weights into the policy; returns their step, or None if the policy keeps the last ones."""
        last = self.run_dir.last_checkpoint()
        self.weights.publish(share(last.step if last else 0))
        best = self.history.best
        if best is None:
            return None
        if best.step == 0:
            say(
                f"WARNING: no evaluation was better than the start ({self.history.measure} "
                f"{self.history.best_value:.3f} at step 0): adapter/ holds the weights of the last step"
            )
            return None
        if not self.weights.are_of(best.step):
            say(f"WARNING: {self.weights.folder} is gone: adapter/ holds the weights of the last step")
            return None
        wait_for_all()
        return best.step if load_weights(self.trainer, self.weights.folder) else None

    def _stage(self, held_out: HeldOut) -> None:
        self.weights.stage(held_out.step, self._record(held_out) | {"prompts": len(self.prompts)})

    def _restore(self) -> None:
        """Replay the run's earlier evaluations; `_fresh` is set if their best was measured with other settings."""
        digest, mine, measure = digest_prompts(self.prompts), self.run.eval, self.history.measure
        limit = mine.max_completion_length or self.run.rloo.max_completion_length
        then = now = (measure, digest, mine.num_samples, mine.temperature, limit, self.run_dir.inputs)
        for row, held_out in zip(self.rows, parse_evaluations(self.rows), strict=True):
            past, self.history.measure = held_out.evaluation, row["measure"]
            if self.history.observe(held_out, bool(row.get("is_best"))):
                same = (past.prompts_digest, past.num_samples, past.temperature, past.max_completion_length)
                then = (row["measure"], *same, row.get("inputs", self.run_dir.inputs))
        self.history.measure = then[0]
        self.stopped = self._why_over() if self.history.is_over else None
        self._fresh = None if then == now else HeldOutHistory(measure, mine.patience)

    def _measure_best_again(self) -> None:
        """Measure the best weights with the settings of now, and load those of the current step again."""
        best, current = self.history.best, self.run_dir / UNFINISHED / "current"
        if self._fresh is None or best is None:
            return
        self.history, self._fresh = self._fresh, None
        if best.step == 0 or not self.weights.are_of(best.step):
            return
        save_adapter(self.policy, current)
        wait_for_all()
        if not load_weights(self.trainer, self.weights.folder):
            return
        held_out = HeldOut(best.step, self._measure(best.step))
        if not load_weights(self.trainer, current):
            raise SetupError(f"the weights of this step were saved in {current} and cannot be read: resume again")
        self.history.observe(held_out)
        self.rows = [row for row in self.rows if row["step"] != best.step]
        self._write(held_out, True, None)
        say(f"{self.history.describe(held_out, None)}, measured again with the settings of now")

    def _why_over(self) -> str:
        best, history = self.history.best, self.history
        return (
            f"{history.measure} {history.value:.3f}, no new best in {history.since} evaluations (eval.patience); best "
            f"{history.best_value:.3f} at step {best.step if best else 0}"
        )
