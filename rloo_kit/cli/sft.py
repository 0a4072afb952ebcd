"""The command that trains on demonstrations before RLOO: sft."""

import shlex

import typer

from rloo_kit.cli.common import ConfigFile, Overrides, Overwrite, app, exit_codes, prepare, read_config, say_activation
from rloo_kit.system.processes import INTERRUPTED, say


@app.command()
def sft(file: ConfigFile, overrides: Overrides = None, overwrite: Overwrite = False) -> None:
    """Train on demonstrations before RLOO, for a model that solves nothing yet."""
    with exit_codes():
        from rloo_kit.preflight.cheap import refuse_worked_faults
        from rloo_kit.runs.sft_folder import check_folder, open_folder

        run, words = read_config(file, overrides), overrides or []
        check_folder(run, overwrite)
        refuse_worked_faults(run)
        with open_folder(run, overwrite) as run_dir:
            run_dir.resume_command = shlex.join(["rloo-kit", "sft", str(file), *words, "--overwrite"])
            policy, data = prepare(run)
            from rloo_kit.loop.sft_run import fine_tune_and_report, next_command

            result = fine_tune_and_report(run, policy, data, run_dir)
        say(f"next: {next_command(run, words, result)}")
        say_activation()
    if result.stopped:
        raise typer.Exit(INTERRUPTED)
