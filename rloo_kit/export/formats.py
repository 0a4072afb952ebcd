"""The formats of an export, each of which fills a staging folder, reads the tensors back and describes how to load the
export; and the model card."""

import hashlib
import json
import shlex
import shutil
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import Any

import torch
import yaml
from jinja2 import Environment, StrictUndefined
from transformers import GenerationConfig

from rloo_kit import __version__
from rloo_kit.config.checks import GYM_PREFIX, describe_method, name_method
from rloo_kit.config.model_names import EMBEDDED_PREFIX, SMOLLM2_PREFIX
from rloo_kit.config.run import RunConfig
from rloo_kit.data.chat import thinks
from rloo_kit.errors import ExportError
from rloo_kit.export import gguf
from rloo_kit.export.merge import compare_shards, list_weights
from rloo_kit.gradient.objective import choose_ratio_form
from rloo_kit.models.adapters import follow_umask
from rloo_kit.models.policy import Policy
from rloo_kit.models.source import write_shards
from rloo_kit.results.changes import compare
from rloo_kit.results.evaluation import named_sides
from rloo_kit.results.verdict import load_evaluation
from rloo_kit.runs.files import read_object, write_json, write_text
from rloo_kit.runs.find import ADAPTER_CONFIG, MODEL_CONFIG
from rloo_kit.system.environment import cache_folder
from rloo_kit.system.processes import say

# The program that checks each target; the hub calls llama.cpp's library gguf.
LOADERS = {"adapter": "peft", "merged": "transformers", "vllm": "transformers", "gguf": "llama.cpp"}


NOT_WITH_IMAGES = {  # targets that a vision tower rules out: why, and what to do
    "gguf": "llama.cpp needs the tower as a separate mmproj file, which the kit does not write: use --to merged, then "
    "llama.cpp's convert_hf_to_gguf.py, and once more with --mmproj",
    "vllm": "no such export was ever served with vLLM: use --to merged, whose format vLLM reads",
}


def hub_id(name: str) -> str | None:
    """The hub id of a model or dataset, given as the id or as a folder of the hub's cache; None for any other folder
    or file.

    >>> hub_id("Qwen/Qwen3-4B"), hub_id("/a/models--Qwen--Qwen3-4B/snapshots/0af"), hub_id("/a/b"), hub_id("./a")
    ('Qwen/Qwen3-4B', 'Qwen/Qwen3-4B', None, None)
    """
    cached = [part for part in Path(name).parts if part.startswith("models--")]
    if cached:
        return cached[-1].removeprefix("models--").replace("--", "/")
    made_here = (EMBEDDED_PREFIX, SMOLLM2_PREFIX, GYM_PREFIX)
    is_local = name.startswith((".", "/", "~", *made_here)) or name.count("/") != 1 or Path(name).exists()
    return None if is_local or Path(name).suffix in (".jsonl", ".csv", ".parquet") else name


def public_name(name: str) -> str:
    """A name without local paths: a hub id, `embedded/...`, the last part of a path, or the run for a run's weights.

    >>> public_name("outputs/sums-sft/adapter"), public_name("/models/mine")
    ('sums-sft', 'mine')
    """
    path = Path(name)
    last = path.parent.name if path.name == "adapter" and path.parent.name else path.name
    return hub_id(name) or (name if name.startswith((EMBEDDED_PREFIX, SMOLLM2_PREFIX, GYM_PREFIX)) else last)


