"""What the scripts share: JSON on stdout whatever happens, and an exit code for each way to fail. Not a script."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

NO_RUN, NOTHING_YET, NOT_INSTALLED = 3, 4, 5
CODES = """2 a wrong option (message on stderr); 3 the folder holds no run; 4 what is asked for is not there yet;
5 this Python has no rloo-kit."""


def show(value: dict[str, Any]) -> None:
    """Print `value` as JSON, without NaN, which JSON has not."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def fail(code: int, message: str) -> NoReturn:
    """Print the error as JSON and end with `code`."""
    show({"error": message})
    sys.exit(code)


def open_run(folder: Path) -> Any:
    """The folder of a run, for reading; ends the script where rloo-kit or the run is missing."""
    try:
        from rloo_kit.runs.run_dir import RunDir
    except ImportError as error:
        fail(
            NOT_INSTALLED,
            f"{error}: {sys.executable} has no rloo-kit. Run this script with the Python of the environment that has "
            f"it, .venv-rloo/bin/python for one; scripts/check_setup.py says how to install it",
        )
    run_dir = RunDir(folder)
    if not run_dir.status():
        fail(
            NO_RUN,
            f"{folder} holds no run: it has no status.json. `rloo-kit train` makes one in OUTPUT_DIR/NAME, "
            "outputs/arithmetic_thinking for example; a run of a batch lies in BATCH/NAME/run",
        )
    return run_dir


def read_config(folder: Path) -> Any:
    """The run's resolved configuration."""
    from rloo_kit import RlooKitError, load_config

    try:
        return load_config(folder / "config.yaml")
    except RlooKitError as error:
        fail(NO_RUN, f"the configuration of the run in {folder} cannot be read: {error}")


def read_evaluations(run_dir: Any) -> dict[str, Any]:
    """before and after as `Evaluation`s, as far as they are there."""
    from rloo_kit.results.evaluation import Evaluation

    found = {name: Evaluation.read(run_dir / f"{name}.json") for name in ("before", "after")}
    return {name: evaluation for name, evaluation in found.items() if evaluation is not None}
