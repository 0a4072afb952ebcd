"""The commands after a run: eval, report."""

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from rloo_kit.cli.common import ConfigFile, Overrides, app, exit_codes, find_run, prepare, read_config
from rloo_kit.system.processes import say


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
    with exit_codes():
        from rloo_kit.runs.find import weights_of

        run = read_config(file, [*(overrides or []), *([] if adapter is None else weights_of(adapter, "--adapter"))])
        policy, data = prepare(run)
        from rloo_kit.collective import end_processes
        from rloo_kit.evals.evaluate import evaluate as measure

        found = measure(run, policy, data.test, label=f"of {adapter or run.model.name}")
        say(found)
        if json:
            say(dumps(found.to_dict() | {"more_samples": []}))
        end_processes()


@app.command()
def report(
    source: Annotated[Path, typer.Argument(metavar="FILE|FOLDER", help="A run's YAML file, or its folder.")],
    overrides: Overrides = None,
) -> None:
    """Write report.html again from what lies in a run's folder."""
    with exit_codes():
        run = find_run(source, overrides)
        from rloo_kit.results.report import write_report
        from rloo_kit.results.result import load_evaluation, load_result

        result = load_result(run)
        path = write_report(run, result, load_evaluation(run, "before"), load_evaluation(run, "after"))
        print(f"report: {path}")
