"""The command `ask`: asks a trained model a question, or holds a dialogue at a prompt, with the earlier turns."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from rloo_kit.cli.common import app, exit_codes, with_warnings_as_lines
from rloo_kit.errors import ConfigError, QuestionTooLongError, RlooKitError
from rloo_kit.system.console import fill_text

if TYPE_CHECKING:  # slow to import
    from rloo_kit.evals.ask import TrainedModel

COMMANDS = (
    "(/base toggles the base model, /budget N closes thinking after N tokens, /reset forgets earlier turns, /quit or "
    "Ctrl-D ends; Ctrl-C stops an answer)"
)


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
        asked = list(questions or [])
        if not asked and not (sys.stdin is not None and sys.stdin.isatty()):
            asked = ["" if sys.stdin is None else sys.stdin.read().strip()]
            if not asked[0]:
                raise ConfigError('there is no question: rloo-kit ask RUN "58+67=", or pipe one in')
        if json and not asked:
            raise ConfigError('--json needs a question: rloo-kit ask RUN "58+67=" --json')
        from rloo_kit import setup_environment
        from rloo_kit.runs.exported import origin_of

        run = with_warnings_as_lines(origin_of, source, *(overrides or []))
        setup_environment(run.model.backend)
        from rloo_kit.evals.ask import TrainedModel

        model = TrainedModel(source, *(overrides or []))
        options: dict[str, Any] = {"base": base, "budget": budget, "temperature": temperature, "max_tokens": max_tokens}
        options |= {"seed": seed, "system": system}
        if not asked:
            print(fill_text(COMMANDS))
            Dialogue(model, options, history).hold()
        for question in asked:
            answer = model.ask(question, stream=not json, **options)
            if json:
                print(dumps(asdict(answer)), file=out, flush=True)


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


class Dialogue:
    """A conversation with a model.

    Args:
        options: those of `evals.ask.ask`; the commands change them.
        history: whether earlier turns are in the prompt, with their answers, without their thinking. None: unless the
            model takes single questions only (`TrainedModel.single`).
    """

    def __init__(self, asked: "TrainedModel", options: dict[str, Any], history: bool | None) -> None:
        self._asked, self._options = asked, options
        self._history = not asked.single if history is None else history
        self._turns: list[dict[str, str]] = []  # question, answer, question, answer
        if history is None and asked.single:
            print(fill_text(f"(each question is asked alone: {asked.single}; --history keeps earlier turns)"))

    def hold(self) -> None:
        """Read and answer lines until Ctrl-D or /quit; Ctrl-C stops an answer."""
        with suppress(ImportError):
            import readline  # noqa: F401 - gives input() a line editor
        while True:
            try:
                if not self.take(input("> ").strip()):
                    return
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("(stopped; Ctrl-D ends)")
            except RlooKitError as error:
                print(fill_text(f"rloo-kit: {error}"), file=sys.stderr)

    def take(self, line: str) -> bool:
        """Answer a line or run a command; False if it ends the dialogue."""
        command, _, value = line.partition(" ")
        if command in ("/quit", "/exit"):
            return False
        if command == "/reset":
            self._turns.clear()
        elif command == "/base":
            self._options["base"] = not self._options["base"]
            print(f"(the base model is {'asked too' if self._options['base'] else 'no longer asked'})")
        elif command == "/budget":
            if value.strip() and not value.strip().isdecimal():
                raise ConfigError(f"/budget takes a number of tokens, for example /budget 64; got {value.strip()!r}")
            self._options["budget"] = int(value) if value.strip() else None
            print(f"(thinking {f'is closed after {int(value)} tokens' if value.strip() else 'has no budget'})")
        elif line.startswith("/"):
            print(fill_text(COMMANDS))
        elif line:
            self._answer(line)
        return True

    def _answer(self, question: str) -> None:
        asked = {"role": "user", "content": question}
        while True:
            try:
                answer = self._asked.ask([*self._turns, asked] if self._turns else question, **self._options)
                break
            except QuestionTooLongError:
                if not self._turns:
                    raise
                del self._turns[:2]
                print("(the turns exceed the model's context: the oldest is dropped)")
        self._options["seed"] += 1
        if self._history and answer.answer:  # a template takes no empty turn
            self._turns += [asked, {"role": "assistant", "content": answer.answer}]
