"""The commands before a run: doctor, init, config, plan, preflight."""

import sys
from contextlib import nullcontext, redirect_stdout
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from rloo_kit.cli.common import (
    ConfigFile,
    Json,
    Overrides,
    app,
    command,
    exit_codes,
    prepare,
    print_found,
    read_config,
    say_activation,
)
from rloo_kit.errors import ConfigError


@command()
def doctor(json: Json = False) -> None:
    """Check this machine: GPU, libraries, cache, environment variables."""
    from rloo_kit.system.doctor import check_installation

    found = check_installation()
    print_found(found, json)
    raise typer.Exit(found.exit_code)


@app.command()
def init(
    model: Annotated[str | None, typer.Option("--model", help="Hub id, local folder or embedded/thinking.")] = None,
    data: Annotated[str | None, typer.Option("--data", metavar="FILE", help="A .csv, .jsonl or .parquet file.")] = None,
    prompt_column: Annotated[str | None, typer.Option("--prompt-column", help="Column with the prompts.")] = None,
    answer_column: Annotated[str | None, typer.Option("--answer-column", help="Column with the answers.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Config file to write, or its folder; default: ./DATA.yaml."),
    ] = None,
    gpu_gib: Annotated[
        float | None, typer.Option("--gpu-gib", help="Fit a GPU with this many GiB instead of this machine.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Accept the proposed value of every missing flag.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Write a config for your own data that fits this machine, and a reward with its test."""
    with exit_codes():
        from rloo_kit.checks.starter import (
            check_column,
            guess_columns,
            read_columns,
            read_table,
            suggest_model,
            write_starter,
        )

        def ask(flag: str, given: str | None, proposed: str | None) -> str:
            return given if given is not None else _ask(flag, proposed, yes)

        source = ask("--data", data, None)
        names = read_columns(source)
        guessed = guess_columns(names)
        prompts = check_column(ask("--prompt-column", prompt_column, guessed[0]), "--prompt-column", names)
        answers = check_column(ask("--answer-column", answer_column, guessed[1]), "--answer-column", names)
        table = read_table(source, prompts, answers)
        chosen = ask("--model", model, suggest_model(table, gpu_gib) if model is None else None)
        print(write_starter(chosen, table, output, gpu_gib, overwrite))
        say_activation()


def _ask(flag: str, proposed: str | None, take_it: bool) -> str:
    """The value of a missing flag: the proposed one with --yes, else typed at the terminal."""
    if take_it and proposed is not None:
        return proposed
    if take_it or not _can_ask():
        there = f" (for example {flag} {proposed}), or accept the proposed values with --yes" if proposed else ""
        raise ConfigError(f"{flag} is missing, and there is no terminal to ask at: pass it{there}")
    answer: str = typer.prompt(flag.removeprefix("--").replace("-", " "), default=proposed)
    return answer


def _can_ask() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


@command()
def config(file: ConfigFile, overrides: Overrides = None) -> None:
    """Print the resolved config with every key, and warnings for what would stop the run on this machine."""
    run = read_config(file, overrides)
    print(run.to_yaml(), end="", flush=True)
    from rloo_kit.checks.cheap import find_faults

    for fault in find_faults(run):
        print(f"rloo-kit: warning: {fault}", file=sys.stderr)


@app.command()
def plan(
    file: ConfigFile,
    overrides: Overrides = None,
    gpu_gib: Annotated[
        float | None,
        typer.Option("--gpu-gib", "--card-gib", help="Plan for a GPU with this many GiB instead of this machine."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute a run's memory from its config alone. Exit code 1 if it does not fit, with what to change."""
    with exit_codes():
        from rloo_kit.plan.planner import plan_vram

        planned = plan_vram(read_config(file, overrides), gpu_gib)
        print(dumps(planned.to_dict(), indent=2) if json else planned)
    raise typer.Exit(0 if planned.fits else 1)


@app.command()
def preflight(
    file: ConfigFile,
    overrides: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON; everything else goes to stderr.")] = False,
) -> None:
    """Check whether a run can learn, in about a rollout's time: GO, or NO-GO with every problem and exit code 1."""
    with exit_codes():
        run = read_config(file, overrides)
        with redirect_stdout(sys.stderr) if json else nullcontext():
            from rloo_kit.checks.cheap import find_faults
            from rloo_kit.checks.result import Preflight
            from rloo_kit.system.problems import errors_of

            faults = find_faults(run)
            found = Preflight(run.run.name or "", tuple(faults))
            if not errors_of(faults):  # the checks without the model come first
                policy, data = prepare(run)
                import rloo_kit as kit

                found = kit.check_preflight(run, policy, data, kit.build_rewards(run, policy.tokenizer))
        print(dumps(found.to_dict(), indent=2) if json else found)
    raise typer.Exit(0 if found.go else 1)
