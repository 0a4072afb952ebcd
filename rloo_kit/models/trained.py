"""Loads the policy that a run has trained, in the way the run loaded it."""

from pathlib import Path
from typing import Any

from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError, RunNotFoundError
from rloo_kit.models.checkpoint import dtype_name, find_source
from rloo_kit.models.policy import Policy, load_policy
from rloo_kit.runs.files import read_object
from rloo_kit.runs.find import ADAPTER_CONFIG, MODEL_CONFIG, RUN_FILE, is_export, origin_of, weights_of
from rloo_kit.system.input_files import from_here


def trained_run(source: str | Path, *overrides: str) -> RunConfig:
    """The configuration for `load_policy` to load what a run has trained: its `adapter/` on its base.

    Args:
        source: the run's folder, or its YAML file; or a folder of weights, see `origin_of`.
        overrides: KEY=VALUE, for example `rollout.engine=native`.

    Raises:
        RunNotFoundError: no such run, or it has not saved an adapter yet.
        ConfigError: as `load_config`, `weights_of` and `origin_of` raise it.
    """
    source = from_here(source)
    run = origin_of(source, *overrides)
    saved = source if is_export(source) else run.folder / "adapter"
    if not saved.is_dir():
        raise RunNotFoundError(
            f"{run.folder} has no adapter/, so nothing is trained there yet: run rloo-kit train {source}"
        )
    key, weights = weights_of(source if is_export(source) else run.folder)
    changed: dict[str, Any] = {"adapter": None, "name": run.model.name}
    named = Path(run.model.name).expanduser()
    if (named / ADAPTER_CONFIG).is_file() and named.resolve() != saved.resolve():
        changed["name"] = find_source(run).base  # the run continued another adapter, which is part of this one
    is_quantised = read_object(weights / MODEL_CONFIG).get("quantization_config") is not None  # loads with an adapter
    if key == "name" and run.model.lora is not None and not is_quantised:
        # merged: it has no separate base, and it is no longer in 4-bit
        backend = "auto" if run.model.backend == "unsloth" else run.model.backend  # Unsloth's loader needs an adapter
        changed |= {"lora": None, "load_in_4bit": False, "dtype": dtype_name(run), "backend": backend}
    run.model = run.model.model_copy(update=changed | {key: str(weights)})
    return run


def load_trained(source: str | Path, *overrides: str) -> tuple[RunConfig, Policy]:
    """`trained_run` and its policy; raises what `trained_run` and `load_policy` raise."""
    run = trained_run(source, *overrides)
    return run, load_policy(run, check=False)


def load_base(source: str | Path, *overrides: str) -> Policy | None:
    """The model that a run started from, if the run's result has all weights; None if the result is an adapter, since
    the policy of `load_trained` with its adapter disabled is the base. Arguments and errors are those of
    `load_trained`.

    Raises:
        ConfigError: a merged model that does not record its base.
    """
    trained = trained_run(source, *overrides)
    if trained.model.adapter is not None:
        return None
    run = origin_of(source, *overrides)
    if Path(run.model.name).resolve() == Path(trained.model.name).resolve():
        raise ConfigError(
            f"{source} has whole weights and does not record their base (no {RUN_FILE} that names it): ask the base "
            "directly, rloo-kit ask FOLDER"
        )
    return load_policy(run, check=False)
