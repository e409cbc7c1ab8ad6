"""Draws curves as SVG. They differ in colour and in dashes, for the colour-blind and for print in black and white."""

import io
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito 2008, no yellow
DASHES: tuple[tuple[int, ...], ...] = (
    (),
    (6, 2),
    (2, 2),
    (6, 2, 2, 2),
)  # lengths of strokes and gaps; with 7 colours, 28 styles
MAX_POINTS = 1000  # of a curve: a picture shows no more, and the file stays small


class Curve(NamedTuple):
    label: str
    points: list[tuple[int, float]]  # step, value


def draw_curves(title: str, curves: Mapping[int, Curve]) -> str:
    """The curves over the steps, each in the style of its number, as an <svg> element. Its text is escaped."""
    options: Any = {"svg.fonttype": "none", "text.parse_math": False, "font.size": 9, "axes.formatter.limits": (-3, 4)}
    with matplotlib.rc_context({"font.family": "sans-serif", **options}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that matplotlib's font lacks: the browser has them
        figure = Figure(figsize=(4.6, 2.9), layout="constrained")
        axes = figure.add_subplot(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        for style, (label, points) in curves.items():
            shown = points[:: max(1, len(points) // MAX_POINTS)]
            color, dashes = COLORS[style % len(COLORS)], (0, DASHES[style % len(DASHES)])
            marker = "." if len(shown) == 1 else ""
            axes.plot(
                *zip(*shown, strict=True), color=color, linestyle=dashes, linewidth=1.4, marker=marker, label=label
            )
        if len({curve.label for curve in curves.values()}) > 1:
            axes.legend(frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    return file.getvalue()[file.getvalue().index("<svg") :]


def sample_line(style: int) -> str:
    """A piece of a curve of this style, as an <svg> element: the key in a table's row."""
    dashes = " ".join(map(str, DASHES[style % len(DASHES)]))
    stroke = f"stroke='{COLORS[style % len(COLORS)]}' stroke-width='2' stroke-dasharray='{dashes}'"
    return f"<svg width='48' height='10'><line x1='0' y1='5' x2='48' y2='5' {stroke}/></svg>"
