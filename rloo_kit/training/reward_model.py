"""A reward model from preferences: TRL's RewardTrainer on pairs of answers, then its ranking of held-out pairs.

It is trained and measured on the text that the reward `reward_model` reads in a run (`TextForm`).
"""

import random
import shutil
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import trl
from datasets import Dataset
from rich.table import Table
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig
from transformers.trainer_callback import PrinterCallback
from trl.trainer.reward_trainer import suppress_seqcls_warning

from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import FULL_LEARNING_RATE, LORA_LEARNING_RATE, LoraSection
from rloo_kit.config.supervised import RewardModelSection
from rloo_kit.config.yaml_files import write_value
from rloo_kit.data.chat import family_of, parse_conversation, prompt_identity
from rloo_kit.data.load import SEED, draw_subset, read_part, render_row
from rloo_kit.data.sources import Columns, Part
from rloo_kit.errors import BackendError, ConfigError, DataError, NonFiniteError, excerpt
from rloo_kit.graders.scoring_model import TEXT_ENDS, RewardModel, TextForm
from rloo_kit.loop.callbacks import Interrupts, MetricsWriter
from rloo_kit.loop.progress_bar import use_text_progress
from rloo_kit.models.adapters import choose_targets, follow_umask, restore_precision, trainable_tensors
from rloo_kit.models.source import ModelSource, bind_padding, find_source
from rloo_kit.models.transformers import keep_4bit_weights
from rloo_kit.results.intervals import Measured, mean_of_prompts, paired_difference
from rloo_kit.runs.checkpoints import UNFINISHED, publish
from rloo_kit.runs.files import saving, write_json
from rloo_kit.runs.folder import RunDir, check_folder, open_folder
from rloo_kit.system import environment
from rloo_kit.system.console import fill_text, render_text
from rloo_kit.system.processes import count_processes, say
from rloo_kit.think_tags import THINK_END
from rloo_kit.training.live import ProgressLine
from rloo_kit.training.sft import plain_arguments

FOLDER = "reward_model"  # of the checkpoint, in the run's; also the method in its status
ALONE, SHORTER = "accuracy of length alone", "accuracy, chosen is shorter"


@dataclass(frozen=True)
class Pair:
    """A rendered prompt, its better and its worse answer, and the token ids that the model reads of each."""

    prompt: str
    answers: tuple[str, str]
    ids: tuple[list[int], list[int]]


@dataclass
class RewardModelResult:
    """What `train_reward_model` did.

    Attributes:
        folder: the checkpoint. steps: optimizer steps. pairs: trained on. stopped: "interrupted", or None.
        measures: of the held-out pairs, by name. warnings: what speaks against using it.
    """

    folder: Path
    steps: int
    pairs: int
    stopped: str | None
    measures: dict[str, Measured]
    warnings: list[str]

    def __str__(self) -> str:
        table = Table("measure", title="Reward model on held-out pairs", title_justify="left")
        table.add_column("value [95 % interval]", justify="right")
        table.add_column("prompts", justify="right")
        for name, measured in self.measures.items():
            table.add_row(name, str(measured), str(measured.count))
        warnings = [fill_text(f"WARNING: {warning}") for warning in self.warnings]
        path = self.folder.relative_to(Path.cwd()) if self.folder.is_relative_to(Path.cwd()) else self.folder
        entry = f"- {{name: reward_model, params: {{model: {write_value(str(path))}}}}}"
        return "\n".join([render_text(table), *warnings, f"to use it, in a config below rewards:\n  {entry}"])


