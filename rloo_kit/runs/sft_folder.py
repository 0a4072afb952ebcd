"""The folder of a run's supervised part: outputs/NAME-sft, next to the run's own."""

from rloo_kit.config.run import RunConfig
from rloo_kit.errors import RunExistsError
from rloo_kit.runs.run_dir import RunDir


def sft_run(run: RunConfig) -> RunConfig:
    """`run` with the name of its supervised part, NAME-sft, which is also its folder's name."""
    changed = run.model_copy(deep=True)
    changed.run.name = f"{run.name}-sft"
    return changed


def check_folder(run: RunConfig, overwrite: bool = False) -> None:
    """Refuse, with RunExistsError, a folder that `open_folder` would not overwrite."""
    changed = sft_run(run)
    found = RunDir(changed.folder)
    if found.id and found.status().get("method") != "sft":
        raise RunExistsError(
            f"{changed.folder} contains a run that is no supervised training: set another run.name, or move it away"
        )
    try:
        RunDir.check(changed, overwrite=overwrite)
    except RunExistsError as error:
        if not (changed.folder / "status.json").is_file():  # not a folder of ours
            raise
        raise RunExistsError(
            f"{changed.folder} already contains the supervised training of {run.name}: delete it and start over with "
            "--overwrite (overwrite=True), or choose another name with run.name=..."
        ) from error


def open_folder(run: RunConfig, overwrite: bool = False) -> RunDir:
    """outputs/NAME-sft, open for writing; raises like `check_folder` and `RunDir.create`."""
    check_folder(run, overwrite)
    run_dir = RunDir.create(sft_run(run), overwrite=overwrite)
    run_dir.resume_command = "fine_tune(run, policy, data, overwrite=True)"
    run_dir.set_status("running", method="sft")
    return run_dir
