"""Completions beside each other as HTML for a notebook's output, and as text.

The HTML has inline styles only, of properties and values that JupyterLab leaves in the outputs of a notebook that is
not trusted; it takes the page's colours, and its own have a contrast of more than 4 : 1 to a white and to a dark
ground. Everything that a model wrote is escaped and stands in `pre` or `code`, where no formula is typeset.
"""

import html
import textwrap
from typing import Any

from rloo_kit.results.samples import SamplePair, describe_sample, is_thinking, picture_controls, plain_prompt

INK, RIGHT, WRONG = "#797979", "#1a8a4a", "#c9510c"
MAX_HTML, MAX_TEXT = 6000, 600  # characters of one part that are shown
TEXT_WIDTH = 100  # columns
_MARKS = {True: ("✓ right", RIGHT), False: ("✗ wrong", WRONG), None: ("not judged", INK)}
_CARD = "border: 1px solid rgba(128, 128, 128, 0.4); border-radius: 6px; padding: 8px 12px; margin: 8px 0"
_PAIR = "display: flex; flex-wrap: wrap; gap: 12px; margin: 6px 0 0"
_SIDE = "flex: 1 1 280px; min-width: 0; border-left: 3px solid rgba(128, 128, 128, 0.4); padding: 0 0 0 10px"
_PRE = (
    "white-space: pre-wrap; overflow-wrap: break-word; word-break: normal; max-height: 16em; overflow-y: auto; "
    "margin: 0; padding: 0; background-color: transparent; font-family: monospace; font-size: 13px; line-height: 1.4"
)
_LABEL = f"color: {INK}; font-size: 12px; margin: 6px 0 0"


def as_html(note: str, pairs: list[SamplePair]) -> str:
    """A card for each prompt; its sides stand beside each other and fold where there is no room."""
    cards = "".join(_card(number, pair) for number, pair in enumerate(pairs, 1))
    return f'<div style="text-align: left"><div style="{_LABEL}">{_escape(note)}</div>{cards}</div>'


def _card(number: int, pair: SamplePair) -> str:
    gold = "" if pair.gold is None else f" · right answer <code>{_escape(pair.gold)}</code>"
    sides = "".join(_side(title, sample) for title, sample in pair.samples.items())
    return (
        f'<div style="{_CARD}"><div style="color: {INK}; font-size: 12px">{number}{gold}</div>'
        f'{_pre(plain_prompt(pair.prompt))}<div style="{_PAIR}">{sides}</div></div>'
    )


def _side(title: str, sample: dict[str, Any]) -> str:
    mark, color = _MARKS[sample["correct"]]
    parts = "".join(f'<div style="{_LABEL}">{label}</div>{_pre(text)}' for label, text in _parts(sample))
    return (
        f'<div style="{_SIDE}"><div><b>{_escape(title)}</b> <b style="color: {color}">{mark}</b></div>{parts}'
        f'<div style="{_LABEL}">{_escape(describe_sample(sample))}</div></div>'
    )


def _parts(sample: dict[str, Any]) -> list[tuple[str, str]]:
    thinking = [("thinking", sample["thinking"])] if is_thinking(sample) else []
    return [*thinking, ("answer", sample["answer"])]


def _pre(text: str) -> str:
    if not text:
        return f'<div style="{_LABEL}">(none)</div>'
    return f'<pre style="{_PRE}">{_escape(_shorten(text, MAX_HTML))}</pre>'


def as_text(note: str, pairs: list[SamplePair]) -> str:
    """The same as lines of at most `TEXT_WIDTH` columns."""
    lines = [note]
    for number, pair in enumerate(pairs, 1):
        gold = "" if pair.gold is None else f"   (right answer: {pair.gold})"
        lines += ["", *_wrap(f"{number}. ", f"{plain_prompt(pair.prompt)}{gold}")]
        for title, sample in pair.samples.items():
            lines.append(f"   {title}: {_MARKS[sample['correct']][0].lstrip('✓✗ ')}, {describe_sample(sample)}")
            for label, text in _parts(sample):
                lines += _wrap(f"      {label + ':':<10}", text or "(none)")
    return "\n".join(lines)


def _wrap(head: str, text: str) -> list[str]:
    """Text with `head` before its first line and as much room before the others; its own line ends are kept."""
    lines: list[str] = []
    for line in picture_controls(_shorten(text, MAX_TEXT)).splitlines():
        lines += textwrap.wrap(line, TEXT_WIDTH - len(head)) or [""]
    return [f"{head if number == 0 else ' ' * len(head)}{line}".rstrip() for number, line in enumerate(lines)]


def _shorten(text: str, limit: int) -> str:
    """Long text without its middle."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def _escape(value: Any) -> str:
    return html.escape(picture_controls(str(value)))
