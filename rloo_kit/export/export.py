"""A finished run for other programs: written into a staging folder, checked against the policy, then published."""

import gc
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from rloo_kit.config.run import RunConfig
from rloo_kit.data.load import load_data
from rloo_kit.errors import ConfigError, ExportError, RunExistsError
from rloo_kit.export import adapter, gguf, loading
from rloo_kit.export.card import public_name, write_card
from rloo_kit.export.hub import push_folder
from rloo_kit.export.merge import Weight, compare_shards, list_weights, write_shards
from rloo_kit.export.ollama import write_modelfile
from rloo_kit.export.parity import Check, Reference, check_parity, find_missing, measure_reference
from rloo_kit.models.checkpoint import find_source
from rloo_kit.models.policy import Policy, load_policy
from rloo_kit.models.trained import trained_run
from rloo_kit.plan.shapes import find_shape
from rloo_kit.rollout.completions import find_end_ids
from rloo_kit.runs.checkpoints import publish
from rloo_kit.runs.files import now, read_object, saving, write_json
from rloo_kit.runs.find import find_run
from rloo_kit.system.environment import current
from rloo_kit.system.gpu import GIB
from rloo_kit.system.memory import available_gib
from rloo_kit.system.processes import say

TARGETS = ("adapter", "merged", "gguf", "vllm")
DTYPES = ("float32", "bfloat16", "float16")
LOADERS = {"adapter": "peft", "merged": "transformers", "vllm": "vllm", "gguf": "llama.cpp"}
GRADES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}  # of GGUF's types; the others are grades themselves
CERTIFICATE = "certificate.json"


@dataclass(frozen=True)
class Export:
    """A published export.

    Attributes:
        folder: where it lies. target: adapter, merged, gguf or vllm. kind: dtype or quantisation of what was made.
        certificate: as in `certificate.json`. verdict: the same in lines. usage: how to load or serve it.
        address: on the hub, with `push`.
    """

    folder: Path
    target: str
    kind: str
    certificate: dict[str, Any]
    verdict: list[str]
    usage: list[str]
    address: str | None = None

    def __str__(self) -> str:
        lines = [f"exported: {self.folder} ({self.target}, {self.kind})", *self.verdict, *self.usage]
        return "\n".join([*lines, *([f"pushed: {self.address}"] if self.address else [])])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"folder": str(self.folder), "target": self.target, "kind": self.kind, "address": self.address} | {
            "certificate": self.certificate
        }


@dataclass
class _Job:
    """One export on its way."""

    trained: RunConfig  # what `load_policy` loads
    policy: Policy | None
    base: str  # folder or hub id
    target: str
    kind: str
    staged: Path
    grade: str = ""
    model: Path | None = None  # what the loader is given
    tensors: str = ""  # what was found when they were read back
    usage: list[str] = field(default_factory=list)
    snippet: str = ""
    request: dict[str, Any] = field(default_factory=dict)


