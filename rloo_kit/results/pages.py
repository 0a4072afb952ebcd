"""The frame of the kit's HTML pages (a single file that fetches nothing, two colour schemes), and escaping.

All text from the model, the data or the configuration goes through `escape_text` or `embed_json`.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rloo_kit.system.console import picture_controls

_VERDICTS = {"learnt": "right", "no signal": "wrong", "broken": "wrong", "gamed": "wrong"}
_SURROGATES = re.compile("[\ud800-\udfff]")  # lone ones, which UTF-8 cannot encode
_IN_SCRIPTS = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def make_page(title: str, sections: Iterable[str], script: str = "", data: Any = None) -> str:
    """A complete page that fetches nothing, enforced by its content security policy.

    Args:
        title: plain text.
        sections: HTML, already escaped.
        script: the kit's JavaScript, run at the end of the page; the only script that the policy allows.
        data: plain values that the script finds as JSON in the element `data`.
    """
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"'sha256-{digest}'" if script else "'none'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none'; form-action 'none'"
    scripts = ""
    if script:
        scripts = f'<script type="application/json" id="data">{embed_json(data)}</script>\n<script>{script}</script>\n'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape_text(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n<main>\n{''.join(sections)}</main>\n{scripts}</body>\n</html>\n"
    )


def make_section(title: str, content: str, name: str = "") -> str:
    """A section with its heading; `name`: its id, for links."""
    if not name:
        return f"<section>\n<h2>{title}</h2>\n{content}\n</section>\n"
    label = f"{name}-title"
    return f'<section id="{name}" aria-labelledby="{label}">\n<h2 id="{label}">{title}</h2>\n{content}\n</section>\n'


def make_table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Iterable[int] = (), ids: Any = ()
) -> str:
    """A table of plain values; the first cell of a row is its heading.

    Args:
        caption: for screen readers. head: names of the columns. numbers: columns aligned to the right.
        ids: of the rows, for links.
    """
    right = set(numbers)
    ids = list(ids)

    def cell(place: int, value: Any) -> str:
        kind = " class='num'" if place in right else ""
        tag, scope = ("th", " scope='row'") if place == 0 else ("td", "")
        return f"<{tag}{scope}{kind}>{escape_text(value)}</{tag}>"

    top = "".join(
        f"<th scope='col'{' class=num' if place in right else ''}>{escape_text(name)}</th>"
        for place, name in enumerate(head)
    )
    body = ""
    for number, row in enumerate(rows):
        name = f' id="{escape_text(ids[number])}"' if ids else ""
        body += f"<tr{name}>{''.join(cell(place, value) for place, value in enumerate(row))}</tr>\n"
    label = escape_text(caption)
    return (
        f"<div class='scroll' role='region' aria-label='{label}' tabindex='0'><table><caption>{label}</caption>"
        f"<thead><tr>{top}</tr></thead>\n<tbody>{body}</tbody></table></div>\n"
    )


def escape_text(value: Any) -> str:
    """Any value as text, escaped for HTML.

    >>> escape_text("a <b> & c")
    'a &lt;b&gt; &amp; c'
    """
    return html.escape(show_text(value))


def show_text(value: Any) -> str:
    """Any value as printable text: control characters as their symbols."""
    return _SURROGATES.sub("\ufffd", picture_controls(str(value)))


def embed_json(value: Any) -> str:
    """Plain values as JSON for a script element; strings must have gone through `show_text`.

    >>> embed_json({"text": "</script><!--"})
    '{"text":"\\\\u003c/script\\\\u003e\\\\u003c!--"}'
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate(_IN_SCRIPTS)


def mark_verdict(kind: str) -> str:
    """A verdict's word in its colour; any other text unchanged."""
    return f"<span class='{_VERDICTS.get(kind, '')}'>{escape_text(kind)}</span>"


def format_duration(seconds: float) -> str:
    """Seconds as text.

    >>> format_duration(7.25), format_duration(75), format_duration(3675)
    ('7.2 s', '1 min 15 s', '1 h 1 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def format_count(number: float) -> str:
    """A large number in short form.

    >>> format_count(950), format_count(171_300), format_count(2_400_000)
    ('950', '171,300', '2.4 million')
    """
    return f"{number / 1e6:,.1f} million" if number >= 1e6 else f"{number:,.0f}"
