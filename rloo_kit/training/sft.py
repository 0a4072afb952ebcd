"""Supervised training on demonstrations, for a model that solves nothing yet and so gives RLOO no signal.

It uses TRL's SFTTrainer (Unsloth's version if Unsloth loaded the model) with the loss from the kit's scorer: TRL's loss
needs Triton, and the scorer's is the same on every machine.
"""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers.trainer_callback import PrinterCallback
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from rloo_kit.config.run import RunConfig, changed_keys, load_config
from rloo_kit.config.supervised import RewardModelSection, SftSection
from rloo_kit.config.yaml_files import write_value
from rloo_kit.data.load import Data
from rloo_kit.errors import ConfigError, NonFiniteError
from rloo_kit.evals.difficulty import measure_signal
from rloo_kit.evals.evaluate import evaluate
from rloo_kit.gradient.packing import Group
from rloo_kit.gradient.scorer import Scorer
from rloo_kit.loop.callbacks import Interrupts, MetricsWriter
from rloo_kit.loop.options import default_of, precision_flags
from rloo_kit.loop.progress_bar import use_text_progress
from rloo_kit.loop.saving import publish_adapter
from rloo_kit.models.adapters import restore_precision, trainable_tensors
from rloo_kit.models.backends import keep_settings, keep_values
from rloo_kit.models.policy import Policy
from rloo_kit.models.transformers import keep_4bit_weights
from rloo_kit.results.changes import compare
from rloo_kit.results.evaluation import Evaluation
from rloo_kit.rewarding.worker import end_workers
from rloo_kit.runs.find import weights_of
from rloo_kit.runs.folder import RunDir, open_folder
from rloo_kit.system.console import format_seconds
from rloo_kit.system.processes import count_processes, say
from rloo_kit.tasks.worked import Demonstrations, load_worked
from rloo_kit.think_tags import THINK_END, THINK_START
from rloo_kit.training.live import ProgressLine

WEIGHTS = ("model.adapter", "model.name")  # an adapter still needs the name of its base
EQUAL = 0.9  # cosine of two rows: in SmolLM2 0.94 or more of unused tokens, below 0.8 of 99.99 % of the others
WARMUP_SHARE = 0.05  # of the run; without it the first steps of Adam have full size
# TRL's own class, below the one that Unsloth generates (and may call SFTConfig too).
_STOCK = next(c for c in reversed(trl.SFTConfig.__mro__) if c.__name__ == "SFTConfig")


@dataclass
class SftResult:
    """What `fine_tune` did.

    Attributes:
        folder: of the run, outputs/NAME-sft. adapter_folder: the adapter in it, or the whole trained model.
        steps: optimizer steps. metrics: the rows of `metrics.jsonl`. seconds: of training. stopped: "interrupted", or
            None.
    """

    folder: Path
    adapter_folder: Path
    steps: int
    metrics: list[dict[str, Any]]
    seconds: float
    stopped: str | None


def fine_tune(run: RunConfig, policy: Policy, data: Data, rows: Any = None, *, overwrite: bool = False) -> SftResult:
    """Train `policy` in place on the demonstrations of `run.sft`; everything is written to outputs/NAME-sft.

    Args:
        run: reads `sft`, `data`, `model`, `run`, and the optimizer in `rloo`.
        policy: from `load_policy`. data: from `load_data`; rows with one of its held-out prompts are left out.
        rows: demonstrations in Python instead of `sft.source`, with the column names of `sft`.
        overwrite: delete what an earlier supervised training left in that folder, once nothing is left to refuse.

    Returns:
        `SftResult`. Ctrl-C does not raise: the current weights are saved, and `stopped` is "interrupted".

    Raises:
        DataError: the demonstrations cannot be used. ConfigError: several processes, or this policy is trained already.
        RunExistsError: there is an earlier training, and `overwrite` is not set.
        NonFiniteError: the loss became NaN or infinite; nothing is saved.
    """
    worked = check_demonstrations(run, policy, data, rows)
    with open_folder(run, overwrite) as run_dir:
        return _train(run, policy, worked, run_dir)


def check_demonstrations(run: RunConfig, policy: Policy, data: Data, rows: Any = None) -> Demonstrations:
    """The demonstrations; raises whatever `fine_tune` raises before it trains."""
    policy.refuse_trained("this training would not begin at the start", "RLOO", "SFT")
    if count_processes() > 1:
        raise ConfigError(
            f"supervised training runs in one process, and there are {count_processes()}: start it without a launcher; "
            "RLOO afterwards may use all of them"
        )
    worked = load_worked(run, policy.tokenizer, data.test["prompt"], rows)
    for note in worked.notes:
        say(f"sft: {note}")
    if has_equal_tags(policy):
        say(
            f"WARNING: sft: the embedding's rows of {THINK_START} and {THINK_END} are equal, that is untrained, and an "
            "adapter does not train them: set them from trained tokens first, or set model.lora=null"
        )
    return worked


