"""The tiles at the top of a report: each measure before and after, with the difference and drawn intervals."""

from rloo_kit.data.answers import EXACT
from rloo_kit.results.changes import Change, change_of
from rloo_kit.results.evaluation import Evaluation, name_of, says_nothing
from rloo_kit.results.intervals import Measured
from rloo_kit.results.pages import escape_text

PERCENT = 100


def make_tiles(before: Evaluation | None, after: Evaluation | None) -> str:
    """The tiles as HTML, the deciding measure first; empty if nothing was measured."""
    sides = [one for one in (before, after) if one is not None]
    by_reward = any(one.leading == "reward" for one in sides)
    repeats = all(one.judged_by == EXACT and one.value("accuracy") == one.value("reward") for one in sides)
    names = [] if says_nothing(*sides) or repeats else ["accuracy", "greedy_accuracy"]
    if by_reward or any(one.value("reward") != one.value("accuracy") for one in sides):
        names = ["reward", "greedy_reward", *names] if by_reward else [*names, "reward"]
    tiles = []
    for name in names:
        old, new = (None if one is None else one.measure(name) for one in (before, after))
        change = None if before is None or after is None else change_of(name, before, after)
        tiles.append(_measured(name_of(name, *sides).capitalize(), old, new, change, is_share="accuracy" in name))
    plain = {"mean_thinking_tokens": ("Thinking tokens", False), "closed_share": ("Thinking closed", True)}
    for key, (title, is_share) in plain.items():
        values = [getattr(one, key, None) for one in (before, after)]
        if any(value is not None for value in values):
            old_text, new_text = (_text(value, is_share) for value in values)
            tiles.append(_tile(title, old_text, new_text))
    return f"<div class='tiles'>{''.join(tiles)}</div>" if any(tiles) else ""


def _measured(
    title: str, before: Measured | None, after: Measured | None, change: Change | None, is_share: bool
) -> str:
    if before is None and after is None:
        return ""
    old, new = (_text(None if one is None else one.value, is_share) for one in (before, after))
    return _tile(title, old, new, _change(change, is_share), _bar(before, after) if is_share else "")


def _tile(title: str, before: str, after: str, change: str = "", bar: str = "") -> str:
    below = f"<div class='change'>{escape_text(change)}</div>" if change else ""
    return (
        f"<div class='tile'><div class='name'>{title}</div><div class='value'><span class='old'>{before}</span>"
        f"<span class='arrow'> → </span>{after}</div>{bar}{below}</div>"
    )


def _text(value: float | None, is_share: bool) -> str:
    if value is None:
        return "-"
    return f"{PERCENT * value:.1f} %" if is_share else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _change(change: Change | None, is_share: bool) -> str:
    if change is None:
        return ""
    factor, digits, unit = (PERCENT, 1, " points") if is_share else (1, 2, "")
    value, low, high = (None if one is None else f"{factor * one:+.{digits}f}" for one in change.difference.ends)
    return f"{value}{unit}" + (f" [{low}, {high}]" if low is not None and high is not None else "")


def _bar(before: Measured | None, after: Measured | None) -> str:
    """A 0 to 100 % bar with both intervals; the tile has the same numbers as text."""
    parts = ["<line class='track' x1='4' x2='196' y1='10' y2='10'/>"]
    for one, kind in ((before, "s0"), (after, "s1")):
        if one is None:
            continue
        low, x, high = (4 + 192 * (one.value if end is None else end) for end in (one.low, one.value, one.high))
        parts.append(f"<line class='ends {kind}' x1='{low:.1f}' x2='{high:.1f}' y1='10' y2='10'/>")
        parts.append(f"<circle class='dot {kind}' cx='{x:.1f}' cy='10' r='4'/>")
    return f"<svg class='bar' viewBox='0 0 200 20' aria-hidden='true' focusable='false'>{''.join(parts)}</svg>"
