"""The commands that train: sft, train, batch."""

import shlex
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from rloo_kit.cli.common import (
    Command,
    ConfigFile,
    JsonLine,
    Overrides,
    Overwrite,
    app,
    command,
    prepare,
    read_config,
    say_activation,
)
from rloo_kit.errors import ConfigError
from rloo_kit.system.processes import INTERRUPTED, REFUSED, launch_run, resume_words, say

BATCH_REFUSED, MOST_COUNTED = 125, 100  # `batch` uses the small exit codes to count runs


@command()
def sft(file: ConfigFile, overrides: Overrides = None, overwrite: Overwrite = False) -> None:
    """Train on demonstrations before RLOO, for a model that solves nothing yet."""
    from rloo_kit.checks.cheap import refuse_worked_faults
    from rloo_kit.runs.sft_folder import check_folder, open_folder

    run, words = read_config(file, overrides), overrides or []
    check_folder(run, overwrite)
    refuse_worked_faults(run)
    with open_folder(run, overwrite) as run_dir:
        run_dir.resume_command = shlex.join(["rloo-kit", "sft", str(file), *words, "--overwrite"])
        policy, data = prepare(run)
        from rloo_kit.loop.sft import fine_tune_and_report, next_command

        result = fine_tune_and_report(run, policy, data, run_dir)
    say(f"next: {next_command(run, words, result)}")
    say_activation()
    if result.stopped:
        raise typer.Exit(INTERRUPTED)


@command()
def train(
    file: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest intact checkpoint.")] = False,
    overwrite: Overwrite = False,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="With --resume: go on although rows, rewards or weights have changed."),
    ] = False,
    launch: Annotated[
        Path | None,
        typer.Option(
            "--launch", metavar="LAUNCH", help="Launch several processes, for example configs/accelerate/ddp.yaml."
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="With --launch: number of processes; default: the file's.")
    ] = None,
) -> None:
    """Evaluate, train, evaluate again and write the report."""
    if launch is not None:
        given = {"--resume": resume, "--overwrite": overwrite, "--accept-changes": accept_changes}
        flags = [flag for flag, is_given in given.items() if is_given]
        raise typer.Exit(launch_run(launch, ["train", str(file), *(overrides or []), *flags], processes))
    if processes is not None:
        raise ConfigError(f"--processes {processes} needs --launch FILE (configs/accelerate/ddp.yaml and others)")
    from rloo_kit.checks.cheap import FolderUse, refuse_faults
    from rloo_kit.results.result import is_over, load_evaluation, load_result
    from rloo_kit.results.verdict import judge_run
    from rloo_kit.runs.run_dir import RunDir

    run = read_config(file, overrides)
    if resume and not accept_changes and is_over(run):
        result = load_result(run)
        verdict = judge_run(run, result, load_evaluation(run, "before"), load_evaluation(run, "after"))
        say(f"the run in {run.folder} is finished already (step {result.steps}); nothing was changed")
        say(verdict)
        say_activation()
        return
    refuse_faults(run, folder=FolderUse(resume, overwrite))
    with RunDir.create(run, resume=resume, overwrite=overwrite) as run_dir:
        words = ["rloo-kit", "train", str(file), *(overrides or []), *resume_words()]
        run_dir.resume_command = shlex.join([*words, "--resume"])
        run_dir.accepts_changes = accept_changes
        run_dir.set_status("running", command=shlex.join(words))
        try:
            policy, data = prepare(run)
            from rloo_kit.loop.run import run_and_report
            from rloo_kit.preflight.preflight import require_go
            from rloo_kit.rewarding.registry import build_rewards

            rewards = build_rewards(run, policy.tokenizer)
            if not run_dir.resumed:
                require_go(run, policy, data, rewards)
            stopped = run_and_report(run, policy, data, rewards, run_dir)
            say_activation()
        except KeyboardInterrupt:  # outside training, which handles its own
            say(f"interrupted; to go on: {run_dir.resume_command}")
            raise
    from rloo_kit.collective import end_processes

    end_processes()
    if stopped:
        raise typer.Exit(INTERRUPTED)


class BatchCommand(Command):
    """`batch` with its own exit code for refusals and unknown options: 2 means two runs that are not done."""

    refused = BATCH_REFUSED

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # click's UsageError, or typer's own copy of it
            if getattr(error, "exit_code", None) == REFUSED:
                vars(error)["exit_code"] = BATCH_REFUSED
            raise


@app.command(cls=BatchCommand)
def batch(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A batch's YAML file, for example configs/batch_arithmetic.yaml.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, for example parameters.max_steps=20."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Concurrent runs; default: the file's, else 1.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Run only what is missing or failed.")] = False,
    overwrite: Overwrite = False,
    json: JsonLine = False,
) -> None:
    """Run a notebook with many parameters, each run in a separate process, and compare the runs.

    Exit codes: 0 if every run is done, else the number of runs that are not
    (100: 100 or more); 125 refused, or an error of the batch itself;
    130 interrupted (Ctrl-C, SIGTERM, SIGHUP).
    """
    from rloo_kit.batch.file import load_batch
    from rloo_kit.batch.runner import run_batch

    words = [*(overrides or []), *([f"jobs={jobs}"] if jobs else [])]
    again = shlex.join(["rloo-kit", "batch", str(file), *words, "--resume"])
    result = run_batch(load_batch(file, *words), resume=resume, overwrite=overwrite, command=again)
    if json:
        print(dumps(result.to_dict()))
    raise typer.Exit(INTERRUPTED if result.interrupted else min(result.not_done, MOST_COUNTED))
