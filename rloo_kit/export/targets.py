"""The four targets. Each fills a staging folder, reads the tensors back, and describes how to load the export."""

import hashlib
import json
import shlex
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ExportError
from rloo_kit.export import gguf, loading
from rloo_kit.export.card import hub_id
from rloo_kit.export.merge import Weight, compare_shards, list_weights
from rloo_kit.models.adapters import follow_umask
from rloo_kit.models.checkpoint import write_shards
from rloo_kit.models.policy import Policy
from rloo_kit.rollout.completions import find_end_ids
from rloo_kit.runs.find import ADAPTER_CONFIG, MODEL_CONFIG
from rloo_kit.system.environment import cache_folder
from rloo_kit.system.processes import say

WEIGHTS = "adapter_model.safetensors"
TARGETS = ("adapter", "merged", "gguf", "vllm")
DTYPES = ("float32", "bfloat16", "float16")
GRADES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
}  # of GGUF types; the other types are grades themselves
OF_THIS_MACHINE = ("is_local", "local_files_only", "name_or_path")  # in a tokenizer's settings


@dataclass(frozen=True)
class Job:
    """What to export.

    Attributes:
        run: as trained. policy: with the trained weights. base: folder or hub id of its base. settings: the base's
            `config.json`, loaded. quantization, dtype: as requested. staged: the empty folder to fill.
        folder: of the published export. repo: on the hub, or None.
    """

    run: RunConfig
    policy: Policy
    base: str
    settings: Any
    quantization: str | None
    dtype: str | None
    staged: Path
    folder: Path
    repo: str | None


@dataclass(frozen=True)
class Written:
    """The contents of the staging folder.

    Attributes:
        kind: dtype or quantisation. grade: the same as a key of `parity.OF_FILE`.
        model: path for the loader. request: further arguments. tensors: result of reading them back.
        snippet: how to load it, in Markdown, for the card. usage: lines to print, with the local path.
    """

    kind: str
    grade: str
    model: Path
    tensors: str
    snippet: str
    usage: list[str] = field(default_factory=list)
    request: dict[str, Any] = field(default_factory=dict)


def name_base(base: str) -> tuple[str, str | None]:
    """(name of the base in a published adapter, folder of the base in the export or None if it is not included).

    A hub id stays, even if the model came from the hub's cache. The embedded model is not on the hub, so its folder
    (2 MB, or 83 MB with Qwen3's vocabulary) is included. Any other folder is named by the last part of its path.
    """
    if (found := hub_id(base)) is not None:
        return found, None
    folder = Path(base)
    return folder.name, folder.name if folder.resolve().parent == cache_folder().resolve() else None


