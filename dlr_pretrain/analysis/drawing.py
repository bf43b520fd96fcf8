"""Shared parts of the figures: axes that need no display, marks, colours, and writing of files.

The colours are those of Okabe and Ito (2008), which can be told apart with every kind of colour vision.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PINK = "#0072B2", "#D55E00", "#CC79A7"
GREY = "#767676"  # for guide lines and arrows
SERIES = (BLUE, VERMILLION, GREEN, PINK, ORANGE, SKY, BLACK)
MARKS = "osD^vPX*"
COLUMNS = 3  # panels in a row, at most
IMAGES = ("png", "svg")


@dataclass(frozen=True)
class Picture:
    """A figure that was saved as ``<name>.png`` and ``<name>.svg``; ``caption`` describes it."""

    name: str
    caption: str


def subplots(n: int, width: float = 3.6, height: float = 3.1, shared: bool = True):
    """A figure and its ``n`` panels of equal size; ``shared`` panels have the same ranges on both axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(n, COLUMNS)
    rows = -(-n // columns)
    figure = Figure(figsize=(max(5.0, width * columns), height * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, sharex=shared, sharey=shared, squeeze=False).flatten()
    for empty in axes[n:]:
        empty.remove()
    for above in axes[max(0, n - columns) : n]:
        above.tick_params(labelbottom=True)
    return figure, list(axes[:n])


def unframe(ax, which: str = "major") -> None:
    """Draw faint lines at the ticks, and remove the frame at the top and on the right."""
    ax.grid(alpha=0.25, which=which)
    ax.spines[["top", "right"]].set_visible(False)


def metric(number: float, _position: int) -> str:
    """1500000000 -> 1.5G."""
    units = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    size, unit = next(((size, unit) for size, unit in units if number >= size), (1, ""))
    return f"{number / size:.4g}{unit}"


def label_axes(axes, x: str, y: str, limits: tuple[float, float] | None = None, shown=metric) -> None:
    columns = min(len(axes), COLUMNS)
    for i, ax in enumerate(axes):
        unframe(ax)
        if i + columns >= len(axes):
            ax.set_xlabel(x)
        if i % columns == 0:
            ax.set_ylabel(y)
        if limits:
            ax.set_ylim(*limits)
        if shown:
            ax.xaxis.set_major_formatter(shown)


def legend_beside(ax) -> None:
    """Add a legend to the right of ``ax``, and enlarge the figure until the legend leaves its panel enough room."""
    legend = ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure, grid = ax.figure, ax.get_gridspec()
    own = legend.get_window_extent(figure.canvas.get_renderer())
    width, height = grid.ncols * (own.width / figure.dpi + 3.0), grid.nrows * (own.height / figure.dpi + 0.5)
    figure.set_size_inches(max(figure.get_figwidth(), width), max(figure.get_figheight(), height))


def wrapped(label: str, width: int = 28) -> str:
    """Break a label into lines of ``width`` characters, between words only."""
    return textwrap.fill(label, width, break_long_words=False, subsequent_indent="  ")


def save(figure, folder: Path, name: str, caption: str) -> Picture:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": name}):  # equal figures give equal files
        figure.savefig(folder / f"{name}.png")
        figure.set_layout_engine("none")  # the first savefig has laid out the figure
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    return Picture(name, caption)
