"""Checks of a run that take seconds and need no model; all problems are reported at once.

They use no torch, transformers or datasets, unless a user's own reward imports them. What only these libraries can read
(a Parquet file, a hub id, a tokenizer that is not on this machine) is checked once the caller passes a tokenizer.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_kit.config.batches import check_prompts
from rloo_kit.config.embedded import split_model_name
from rloo_kit.config.run import RunConfig
from rloo_kit.data.chat import check_budget, resolve_family, thinks
from rloo_kit.data.load import Prepared, prepare_data
from rloo_kit.data.reading import needs_stack
from rloo_kit.data.tasks import find_family
from rloo_kit.errors import ConfigError
from rloo_kit.plan import parts
from rloo_kit.plan.load import find_machine, read_load
from rloo_kit.plan.machine_check import find_machine_problem
from rloo_kit.plan.peaks import own_bytes
from rloo_kit.preflight.faults import Fault, PreflightError, catching
from rloo_kit.preflight.rewards import find_reward_faults
from rloo_kit.preflight.tokenizers import find_tokenizer
from rloo_kit.runs.run_dir import RunDir
from rloo_kit.system.gpu import GIB
from rloo_kit.system.input_files import looked_for, places_of
from rloo_kit.system.processes import is_main_process, say
from rloo_kit.system.versions import check_trackers


@dataclass(frozen=True)
class FolderUse:
    """How the run's folder will be opened; see `RunDir.create`."""

    resume: bool = False
    overwrite: bool = False


def find_faults(run: RunConfig, tokenizer: Any | None = None, folder: FolderUse | None = None) -> list[Fault]:
    """Every fault of a run that can be found without its weights.

    Args:
        tokenizer: the policy's, if it is loaded. None looks for its files on this machine and skips what needs it if
            there are none. With a tokenizer, sources that need the stack are read too.
        folder: None skips the check that the run's folder is free.

    Returns:
        The faults in the order of `STAGES`; errors keep the run from starting, warnings do not.
    """
    faults = find_machine_faults(run)
    loaded = tokenizer is not None
    with catching("row", faults):
        tokenizer = tokenizer or find_tokenizer(run)
    prepared, thinking = None, True
    if tokenizer is not None:
        with catching("row", faults):
            family = resolve_family(tokenizer, run.model.name, run.model.family, run.model.enable_thinking)
            thinking = thinks(family, run.model.enable_thinking)
            check_budget(run, family)
        prepared = _prepare(run, tokenizer, faults, loaded)
    faults += find_reward_faults(run, tokenizer, thinking, None if prepared is None else prepared.train.row(0))
    faults += _find_measure_faults(run, own_rewards=folder is None)
    return faults + find_place_faults(run, folder)


def find_machine_faults(run: RunConfig) -> list[Fault]:
    """The first part of `find_faults`: the model's folders, and whether the model fits the machine."""
    faults: list[Fault] = []
    with catching("machine", faults):
        _check_folders(run)
    problem = find_machine_problem(run)
    if problem is not None:
        faults.append(Fault("machine", f"{problem.message} {problem.fix}", "error" if problem.is_fatal else "warning"))
    return faults


def find_place_faults(run: RunConfig, folder: FolderUse | None = None) -> list[Fault]:
    """The last part of `find_faults`: the run's folder, its disk, the trackers."""
    faults: list[Fault] = []
    with catching("folder", faults):
        RunDir.check(run, resume=bool(folder and folder.resume), overwrite=folder is None or folder.overwrite)
    faults += _find_disk_faults(run)
    with catching("trackers", faults):
        check_trackers(run.rloo.report_to)
    return faults


def is_complete(run: RunConfig) -> bool:
    """Whether `find_faults` can check everything without the stack and without a download."""
    return not needs_stack(run) and find_tokenizer(run) is not None