def train_reward_model(run: RunConfig, *, overwrite: bool = False) -> RewardModelResult:
    """Train a reward model on the pairs of `run.reward_model`, and measure it on those held out.

    Everything is written to outputs/NAME-reward-model. Ctrl-C saves and measures what is trained so far. `overwrite`
    deletes what an earlier training left in that folder, once nothing is left to refuse.

    Raises:
        ConfigError: no section, several processes, or an adapter to start from. DataError: the pairs cannot be used.
        RunExistsError: there is an earlier training, and `overwrite` is not set.
        NonFiniteError: the loss became NaN or infinite; nothing is saved.
    """
    named, run = run, run.model_copy(deep=True)
    if (section := run.reward_model) is None:
        wanted = "name the pairs, in the columns prompt, chosen and rejected: reward_model.source=preferences.jsonl"
        raise ConfigError(f"the run has no section reward_model; {wanted}")
    if (count := count_processes()) > 1:
        raise ConfigError(f"a reward model is trained in one process, and there are {count}: start it without launcher")
    check_folder(run, overwrite, FOLDER)
    if section.model is not None:
        replaced = {"name": section.model, "adapter": None, "family": "auto", "enable_thinking": None}
        run.model = run.model.model_copy(update=replaced)
    source = find_source(run)
    if source.adapter is not None:
        raise ConfigError(
            f"a reward model starts from whole weights, and {source.adapter} is an adapter: merge it with "
            "rloo-kit export RUN, and set reward_model.model to the folder"
        )
    tokenizer = _load(AutoTokenizer, source.base)
    pairs, held_out = load_pairs(run, section, tokenizer)
    say(f"reward model: {len(pairs)} pairs to train on, {len(held_out)} held out")
    model = load_classifier(run, source, section.lora)
    with open_folder(named, overwrite, FOLDER) as run_dir:
        result = _train(run, section, model, tokenizer, pairs, run_dir)
        reward = RewardModel(str(result.folder), batch_size=2 * section.per_device_train_batch_size)
        measure_pairs(held_out, reward, result)
        write_json(run_dir / "result.json", asdict(result) | {"folder": FOLDER})
        run_dir.set_status(result.stopped or "finished", step=result.steps)
    return result


def load_pairs(run: RunConfig, section: RewardModelSection, tokenizer: Any) -> tuple[list[Pair], list[Pair]]:
    """The pairs to train on, and those held out, which share no prompt with them; prints what was left out."""
    columns = Columns(section.prompt_column or run.data.prompt_column, section.chosen_column, prefix="reward_model.")
    keys: dict[str, Any] = {"key": "reward_model.source", "split_key": "reward_model.split"}
    source = read_part(run, Part(section.source, columns, section.subset, section.split, **keys), thinking=True)
    source = draw_subset(source, section.num_pairs)
    there = [columns.prompt, *([columns.answer] if source.answers else []), *source.other_names]
    for key, name in (("chosen_column", section.chosen_column), ("rejected_column", section.rejected_column)):
        if name not in there:
            problem = f"{source.name} has no column '{name}'; columns found: {', '.join(there)}"
            raise DataError(f"{problem}. Name the right one in reward_model.{key}")
    (family, thinking), form = family_of(run, tokenizer), TextForm(tokenizer, ends=True)
    limit, left_out = run.model.max_seq_length, Counter[str]()
    groups = defaultdict[str, list[Pair]](list)
    for row, both in enumerate(zip(source.answers or [], source.column(section.rejected_column), strict=True)):
        read = [_read_answer(value, source.where(row), tokenizer.eos_token, thinking) for value in both]
        (asked, chosen), (other, rejected) = read
        if asked or columns.prompt == columns.answer:
            source.prompts[row] = asked
        talk = source.prompts[row] if isinstance(source.prompts[row], list) else []
        if any(isinstance(message, dict) and isinstance(message.get("content"), list) for message in talk):
            raise DataError(
                f"{source.where(row)}: the prompt has an image, and a reward model reads text only: remove it"
            )
        prompt = render_row(run, tokenizer, family, source, row, key="reward_model.prompt_column")
        pair = Pair(prompt, (chosen, rejected), (form.encode(prompt, chosen), form.encode(prompt, rejected)))
        reasons = {
            "whose answers follow different prompts": asked != other,
            "with an empty answer": not (chosen and rejected),
            "with equal answers": chosen == rejected,
            f"of more than {limit} tokens (model.max_seq_length)": max(map(len, pair.ids)) > limit,
        }
        if reason := next((reason for reason, applies in reasons.items() if applies), None):
            left_out[reason] += 1
        else:
            groups[prompt_identity(prompt)].append(pair)
    notes = [f"{count} of {len(source)} pairs, {why}, are left out" for why, count in left_out.most_common()]
    size, prompts = section.test_size, list(groups)
    random.Random(f"pairs-{SEED}").shuffle(prompts)
    wanted = int(size) if size >= 1 else max(round(size * len(prompts)), 1)
    if wanted >= len(prompts):
        raise DataError(
            f"{source.name} has usable pairs of {len(prompts)} different prompts, and reward_model.test_size={size} "
            f"holds out {wanted} of them: none is left to train on. {'; '.join(notes) or 'Add pairs of other prompts'}"
        )
    for note in notes:
        say(f"reward model: {note}")
    sides = prompts[wanted:], prompts[:wanted]
    trained, held_out = ([pair for prompt in side for pair in groups[prompt]] for side in sides)
    return trained, held_out


