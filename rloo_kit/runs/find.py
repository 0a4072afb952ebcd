"""Finds a run by its folder, its config or an export; its trained weights, and those of a model on this machine."""

import hashlib
import os
import shlex
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rloo_kit.config.model_names import RECORD
from rloo_kit.config.run import THINKING_LENGTH, RunConfig, load_config
from rloo_kit.config.section import apply_override, explain_errors
from rloo_kit.config.yaml_files import dump_yaml
from rloo_kit.errors import ConfigError, RunNotFoundError
from rloo_kit.runs.files import read_object
from rloo_kit.runs.reader import RunReader
from rloo_kit.system.environment import huggingface_home
from rloo_kit.system.input_files import from_here

ADAPTER_CONFIG, MODEL_CONFIG = "adapter_config.json", "config.json"
TRAINED = "trained.json"  # with saved weights: digest of their base; in a run also its id and steps
BLOCK, SAMPLES = 4096, 1024  # bytes, and places in each file of weights, for a digest


def find_run(source: str | Path, *overrides: str) -> RunConfig:
    """The configuration of a run, given by its YAML file, or its folder (also after a move), with overrides KEY=VALUE.
    Raises RunNotFoundError if the folder is not a run's, ConfigError as `load_config`."""
    source = from_here(source)
    run = load_config(config_file(source), *overrides)
    if source.is_dir():  # the recorded place is out of date if the folder was moved
        folder = with_name(source)
        run.run.output_dir, run.run.name = str(folder.parent), folder.name
    return run


def config_file(source: Path) -> Path:
    """The configuration file: `source` itself, or the one in a run's folder."""
    if not source.exists() and source.suffix not in (".yaml", ".yml"):
        raise RunNotFoundError(f"{source}: no such run folder or config file; a run writes outputs/NAME")
    if not source.is_dir():
        return source
    if not (source / "config.yaml").is_file():
        raise RunNotFoundError(f"{source} has no config.yaml, so it is not a run's folder")
    return source / "config.yaml"


def with_name(folder: Path) -> Path:
    """The folder as given, or its absolute path if it ends without a name (`.`, `..`)."""
    return folder.resolve() if folder.name in ("", "..") else folder


def weights_of(folder: Path, named: str = "") -> tuple[str, Path]:
    """The key of `model:` that loads the weights trained in the folder of an adapter, a model or a run ("adapter", or
    "name" for a whole model), and its value. `named`: what gave the folder, for errors: RunNotFoundError if it is not
    there, ConfigError if the run's adapter is not its newest weights."""
    if not folder.is_dir():
        raise RunNotFoundError(f"{named} {folder}: there is no such folder; a run writes outputs/NAME/adapter".strip())
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    if not is_adapter and not (folder / MODEL_CONFIG).is_file() and (folder / "adapter").is_dir():
        if problem := find_stale(folder):
            raise ConfigError(f"{named} {problem}".strip())
        return weights_of(folder / "adapter", named)
    return ("adapter", folder) if is_adapter else ("name", folder.resolve())


def find_stale(folder: Path) -> str:
    """Why `adapter/` is older than its run, which continued and was killed, with what to do; "" if it is not."""
    run_dir = RunReader(folder)
    status, last = run_dir.status(), run_dir.last_checkpoint()
    saved = read_object(folder / "adapter" / TRAINED)
    done = saved.get("steps_done", 0) if saved.get("run") == run_dir.id else 0
    if last is None or done >= last.step or "adapter_step" in status or status.get("state") == "finished":
        return ""
    then, how = f"step {done}" if done else "an earlier end", status.get("resume") or "rloo-kit train ... --resume"
    return (
        f"{folder / 'adapter'} has the weights of {then}, but the run went on to step {last.step}: finish it ({how}), "
        f"or name {last.folder} for the weights of that step"
    )


# What a configuration has to name and `ask` does not read.
UNREAD: dict[str, Any] = {
    "data": {"source": "any.jsonl"}, "rewards": [{"name": "answer_reward"}], "rloo": {"max_steps": 1},
}  # fmt: skip
RUN_FILE = "rloo_kit.yaml"  # in an export: the part of its run's configuration that `ask` reads


