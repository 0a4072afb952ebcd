"""Find a run's model and adapter, check that they match, and set the tokenizer's padding."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from rloo_kit.config.model_names import SMOLLM2
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import BackendError
from rloo_kit.models.adapters import follow_umask
from rloo_kit.runs.files import read_object, write_json
from rloo_kit.runs.find import ADAPTER_CONFIG, MODEL_CONFIG, TRAINED, digest_weights, find_stale
from rloo_kit.runs.folder import BASE, INPUTS
from rloo_kit.seams import part
from rloo_kit.system import environment
from rloo_kit.system.processes import say

PAD_TOKENS = (
    "<|endoftext|>", "<|pad|>", "<pad>", "[PAD]", "<|PAD_TOKEN|>", "<|vision_pad|>", "<|finetune_right_pad_id|>",
)  # fmt: skip
# Model types, by their beginnings, that overflow in float16: Unsloth's list (unsloth_zoo/model_lists.py, 2026.10.9).
FLOAT16_OVERFLOWS = ("gemma3", "gemma4", "glm4_moe", "gpt_oss", "qwen3_5", "qwen3_moe")
SHARD_BYTES = 2**31
_QUANTISED_ENDINGS = ("-unsloth-bnb-4bit", "-bnb-4bit")


@dataclass(frozen=True)
class ModelSource:
    """What to load: a folder or a hub id, and an adapter's folder to continue from (None: a new adapter)."""

    base: str
    adapter: str | None = None

    @property
    def is_folder(self) -> bool:
        """False for a hub id."""
        return Path(self.base).is_dir()


def find_source(run: RunConfig) -> ModelSource:
    """Resolve `model.name` and `model.adapter`; builds a built-in model if it is not cached. Raises BackendError if a
    folder is missing or not a checkpoint, or the adapter belongs to another model."""
    model = run.model
    if model.is_embedded:
        name = model.name.removeprefix("embedded/")
        source = ModelSource(str(part("demo").build(name)), model.adapter)
    elif model.name in SMOLLM2:
        source = ModelSource(str(part("demo").build_smollm2(model.name)), model.adapter)
    else:
        source = _from_name(model.name, model.adapter)
    if source.is_folder and not (Path(source.base) / MODEL_CONFIG).is_file():
        raise BackendError(
            f"{source.base} has no {MODEL_CONFIG}, so it is not a checkpoint; model.name takes a hub id, a folder "
            "written by save_pretrained, or the folder of an adapter"
        )
    if source.adapter is not None:
        if model.lora is None:
            raise BackendError(
                f"model.lora is null (train every parameter), but there is an adapter to continue, {source.adapter}: "
                "set model.lora={} or remove model.adapter"
            )
        check_base(source)
        folder = Path(source.adapter).expanduser()
        if folder.name == "adapter" and (problem := find_stale(folder.parent)):
            say(f"WARNING: {problem}")
    return source


def digest_source(source: ModelSource) -> dict[str, str]:
    """Digests of the weights of a base and of the adapter to continue; without those that cannot be found."""
    models = {BASE: source.base, "weights of the adapter to continue": source.adapter}
    return {name: digest for name, one in models.items() if one and (digest := digest_weights(one))}


def _from_name(name: str, adapter: str | None) -> ModelSource:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise BackendError(f"model.name is {name}, but there is no such folder")
        return ModelSource(name, adapter)
    if not (folder / ADAPTER_CONFIG).is_file() or (folder / MODEL_CONFIG).is_file():
        return ModelSource(str(folder), adapter)
    if adapter is not None and Path(adapter).expanduser().resolve() != folder.resolve():
        raise BackendError(
            f"model.name is the adapter folder {folder}, but model.adapter names another, {adapter}: set model.name to "
            "the base model"
        )
    base = _recorded_base(folder)
    if not base:
        raise BackendError(
            f"{folder / ADAPTER_CONFIG} names no base model: set model.name to it and model.adapter={folder}"
        )
    if Path(base).is_absolute() and not Path(base).is_dir():
        rebuilt = part("demo").rebuild(Path(base).name)
        if rebuilt is not None:
            return ModelSource(str(rebuilt), str(folder))
        raise BackendError(
            f"{folder} is an adapter of {base}, which no longer exists: set model.name to that model's new location "
            f"and model.adapter={folder}"
        )
    return ModelSource(base, str(folder))


def _recorded_base(adapter: Path) -> str:
    """The base model that PEFT recorded for an adapter; "" if it recorded none."""
    if not (config := read_object(adapter / ADAPTER_CONFIG)):
        raise BackendError(f"{adapter} is not an adapter folder (no readable {ADAPTER_CONFIG}); check model.adapter")
    return config.get("base_model_name_or_path") or ""