def _read_answer(value: Any, where: str, end: str | None, thinking: bool) -> tuple[Any, str]:
    """The messages before an answer (None without any), and the answer without thinking."""
    before, value = None, parse_conversation(value)
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        if value[-1].get("role") != "assistant":
            raise DataError(f"{where}: a conversation ends with the assistant's answer, found {excerpt(value[-1])}")
        # without the keys that Arrow adds
        filled = [{key: item for key, item in message.items() if item is not None} for message in value]
        before, value = filled[:-1] or None, filled[-1].get("content")
    if not isinstance(value, str | None):
        raise DataError(f"{where}: an answer is {excerpt(value)}; it is text, or messages that end with it")
    value = (value or "").strip().removesuffix(end or "")
    return before, (value.rpartition(THINK_END)[2] if thinking else value).strip()


def load_classifier(run: RunConfig, source: ModelSource, lora: LoraSection | None) -> Any:
    """The model to start from, with one output instead of the language model's head, and with an adapter for `lora`."""
    automatic = environment.current().dtype_name if lora else "float32"
    dtype = getattr(torch, automatic if run.model.dtype == "auto" else run.model.dtype)
    options: dict[str, Any] = {"dtype": dtype, "device_map": {"": "cuda" if torch.cuda.is_available() else "cpu"}}
    if run.model.load_in_4bit:
        if lora is None:
            problem = "model.load_in_4bit is true and reward_model.lora is null, but 4-bit weights cannot be trained"
            raise ConfigError(f"{problem}: set reward_model.lora={{}} or model.load_in_4bit=false")
        nf4: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        nf4 |= {"load_in_4bit": True, "bnb_4bit_compute_dtype": dtype, "llm_int8_skip_modules": ["score"]}
        options["quantization_config"] = BitsAndBytesConfig(**nf4)
    torch.manual_seed(run.run.seed)
    with suppress_seqcls_warning():
        model = _load(AutoModelForSequenceClassification, source.base, num_labels=1, **options)
    keep_4bit_weights(model)
    if lora is None:
        return model
    targets, scale = choose_targets(model, lora.target_modules), {"r": lora.r, "lora_alpha": lora.alpha}
    model = peft.get_peft_model(model, peft.LoraConfig("SEQ_CLS", target_modules=targets, **scale))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # the head too: small updates are lost in 16 bits
    return model


