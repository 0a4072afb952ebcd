"""The policy that a run has trained, loaded again as the run loaded it."""

from pathlib import Path

from rloo_kit.config.run import RunConfig
from rloo_kit.errors import RunNotFoundError
from rloo_kit.models.checkpoint import find_source
from rloo_kit.models.policy import Policy, load_policy
from rloo_kit.runs.find import ADAPTER_CONFIG, find_run, weights_of


def trained_run(source: str | Path, *overrides: str) -> RunConfig:
    """The configuration with which `load_policy` loads what a run has trained: its `adapter/`, on its base.

    Args:
        source: the run's folder, or its YAML file. overrides: KEY=VALUE, `rollout.engine=native` for one.

    Raises:
        RunNotFoundError: no such run, or it has not saved an adapter yet. ConfigError: as `load_config`.
    """
    run = find_run(source, *overrides)
    saved = run.folder / "adapter"
    if not saved.is_dir():
        raise RunNotFoundError(
            f"{run.folder} has no adapter/, so nothing is trained there yet: rloo-kit train {source} makes it"
        )
    name = run.model.name
    if (Path(name).expanduser() / ADAPTER_CONFIG).is_file():  # it continued another one, which is part of this one
        name = find_source(run).base
    key, _, value = weights_of(saved)[0].partition("=")
    changed = {"adapter": None, "name": name} | {key.removeprefix("model."): value}
    run.model = run.model.model_copy(update=changed)
    return run


def load_trained(source: str | Path, *overrides: str) -> tuple[RunConfig, Policy]:
    """`trained_run`, and its policy; raises as that and `load_policy` do."""
    run = trained_run(source, *overrides)
    return run, load_policy(run, check=False)
