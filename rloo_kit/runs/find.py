"""A run by its folder or its file, and the weights that it left."""

from pathlib import Path

from rloo_kit.config.run import RunConfig, load_config
from rloo_kit.errors import RunNotFoundError

ADAPTER_CONFIG, MODEL_CONFIG = "adapter_config.json", "config.json"


def find_run(source: str | Path, *overrides: str) -> RunConfig:
    """The configuration of a run.

    Args:
        source: its YAML file, or its folder, wherever that has been moved to. overrides: KEY=VALUE.

    Raises:
        RunNotFoundError: a folder that is not a run's. ConfigError: as `load_config`.
    """
    source = Path(source)
    run = load_config(config_file(source), *overrides)
    if source.is_dir():
        place_run(run, source)
    return run


def config_file(source: Path) -> Path:
    """The file with the configuration: `source` itself, or the one in a run's folder."""
    if not source.exists() and source.suffix not in (".yaml", ".yml"):
        raise RunNotFoundError(f"{source}: there is no such folder of a run, and no such file")
    if not source.is_dir():
        return source
    if not (source / "config.yaml").is_file():
        raise RunNotFoundError(f"{source} has no config.yaml, so it is not the folder of a run")
    return source / "config.yaml"


def with_name(folder: Path) -> Path:
    """The folder as it was written, or its absolute path where that ends without a name (`.`, `..`)."""
    return folder.resolve() if folder.name in ("", "..") else folder


def place_run(run: RunConfig, folder: Path) -> None:
    """Make `folder` the run's own, as it was named: it may have been moved since it was written down."""
    folder = with_name(folder)
    run.run.output_dir, run.run.name = str(folder.parent), folder.name


def weights_of(folder: Path, named: str = "") -> tuple[str, Path]:
    """The key of `model:` that loads what was trained, and its value: "adapter", or "name" of a whole model where no
    adapter was.

    Args:
        folder: of an adapter, of a model, or of a run. named: what named it, for the error.
    """
    if not folder.is_dir():
        raise RunNotFoundError(f"{named} {folder}: there is no such folder; a run writes outputs/NAME/adapter".strip())
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    if not is_adapter and not (folder / MODEL_CONFIG).is_file() and (folder / "adapter").is_dir():
        return weights_of(folder / "adapter", named)
    return ("adapter", folder) if is_adapter else ("name", folder.resolve())