def _load(kind: Any, base: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(base, **options)
    except (OSError, ValueError) as error:
        problem = f"{base} cannot be loaded by {kind.__name__}: {error}"
        raise BackendError(f"{problem}; set reward_model.model (or model.name) to another model") from error


def merge_adapter(model: Any) -> Any:
    """The classifier with its adapter merged, in float32 on the CPU: in 16 or 4 bits the sum would be rounded twice."""
    if not hasattr(model, "peft_config"):
        return model
    if getattr(model, "is_loaded_in_4bit", False):
        state, adapter = peft.get_peft_model_state_dict(model), model.peft_config["default"]
        model = peft.get_peft_model(model.unload().dequantize(torch.float32), adapter)
        peft.set_peft_model_state_dict(model, state)
    return model.cpu().float().merge_and_unload()


def _train(
    run: RunConfig, section: RewardModelSection, model: Any, tokenizer: Any, pairs: list[Pair], run_dir: RunDir
) -> RewardModelResult:
    dtype, masters = model.dtype, trainable_tensors(model)
    bind_padding(model, tokenizer)
    args = trl.RewardConfig(
        output_dir=str(run_dir / UNFINISHED),  # stays empty
        learning_rate=section.learning_rate or (LORA_LEARNING_RATE if section.lora else FULL_LEARNING_RATE),
        gradient_checkpointing=bool(run.model.gradient_checkpointing),
        **plain_arguments(run, section, model.device.type == "cpu"),
    )
    rows = Dataset.from_list([dict(zip(("chosen_ids", "rejected_ids"), pair.ids, strict=True)) for pair in pairs])
    trainer = RewardTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
    restore_precision(trainer.model, masters)
    trainer.remove_callback(PrinterCallback)
    use_text_progress(trainer)
    writer, interrupts = MetricsWriter(run_dir), Interrupts("what is trained so far")
    for callback in (writer, _ProgressLine(writer, run.run.progress_every_s), interrupts):
        trainer.add_callback(callback)
    shutil.rmtree(run_dir / FOLDER, ignore_errors=True)
    (run_dir / "result.json").unlink(missing_ok=True)
    with interrupts:
        trainer.train()
    state, target, staged = trainer.state, run_dir / FOLDER, run_dir / UNFINISHED / FOLDER
    stopped = "interrupted" if interrupts.requested and state.global_step < state.max_steps else None
    with saving(target):
        model = merge_adapter(model).to(dtype)
        model.config.update({TEXT_ENDS: True})
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        follow_umask(staged)
        publish(staged, target)
    return RewardModelResult(target, state.global_step, len(pairs), stopped, {}, [])


class RewardTrainer(trl.RewardTrainer):
    """TRL's trainer, which stops at a loss that is not finite."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = 0) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if not torch.isfinite(loss):
            problem = f"the loss of the reward model is {loss.item()} at step {self.state.global_step + 1}"
            raise NonFiniteError(f"{problem}: lower reward_model.learning_rate, or set model.dtype=float32")
        return (loss, outputs) if return_outputs else loss

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save nothing here: the weights are saved once, at the end."""


class _ProgressLine(ProgressLine):
    def _line(self, state: Any, left_s: float, since_s: float) -> str:
        metrics = ", ".join(f"{name} {self._logs[name]:.3f}" for name in ("loss", "accuracy", "margin"))
        return f"{super()._line(state, left_s, since_s)} | {metrics}"


def measure_pairs(pairs: list[Pair], reward: RewardModel, result: RewardModelResult) -> None:
    """Add the measures and warnings of `reward` on held-out pairs to `result`. Lengths are in tokens, a tie counts as
    half right. "Length alone" is the better of ranking by the longer answer and by the shorter one."""
    prompts = [pair.prompt for pair in pairs]
    scores = reward(prompts * 2, [pair.answers[side] for side in (0, 1) for pair in pairs])
    halves = zip(scores[: len(pairs)], scores[len(pairs) :], strict=True)
    margins = [(better or 0.0) - (worse or 0.0) for better, worse in halves]
    right = [(value > 0) + (value == 0) / 2 for value in margins]
    longer = [(more > 0) + (more == 0) / 2 for more in (len(pair.ids[0]) - len(pair.ids[1]) for pair in pairs)]
    sign = 1 if sum(longer) >= len(pairs) / 2 else -1
    uneven = [i for i, value in enumerate(longer) if value != 0.5]
    rows: dict[str, dict[int, float]] = {
        "accuracy": dict(enumerate(right)),
        ALONE: {i: 0.5 + sign * (value - 0.5) for i, value in enumerate(longer)},
        "accuracy, chosen is longer": {i: right[i] for i in uneven if longer[i]},
        SHORTER: {i: right[i] for i in uneven if not longer[i]},
        "rank correlation of score and length": {i: (2 * right[i] - 1) * (2 * longer[i] - 1) for i in uneven},
        "margin, chosen - rejected": dict(enumerate(margins)),
    }
    means = dict[str, list[float]]()
    for name, values in rows.items():
        groups = defaultdict[str, list[float]](list)
        for index, value in values.items():
            groups[prompt_identity(prompts[index])].append(value)
        means[name] = [sum(group) / len(group) for group in groups.values()]
    result.measures = {name: mean_of_prompts(values, 1) for name, values in means.items() if values}
    gain, shorter = paired_difference(means[ALONE], means["accuracy"]), result.measures.get(SHORTER)
    if (gain.low or 0.0) <= 0:
        problem = f"it is not shown to rank better than length alone (accuracy {gain:+.3f})"
        result.warnings.append(f"{problem}: train longer (reward_model.num_train_epochs), or add pairs")
    if shorter is not None and (shorter.high or 1.0) < 0.5:
        problem = f"where the better answer is the shorter one, it is right in {shorter} of the pairs"
        result.warnings.append(f"{problem}: RLOO would learn length from it; add such pairs")
