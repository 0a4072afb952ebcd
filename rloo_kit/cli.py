"""The `rloo-kit` command line: parses, calls the functions of a notebook, prints.

Heavy libraries are imported inside the commands. Exit codes: 0 done, 1 doctor found a fault, the planned run does not
fit or the preflight says NO-GO, 2 refused, 130 interrupted; for `batch` see there.
"""

import errno
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from rloo_kit import __version__
from rloo_kit.errors import ConfigError, RlooKitError, RunNotFoundError
from rloo_kit.system.processes import (
    INTERRUPTED,
    REFUSED,
    count_processes,
    is_main_process,
    launch_run,
    process_index,
    resume_words,
    say,
)

if TYPE_CHECKING:  # slow to import
    from rloo_kit.config.run import RunConfig
    from rloo_kit.data.load import Data
    from rloo_kit.models.policy import Policy
    from rloo_kit.plan.result import VramPlan
    from rloo_kit.preflight.result import Preflight

BATCH_REFUSED, MOST_COUNTED = 125, 100  # of `batch`, whose small codes count runs
SECONDS_FOR_MAIN = 10.0
OF_THE_DISK = (  # what a file or its disk refuses is no fault of the program
    errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG,
    errno.EIO,
)  # fmt: skip

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="RLOO for Qwen3-Thinking models on one GPU, with a small model inside that learns on a laptop.",
)
ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="A run's YAML file, for example configs/x.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, for example rloo.beta=0.0")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete what is there and start again.")]


@contextmanager
def _exit_codes(refused: int = REFUSED) -> Iterator[None]:
    """Messages instead of tracebacks for the kit's own errors and for Ctrl-C; `batch` has a code for bugs too."""
    try:
        yield
    except RlooKitError as error:
        print(f"{_name_process()}: {error}", file=sys.stderr, flush=True)
        raise typer.Exit(refused) from None
    except KeyboardInterrupt:
        exec("")  # Python ends itself by SIGINT if an interrupt has once passed through its last exec of a text
        if is_main_process():
            print("rloo-kit: interrupted", file=sys.stderr, flush=True)
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None and error.errno in OF_THE_DISK:
            name = error.filename if error.filename2 is None else error.filename2
            print(f"rloo-kit: {name}: {error.strerror}", file=sys.stderr, flush=True)
            raise typer.Exit(refused) from None
        if refused == REFUSED:
            raise
        traceback.print_exc()
        raise typer.Exit(refused) from None


def _name_process() -> str:
    """The sender of an error. A process other than the main one waits first: where that leaves with the same error, the
    launcher ends the others, and the error appears once."""
    if is_main_process():
        return "rloo-kit"
    time.sleep(SECONDS_FOR_MAIN)
    return f"rloo-kit (process {process_index()} of {count_processes()})"


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rloo-kit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check everything about this machine that can be checked without a run."""
    from rloo_kit.system.doctor import run_doctor

    with _exit_codes():
        raise typer.Exit(run_doctor(json=json))


@app.command()
def init(
    model: Annotated[str | None, typer.Option("--model", help="Hub id, folder or embedded/thinking.")] = None,
    data: Annotated[str | None, typer.Option("--data", metavar="FILE", help="A .csv, .jsonl or .parquet file.")] = None,
    prompt_column: Annotated[str | None, typer.Option("--prompt-column", help="Its column with the prompts.")] = None,
    answer_column: Annotated[str | None, typer.Option("--answer-column", help="And that with the answers.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="The run's file, or a folder; ./DATA.yaml unless given."),
    ] = None,
    gpu_gib: Annotated[
        float | None, typer.Option("--gpu-gib", help="Fit a GPU with so many GiB instead of this machine.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Take what is proposed where a flag is missing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
) -> None:
    """Write a run's file for your own data that fits this machine, and a reward with its test."""
    with _exit_codes():
        from rloo_kit.starter.columns import guess_columns, read_columns
        from rloo_kit.starter.fit import suggest_model
        from rloo_kit.starter.table import check_column, find_data, read_table
        from rloo_kit.starter.write import write_starter

        def ask(flag: str, given: str | None, proposed: str | None) -> str:
            return given if given is not None else _ask(flag, proposed, yes)

        source = ask("--data", data, None)
        names = read_columns(find_data(source))
        guessed = guess_columns(names)
        prompts = check_column(ask("--prompt-column", prompt_column, guessed[0]), "--prompt-column", names)
        answers = check_column(ask("--answer-column", answer_column, guessed[1]), "--answer-column", names)
        table = read_table(source, prompts, answers)
        chosen = ask("--model", model, suggest_model(table, gpu_gib) if model is None else None)
        print(write_starter(chosen, table, output, gpu_gib, overwrite))