def check_adapter(saved: Path) -> None:
    """Raise ExportError if the run's `adapter/` contains no adapter."""
    if (saved / ADAPTER_CONFIG).is_file():
        return
    if (saved / MODEL_CONFIG).is_file():
        raise ExportError(f"{saved} contains a whole model, not an adapter (model.lora is null): use --to merged")
    raise ExportError(f"{saved} has no {ADAPTER_CONFIG}, so there is no adapter to export")


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def write_adapter(job: Job) -> Written:
    """The adapter for PEFT, with its base under a name that is valid on other machines."""
    saved, policy = job.run.folder / "adapter", job.policy
    for file in sorted(saved.iterdir()):
        if file.is_file() and file.name != "README.md":  # PEFT's empty template; the card replaces it
            shutil.copyfile(file, job.staged / file.name)
    name, included = name_base(job.base)
    settings = json.loads((job.staged / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    settings["base_model_name_or_path"] = name
    (job.staged / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if included is not None:
        shutil.copytree(job.base, job.staged / included)
    follow_umask(job.staged)
    if digest(saved / WEIGHTS) != digest(job.staged / WEIGHTS):
        raise ExportError(f"{job.staged} differs from the trained adapter, so the export is not published")
    _drop_machine(job.staged)
    four_bit = job.run.model.load_in_4bit and getattr(job.settings, "quantization_config", None) is None
    embedding = policy.model.get_base_model().get_input_embeddings().weight
    return Written(
        kind="LoRA",
        grade="float32",
        model=Path(job.base) if included is None else job.staged / included,
        tensors="the adapter's file equals the run's byte for byte",
        snippet=loading.snippet_adapter(name, included, four_bit, str(embedding.dtype).removeprefix("torch.")),
        usage=[f"its base is {name}{', included' if included else ''}"],
        request={"adapter": str(job.staged), "four_bit": four_bit},
    )


def write_merged(job: Job, for_vllm: bool = False) -> Written:
    """Merged weights for transformers and vLLM."""
    weights = list_weights(job.policy.model)
    held = getattr(job.settings, "dtype", None) or torch.float32
    kind = job.dtype or {torch.float32: "float32", torch.float16: "float16"}.get(held, "bfloat16")
    say(f"export: {len(weights)} merged tensors in {kind}")
    _write_config(job, job.staged, kind)
    read = {weight.name: weight.read for weight in weights}
    sizes = {weight.name: weight.shape for weight in weights}
    write_shards(sizes, lambda name: read[name](), job.staged, getattr(torch, kind))
    count = compare_shards(weights, job.staged, getattr(torch, kind))
    line, shown = (loading.serve_line(job.run, job.policy, name) for name in (str(job.folder), job.repo or "."))
    return Written(
        kind=kind,
        grade=kind,
        model=job.staged,
        tensors=f"{count} tensors read back, each bit for bit the merged one in {kind}",
        snippet=loading.snippet_vllm(shown) if for_vllm else loading.PLAIN,
        usage=[line] if for_vllm else [],
    )


def write_vllm(job: Job) -> Written:
    """Merged weights, and the command that serves them with vLLM."""
    return write_merged(job, for_vllm=True)


def write_gguf(job: Job) -> Written:
    """A GGUF file and its Modelfile."""
    weights: list[Weight] = list_weights(job.policy.model)
    wanted, name, usage = job.quantization or "f16", job.run.name, []
    kind = "f16" if wanted == "q4_k_m" else wanted
    file = job.staged / f"{name}-{kind}.gguf"
    say(f"export: {len(weights)} merged tensors as GGUF in {kind}")
    with tempfile.TemporaryDirectory(prefix="rloo-kit-") as folder:
        _write_config(job, Path(folder), "float32")
        gguf.write_gguf(weights, Path(folder), job.policy.tokenizer, job.settings, file, kind, name)
    if wanted == "q4_k_m":
        smaller = job.staged / f"{name}-q4_k_m.gguf"
        command = gguf.quantise(file, smaller)
        if command is None:
            file.unlink()
            file, kind = smaller, wanted
        else:
            usage = [f"NO q4_k_m WAS MADE: llama-cpp-python is not installed. In {job.folder}: {command}"]
    error = gguf.compare_gguf(weights, file, kind)
    modelfile = loading.write_modelfile(job.run, job.policy, file.name, find_end_ids(job.policy))
    if modelfile is None:
        usage.append("no Modelfile for Ollama: the chat template is not ChatML")
    else:
        (job.staged / "Modelfile").write_text(modelfile, encoding="utf-8")
    return Written(
        kind=kind,
        grade=GRADES.get(kind, kind),
        model=file,
        tensors=f"{len(weights)} tensors read back by gguf's reader; they differ from the merged ones by at most "
        f"{error:.2g} of the largest neighbour",
        snippet=loading.snippet_gguf(name.lower(), file.name, modelfile is not None),
        usage=[f"llama-server -m {shlex.quote(str(job.folder / file.name))} --jinja", *usage],
    )


def _write_config(job: Job, folder: Path, dtype: str) -> None:
    """Files next to merged weights: the base's configuration, no longer quantised, and the run's tokenizer."""
    config = type(job.settings).from_dict(job.settings.to_dict())
    config.dtype = getattr(torch, dtype)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(folder)
    try:
        GenerationConfig.from_pretrained(job.base).save_pretrained(folder)
    except OSError:  # the base has none
        job.policy.model.generation_config.save_pretrained(folder)
    job.policy.tokenizer.save_pretrained(folder)
    _drop_machine(folder)


def _drop_machine(folder: Path) -> None:
    """Remove machine-specific entries from the tokenizer's settings."""
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    kept = {name: value for name, value in settings.items() if name not in OF_THIS_MACHINE}
    file.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


WRITERS = {"adapter": write_adapter, "merged": write_merged, "gguf": write_gguf, "vllm": write_vllm}
