"""Export a finished run: write into a staging folder, check against the policy, publish."""

import gc
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from rloo_kit.config.run import RunConfig
from rloo_kit.data.load import load_data
from rloo_kit.demo.embedded import name_built
from rloo_kit.errors import ConfigError, ExportError, RunExistsError
from rloo_kit.export import formats, gguf
from rloo_kit.export.formats import DTYPES, LOADERS, WRITERS, Job, Written, digest, public_name
from rloo_kit.export.parity import ENGINE, Reference, check_parity, find_missing, measure_reference
from rloo_kit.images.model import choose_class
from rloo_kit.models.policy import Policy, load_policy, trained_run
from rloo_kit.models.source import find_source
from rloo_kit.runs.checkpoints import publish
from rloo_kit.runs.files import now, read_object, saving, write_json, write_text
from rloo_kit.runs.find import RUN_FILE, TRAINED, describe_origin, find_run, with_name
from rloo_kit.system.processes import say

CERTIFICATE = "certificate.json"


@dataclass(frozen=True)
class Export:
    """A published export."""

    folder: Path
    target: str  # adapter, merged, gguf or vllm
    kind: str  # dtype or quantisation
    certificate: dict[str, Any]  # as in `certificate.json`
    verdict: list[str]  # the same as lines of text
    usage: list[str]  # how to load or serve it

    def __str__(self) -> str:
        return "\n".join([f"exported: {self.folder} ({self.target}, {self.kind})", *self.verdict, *self.usage])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        found = {"folder": str(self.folder), "target": self.target, "kind": self.kind}
        return found | {"usage": self.usage, "certificate": self.certificate}


def export_model(
    source: str | Path,
    to: str,
    *overrides: str,
    quantization: str | None = None,
    dtype: str | None = None,
    output: str | Path | None = None,
    num_prompts: int = 20,
    overwrite: bool = False,
) -> Export:
    """Export what a run has trained, and check the export against the policy.

    Args:
        source: the run's folder, or its file. to: adapter, merged, gguf or vllm. overrides: KEY=VALUE of the run, as in
            `load_trained`.
        quantization: of a GGUF: f32, f16 (the default), bf16, q8_0. dtype: of merged weights: float32, bfloat16,
            float16; None takes the base's dtype, or bfloat16 if it is none of these.
        output: the folder to create; None: RUN/export/TARGET. num_prompts: held-out prompts to compare on.
        overwrite: replace an existing export.

    Returns:
        `Export`; print it.

    Raises:
        RunNotFoundError: no such run, or it has no trained weights. RunExistsError: the folder exists.
        ConfigError: invalid arguments. ExportError: the export cannot be made, or differs from what was trained; then
        nothing is published.
    """
    if to not in WRITERS:
        raise ConfigError(f"--to is {to!r}; it is one of {', '.join(WRITERS)}")
    choices = {"--quantization": (quantization, gguf.TYPES, ["gguf"]), "--dtype": (dtype, DTYPES, ["merged", "vllm"])}
    for option, (value, known, targets) in choices.items():
        if value is not None and to not in targets:
            raise ConfigError(f"{option} {value} is for --to {' or '.join(targets)}")
        if value is not None and value not in known:
            raise ConfigError(f"{option} is {value!r}; it is one of {', '.join(known)}")
    if num_prompts < 1:
        raise ConfigError(f"--prompts is {num_prompts}; it must be at least 1")
    run, trained = find_run(source), trained_run(source, *overrides)
    run.run = trained.run  # the name may select another run of the same file
    trained.rollout = trained.rollout.model_copy(update={"engine": ENGINE})
    place = Path(source) if Path(source).is_dir() else run.folder
    folder = with_name(Path(output) if output is not None else place / "export" / to)
    _check_folder(folder, overwrite)
    if to == "adapter":
        formats.check_adapter(run.folder / "adapter")
    base = find_source(trained).base
    settings = AutoConfig.from_pretrained(base)
    sees = hasattr(settings, "vision_config") and choose_class(trained, base, settings)[1] is not None
    if sees and to in formats.NOT_WITH_IMAGES:
        raise ExportError(f"the model has a vision tower, and {formats.NOT_WITH_IMAGES[to]}")
    if to == "gguf":
        gguf.check_gguf(settings)
    policy = load_policy(trained)
    reference = _ask_policy(trained, policy, num_prompts)
    folder.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with saving(folder):
            staged = stage / folder.name
            staged.mkdir()
            written = WRITERS[to](Job(to, run, policy, base, settings, quantization or dtype, staged, folder))
            del policy  # frees memory for the loader
            certificate, verdict = _certify(to, written, run, reference)
            shown = public_name(run.model.name if run.model.is_embedded or run.model.lora is None else base)
            card = formats.write_card(run, to, shown, verdict, written.loading, sees)
            write_text(staged / "README.md", card)
            write_text(staged / RUN_FILE, describe_origin(run, find_base(run, base)))
            files = {
                path.relative_to(staged).as_posix(): {"bytes": path.stat().st_size, "sha256": digest(path)}
                for path in sorted(staged.rglob("*"))
                if path.is_file()
            }
            write_json(staged / CERTIFICATE, certificate | {"files": files})
            publish(staged, folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return Export(folder, to, written.kind, certificate, verdict, written.usage)


def _check_folder(folder: Path, overwrite: bool) -> None:
    """Only an export may be replaced, and only with `overwrite`."""
    above = next(one for one in folder.absolute().parents if one.exists())
    if not above.is_dir():
        raise ConfigError(f"--output is {folder}, and {above} is not a folder")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / CERTIFICATE).is_file():
        raise RunExistsError(
            f"{folder} exists and is not an export (it has no {CERTIFICATE}): use --output for another folder"
        )
    if not overwrite:
        raise RunExistsError(
            f"{folder} already exists: replace it with --overwrite, or use --output for another folder"
        )


