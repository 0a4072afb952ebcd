"""Faults of demonstrations, found before the model is loaded; `cheap` checks the rest of a run."""

from typing import Any

from rloo_kit.config.run import RunConfig
from rloo_kit.data.load import prepare_data
from rloo_kit.data.reading import needs_stack
from rloo_kit.data.worked import load_worked, worked_need_stack
from rloo_kit.preflight.cheap import FolderUse, find_faults
from rloo_kit.preflight.faults import Fault, PreflightError, catching
from rloo_kit.preflight.tokenizers import find_tokenizer
from rloo_kit.system.processes import say


def refuse_worked_faults(run: RunConfig) -> None:
    """Raise PreflightError if the run or its demonstrations have faults that can be found without the weights. Prints
    warnings and what is left out.

    What only the stack can read (Parquet, a hub id, a tokenizer that is not on this machine) is left to `fine_tune`.
    """
    faults = find_faults(run, folder=FolderUse(overwrite=True))
    tokenizer = None
    with catching("row", []):  # `find_faults` reports it
        tokenizer = find_tokenizer(run)
    if tokenizer is not None and not any(fault.stage == "data" for fault in faults):
        faults += _find(run, tokenizer)
    if any(fault.level == "error" for fault in faults):
        raise PreflightError(faults)
    for fault in faults:
        say(f"WARNING: {fault}")


def _find(run: RunConfig, tokenizer: Any) -> list[Fault]:
    faults: list[Fault] = []
    if worked_need_stack(run) or needs_stack(run):
        return faults
    with catching("data", faults):
        held_out = prepare_data(run, tokenizer).test
        load_worked(run, tokenizer, [held_out.texts[row] for row in held_out.rows])
    return faults
