"""Count words that read as translated, and the field's words for the same things, in the repository's text.

    python benchmarks/words.py                     # the working tree
    python benchmarks/words.py 73c885f HEAD        # commits, side by side

Whole words in tracked text files, code and prose alike, without results and pictures. "card" counts where it means a
GPU; a model card is the field's word.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = (":!benchmarks/results", ":!docs/pictures", ":!benchmarks/words.py")
AVOIDED = {
    "beside": r"\bbeside\b",
    "anew": r"\banew\b",
    "told": r"\btold\b",
    "mend, mended": r"\bmend(ed|s|ing)?\b",
    "card, cards (a GPU)": r"(?<!model )(?<!model_)\bcards?\b(?! of a model)",
    "nobody": r"\bnobody\b",
    "in silence": r"\bin silence\b",
    "of its own": r"\bof its own\b",
    "worked solutions": r"\bworked (answers?|solutions?)\b",
}
USED = {"GPU, GPUs": r"\bGPUs?\b", "VRAM": r"\bVRAM\b", "held-out": r"\bheld[- ]out\b"}


def count(revision: str | None = None) -> dict[str, int]:
    """How often each word occurs at a revision, or in the working tree; "words" has the size of the Markdown."""
    command = ["git", "grep", "-I", "-h", "-e", "", *([revision] if revision else []), "--", ".", *LEFT_OUT]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True).stdout
    command[-1 - len(LEFT_OUT)] = "*.md"
    pages = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True).stdout
    found = {name: len(re.findall(word, text, re.IGNORECASE)) for name, word in (AVOIDED | USED).items()}
    return found | {"words of Markdown": len(pages.split())}


def main() -> None:
    revisions: list[str | None] = [*sys.argv[1:]] or [None]
    columns = [count(revision) for revision in revisions]
    heads = [(revision or "now")[:9] for revision in revisions]
    for row in ("", *columns[0]):
        cells = [column[row] for column in columns] if row else heads
        print(f"{row:<22}" + "".join(f"{cell:>10}" for cell in cells))


if __name__ == "__main__":
    main()
