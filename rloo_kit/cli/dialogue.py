"""The dialogue of `rloo-kit ask`: questions at a prompt, with the turns before them."""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rloo_kit.errors import ConfigError, QuestionTooLongError, RlooKitError
from rloo_kit.system.console import fill_text

if TYPE_CHECKING:  # slow to import
    from rloo_kit.evals.asked import Asked

COMMANDS = (
    "(/base asks the base model too, /budget N closes thinking at N tokens, /reset forgets the turns, /quit or Ctrl-D "
    "ends; Ctrl-C stops an answer)"
)


class Dialogue:
    """Turns with a model.

    Args:
        options: those of `evals.ask.ask`; the commands change them.
        history: earlier turns are in the prompt, with their answers and without their thinking.
    """

    def __init__(self, asked: "Asked", options: dict[str, Any], history: bool) -> None:
        self._asked, self._options, self._history = asked, options, history
        self._turns: list[dict[str, str]] = []  # question, answer, question, answer

    def take(self, line: str) -> bool:
        """Answer a line, or do what a command says; False where it ends the dialogue."""
        command, _, value = line.partition(" ")
        if command in ("/quit", "/exit"):
            return False
        if command == "/reset":
            self._turns.clear()
        elif command == "/base":
            self._options["base"] = not self._options["base"]
            print(f"(the base model is {'asked too' if self._options['base'] else 'not asked any more'})")
        elif command == "/budget":
            self._set_budget(value.strip())
        elif line.startswith("/"):
            print(fill_text(COMMANDS))
        elif line:
            self._answer(line)
        return True

    def _set_budget(self, value: str) -> None:
        if value and not value.isdecimal():
            raise ConfigError(f"/budget takes a number of tokens, /budget 64 for one, and got {value!r}")
        self._options["budget"] = int(value) if value else None
        print(f"(thinking {f'is closed at {value} tokens' if value else 'has no budget'})")

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
                print("(the model has no room for all turns: the oldest is left out)")
        self._options["seed"] += 1
        if self._history and answer.answer:  # a template takes no empty turn
            self._turns += [asked, {"role": "assistant", "content": answer.answer}]


def hold_dialogue(asked: "Asked", options: dict[str, Any], history: bool | None) -> None:
    """Read and answer lines until Ctrl-D or /quit; Ctrl-C stops an answer.

    Args:
        history: None: kept, unless the model is none for it (`Asked.single`).
    """
    with suppress(ImportError):
        import readline  # noqa: F401 - input() then has a line editor
    print(fill_text(COMMANDS))
    if history is None and asked.single:
        print(fill_text(f"(each question stands alone: {asked.single}; --history keeps the turns)"))
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