def refuse_faults(run: RunConfig, tokenizer: Any | None = None, folder: FolderUse | None = None) -> None:
    """Raise PreflightError if `find_faults` finds an error; print warnings. With several processes only the main one
    checks. An unchanged run that has passed is not checked again."""
    state = f"{tokenizer is not None} {run.model_dump_json()}"
    if run._checked == state or not is_main_process():
        return
    faults = find_faults(run, tokenizer, folder)
    raise_errors(faults)
    run._checked = state


def raise_errors(faults: Sequence[Fault]) -> None:
    """Raise PreflightError if one of the faults is an error; else print the warnings."""
    if any(fault.level == "error" for fault in faults):
        raise PreflightError(faults)
    for fault in faults:
        say(f"WARNING: {fault}")


def _check_folders(run: RunConfig) -> None:
    """Check the folders of model and adapter, and the task family of an embedded model."""
    name, adapter = run.model.name, run.model.adapter
    if run.model.is_embedded:
        try:
            find_family(split_model_name(name)[1], run.source)
        except ConfigError as error:
            raise ConfigError(f"model.name is {name}: {error}") from None
    is_path = not run.model.is_embedded and (name.startswith((".", "/", "~")) or name.count("/") > 1)
    for key, folder in (("model.name", name if is_path else None), ("model.adapter", adapter)):
        if folder is not None and not Path(folder).expanduser().is_dir():
            places = places_of(folder, key, run.source and run.source.parent)
            raise ConfigError(f"{key} is {folder}, and there is no such folder; {looked_for(places, key)}")
    if adapter is not None and not (Path(adapter).expanduser() / "adapter_config.json").is_file():
        inner = Path(adapter).expanduser() / "adapter"
        hint = f"; set model.adapter={inner}" if (inner / "adapter_config.json").is_file() else ""
        raise ConfigError(f"model.adapter is {adapter}, which holds no adapter_config.json{hint}")


def _find_measure_faults(run: RunConfig, own_rewards: bool) -> list[Fault]:
    """Whether a reward has the name in `eval.measure`; only a warning if `own_rewards` may be defined in Python."""
    names = [name for entry in run.rewards for name in dict.fromkeys((entry.name, entry.name.rpartition(":")[2]))]
    known = ["auto", "accuracy", "reward", *names]
    if not run.eval.every_steps or run.eval.measure in known:
        return []
    message = f"eval.measure is {run.eval.measure}; set it to one of {', '.join(known)}"
    return [Fault("rewards", message, "warning" if own_rewards else "error")]


def _prepare(run: RunConfig, tokenizer: Any, faults: list[Fault], loaded: bool) -> Prepared | None:
    """The rows as they will be trained on; None if they cannot be read (yet)."""
    if needs_stack(run) and not loaded:
        return None
    prepared = None
    with catching("data", faults):
        prepared = prepare_data(run, tokenizer)
    if prepared is not None:
        with catching("data", faults):
            check_prompts(run, len(prepared.train.rows))
    return prepared


def _find_disk_faults(run: RunConfig) -> list[Fault]:
    """Whether the checkpoints fit on their disk."""
    place = Path(run.folder).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    try:
        needed = checkpoint_bytes(run)
    except ConfigError:  # unknown shape
        return []
    kept = run.rloo.save_total_limit
    total = (
        needed * ((kept or 1) + 1) + needed
    )  # one is written before the oldest is deleted; adapter/ is smaller than one
    if total <= free:
        return []
    what = f"{kept} checkpoints and the next one" if kept else "two checkpoints"
    fewer = "rloo.save_total_limit=1, " if kept is None or kept > 1 else ""
    return [
        Fault(
            "disk",
            f"{place} has {free / GIB:.2f} GiB free, but {what} and the adapter take {total / GIB:.2f} "
            f"({needed / GIB:.2f} each, computed): set {fewer}run.output_dir=... to a folder on a larger disk",
        )
    ]


def checkpoint_bytes(run: RunConfig) -> int:
    """Computed size of one checkpoint: the trained weights in float32, and the optimizer's state."""
    load = read_load(run, find_machine(None))
    weights = own_bytes(load) or parts.FLOAT * parts.trained_weights(load)
    return weights + parts.optimizer_bytes(load)
