"""`rloo-kit show`: a run, its completions, or several runs side by side, in the terminal or as JSON."""

from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from rloo_kit.cli.common import app, exit_codes
from rloo_kit.errors import ConfigError
from rloo_kit.system.console import print_table


@app.command()
def show(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or their configs.")],
    completions: Annotated[
        int | None, typer.Option("--completions", min=0, help="Show N completions of one step.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="Step of the completions; default: the last.")] = None,
    order: Annotated[str, typer.Option("--order", help="Which completions: first, best, worst or longest.")] = "first",
    max_chars: Annotated[int, typer.Option("--max-chars", min=10, help="Maximum characters per text.")] = 1500,
    last: Annotated[int, typer.Option("--last", min=1, help="Logged steps to average.")] = 10,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a run's outcome, its completions, or several runs. Exit code 1 if the run failed or is alarming."""
    with exit_codes():
        found: Any
        code = 0
        asks = completions is not None or step is not None
        if asks and len(runs) > 1:
            raise ConfigError(f"--completions and --step take one run; got {len(runs)}")
        if len(runs) > 1:
            from rloo_kit.results.versus import compare_runs

            found = compare_runs(runs)
        elif asks:
            from rloo_kit.results.completions import pick_completions

            num = 4 if completions is None else completions
            found = pick_completions(runs[0], step, num, order, max_chars)
        else:
            from rloo_kit.results.overview import describe_run

            found = describe_run(runs[0], last)
            code = int(found.status.get("state") == "failed" or found.level == "alarming")
        if json:
            print(dumps(found.to_dict(), indent=2, ensure_ascii=False, allow_nan=False))
        else:
            print_table(found)
    raise typer.Exit(code)
