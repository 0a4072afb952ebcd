"""The commands after a run: eval, report, show."""

from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from rloo_kit.cli.common import (
    ConfigFile,
    Json,
    JsonLine,
    Overrides,
    command,
    find_run,
    prepare,
    print_found,
    read_config,
)
from rloo_kit.errors import ConfigError
from rloo_kit.system.console import fill_text
from rloo_kit.system.processes import say


@command("eval")
def evaluate(
    file: ConfigFile,
    overrides: Overrides = None,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="Folder of a trained adapter or of its run.")
    ] = None,
    json: JsonLine = False,
) -> None:
    """Evaluate a run's initial model, or a trained adapter, on its held-out prompts."""
    from rloo_kit.config.yaml_files import write_value
    from rloo_kit.runs.find import weights_of

    overrides = list(overrides or [])
    if adapter is not None:
        key, folder = weights_of(adapter, "--adapter")
        overrides.append(f"model.{key}={write_value(str(folder))}")
    run = read_config(file, overrides)
    policy, data = prepare(run)
    from rloo_kit.collective import end_processes
    from rloo_kit.evals.evaluate import evaluate as measure

    found = measure(run, policy, data.test, label=f"of {adapter or run.model.name}")
    say(found)
    if json:
        say(dumps(found.to_dict() | {"more_samples": []}))
    end_processes()


@command()
def report(
    sources: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Folders of runs, or their configs; then KEY=VALUE.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="With several runs: the page; default: comparison.html."),
    ] = None,
) -> None:
    """Rebuild report.html from a run's folder, or write a page that compares several runs."""
    runs = [Path(word) for word in sources if "=" not in word or Path(word).exists()]
    overrides = [word for word in sources if Path(word) not in runs]
    if len(runs) > 1:
        if overrides:
            raise ConfigError(f"{overrides[0]}: a comparison of several runs takes no overrides")
        from rloo_kit.results.versus import compare_runs
        from rloo_kit.results.versus_page import write_comparison_page

        found = compare_runs(runs)
        page = output or found.runs[0].result.folder.parent / "comparison.html"
        print(fill_text(found.sentence))
        print(f"comparison: {write_comparison_page(found, page)}")
        return
    if not runs or output is not None:
        raise ConfigError("--output needs several runs" if runs else "name a run: its folder or its config")
    run = find_run(runs[0], overrides)
    from rloo_kit.results.report import write_report
    from rloo_kit.results.result import load_evaluation, load_result

    result = load_result(run)
    path = write_report(run, result, load_evaluation(run, "before"), load_evaluation(run, "after"))
    print(f"report: {path}")


@command()
def show(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or their configs.")],
    completions: Annotated[
        int | None, typer.Option("--completions", min=0, help="Show N completions of one step.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="Step of the completions; default: the last.")] = None,
    order: Annotated[str, typer.Option("--order", help="Which completions: first, best, worst or longest.")] = "first",
    max_chars: Annotated[int, typer.Option("--max-chars", min=10, help="Maximum characters per text.")] = 1500,
    last: Annotated[int, typer.Option("--last", min=1, help="Logged steps to average.")] = 10,
    json: Json = False,
) -> None:
    """Show a run's outcome, its completions, or several runs. Exit code 1 if the run failed or is alarming."""
    found: Any
    code = 0
    asks_completions = completions is not None or step is not None
    if len(runs) > 1:
        if asks_completions:
            raise ConfigError(f"--completions and --step take one run; got {len(runs)}")
        from rloo_kit.results.versus import compare_runs

        found = compare_runs(runs)
    elif asks_completions:
        from rloo_kit.results.completions import pick_completions

        found = pick_completions(runs[0], step, 4 if completions is None else completions, order, max_chars)
    else:
        from rloo_kit.results.overview import describe_run

        found = describe_run(runs[0], last)
        code = int(found.status.get("state") == "failed" or found.level == "alarming")
    print_found(found, json)
    raise typer.Exit(code)