def export_model(
    source: str | Path,
    to: str,
    *overrides: str,
    quantization: str | None = None,
    dtype: str | None = None,
    output: str | Path | None = None,
    num_prompts: int = 20,
    push: str | None = None,
    overwrite: bool = False,
) -> Export:
    """Export what a run has trained, and check the export against it.

    Args:
        source: the run's folder, or its file. to: adapter, merged, gguf or vllm. overrides: KEY=VALUE of the run, as in
            `load_trained`.
        quantization: of a GGUF: f32, f16 (unless given), bf16, q8_0, q4_k_m. dtype: of merged weights: float32,
            bfloat16, float16; None takes float32 where the base is in float32, else bfloat16.
        output: the folder to make; None: RUN/export/TARGET. num_prompts: held-out prompts of the comparison.
        push: repository on the hub, OWNER/NAME, to upload the folder to. overwrite: replace a folder that is there.

    Returns:
        `Export`; print it.

    Raises:
        RunNotFoundError: no such run, or nothing trained there. RunExistsError: the folder is there.
        ConfigError: arguments that no export has. ExportError: the export cannot be made, does not fit into memory, or
        is not what was trained; then nothing is published.
    """
    _check_arguments(to, quantization, dtype, num_prompts)
    run, trained = find_run(source), trained_run(source, *overrides)
    folder = Path(output) if output is not None else run.folder / "export" / to
    if folder.exists() and not overwrite:
        raise RunExistsError(f"{folder} is there already: --overwrite replaces it, --output names another folder")
    base = find_source(trained).base
    settings = AutoConfig.from_pretrained(base)
    if to == "gguf":
        gguf.check_gguf(settings)
    if to == "adapter" and run.model.lora is None:
        adapter.write_adapter(run.folder / "adapter", base, folder)  # refuses, with the reason
    _check_memory(trained)
    policy = load_policy(trained, check=False)
    reference = _ask_policy(trained, policy, num_prompts)
    folder.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with saving(folder):
            job = _Job(trained, policy, base, to, "", stage / folder.name)
            job.staged.mkdir()
            _write(job, run, settings, quantization, dtype, folder.name if push is None else push)
            job.policy = policy = None  # its memory is the loader's now
            certificate, verdict = _certify(job, run, reference)
            notes = _recipe_notes(run, job)
            card = write_card(run, to, adapter.name_base(base)[0], verdict, job.snippet, notes)
            (job.staged / "README.md").write_text(card, encoding="utf-8")
            certificate["files"] = _describe_files(job.staged)
            write_json(job.staged / CERTIFICATE, certificate)
            publish(job.staged, folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    address = push_folder(folder, push, f"{run.name}: {to}, exported by rloo-kit") if push else None
    return Export(folder, to, job.kind, certificate, verdict, job.usage, address)


def _check_arguments(to: str, quantization: str | None, dtype: str | None, num_prompts: int) -> None:
    def refuse_unknown(name: str, value: str | None, known: tuple[str, ...]) -> None:
        if value is not None and value not in known:
            raise ConfigError(f"{name} is {value!r}; it is one of {', '.join(known)}")

    refuse_unknown("--to", to, TARGETS)
    refuse_unknown("--quantization", quantization, gguf.KINDS)
    refuse_unknown("--dtype", dtype, DTYPES)
    if quantization is not None and to != "gguf":
        raise ConfigError(f"--quantization {quantization} is for --to gguf; for --to {to} there is --dtype")
    if dtype is not None and to not in ("merged", "vllm"):
        raise ConfigError(f"--dtype {dtype} is for --to merged and vllm; for --to gguf there is --quantization")
    if num_prompts < 1:
        raise ConfigError(f"--prompts is {num_prompts}; the comparison takes at least 1")


def _check_memory(run: RunConfig) -> None:
    """Refuse before an hour of work what does not fit: the policy, then the export in its dtype, and one table more in
    float32. On a GPU it is load_policy that finds out."""
    if torch.cuda.is_available():
        return
    try:
        shape = find_shape(run)
    except ConfigError:  # no shape that the kit knows
        return
    name = current().dtype_name if run.model.dtype == "auto" else run.model.dtype
    needed = (shape.num_weights * getattr(torch, name).itemsize + 3 * 4 * shape.table_weights) / GIB
    free = available_gib()
    if needed > free:
        smaller = "" if name != "float32" else " model.dtype=bfloat16 halves it, at coarser limits;"
        raise ExportError(
            f"exporting {run.model.name} takes about {needed:.1f} GiB of RAM in {name}, and {free:.1f} GiB are free:"
            f"{smaller} or export on a machine with more"
        )


def _ask_policy(run: RunConfig, policy: Policy, num_prompts: int) -> Reference:
    prompts = list(load_data(run, policy.tokenizer).test["prompt"][:num_prompts])
    if not prompts:
        raise ExportError("the run has no held-out prompts to compare with: data.test_size=20 as an override gives some")
    say(f"export: {policy.describe()}; its greedy answers to {len(prompts)} held-out prompts")
    return measure_reference(run, policy, prompts)


def _write(
    job: _Job, run: RunConfig, settings: Any, quantization: str | None, dtype: str | None, name: str
) -> None:
    """Fill the staging folder, read the tensors back, and set what the certificate and the card need to know."""
    assert job.policy is not None
    if job.target == "adapter":
        _write_adapter(job, run, settings)
        return
    weights = list_weights(job.policy.model)
    if job.target == "gguf":
        _write_gguf(job, run, settings, weights, quantization or "f16")
        return
    held = getattr(settings, "dtype", None) or torch.float32
    job.kind = job.grade = dtype or ("float32" if held == torch.float32 else "bfloat16")
    _write_config(job.base, settings, job.policy, job.staged, job.kind)
    say(f"export: {len(weights)} merged tensors in {job.kind}")
    write_shards(weights, job.staged, getattr(torch, job.kind))
    count = compare_shards(weights, job.staged, getattr(torch, job.kind))
    job.tensors = f"{count} tensors read back, each the merged one in {job.kind} to the bit"
    job.model = job.staged
    job.snippet = loading.snippet_merged()
    if job.target == "vllm":
        job.usage = [line := loading.serve_line(run, job.policy, name)]
        job.snippet = loading.snippet_vllm(line)


def _write_adapter(job: _Job, run: RunConfig, settings: Any) -> None:
    saved = run.folder / "adapter"
    adapter.write_adapter(saved, job.base, job.staged)
    adapter.compare_adapter(saved, job.staged)
    name, included = adapter.name_base(job.base)
    assert job.policy is not None
    base_model = job.policy.model.get_base_model()
    job.kind, job.grade = "adapter", "float32"
    job.tensors = "the adapter's file is the run's to the byte"
    job.model = Path(job.base) if included is None else job.staged / included
    four_bit = run.model.load_in_4bit and getattr(settings, "quantization_config", None) is None
    job.request = {"adapter": str(job.staged), "four_bit": four_bit}
    compute = str(base_model.get_input_embeddings().weight.dtype).removeprefix("torch.")
    job.snippet = loading.snippet_adapter(name, included, four_bit, compute)
    job.usage = [f"its base: {name}" + (", included" if included else "")]


def _write_gguf(job: _Job, run: RunConfig, settings: Any, weights: list[Weight], wanted: str) -> None:
    policy = job.policy
    assert policy is not None
    job.kind = "f16" if wanted == "q4_k_m" else wanted
    file = job.staged / f"{run.name}-{job.kind}.gguf"
    say(f"export: {len(weights)} merged tensors as GGUF in {job.kind}")
    with tempfile.TemporaryDirectory(prefix="rloo-kit-") as folder:
        _write_config(job.base, settings, policy, Path(folder), "float32")
        gguf.write_gguf(weights, Path(folder), policy.tokenizer, settings, file, job.kind, run.name)
    if wanted == "q4_k_m":
        smaller = job.staged / f"{run.name}-q4_k_m.gguf"
        command = gguf.quantise(file, smaller)
        if command is None:
            file.unlink()
            file, job.kind = smaller, wanted
        else:
            job.usage = [f"NO q4_k_m WAS MADE: llama-cpp-python is not installed. From {file.name}: {command}"]
    error = gguf.compare_gguf(weights, file, job.kind)
    job.tensors = (
        f"{len(weights)} tensors read back by gguf's reader, off the merged ones by {error:.2g} of the largest of 32 "
        "neighbours at most"
    )
    job.grade, job.model = GRADES.get(job.kind, job.kind), file
    modelfile = write_modelfile(run, policy, file.name, find_end_ids(policy))
    if modelfile is None:
        job.usage.append("no Modelfile for Ollama: the chat template is not ChatML")
    else:
        (job.staged / "Modelfile").write_text(modelfile, encoding="utf-8")
    job.snippet = loading.snippet_gguf(run.name.lower(), file.name, modelfile is not None)


def _write_config(base: str, settings: Any, policy: Policy, folder: Path, dtype: str) -> None:
    """What stands beside merged weights: the base's configuration, no longer quantised, and the run's tokenizer."""
    config = type(settings).from_dict(settings.to_dict())
    config.dtype = getattr(torch, dtype)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(folder)
    try:
        GenerationConfig.from_pretrained(base).save_pretrained(folder)
    except OSError:  # the base has none
        policy.model.generation_config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def _certify(job: _Job, run: RunConfig, reference: Reference) -> tuple[dict[str, Any], list[str]]:
    """The certificate and its lines: what was compared, and plainly what was not."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    loader = LOADERS[job.target]
    missing = find_missing(loader)
    checks: list[Check] = []
    asked = [loader] if missing is None else ["transformers"] if job.target == "vllm" else []
    assert job.model is not None
    for one in asked:
        say(f"export: loading it with {one} in a process of its own")
        checks.append(check_parity(reference, one, job.model, job.grade, **job.request))
    verdict = [f"NOT CHECKED with {loader}: {missing}"] if missing else []
    verdict += [f"checked with {check}" for check in checks] + [job.tensors]
    status = read_object(run.folder / "status.json")
    return {
        "target": job.target,
        "kind": job.kind,
        "verdict": "not checked" if missing else "checked",
        "loader": loader,
        "why_not": missing,
        "checks": [check.to_dict() for check in checks],
        "tensors": job.tensors,
        "reference": {"compute": reference.compute, "device": reference.device, "longest_tokens": reference.limit},
        "run": {"id": status.get("run"), "state": status.get("state"), "weights_of_step": status.get("adapter_step")},
        "written": now(),
    }, verdict


def _recipe_notes(run: RunConfig, job: _Job) -> list[str]:
    base = public_name(adapter.name_base(job.base)[0])
    return [f"base | {base}{', 4-bit (NF4, bitsandbytes)' if run.model.load_in_4bit else ''}"]


def _describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": adapter.digest(path)}
        for path in files
    }
