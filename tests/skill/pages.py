"""The pages of the skill, taken apart: their code blocks and the code in their sentences."""

import re
import shlex
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", flags=re.M | re.S)
INLINE = re.compile(r"(?<!`)`((?:rloo-kit|python3?|papermill|npx|make|pip) [^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A piece of code and where it stands; `page` is its path from the root, `line` its first line."""

    page: str
    line: int
    code: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def list_tracked() -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [name for name in listing.split("\0") if name and (ROOT / name).exists()]


def copy_skill(folder: Path) -> None:
    """The tracked files of the repository as they are now, links as links."""
    for name in list_tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)


def read_pages() -> list[tuple[str, str]]:
    """Path from the root and text of each page."""
    paths = [ROOT / "SKILL.md", *sorted((ROOT / "references").glob("*.md"))]
    paths += [ROOT / "docs" / "rewarding.md", ROOT / "docs" / "plan.md"]
    return [(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def find_blocks(page: str, text: str, language: str) -> list[Block]:
    """The fenced blocks of one language, also those that are indented as part of a list."""
    return [
        Block(page, text[: found.start()].count("\n") + 2, textwrap.dedent(found["code"]))
        for found in FENCE.finditer(text)
        if found["language"] == language
    ]


def find_shell(page: str, text: str) -> list[Block]:
    """The shell blocks, and the commands in sentences and tables."""
    prose = FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)
    return find_blocks(page, text, "bash") + [
        Block(page, prose[: found.start()].count("\n") + 1, found[1].replace("\\|", "|"))
        for found in INLINE.finditer(prose)
    ]


def split_commands(code: str) -> Iterator[list[str]]:
    """The words of each simple command, line by line, without quotes, keywords of the shell, assignments and
    redirections; a `for NAME in ...` is nothing to run."""
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not word or set(word) - set(";&|()"):
                words.append(word)
                continue
            end = next((index for index, word in enumerate(words) if word and set(word) <= set("<>")), len(words))
            kept = [word for word in words[:end] if word]
            while kept and (kept[0] in ("do", "done", "then", "fi", "nohup", "export") or re.match(r"\w+=", kept[0])):
                kept = kept[1:]
            if kept and kept[0] != "for":
                yield kept
            words = []
