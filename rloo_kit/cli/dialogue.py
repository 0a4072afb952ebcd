"""The dialogue of `rloo-kit ask`: questions at a prompt, with the earlier turns."""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rloo_kit.errors import ConfigError, QuestionTooLongError, RlooKitError
from rloo_kit.system.console import fill_text

if TYPE_CHECKING:  # slow to import
    from rloo_kit.evals.ask import TrainedModel

COMMANDS = (
    "(/base toggles the base model, /budget N closes thinking after N tokens, /reset forgets earlier turns, /quit or "
    "Ctrl-D ends; Ctrl-C stops an answer)"
)


class Dialogue:
    """A conversation with a model.

    Args:
        options: those of `evals.ask.ask`; the commands change them.
        history: whether earlier turns are in the prompt, with their answers, without their thinking.
    """

    def __init__(self, asked: "TrainedModel", options: dict[str, Any], history: bool) -> None:
        self._asked, self._options, self._history = asked, options, history
        self._turns: list[dict[str, str]] = []  # question, answer, question, answer

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
            self._set_budget(value.strip())
        elif line.startswith("/"):
            print(fill_text(COMMANDS))
        elif line:
            self._answer(line)
        return True

    def _set_budget(self, value: str) -> None:
        if value and not value.isdecimal():
            raise ConfigError(f"/budget takes a number of tokens, for example /budget 64; got {value!r}")
        self._options["budget"] = int(value) if value else None
        print(f"(thinking {f'is closed after {value} tokens' if value else 'has no budget'})")

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


def hold_dialogue(asked: "TrainedModel", options: dict[str, Any], history: bool | None) -> None:
    """Read and answer lines until Ctrl-D or /quit; Ctrl-C stops an answer.

    Args:
        history: None: keep earlier turns, unless the model takes single questions only (`TrainedModel.single`).
    """
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() a line editor
    print(fill_text(COMMANDS))
    if history is None and asked.single:
        print(fill_text(f"(each question is asked alone: {asked.single}; --history keeps earlier turns)"))
    dialogue = Dialogue(asked, options, not asked.single if history is None else history)
    while True:
        try:
            if not dialogue.take(input("> ").strip()):
                return
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("(stopped; Ctrl-D ends)")
        except RlooKitError as error:
            print(fill_text(f"rloo-kit: {error}"), file=sys.stderr)
