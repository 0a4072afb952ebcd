"""The pages of the skill, taken apart: their code blocks and the code in their sentences."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", flags=re.M | re.S)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PROGRAMS = ("rloo-kit", "python", "python3", "papermill", "npx", "make", "pip")


@dataclass(frozen=True)
class Block:
    """A piece of code and where it stands; `page` is its path from the root, `line` its first line."""

    page: str
    line: int
    code: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One simple command: its words, quotes and redirections taken off."""

    place: str
    words: tuple[str, ...]


def list_pages() -> list[Path]:
    return [ROOT / "SKILL.md", *sorted((ROOT / "references").glob("*.md"))]


def read_pages() -> list[tuple[str, str]]:
    """Path from the root and text of each page."""
    return [(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in list_pages()]


def find_blocks(page: str, text: str, language: str) -> list[Block]:
    """The fenced blocks of one language, also those that are indented as part of a list."""
    return [
        Block(page, text[: found.start()].count("\n") + 2, textwrap.dedent(found["code"]))
        for found in FENCE.finditer(text)
        if found["language"] == language
    ]


def find_inline_commands(page: str, text: str) -> list[Block]:
    """Commands in the sentences and tables of a page."""
    prose = FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)
    return [
        Block(page, prose[: found.start()].count("\n") + 1, found[1].replace("\\|", "|"))
        for found in INLINE.finditer(prose)
        if found[1].split()[0] in PROGRAMS and len(found[1].split()) > 1
    ]


def find_shell(page: str, text: str) -> list[Block]:
    return find_blocks(page, text, "bash") + find_inline_commands(page, text)


def split_commands(block: Block) -> Iterator[Command]:
    """The simple commands of a block, line by line; words of the shell's own (for, do, done, ...) are dropped."""
    code = block.code.replace("\\\n", " ")
    for line in code.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word and set(word) <= set(";&|()"):
                words = drop_shell_words(words)
                if words:
                    yield Command(block.place, tuple(words))
                words = []
            else:
                words.append(word)


def drop_shell_words(words: list[str]) -> list[str]:
    """Without keywords, assignments and redirections; a `for NAME in ...` is nothing to run."""
    if words[:1] == ["for"]:
        return []
    while words and (words[0] in ("do", "done", "then", "fi", "nohup", "export") or re.match(r"\w+=", words[0])):
        words = words[1:]
    for index, word in enumerate(words):
        if set(word) <= set("<>") and word:
            words = words[:index]
            break
    return [word for word in words if word]
