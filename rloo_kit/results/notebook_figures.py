"""A run's curves as a PNG that reads well on a light and on a dark ground.

A saved notebook is read in JupyterLab's light and dark themes and on code hosts, and an image cannot ask which ground
it lies on. So the ground is transparent, and everything drawn has a middle tone: `INK` and `LINE` have a contrast of
more than 4 : 1 to white and to JupyterLab's dark ground alike. One colour for all lines: none is told from another by
hue.
"""

import io
from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure

from rloo_kit.results.figures import STYLE, draw_curve

INK, LINE = "#797979", "#2878e0"
WIDTH_PX = 864  # as shown; the image has twice as many, for dense screens
_DPI, _SCALE = 96, 2
_INKED = ("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor", "xtick.color", "ytick.color")
_STYLE = STYLE | dict.fromkeys(_INKED, INK)
_STYLE |= {"grid.color": INK, "grid.alpha": 0.3, "axes.linewidth": 0.8, "font.size": 10}

Curve = tuple[str, list[tuple[int, float]], float | None, float | None]  # title, step and value, ends of the axis


def draw_curves(curves: Sequence[Curve], note: str = "") -> bytes:
    """A PNG with one panel for each curve, three in a row or two where there are four, and a note below.

    Args:
        curves: at least one. note: one line; empty for none.
    """
    columns = 2 if len(curves) == 4 else min(len(curves), 3)
    rows = -(-len(curves) // columns)
    width = WIDTH_PX / _DPI if columns > 1 else 0.6 * WIDTH_PX / _DPI
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, 2.5 * rows + (0.3 if note else 0)), layout="constrained")
        figure.get_layout_engine().set(h_pad=0.08)
        if note:
            figure.supxlabel(note, x=0.01, ha="left", fontsize=9)
        for number, curve in enumerate(curves, 1):
            draw_curve(figure.add_subplot(rows, columns, number), *curve, LINE)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DPI * _SCALE, transparent=True, metadata={"Software": None})
    return buffer.getvalue()


def shown_width(png: bytes) -> int:
    """Pixels at which an image of `draw_curves` is to be shown."""
    return int.from_bytes(png[16:20], "big") // _SCALE  # PNG's header holds the width there
