"""The table of docs/agent-skill.md: each row is measured by a test, compared, and written when it is asked for."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "agent-skill.md"
COLUMNS = ("installed with", "Node asked for", "where", "exit code", "installed", "equal to the tracked files")
CLAUDE_VERSION = "2.1.197"
PLUGIN_ROW = (f"`claude plugin` {CLAUDE_VERSION}", "user's folder, plugin")  # first and third column
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"


def read_rows() -> list[list[str]]:
    """The cells of the table's rows, in order."""
    text = PAGE.read_text(encoding="utf-8")
    assert HEAD in text, f"{PAGE.name} has no table that begins with\n{HEAD}"
    table = re.match(r"(?:\|.*\n)*", text.split(HEAD)[1])
    return [line.strip("| ").split(" | ") for line in table.group().splitlines()] if table else []


def check_row(row: Sequence[str]) -> None:
    """The row stands in the page as it was measured; with INSTALLERS_TABLE=write it is put there first."""
    line = f"| {' | '.join(row)} |"
    if os.environ.get("INSTALLERS_TABLE") == "write":
        _write_row(line, rf"\| {re.escape(row[0])} \| [^|]* \| {re.escape(row[2])} \|.*")
    measured = list(row) in read_rows()
    assert measured, f"measured, but not in {PAGE.name} (INSTALLERS_TABLE=write writes it):\n{line}"


def _write_row(line: str, old: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    text, replaced = re.subn(old, lambda _: line, text)
    if not replaced:
        end = text.index(HEAD) + len(HEAD) + sum(len(f"| {' | '.join(row)} |\n") for row in read_rows())
        text = text[:end] + line + "\n" + text[end:]
    PAGE.write_text(text, encoding="utf-8")
