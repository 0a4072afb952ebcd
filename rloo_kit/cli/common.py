"""Shared by the commands: the app, arguments, exit codes, reading a config file, loading policy and data."""

import errno
import os
import shlex
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from rloo_kit import __version__
from rloo_kit.errors import RlooKitError, shorten
from rloo_kit.runs.files import is_disk_full
from rloo_kit.system.console import fill_text, print_table
from rloo_kit.system.processes import INTERRUPTED, REFUSED, count_processes, is_main_process, process_index, say

if TYPE_CHECKING:  # slow to import
    from rloo_kit.config.run import RunConfig
    from rloo_kit.data.load import Data
    from rloo_kit.models.policy import Policy

SECONDS_FOR_MAIN = 10.0
OF_THE_DISK = (  # errors of a file or its disk, not of the program
    errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG,
    errno.EIO,
)  # fmt: skip

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="RLOO for Qwen3-Thinking models on one GPU, with a built-in small model that trains on a laptop.",
)
ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="A run's config, for example configs/x.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, for example rloo.beta=0.0.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete existing output and start over.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonLine = Annotated[bool, typer.Option("--json", help="Print JSON at the end, on one line.")]


class Command(TyperCommand):
    """A command that ends with the kit's messages and exit codes; `refused` is that of a refusal."""

    refused = REFUSED

    def invoke(self, ctx: Any) -> Any:
        with exit_codes(self.refused):
            return super().invoke(ctx)


command = partial(app.command, cls=Command)


@contextmanager
def exit_codes(refused: int = REFUSED) -> Iterator[None]:
    """Messages instead of tracebacks for the kit's own errors and Ctrl-C; `batch` also has an exit code for bugs."""
    try:
        yield
    except typer.Exit:
        raise
    except RlooKitError as error:
        name = "rloo-kit"
        if not is_main_process():  # if the main one exits with the same error, the launcher ends this one: printed once
            time.sleep(SECONDS_FOR_MAIN)
            name = f"rloo-kit (process {process_index()} of {count_processes()})"
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        raise typer.Exit(refused) from None
    except KeyboardInterrupt:
        exec("")  # otherwise Python exits through SIGINT if an interrupt once passed through its last exec of a string
        if is_main_process():
            print("rloo-kit: interrupted", file=sys.stderr, flush=True)
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        why = ""
        if is_disk_full(error):
            found = f"{type(error).__name__}: {shorten(str(error))}"
            why = f"the disk is full, or a quota is used up ({found}): free some space, then repeat the command"
        elif isinstance(error, OSError) and error.filename is not None and error.errno in OF_THE_DISK:
            why = f"{error.filename if error.filename2 is None else error.filename2}: {error.strerror}"
        if not why and refused == REFUSED:
            raise
        print(f"rloo-kit: {why}" if why else traceback.format_exc(), file=sys.stderr, flush=True)
        raise typer.Exit(refused) from None


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


def print_found(found: Any, json: bool) -> None:
    """Print a result, as a table or as JSON."""
    if json:
        print(dumps(found.to_dict(), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print_table(found)


def read_config(file: Path, overrides: list[str] | None) -> "RunConfig":
    """`load_config`, with its warnings as lines on stderr."""
    from rloo_kit.config.run import load_config

    return with_warnings_as_lines(load_config, file, *(overrides or []))


def with_warnings_as_lines(read: "Callable[..., RunConfig]", *arguments: Any) -> "RunConfig":
    """Call `read` and print its warnings as lines on stderr. Later calls in the same command do not repeat them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FutureWarning)
        try:
            found = read(*arguments)
        finally:
            for warning in caught if is_main_process() else []:
                print(f"rloo-kit: {warning.message}", file=sys.stderr)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"rloo_kit\.")
    return found


def find_run(source: Path, overrides: list[str] | None) -> "RunConfig":
    """`read_config` of a run's config file or of its folder, even if the folder was moved."""
    from rloo_kit.runs.find import config_file, place_run

    run = read_config(config_file(source), overrides)
    if source.is_dir():
        place_run(run, source)
    return run


def say_activation() -> None:
    """Print how to activate the environment, after printed next commands, if the shell does not find `rloo-kit`."""
    script = Path(sys.prefix, "bin", "activate")
    if shutil.which("rloo-kit") is None and script.is_file():
        nearby = os.path.relpath(script)
        say(f"  (first, once per shell: source {shlex.quote(nearby if nearby[:2] != '..' else str(script))})")


def prepare(run: "RunConfig") -> "tuple[Policy, Data]":
    """Set up, load policy and data, and print a line for each."""
    import rloo_kit as kit

    say(kit.setup_environment(run.model.backend).describe())
    started = time.monotonic()
    policy = kit.load_policy(run)
    say(fill_text(f"policy: {policy.describe()}, loaded in {time.monotonic() - started:.0f} s"))
    data = kit.load_data(run, policy.tokenizer)
    say(f"data: {data}")
    return policy, data