def _ask_policy(run: RunConfig, policy: Policy, num_prompts: int) -> Reference:
    prompts = list(load_data(run, policy.tokenizer).test["prompt"][:num_prompts])
    if not prompts:
        raise ExportError("the run has no held-out prompts to compare on: add the override data.test_size=20")
    say(f"export: {policy.describe()}; sampling greedy answers to {len(prompts)} held-out prompts")
    return measure_reference(run, policy, prompts)


def _certify(target: str, written: Written, run: RunConfig, reference: Reference) -> tuple[dict[str, Any], list[str]]:
    """The certificate and its lines: what was compared, and what was not."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    loader, checks = LOADERS[target], []
    if (missing := find_missing(loader)) is None:
        say(f"export: loading it with {loader} in a separate process")
        checks = [check_parity(reference, loader, written.model, written.kind, **written.request)]
        verdict = [f"checked with {checks[0]}", written.tensors]
    else:
        verdict = [f"NOT CHECKED with {loader}: {missing}", written.tensors]
    status, saved = (read_object(run.folder / name) for name in ("status.json", f"adapter/{TRAINED}"))
    step = status.get("adapter_step", saved.get("step"))
    return {
        "target": target,
        "kind": written.kind,
        "verdict": "not checked" if missing else "checked",
        "loader": loader,
        "why_not": missing,
        "checks": [asdict(check) for check in checks],
        "tensors": written.tensors,
        "reference": {"compute": reference.compute, "device": reference.device, "longest_tokens": reference.limit},
        "run": {"id": status.get("run"), "state": status.get("state"), "weights_of_step": step},
        "written": now(),
    }, verdict


def find_base(run: RunConfig, base: str) -> dict[str, Any]:
    """The `model` keys that find the base on another machine, or at least name it. Without an adapter
    `base` is the trained model itself."""
    folder = Path(base).name
    own = folder if run.model.is_embedded else public_name(run.model.name if run.model.lora is None else base)
    return name_built(folder) or {"name": own}