def _ask(flag: str, proposed: str | None, take_it: bool) -> str:
    """The value of a missing flag: the proposed one with --yes, else the answer that is typed at the terminal."""
    if take_it and proposed is not None:
        return proposed
    if take_it or not _can_ask():
        there = f" ({flag} {proposed}, say), or --yes takes what is proposed" if proposed else ""
        raise ConfigError(f"{flag} is missing, and nobody is there to be asked: give it{there}")
    answer: str = typer.prompt(flag.removeprefix("--").replace("-", " "), default=proposed)
    return answer


def _can_ask() -> bool:
    return sys.stdin.isatty()


@app.command()
def config(file: ConfigFile, overrides: Overrides = None) -> None:
    """Print the resolved run, every key with its value; what keeps it from starting here, as warnings."""
    with _exit_codes():
        run = _load_config(file, overrides)
        print(run.to_yaml(), end="", flush=True)
        from rloo_kit.preflight.cheap import find_faults

        for fault in find_faults(run):
            print(f"rloo-kit: warning: {fault}", file=sys.stderr)


@app.command()
def plan(
    file: ConfigFile,
    overrides: Overrides = None,
    gpu_gib: Annotated[
        float | None,
        typer.Option("--gpu-gib", "--card-gib", help="Plan for a GPU with so many GiB instead of this machine."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Then measure it here, with random weights of the model's shape.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute the memory that a run takes; exit code 1 where it does not fit, with what to change."""
    with _exit_codes():
        from rloo_kit.plan.planner import plan_vram

        run = _load_config(file, overrides)
        planned = plan_vram(run, gpu_gib)
        if not json:
            print(planned, flush=True)
        measured = _measure(run, planned, to_stderr=json) if measure else []
        if json:
            found = {"measured": [one.to_dict() for one in measured]} if measure else {}
            print(dumps(planned.to_dict() | found, indent=2))
    raise typer.Exit(0 if planned.fits and not any(one.error for one in measured) else 1)


@app.command()
def preflight(
    file: ConfigFile,
    overrides: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON; everything else goes to stderr.")] = False,
) -> None:
    """Find out in about a minute whether a run can learn: GO, or NO-GO with every problem; exit code 1 for NO-GO."""
    with _exit_codes():
        run = _load_config(file, overrides)
        with redirect_stdout(sys.stderr) if json else nullcontext():
            found = _check_preflight(run)
        print(dumps(found.to_dict(), indent=2) if json else found)
    raise typer.Exit(0 if found.go else 1)


def _check_preflight(run: "RunConfig") -> "Preflight":
    """The cheap half, and only behind a GO the whole with the model."""
    from rloo_kit.preflight.cheap import find_faults
    from rloo_kit.preflight.result import Preflight

    faults = find_faults(run)
    if any(fault.level == "error" for fault in faults):
        return Preflight(run.run.name or "", tuple(faults))
    policy, data = _prepare(run)
    import rloo_kit as kit

    return kit.check_preflight(run, policy, data, kit.build_rewards(run, policy.tokenizer))


def _measure(run: "RunConfig", planned: "VramPlan", to_stderr: bool) -> list[Any]:
    """What `plan --measure` finds; with `to_stderr` everything else that it prints goes there."""
    import rloo_kit as kit

    with redirect_stdout(sys.stderr) if to_stderr else nullcontext():
        print(kit.setup_environment(run.model.backend), flush=True)
        from rloo_kit.measure.plan import format_measured, measure_plan

        found = measure_plan(run, planned, say=lambda line: print(line, flush=True))
        print(format_measured(found), flush=True)
    return found


@app.command()
def train(
    file: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the run's last checkpoint.")] = False,
    overwrite: Overwrite = False,
    launch: Annotated[
        Path | None,
        typer.Option("--launch", metavar="LAUNCH", help="Several processes: configs/accelerate/ddp.yaml and others."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="With --launch: how many, if not as its file says.")
    ] = None,
) -> None:
    """Evaluate, train, evaluate again and write the report."""
    with _exit_codes():
        if launch is not None:
            flags = [*(["--resume"] if resume else []), *(["--overwrite"] if overwrite else [])]
            raise typer.Exit(launch_run(launch, ["train", str(file), *(overrides or []), *flags], processes))
        if processes is not None:
            raise ConfigError(f"--processes {processes} says how many --launch starts, which is not given")
        from rloo_kit.preflight.cheap import FolderUse, refuse_faults
        from rloo_kit.runs.run_dir import RunDir

        run = _load_config(file, overrides)
        refuse_faults(run, folder=FolderUse(resume, overwrite))
        with RunDir.create(run, resume=resume, overwrite=overwrite) as run_dir:
            words = ["rloo-kit", "train", str(file), *(overrides or []), *resume_words(), "--resume"]
            run_dir.resume_command = shlex.join(words)
            try:
                policy, data = _prepare(run)
                from rloo_kit.loop.run import run_and_report
                from rloo_kit.measure.preflight import require_go
                from rloo_kit.rewarding.registry import build_rewards

                rewards = build_rewards(run, policy.tokenizer)
                if not run_dir.resumed:
                    require_go(run, policy, data, rewards)
                stopped = run_and_report(run, policy, data, rewards, run_dir)
            except KeyboardInterrupt:  # outside training, which handles its own
                say(f"interrupted; to go on: {run_dir.resume_command}")
                raise
        from rloo_kit.collective import end_processes

        end_processes()
    if stopped:
        raise typer.Exit(INTERRUPTED)


@app.command("eval")
def evaluate(
    file: ConfigFile,
    overrides: Overrides = None,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="Folder of a trained adapter, or of its run.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON at the end, on one line.")] = False,
) -> None:
    """Measure a run's model on its held-out prompts: as it starts, or with a trained adapter."""
    with _exit_codes():
        run = _load_config(file, _with_adapter(overrides, adapter))
        policy, data = _prepare(run)
        from rloo_kit.collective import end_processes
        from rloo_kit.evals.evaluate import evaluate as measure

        found = measure(run, policy, data.test, label=f"of {adapter or run.model.name}")
        say(found)
        if json:
            say(dumps(found.to_dict()))
        end_processes()


@app.command()
def report(
    source: Annotated[Path, typer.Argument(metavar="FILE|FOLDER", help="A run's YAML file, or its folder.")],
    overrides: Overrides = None,
) -> None:
    """Write report.html again from what lies in a run's folder."""
    with _exit_codes():
        file = source / "config.yaml" if source.is_dir() else source
        if source.is_dir() and not file.is_file():
            raise RunNotFoundError(f"{source} has no config.yaml, so it is not the folder of a run")
        run = _load_config(file, overrides)
        if source.is_dir():  # wherever the folder has been moved to
            run.run.output_dir, run.run.name = str(source.resolve().parent), source.resolve().name
        from rloo_kit.results.report import load_evaluation, load_result, write_report

        result = load_result(run)
        path = write_report(run, result, load_evaluation(run, "before"), load_evaluation(run, "after"))
        print(f"report: {path}")


class BatchCommand(TyperCommand):
    """`batch` with its own exit code for unknown options: 2 means two runs that are not done."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # a UsageError of click, of which typer may bring its own
            if getattr(error, "exit_code", None) == REFUSED:
                vars(error)["exit_code"] = BATCH_REFUSED
            raise


@app.command(cls=BatchCommand)
def batch(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A batch's YAML file: configs/batch_arithmetic.yaml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, for example parameters.max_steps=20"),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Runs side by side; 1 unless the file says so.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Do what is missing or failed, and nothing else.")] = False,
    overwrite: Overwrite = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON at the end, on one line.")] = False,
) -> None:
    """Run a notebook with many parameters, each run in a process of its own, and compare the runs.

    Exit codes: 0 when every run is done, else the number of runs that are not (100 for 100 or more); 125 refused, or
    an error of the batch itself; 130 interrupted (Ctrl-C, SIGTERM, hang-up).
    """
    with _exit_codes(BATCH_REFUSED):
        from rloo_kit.batch.file import load_batch
        from rloo_kit.batch.runner import run_batch

        words = [*(overrides or []), *([f"jobs={jobs}"] if jobs else [])]
        command = shlex.join(["rloo-kit", "batch", str(file), *words, "--resume"])
        result = run_batch(load_batch(file, *words), resume=resume, overwrite=overwrite, command=command)
        if json:
            print(dumps(result.to_dict()))
    raise typer.Exit(INTERRUPTED if result.interrupted else min(result.not_done, MOST_COUNTED))


def _load_config(file: Path, overrides: list[str] | None) -> "RunConfig":
    """`load_config`, with its warnings as lines of stderr."""
    from rloo_kit.config.run import load_config

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FutureWarning)
        try:
            return load_config(file, *(overrides or []))
        finally:
            for warning in caught if is_main_process() else []:
                print(f"rloo-kit: {warning.message}", file=sys.stderr)


def _with_adapter(overrides: list[str] | None, adapter: Path | None) -> list[str]:
    """The overrides that load what was trained: an adapter, or a whole model where no adapter was."""
    words = list(overrides or [])
    if adapter is None:
        return words
    if not adapter.is_dir():
        raise RunNotFoundError(f"--adapter {adapter}: there is no such folder; a run writes outputs/NAME/adapter")
    is_adapter = (adapter / "adapter_config.json").is_file()
    if not is_adapter and not (adapter / "config.json").is_file() and (adapter / "adapter").is_dir():  # a run's folder
        return _with_adapter(words, adapter / "adapter")
    return [*words, f"model.adapter={adapter}" if is_adapter else f"model.name={adapter.resolve()}"]


def _prepare(run: "RunConfig") -> "tuple[Policy, Data]":
    """Set-up, policy and data, each with its line."""
    import rloo_kit as kit

    say(kit.setup_environment(run.model.backend))
    policy = kit.load_policy(run)
    say(f"policy: {policy.describe()}")
    data = kit.load_data(run, policy.tokenizer)
    say(f"data: {data}")
    return policy, data


def main() -> None:
    """Entry point of `rloo-kit`."""
    app()


if __name__ == "__main__":
    main()
