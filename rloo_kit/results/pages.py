"""The kit's HTML pages: single files from the templates, which fetch nothing and escape every text.

A page is a template and plain values. Only `embed_json` and the kit's own files are put in as they are.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_kit.system.console import format_seconds, picture_controls

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")
TONES = {"learnt": "right", "no signal": "wrong", "broken": "wrong", "gamed": "wrong", "done": "right"}
TONES |= {"failed": "wrong", "killed": "wrong"}
_IN_SCRIPTS = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


@dataclass
class Cell:
    """A cell of a table that is more than a text: small text below it, a relative link, the class of a series or a tone
    ("right", "wrong") for its colour."""

    text: str
    under: str = ""
    link: str = ""
    key: str = ""
    tone: str = ""

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.text, self.under)))


@dataclass
class Table:
    """A table with a caption for screen readers. Rows have plain values or a `Cell`, the first of which is a heading;
    `numbers` are the columns aligned to the right."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    numbers: Sequence[int] = ()


def make_page(template: str, data: Any = None, **values: Any) -> str:
    """A complete page; its content security policy lets it fetch nothing, show only images that it contains and run
    only the kit's script.

    Args:
        template: file in TEMPLATES. data: plain values that the script finds as JSON; None: the page has no script.
        values: for the template; its texts are escaped there.
    """
    from markupsafe import Markup

    style = Markup((TEMPLATES / "page.css").read_text(encoding="utf-8"))
    allowed, script = "'none'", ""
    if data is not None:
        script = Markup((TEMPLATES / "report.js").read_text(encoding="utf-8"))
        allowed = f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}"
    policy += "; base-uri 'none'; form-action 'none'"
    return render(template, policy=Markup(policy), style=style, script=script, data=Markup(embed_json(data)), **values)


def render(template: str, **values: Any) -> str:
    """A template with every text printable and escaped."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else show_text(value),
    )
    environment.filters |= {"thousands": "{:,.0f}".format, "duration": format_seconds}
    return environment


def show_text(value: Any) -> str:
    """Any value as printable text: control characters as their symbols."""
    return picture_controls(str(value))


def embed_json(value: Any) -> str:
    """Plain values as JSON for a script element; strings must have gone through `show_text`.

    >>> embed_json({"text": "</script><!--"})
    '{"text":"\\\\u003c/script\\\\u003e\\\\u003c!--"}'
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate(_IN_SCRIPTS)