def train_and_report(run: RunConfig, policy: Policy, data: Data, worked: Demonstrations, run_dir: RunDir) -> SftResult:
    """`fine_tune` with held-out accuracy before and after (before.json, after.json), and the signal that RLOO would
    have."""
    before = None
    if run.run.evaluate:
        before = evaluate(run, policy, data.test, label="before")
        run_dir.write_json("before.json", before.to_dict())
        say(before)
    result = _train(run, policy, worked, run_dir)
    if result.stopped:
        return result
    if before is not None:
        after = evaluate(run, policy, data.test, label="after", base=before)
        run_dir.write_json("after.json", after.to_dict())
        say(after)
        say(f"after supervised training: {compare(before, after)}")
    signal = measure_signal(run, policy, data)
    say(signal or "signal: no training prompt has an answer to judge by; rloo-kit preflight measures the rewards")
    end_workers()
    say(f"{result.steps} steps, {result.seconds:.0f} s of supervised training. Everything is in {run_dir.folder}")
    return result


def next_command(run: RunConfig, overrides: Sequence[str], result: SftResult) -> str:
    """The command that goes on with RLOO from the weights of `result`, with the run's file and its overrides. A default
    that follows the model's name keeps its value if the name is now a folder's."""
    adapter, source = result.adapter_folder, run.source
    if adapter.resolve().is_relative_to(Path.cwd()):
        adapter = adapter.resolve().relative_to(Path.cwd())
    key = f"model.{weights_of(adapter)[0]}"
    replaced = WEIGHTS[: WEIGHTS.index(key) + 1]
    prefixes = (*(f"{name}=" for name in (*replaced, "run.name")), "sft.")
    kept = [word for word in overrides if not word.startswith(prefixes)]
    if any(word.startswith("run.name=") for word in overrides):
        kept.append(f"run.name={run.name}")
    with_weights = [*kept, f"{key}={write_value(str(adapter))}"]
    assert source is not None
    if key == "model.name":
        then = load_config(source, *with_weights)
        changed = changed_keys(then.model_dump(mode="json"), run.model_dump(mode="json"))
        with_weights += [
            f"{name}={write_value(value)}"
            for name, (_, value) in changed.items()
            if not name.startswith(("model.name", "model.adapter", "sft."))
        ]
    return shlex.join(["rloo-kit", "train", str(source), *with_weights])


def has_equal_tags(policy: Policy) -> bool:
    """Whether the thinking tags have nearly equal rows, as added or unused tokens have, in a frozen embedding."""
    table, tags = policy.model.get_input_embeddings().weight, [policy.tags.start_id, policy.tags.end_id]
    is_fixed = None not in tags and not table.requires_grad
    return is_fixed and bool(torch.cosine_similarity(*table[tags].float(), dim=0) > EQUAL)


def _train(run: RunConfig, policy: Policy, worked: Demonstrations, run_dir: RunDir) -> SftResult:
    was_training = policy.model.training
    writer, interrupts = MetricsWriter(run_dir), Interrupts("what is trained so far")
    unused = run_dir / "checkpoints"
    trainer = build_trainer(run, policy, worked, unused)
    before = Evaluation.read(run_dir / "before.json")
    after_s = 0.0 if before is None else before.seconds  # the one after takes about as long
    for callback in (writer, _SftProgressLine(trainer, writer, run.run.progress_every_s, after_s), interrupts):
        trainer.add_callback(callback)
    say(f"sft: {worked}; {trainer.scorer.reason}")
    try:
        with interrupts:
            trainer.train()
        state = trainer.state
        stopped = "interrupted" if interrupts.requested and state.global_step < state.max_steps else None
        target = publish_adapter(policy, run_dir)
    finally:
        policy.trained["SFT"] = trainer.state.global_step + (not interrupts.between_steps)
        with suppress(OSError):
            unused.rmdir()
        if not was_training:
            policy.model.eval()
    steps = {"step": state.global_step, "max_steps": state.max_steps, "adapter_step": state.global_step}
    seconds = round(writer.seconds, 3)
    run_dir.set_status(stopped or "finished", seconds=seconds, **steps)
    if stopped:
        say(f"interrupted at step {state.global_step} of {state.max_steps}; {target} holds what is trained so far")
    return SftResult(run_dir.folder, target, state.global_step, writer.rows, seconds, stopped)