def describe_origin(run: RunConfig, base: dict[str, Any]) -> str:
    """The text of `RUN_FILE`: the part of a run's configuration that `ask` reads, without anything about the machine.
    `base`: keys of `model` that locate the base model on the target machine: `name`, and others if needed."""
    lengths = run.rloo.model_dump(mode="json", include={"max_completion_length", "thinking_close", "temperature"})
    values = {"run": {"name": run.name, "seed": run.run.seed}} | {
        "model": run.model.model_dump(mode="json") | base | {"adapter": None},
        "data": UNREAD["data"] | run.data.model_dump(mode="json", include={"system_prompt", "max_pixels"}),
        "rewards": UNREAD["rewards"], "rloo": {**UNREAD["rloo"], **lengths}, "eval": run.eval.model_dump(mode="json"),
    }  # fmt: skip
    return dump_yaml(values)


def is_export(folder: Path) -> bool:
    """Whether the folder contains weights and is not a run's folder."""
    names = (ADAPTER_CONFIG, MODEL_CONFIG)
    return not (folder / "config.yaml").is_file() and any((folder / name).is_file() for name in names)


def origin_of(source: str | Path, *overrides: str) -> RunConfig:
    """The run that a source comes from, as it was trained: `find_run`, extended to folders of weights.

    For weights, the run is that of `RUN_FILE` in the folder; else the run whose folder contains it; else one with
    defaults whose model is the folder. An export in its run's folder finds its base as the run does, elsewhere in
    itself. ConfigError for a GGUF file; else as `find_run`.
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
    above = (parent / "config.yaml" for parent in folder.parents[:2])
    around = next(filter(Path.is_file, above), None)
    if (folder / RUN_FILE).is_file():
        inside = folder / Path(str(read_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path"))).name
        if around is not None:
            base = {"name": load_config(around).model.name}
        else:
            base = {"name": str(inside)} if (inside / MODEL_CONFIG).is_file() else {}
        run = load_config(folder / RUN_FILE, *overrides, model=base)
        run._source = around or run.source
        return run
    if around is not None:
        return load_config(around, *overrides)
    values: dict[str, Any] = {"run": {"name": folder.name}, "model": {"name": str(folder)}} | UNREAD
    if isinstance(positions := read_object(folder / MODEL_CONFIG).get("max_position_embeddings"), int):
        values["model"]["max_seq_length"] = min(positions, THINKING_LENGTH)
    for override in overrides:
        apply_override(values, override, RunConfig)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain_errors(error, RunConfig)) from None


def read_adapter(folder: str | Path) -> dict[str, Any]:
    """`adapter_config.json` of an adapter's folder; empty if it cannot be read."""
    return read_object(Path(folder).expanduser() / "adapter_config.json")


def hub_cache() -> Path:
    return Path(os.environ.get("HF_HUB_CACHE") or huggingface_home() / "hub").expanduser()


def find_in_cache(name: str) -> Path | None:
    """`config.json` of a hub id in the cache: of the branch main, or else the newest."""
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    main = folder / "refs" / "main"
    commit = main.read_text(encoding="utf-8").strip() if main.is_file() else ""
    files = filter(Path.is_file, folder.glob("snapshots/*/config.json"))  # of a dangling link there is none
    return max(files, key=lambda path: (path.parent.name == commit, path.stat().st_mtime), default=None)


def digest_weights(model: str) -> str:
    """A digest of the files of weights in a folder, or of a hub id in the cache: their sizes, and up to `SAMPLES`
    blocks of each. A built-in model's is its folder's name, which has the recipe. "" without any files."""
    folder, cached = Path(os.path.expanduser(model)), find_in_cache(model)
    folder = cached.parent if cached and not folder.is_dir() else folder
    if (folder / RECORD).is_file():
        return folder.name
    digest, files = hashlib.sha256(), sorted(folder.glob("*model*.safetensors")) or sorted(folder.glob("*model*.bin"))
    for file in files:
        size = file.stat().st_size
        digest.update(f"{size}\n".encode())
        with open(file, "rb") as opened:
            for place in range(0, size, max(BLOCK, size // SAMPLES)):
                opened.seek(place)
                digest.update(opened.read(BLOCK))
    return digest.hexdigest()[:16] if files else ""
