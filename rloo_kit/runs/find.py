"""Finds a run by its folder or config file, and its trained weights."""

from pathlib import Path

from rloo_kit.config.run import RunConfig, load_config
from rloo_kit.errors import ConfigError, RunNotFoundError
from rloo_kit.runs.files import read_object
from rloo_kit.runs.run_dir import RunDir
from rloo_kit.system.input_files import from_here

ADAPTER_CONFIG, MODEL_CONFIG = "adapter_config.json", "config.json"
TRAINED = "trained.json"  # with saved weights: digest of their base; in a run also its id and steps


def find_run(source: str | Path, *overrides: str) -> RunConfig:
    """The configuration of a run.

    Args:
        source: its YAML file, or its folder, also after a move; from the working folder. overrides: KEY=VALUE.

    Raises:
        RunNotFoundError: the folder is not a run's. ConfigError: see `load_config`.
    """
    source = from_here(source)
    run = load_config(config_file(source), *overrides)
    if source.is_dir():
        place_run(run, source)
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


def place_run(run: RunConfig, folder: Path) -> None:
    """Set `folder` as the run's own, as given; the recorded one is out of date if the folder was moved."""
    folder = with_name(folder)
    run.run.output_dir, run.run.name = str(folder.parent), folder.name


def weights_of(folder: Path, named: str = "") -> tuple[str, Path]:
    """The key of `model:` that loads the trained weights, and its value: "adapter", or "name" for a whole model.

    Args:
        folder: of an adapter, of a model, or of a run. named: the flag or key that gave it, for the error.

    Raises:
        RunNotFoundError: there is no such folder. ConfigError: the run's adapter is not its newest weights.
    """
    if not folder.is_dir():
        raise RunNotFoundError(f"{named} {folder}: there is no such folder; a run writes outputs/NAME/adapter".strip())
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    if not is_adapter and not (folder / MODEL_CONFIG).is_file() and (folder / "adapter").is_dir():
        if problem := find_stale(folder):
            raise ConfigError(f"{named} {problem}".strip())
        return weights_of(folder / "adapter", named)
    return ("adapter", folder) if is_adapter else ("name", folder.resolve())


def find_stale(folder: Path) -> str:
    """Why `adapter/` in a run's folder is older than the run, which continued and was killed, with what to do; "" if it
    is not."""
    run_dir = RunDir(folder)
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
