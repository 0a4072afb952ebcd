"""What the kit's pages share: the frame without scripts, the escaping, and the style sheet with two colour schemes."""

import html
from collections.abc import Iterable
from typing import Any

from rloo_kit.results.samples import picture_controls

STYLE_SHEET = """
:root { color-scheme: light dark; --ink: #1b1f27; --soft: #5c6470; --ground: #ffffff; --box: #f4f5f7; --line: #d9dce1;
  --right: #15803d; --wrong: #b91c1c; --accent: #1d62d1; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ec; --soft: #a3aab5; --ground: #14161a; --box: #1e2127;
  --line: #363b44; --right: #4ade80; --wrong: #f87171; --accent: #7db2ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 20px 64px; }
h1 { font-size: 26px; margin: 8px 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 36px 0 10px; padding-bottom: 4px; border-bottom: 1px solid var(--line); }
a { color: var(--accent); }
p { margin: 8px 0; }
pre { margin: 4px 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace; }
code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; }
figure { margin: 0; color: var(--ink); }
figure.wide { max-width: 760px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px; margin: 16px 0; }
.tile { background: var(--box); border-radius: 8px; padding: 12px 14px; }
.tile .name { color: var(--soft); font-size: 13px; }
.tile .value { font-size: 22px; font-weight: 600; white-space: nowrap; }
.tile .old { color: var(--soft); font-weight: 400; }
.tile .change { color: var(--soft); font-size: 13px; }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 14px; }
table { border-collapse: collapse; width: 100%; margin: 10px 0; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 600; font-size: 13px; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
article { border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px 14px; margin: 12px 0; }
.prompt { display: flex; gap: 10px; }
.prompt pre { color: var(--soft); max-height: 12em; overflow-y: auto; }
.number { font-weight: 600; color: var(--soft); }
.gold { margin: 2px 0 8px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 12px; }
.side { background: var(--box); border-radius: 6px; padding: 8px 12px; min-width: 0; }
.side pre { max-height: 24em; overflow-y: auto; }
.side .title { font-weight: 600; }
.mark { font-weight: 600; margin-left: 6px; }
.right { color: var(--right); }
.wrong { color: var(--wrong); }
.label { color: var(--soft); font-size: 12px; margin-top: 6px; }
.thinking { color: var(--soft); }
.answer { font-weight: 600; }
.notes { color: var(--soft); font-size: 13px; }
.scroll { overflow-x: auto; }
.runs td { white-space: nowrap; }
.runs td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 180px; }
.under { display: block; color: var(--soft); font-size: 13px; }
details { margin: 8px 0; }
summary { cursor: pointer; }
details pre { background: var(--box); border-radius: 6px; padding: 10px 12px; }
"""


def make_page(title: str, sections: Iterable[str]) -> str:
    """A whole page: nothing to fetch, and columns that fold on a narrow screen.

    Args:
        title: as plain text.
        sections: HTML, escaped by whoever made it.
    """
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape_text(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE_SHEET}</style>\n</head>\n<body>\n<main>\n{''.join(sections)}</main>\n</body>\n</html>\n"
    )


def make_section(title: str, content: str) -> str:
    """A section with its heading."""
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>\n"


def escape_text(value: Any) -> str:
    """Any value as text that HTML shows as it is.

    >>> escape_text("a <b> & c")
    'a &lt;b&gt; &amp; c'
    """
    return html.escape(picture_controls(str(value)))


def format_duration(seconds: float) -> str:
    """Seconds in words.

    >>> format_duration(7.25), format_duration(75), format_duration(3675)
    ('7.2 s', '1 min 15 s', '1 h 1 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
