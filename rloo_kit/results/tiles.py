"""The tiles at the top of a report: each measure before and after, with the difference and drawn intervals."""

from rloo_kit.results.evaluation import Comparison, Evaluation, Measured
from rloo_kit.results.pages import escape_text

PERCENT = 100


def make_tiles(before: Evaluation | None, after: Evaluation | None, comparison: Comparison | None) -> str:
    """The tiles as HTML; empty if nothing was measured."""
    shows_reward = any(one is not None and one.reward != one.accuracy for one in (before, after))
    names = {"accuracy": "Accuracy", "greedy_accuracy": "Accuracy, greedy"}
    names |= {"reward": "Reward"} if shows_reward else {}
    differences = {"accuracy": "", "greedy_accuracy": "greedy_", "reward": "reward_"}
    tiles = []
    for name, title in names.items():
        old, new = (None if one is None else one.measure(name) for one in (before, after))
        prefix = differences[name]
        change = None if comparison is None else [
            getattr(comparison, f"{prefix}{end}") for end in ("difference", "low", "high")
        ]  # fmt: skip
        tiles.append(_measured(title, old, new, change, is_share=name != "reward"))
    plain = {"mean_thinking_tokens": ("Thinking tokens", False), "closed_share": ("Thinking closed", True)}
    for key, (title, is_share) in plain.items():
        values = [getattr(one, key, None) for one in (before, after)]
        if any(value is not None for value in values):
            old_text, new_text = (_text(value, is_share) for value in values)
            tiles.append(_tile(title, old_text, new_text))
    return f"<div class='tiles'>{''.join(tiles)}</div>" if any(tiles) else ""


def _measured(
    title: str, before: Measured | None, after: Measured | None, change: list[float | None] | None, is_share: bool
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


def _change(change: list[float | None] | None, is_share: bool) -> str:
    if change is None or change[0] is None:
        return ""
    factor, digits, unit = (PERCENT, 1, " points") if is_share else (1, 2, "")
    value, low, high = (None if one is None else f"{factor * one:+.{digits}f}" for one in change)
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