def build_trainer(run: RunConfig, policy: Policy, worked: Demonstrations, folder: Path) -> "SftTrainer":
    """The trainer of `policy` on `worked`; `folder` is TRL's output folder, which stays empty."""
    rows = [
        {"input_ids": row.prompt_ids + row.completion_ids, "labels": [-100] * len(row.prompt_ids) + row.labels}
        for row in worked.examples
    ]
    # TRL's defaults, even if Unsloth generated the class
    values = {field.name: default_of(field) for field in fields(_STOCK) if field.init} | _arguments(run, policy, folder)
    args = trl.SFTConfig(**values)
    keep_values(args, _STOCK, values)
    arguments = {"model": policy.model, "args": args, "processing_class": policy.tokenizer}
    masters = trainable_tensors(policy.model)
    with keep_settings(arguments):
        trainer = SftTrainer(
            **arguments,
            data_collator=DataCollatorForLanguageModeling(policy.tokenizer.pad_token_id),
            train_dataset=Dataset.from_list(rows),
        )
    restore_precision(trainer.model, masters)
    keep_4bit_weights(trainer.model)
    trainer.scorer = Scorer(trainer.model, 1.0, policy.tokenizer.pad_token_id)
    trainer.remove_callback(PrinterCallback)
    use_text_progress(trainer)
    return trainer


def plain_arguments(run: RunConfig, section: SftSection | RewardModelSection, on_cpu: bool) -> dict[str, Any]:
    """What the trainings before RLOO pass to TRL's configs alike."""
    return {
        "max_steps": section.max_steps or -1,
        "num_train_epochs": section.num_train_epochs,
        "per_device_train_batch_size": section.per_device_train_batch_size,
        "gradient_accumulation_steps": section.gradient_accumulation_steps,
        "seed": run.run.seed,
        "max_length": None,  # longer rows are left out: a truncated one would teach the model not to stop
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": on_cpu,
        "dataloader_pin_memory": not on_cpu,
        **precision_flags(run),
    }


def _arguments(run: RunConfig, policy: Policy, folder: Path) -> dict[str, Any]:
    return plain_arguments(run, run.sft, policy.model.device.type == "cpu") | {
        "output_dir": str(folder),
        "learning_rate": run.sft.learning_rate,
        "lr_scheduler_type": "linear",
        "warmup_steps": WARMUP_SHARE,
        "max_grad_norm": run.rloo.max_grad_norm,
        "optim": run.rloo.optim,
        "dataset_kwargs": {"skip_prepare_dataset": True},  # they are tokens already
        **policy.config_arguments,
    }


class SftTrainer(trl.SFTTrainer):
    """TRL's trainer, with the mean cross-entropy of the completion tokens from the kit's scorer: rows are end to end,
    and no tokens x vocabulary tensor is built. `tokens`: of the completions trained on so far."""

    scorer: Scorer
    tokens: int = 0

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The sum over the micro-step's completion tokens, divided by their number in the optimizer step, if it is
        known."""
        groups, kept = list[Group](), list[torch.Tensor]()
        for ids, labels, mask in zip(inputs["input_ids"], inputs["labels"], inputs["attention_mask"], strict=True):
            is_trained = labels[: int(mask.sum())] != -100  # not the prompt, nor tools' results
            start = int(is_trained.int().argmax())
            groups.append(Group(ids[:start], [ids[start : len(is_trained)]]))
            kept.append(is_trained[start:])
        scores, trained = self.scorer.score(model, groups), torch.cat(kept)
        count = int(trained.sum())
        self.tokens += count
        assert scores.entropies is not None
        self._metrics["train"]["entropy"].append(scores.entropies[trained].mean().item())
        loss = -scores.logps[trained].sum() / (count if num_items_in_batch is None else num_items_in_batch)
        if not torch.isfinite(loss):
            raise NonFiniteError(
                f"the loss of supervised training is {loss.item()} at step {self.state.global_step + 1}: lower "
                "sft.learning_rate, or set model.dtype=float32"
            )
        return (loss, scores) if return_outputs else loss

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save nothing here: the weights are saved once, at the end."""


class _SftProgressLine(ProgressLine):
    def __init__(self, trainer: SftTrainer, writer: MetricsWriter, every_s: float, after_s: float):
        super().__init__(writer, every_s, after_s)
        self.trainer, self._tokens = trainer, 0

    def _line(self, state: Any, left_s: float, since_s: float) -> str:
        speed = (self.trainer.tokens - self._tokens) / max(since_s, 1e-9)
        self._tokens = self.trainer.tokens
        loss, eta = self._logs["loss"], format_seconds(left_s)
        return f"sft step {state.global_step}/{state.max_steps} | loss {loss:.3f} | {speed:.0f} tok/s | eta {eta}"
