"""The command `ask`: questions to a trained model, or a dialogue with it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from rloo_kit.cli.common import app, exit_codes, with_warnings_as_lines
from rloo_kit.cli.dialogue import hold_dialogue
from rloo_kit.errors import ConfigError


@app.command()
def ask(
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's folder or YAML file, or a folder of exported weights.")
    ],
    questions: Annotated[
        list[str] | None, typer.Argument(metavar="[QUESTION]...", help="None: from a pipe, or a dialogue.")
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="Ask the base model too, first.")] = False,
    budget: Annotated[int | None, typer.Option("--budget", min=0, help="Close thinking at so many tokens.")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0, help="0: greedy; eval.temperature unless given.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Tokens of an answer; the run's limit unless given.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the sampling.")] = 0,
    system: Annotated[str | None, typer.Option("--system", help="In place of data.system_prompt.")] = None,
    history: Annotated[
        bool | None,
        typer.Option("--history/--no-history", help="Dialogue: earlier turns in the prompt; not for embedded models."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override of the run, again for more.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a question, nothing else.")] = False,
) -> None:
    """Ask a trained model: its thinking is printed dim, its answer plain. Without a question, a dialogue."""
    with exit_codes(), _stdout_for_answers(json) as out:
        asked = _piped(questions or [])
        if json and not asked:
            raise ConfigError('--json answers questions: rloo-kit ask RUN "58+67=" --json')
        from rloo_kit import setup_environment
        from rloo_kit.runs.exported import origin_of

        run = with_warnings_as_lines(origin_of, source, *(overrides or []))
        setup_environment(run.model.backend)
        from rloo_kit.evals.asked import open_model

        model = open_model(source, *(overrides or []))
        options: dict[str, Any] = {"base": base, "budget": budget, "temperature": temperature, "max_tokens": max_tokens}
        options |= {"seed": seed, "system": system}
        if not asked:
            hold_dialogue(model, options, history)
        for question in asked:
            answer = model.ask(question, stream=not json, **options)
            if json:
                print(dumps(asdict(answer)), file=out, flush=True)


def _piped(questions: list[str]) -> list[str]:
    """The questions; what is piped in where there are none."""
    if questions or (sys.stdin is not None and sys.stdin.isatty()):
        return questions
    text = "" if sys.stdin is None else sys.stdin.read().strip()
    if not text:
        raise ConfigError('there is no question: rloo-kit ask RUN "58+67=", or a pipe that is not empty')
    return [text]


@contextmanager
def _stdout_for_answers(json: bool) -> Iterator[TextIO]:
    """What answers are printed to. For `--json` all else goes to stderr, also what libraries write in C."""
    if not json:
        yield sys.stdout
        return
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out, redirect_stdout(sys.stderr):
        os.dup2(2, 1)
        try:
            yield out
        finally:
            os.dup2(out.fileno(), 1)