def check_base(source: ModelSource) -> None:
    """Raise BackendError if the adapter of `source` belongs to another base: by the weights that it was trained on if
    they are recorded, else by the name. 4-bit copies of a base have other weights and share its adapters."""
    adapter = Path(str(source.adapter)).expanduser()
    recorded = _recorded_base(adapter)
    at = adapter / TRAINED if (adapter / TRAINED).is_file() else adapter.parent.parent / INPUTS  # a checkpoint's run
    record, now = read_object(at), digest_weights(source.base)
    trained_on = record.get("base") or record.get(BASE)
    if trained_on and trained_on == now:
        return
    if trained_on and now and Path(recorded).name == Path(source.base).name:
        raise BackendError(
            f"the adapter {adapter} was trained on other weights than those in {source.base}: restore them, or set "
            f"model.name to the model that it was trained on. If they are the same weights in another file format, "
            f"delete {at}"
        )
    if recorded and _short_name(recorded) != _short_name(source.base):
        raise BackendError(
            f"the adapter {adapter} was trained on {recorded}, not on {source.base}: set model.name to that model. If "
            f"it is the same model under another name, change base_model_name_or_path in {adapter / ADAPTER_CONFIG}"
        )


def _short_name(model: str) -> str:
    """The model's name without owner, folder and the endings of its 4-bit copies, which share adapters."""
    name = Path(model.rstrip("/")).name.lower()
    for ending in _QUANTISED_ENDINGS:
        name = name.removesuffix(ending)
    return name


def bind_padding(model: Any, tokenizer: Any) -> None:
    """Set left padding, and a pad token other than the end token if the vocabulary has one, in the tokenizer and the
    model's settings. Padding with the end token would make every padded completion look ended."""
    vocab = tokenizer.get_vocab()
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        rows = model.get_input_embeddings().weight.shape[0]
        free = [token for token in PAD_TOKENS if vocab.get(token, rows) < rows and token != tokenizer.eos_token]
        tokenizer.pad_token = free[0] if free else tokenizer.eos_token
    tokenizer.padding_side = "left"
    for settings in (model.config, getattr(model, "generation_config", None)):
        if settings is not None:
            settings.pad_token_id = tokenizer.pad_token_id


def usable_length(run: RunConfig, config: Any) -> int:
    """The smaller of `model.max_seq_length` and the model's positions, in tokens; BackendError if a prompt and its
    completion may be longer than those."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or run.model.max_seq_length
    wanted = run.data.max_prompt_length + run.rloo.max_completion_length
    if wanted > limit:
        raise BackendError(
            f"{run.model.name} has {limit} positions, but data.max_prompt_length + rloo.max_completion_length is "
            f"{run.data.max_prompt_length} + {run.rloo.max_completion_length} = {wanted}: lower one of them"
        )
    return min(run.model.max_seq_length, limit)


def dtype_name(run: RunConfig) -> str:
    """The base's dtype; `auto` follows the machine, or is float32 if every parameter is trained."""
    automatic = environment.current().dtype_name if run.model.lora is not None else "float32"
    return automatic if run.model.dtype == "auto" else run.model.dtype


def check_config(run: RunConfig, config: Any, backend: str) -> None:
    """Raise BackendError if the run needs more positions than the model has, or would compute in float16 with a model
    whose activations or gradients overflow it, which shows only as steps that are skipped. On a GPU without bfloat16
    Unsloth casts such a model to float16."""
    usable_length(run, config)
    kind, machine = config.get_text_config().model_type, environment.current()
    mixed = environment.mixed_precision(run.model.dtype) == "fp16"
    is_cast = backend == "unsloth" and machine.precision == "fp16"
    if kind.startswith(FLOAT16_OVERFLOWS) and (mixed or is_cast or dtype_name(run) == "float16"):
        raise BackendError(
            f"the run would compute in float16, in which {kind} overflows: set model.dtype=float32"
            + (" model.backend=transformers, because Unsloth casts it on a GPU without bfloat16" if is_cast else "")
        )


def write_shards(
    sizes: Mapping[str, Sequence[int]],
    read: Callable[[str], torch.Tensor],
    folder: Path,
    dtype: torch.dtype,
    largest: int = SHARD_BYTES,
) -> None:
    """Write `model*.safetensors` of at most `largest` bytes each (or one tensor) and their index, one file in memory at
    a time. `sizes`: shapes by name, in transformers. `read`: a tensor by its name, which is cast to `dtype`."""
    empty = {name: torch.empty(tuple(size), dtype=dtype, device="meta") for name, size in sizes.items()}
    pattern = "model{suffix}.safetensors"
    split = split_torch_state_dict_into_shards(empty, filename_pattern=pattern, max_shard_size=largest)
    for file, names in split.filename_to_tensors.items():
        save_file({name: read(name).to(dtype).contiguous() for name in names}, folder / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)
    follow_umask(folder)
