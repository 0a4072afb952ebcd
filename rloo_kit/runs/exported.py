"""Reads a folder of weights as a run: an exported adapter, a merged model, a checkpoint, or any other model folder."""

import json
import shlex
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rloo_kit.config.run import THINKING_LENGTH, RunConfig, load_config
from rloo_kit.config.section import explain_errors
from rloo_kit.config.yaml_files import apply_override, dump_yaml
from rloo_kit.errors import ConfigError
from rloo_kit.runs.files import read_object
from rloo_kit.runs.find import ADAPTER_CONFIG, MODEL_CONFIG, find_run
from rloo_kit.system.input_files import from_here

NO_PROMPTS = "any.jsonl"  # a configuration has to name a data source; this one is never read
RUN_FILE = "rloo_kit.yaml"  # in an export: the part of its run's configuration that `ask` reads


def describe_origin(run: RunConfig, base: dict[str, Any]) -> str:
    """The text of `RUN_FILE`: the part of a run's configuration that `ask` reads, without anything about the machine.

    Args:
        base: keys of `model` that locate the base model on the target machine: `name`, and others if needed.
    """
    lengths = run.rloo.model_dump(mode="json", include={"max_completion_length", "thinking_close", "temperature"})
    values = {
        "run": {"name": run.name, "seed": run.run.seed},
        "model": run.model.model_dump(mode="json") | base | {"adapter": None},
        "data": {"source": NO_PROMPTS, "system_prompt": run.data.system_prompt},
        "rewards": [{"name": "answer_reward"}],
        "rloo": {"max_steps": 1} | lengths,
        "eval": run.eval.model_dump(mode="json"),
    }
    return dump_yaml(values)


def is_export(folder: Path) -> bool:
    """Whether the folder contains weights and is not a run's folder."""
    names = (ADAPTER_CONFIG, MODEL_CONFIG)
    return not (folder / "config.yaml").is_file() and any((folder / name).is_file() for name in names)


def origin_of(source: str | Path, *overrides: str) -> RunConfig:
    """The run that a source comes from, as it was trained: `find_run`, extended to folders of weights.

    For weights, the run is that of `RUN_FILE` in the folder; else the run whose folder contains it (a checkpoint, an
    export); else a run with defaults whose model is the folder. An export inside its run's folder finds its base as the
    run does, elsewhere in itself if it is included. Arguments and errors are those of `find_run`; ConfigError for a
    GGUF file.
    """
    source = from_here(source)
    folder = source.resolve()
    if not is_export(folder):
        files = [source] if source.suffix == ".gguf" else sorted(source.glob("*.gguf"))
        if files and not (source / "config.yaml").is_file():
            model = shlex.quote(str(files[0]))
            raise ConfigError(
                f"{files[0]} is for llama.cpp and Ollama: ask it with llama-cli -m {model} --jinja, or in its folder "
                "with ollama create NAME -f Modelfile and ollama run NAME; rloo-kit ask takes the run's folder"
            )
        return find_run(source, *overrides)
    above = (one / "config.yaml" for one in (folder.parent, folder.parent.parent))
    around = next((file for file in above if file.is_file()), None)
    if (folder / RUN_FILE).is_file():
        base = _included_base(folder) if around is None else {"name": load_config(around).model.name}
        run = load_config(folder / RUN_FILE, *overrides, model=base)
        run._source = around or run.source
        return run
    if around is not None:
        return load_config(around, *overrides)
    values: dict[str, Any] = {
        "run": {"name": folder.name},
        "model": {"name": str(folder)},
        # required in a run, but not read by `ask`
        "data": {"source": NO_PROMPTS},
        "rewards": [{"name": "answer_reward"}],
        "rloo": {"max_steps": 1},
    }
    if (positions := _positions(folder)) is not None:
        values["model"]["max_seq_length"] = min(positions, THINKING_LENGTH)
    for override in overrides:
        apply_override(values, override)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain_errors(error, RunConfig)) from None


def _included_base(folder: Path) -> dict[str, str]:
    """The base model inside an exported adapter's folder, as a key of `model`; empty if it is not included."""
    base = folder / Path(str(read_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path"))).name
    return {"name": str(base)} if (base / MODEL_CONFIG).is_file() else {}


def _positions(folder: Path) -> int | None:
    """`max_position_embeddings` of a model's config.json; None for an adapter."""
    try:
        found = json.loads((folder / MODEL_CONFIG).read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) else None
