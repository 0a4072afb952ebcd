"""The command `ask`: asks a trained model a question, or starts a dialogue."""

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
        Path, typer.Argument(metavar="RUN", help="A run's folder or config, or a folder of exported weights.")
    ],
    questions: Annotated[
        list[str] | None, typer.Argument(metavar="[QUESTION]...", help="Questions. Without any: a pipe, or a dialogue.")
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="Ask the base model first, for comparison.")] = False,
    budget: Annotated[int | None, typer.Option("--budget", min=0, help="Close thinking after N tokens.")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0, help="0 is greedy; default: eval.temperature.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Maximum tokens per completion; default: the run's limit.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Sampling seed.")] = 0,
    system: Annotated[str | None, typer.Option("--system", help="System prompt; default: data.system_prompt.")] = None,
    history: Annotated[
        bool | None,
        typer.Option(
            "--history/--no-history",
            help="Keep earlier turns of the dialogue in the prompt; default: yes, except for embedded models.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Config override; repeat for more.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print only one JSON object per question.")] = False,
) -> None:
    """Ask a trained model: thinking is printed dim, the answer plain. Without a question, start a dialogue."""
    with exit_codes(), _stdout_for_answers(json) as out:
        asked = _piped(questions or [])
        if json and not asked:
            raise ConfigError('--json needs a question: rloo-kit ask RUN "58+67=" --json')
        from rloo_kit import setup_environment
        from rloo_kit.runs.exported import origin_of

        run = with_warnings_as_lines(origin_of, source, *(overrides or []))
        setup_environment(run.model.backend)
        from rloo_kit.evals.ask import open_model

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
    """The questions; if there are none, the piped input."""
    if questions or (sys.stdin is not None and sys.stdin.isatty()):
        return questions
    text = "" if sys.stdin is None else sys.stdin.read().strip()
    if not text:
        raise ConfigError('there is no question: rloo-kit ask RUN "58+67=", or pipe one in')
    return [text]


@contextmanager
def _stdout_for_answers(json: bool) -> Iterator[TextIO]:
    """The stream for answers. With `--json` all other output goes to stderr, including what C libraries write."""
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