def write_card(
    run: RunConfig, target: str, base: str, verdict: list[str], loading: dict[str, Any], sees: bool = False
) -> str:
    """The text of the model card; `loading`: what the snippet of this target names, see `card.md.jinja`; `sees`:
    whether the model reads images."""
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"quote": quote, "g": "{:g}".format, "public": public_name}
    environment.filters["cell"] = lambda value: " ".join(str(value).replace("|", "\\|").split())  # of a table
    template = environment.from_string(Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8"))
    rloo, before, after = run.rloo, load_evaluation(run, "before"), load_evaluation(run, "after")
    sides = named_sides(before, after)
    rows = {name: dict(side.rows(*sides.values())) for name, side in sides.items()}
    old, new = rows.get("before", {}), rows.get("after", {})
    versions = read_object(run.folder / "versions.json").get("versions") or {}
    return template.render(
        front=_front_matter(run, target, base, sees),
        run=run,
        base=base,
        method=describe_method(dict(rloo)),
        ratio=choose_ratio_form(rloo.ratio_form, rloo.kl_form, rloo.token_mean),
        results={name: (old.get(name, ""), new.get(name, "")) for name in old | new},
        change=compare(before, after) if before is not None and after is not None else None,
        status={"step": "?", "state": "unknown", "adapter_step": "?"} | read_object(run.folder / "status.json"),
        trained_with=", ".join(f"{name} {number}" for name, number in versions.items() if number),
        exported_with=f"rloo-kit {__version__}, transformers {version('transformers')}",
        target=target,
        verdict=verdict,
        sees=sees,
        **loading,
    )


def _front_matter(run: RunConfig, target: str, base: str, sees: bool) -> str:
    library = "gguf" if target == "gguf" else LOADERS[target]
    front: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
    if sees:
        front["pipeline_tag"] = "image-text-to-text"
    if hub_id(base):
        relation = {"adapter": "adapter", "gguf": "quantized"}.get(target, "finetune")
        front |= {"base_model": hub_id(base), "base_model_relation": relation}
    if data := list(filter(None, map(hub_id, run.data.all_sources))):
        front["datasets"] = data
    method = (name_method(dict(run.rloo)) or "policy gradient").lower().replace(". ", "-").replace(" ", "-")
    front["tags"] = [method, "reinforcement-learning", "trl", "rloo-kit", *(["lora"] if run.model.lora else [])]
    return yaml.safe_dump(front, sort_keys=False, allow_unicode=True)


WEIGHTS = "adapter_model.safetensors"
DTYPES = ("float32", "bfloat16", "float16")
OF_THIS_MACHINE = ("is_local", "local_files_only", "name_or_path")  # in a tokenizer's settings


@dataclass(frozen=True)
class Job:
    """What to export."""

    target: str  # adapter, merged, gguf or vllm
    run: RunConfig  # as trained
    policy: Policy  # with the trained weights
    base: str  # folder or hub id of its base
    settings: Any  # the base's `config.json`, loaded
    kind: str | None  # the dtype or quantisation that is asked for; None for the default
    staged: Path  # the empty folder to fill
    folder: Path  # of the published export


@dataclass(frozen=True)
class Written:
    """The contents of the staging folder."""

    kind: str  # dtype or quantisation
    model: Path  # for the loader
    tensors: str  # result of reading them back
    loading: dict[str, Any]  # what the card's snippet names
    usage: list[str]  # lines to print, with the local path
    request: dict[str, Any] = field(default_factory=dict)  # further arguments of the loader


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def check_adapter(saved: Path) -> None:
    """Raise ExportError if the run's `adapter/` contains no adapter."""
    if (saved / ADAPTER_CONFIG).is_file():
        return
    whole = " but a whole model (model.lora is null): use --to merged" if (saved / MODEL_CONFIG).is_file() else ""
    raise ExportError(f"{saved} has no adapter to export{whole}")


def export_adapter(job: Job) -> Written:
    """The adapter for PEFT, with its base under a name that is valid on other machines."""
    saved = job.run.folder / "adapter"
    for file in sorted(saved.iterdir()):
        if file.is_file() and file.name != "README.md":  # PEFT's empty template; the card replaces it
            shutil.copyfile(file, job.staged / file.name)
    # The embedded model is not on the hub, so its folder (2 MB) is included.
    name = hub_id(job.base) or Path(job.base).name
    included = hub_id(job.base) is None and Path(job.base).resolve().parent == cache_folder().resolve()
    settings = json.loads((job.staged / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    settings["base_model_name_or_path"] = name
    write_json(job.staged / ADAPTER_CONFIG, settings)
    if included:
        shutil.copytree(job.base, job.staged / name)
    follow_umask(job.staged)
    if digest(saved / WEIGHTS) != digest(job.staged / WEIGHTS):
        raise ExportError(f"{job.staged} differs from the trained adapter, so the export is not published")
    _drop_machine(job.staged)
    four_bit = job.run.model.load_in_4bit and getattr(job.settings, "quantization_config", None) is None
    dtype = str(job.policy.model.get_base_model().get_input_embeddings().weight.dtype).removeprefix("torch.")
    return Written(
        kind="LoRA",
        model=job.staged / name if included else Path(job.base),
        tensors="the adapter's file equals the run's byte for byte",
        loading={"base_name": name, "included": included, "four_bit": four_bit, "dtype": dtype},
        usage=[f"its base is {name}{', included' if included else ''}"],
        request={"adapter": str(job.staged), "four_bit": four_bit},
    )


def export_merged(job: Job) -> Written:
    """Merged weights for transformers and vLLM."""
    weights = list_weights(job.policy.model)
    held = getattr(job.settings, "dtype", None) or torch.float32
    kind = job.kind or {torch.float32: "float32", torch.float16: "float16"}.get(held, "bfloat16")
    say(f"export: {len(weights)} merged tensors in {kind}")
    _write_config(job, job.staged, kind)
    by_name = {weight.name: weight for weight in weights}
    sizes = {name: weight.shape for name, weight in by_name.items()}
    write_shards(sizes, lambda name: by_name[name].read(), job.staged, getattr(torch, kind))
    count = compare_shards(weights, job.staged, getattr(torch, kind))
    return Written(
        kind=kind,
        model=job.staged,
        tensors=f"{count} tensors read back, each bit for bit the merged one in {kind}",
        loading={"serve": serve_line(job.run, job.policy, ".")},
        usage=[serve_line(job.run, job.policy, str(job.folder))] if job.target == "vllm" else [],
    )


def serve_line(run: RunConfig, policy: Policy, folder: str) -> str:
    """The command that serves a merged folder with vLLM.

    vLLM's parser deepseek_r1 takes everything before `</think>` for thinking, for any tokenizer with both tags, so it
    fits a model that always thinks; qwen3 knows the switch of Qwen3's templates.
    """
    parser, switch = "", run.model.enable_thinking
    if policy.family == "hybrid" and switch is not None:  # as trained; a request may still say otherwise
        parser = f""" --default-chat-template-kwargs '{{"enable_thinking": {str(switch).lower()}}}'"""
    if thinks(policy.family, switch):
        is_qwen3 = policy.model.config.model_type.startswith("qwen3")  # with or without a switch, Qwen3.5 included
        known = "qwen3" if is_qwen3 else "deepseek_r1" if policy.family == "thinking" else None
        parser += f" --reasoning-parser {known}" if known else "  # --reasoning-parser NAME: see vLLM's list of models"
    return f"vllm serve {shlex.quote(folder)} --max-model-len {run.model.max_seq_length}{parser}"


def export_gguf(job: Job) -> Written:
    """A GGUF file and its Modelfile."""
    weights, run, kind = list_weights(job.policy.model), job.run, job.kind or "f16"
    file = job.staged / f"{run.name}-{kind}.gguf"
    say(f"export: {len(weights)} merged tensors as GGUF in {kind}")
    with tempfile.TemporaryDirectory(prefix="rloo-kit-") as folder:
        _write_config(job, Path(folder), "float32")
        gguf.write_gguf(weights, Path(folder), job.policy.tokenizer, job.settings, file, kind, run.name)
    gguf.compare_gguf(weights, file, job.settings, kind)
    usage = [f"llama-server -m {shlex.quote(str(job.folder / file.name))} --jinja"]
    modelfile = gguf.write_modelfile(run, job.policy, file.name)
    if modelfile is None:
        usage.append("no Modelfile for Ollama: the chat template is not ChatML")
    else:
        write_text(job.staged / "Modelfile", modelfile)
    return Written(
        kind=kind,
        model=file,
        tensors=f"{len(weights)} tensors read back by gguf's reader, each byte for byte the merged one in {kind}",
        loading={"file": shlex.quote(file.name), "has_modelfile": modelfile is not None},
        usage=usage,
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
    write_json(file, kept)


WRITERS = {"adapter": export_adapter, "merged": export_merged, "gguf": export_gguf, "vllm": export_merged}
