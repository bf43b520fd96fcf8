"""Figures of runs as PNG, SVG and PDF: one colour for each method in all of them, means with their bands.

The first colours are those of Okabe and Ito (2008), which can be told apart with every kind of colour vision.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from dlr_pretrain.analysis.runs import METHODS, Runs, ended
from dlr_pretrain.analysis.tables import PATHS, final, probed
from dlr_pretrain.util.history import perplexity
from dlr_pretrain.util.text import amount

COLOURS = dict(zip(METHODS, ("#000000", "#CC79A7", "#9467BD", "#E69F00", "#8C564B", "#56B4E9", "#7F7F00", "#0072B2",
                             "#D55E00", "#009E73", "#B03060", "#17807E"), strict=True))  # fmt: skip
GREY = "#767676"  # for guide lines and methods of one's own
IMAGES = ("png", "svg", "pdf")
MARKS = "osD^vPX*"
PANELS = 3  # in a row, at most
CROWDED = 5  # a legend with more names than this stands beside the axes
POINTS = 1000  # of a curve
LABELS = {"train/tokens": "tokens seen (with padding)", "flops": "FLOPs", "train/loss": "loss (nats/token)",
          "eval/perplexity": "evaluation perplexity, unbiased", "train/grad_norm": "gradient norm"}  # fmt: skip
LOSS = "training loss (lines, running medians) and evaluations (dots)"
FIGURES = (
    ("loss_tokens", "train/loss", "train/tokens", LOSS),
    ("loss_flops", "train/loss", "flops", LOSS),
    ("perplexity", "eval/perplexity", "train/tokens", "evaluation perplexity, unbiased"),
    ("gradient_norm", "train/grad_norm", "train/tokens", "norm of the gradient before clipping (running medians)"),
)


@dataclass(frozen=True)
class Picture:
    """A figure that was saved in each format of ``IMAGES`` as ``<name>.<format>``; ``caption`` describes it."""

    name: str
    caption: str


def look(method: str) -> dict:
    """Colour and line of a method, the same in every figure: a hue for a backbone, lighter and dashed without DLR."""
    from matplotlib.colors import to_rgb

    base, plus, residual = method.partition("+")
    light = 0.0 if plus or base == "full" else 0.4
    colour = tuple(light + (1 - light) * part for part in to_rgb(COLOURS.get(base, GREY)))
    return {"color": colour, "linestyle": "--" if light else "-" if residual in ("", "dlr") else ":"}


def subplots(n: int, width: float = 4.2, height: float = 3.3):
    """A figure and its ``n`` panels of equal size, with faint lines at the ticks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(n, PANELS)
    rows = -(-n // columns)
    figure = Figure(figsize=(max(7.0, width * columns), max(4.2, height * rows)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for empty in axes[n:]:
        empty.remove()
    for ax in axes[:n]:
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[:n])


def log_scale(axis) -> None:
    """A logarithmic axis whose ticks are plain numbers: 700, 800, 900, 1,000."""
    from matplotlib.ticker import AutoLocator, NullLocator, StrMethodFormatter

    low, high = axis.get_data_interval()
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    if high < 10 * low:  # a power of ten may not be in view
        axis.set_major_locator(AutoLocator())
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))


def legend(ax) -> None:
    """Names in the axes, or beside them in a wider figure if there are many."""
    if len(ax.get_legend_handles_labels()[1]) > CROWDED:
        ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
        ax.figure.set_figwidth(ax.figure.get_figwidth() + 4)
    elif ax.get_legend_handles_labels()[1]:
        ax.legend(frameon=False, fontsize=8)


def save(figure, folder: Path, name: str, caption: str) -> Picture:
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.hashsalt": name}):  # equal figures give equal files
        for kind in IMAGES:
            figure.savefig(folder / f"{name}.{kind}", metadata=undated.get(kind))
    return Picture(name, caption)


# ----------------------------------------------------------------------------------------------------
# Curves


def draw(found: Runs, folder: Path) -> Iterator[Picture]:
    """Write every figure for which the runs have the numbers into ``folder``."""
    for scale, runs in found.runs[found.runs.step > 0].groupby("scale", sort=False):
        at = Runs(runs, found.of(runs), [])
        for name, column, x, what in FIGURES:
            if at.metrics[[column, x]].notna().all(axis=1).any():
                yield curves(at, folder, f"{name}_{scale}", column, x, f"{scale}: {what}")
    yield from draw_paths(found, folder)


def curves(at: Runs, folder: Path, name: str, column: str, x: str, caption: str) -> Picture:
    """A panel for each backbone, which also shows the dense model; perplexities are all in one panel."""
    bases = [base for base in dict.fromkeys(at.runs.base) if base != "full"] or ["full"]
    panels = [""] if column == "eval/perplexity" or len(bases) == 1 else bases
    figure, axes = subplots(len(panels))
    for base, ax in zip(panels, axes, strict=True):
        levels: list[float] = []
        drawn: Counter[str] = Counter()
        for of in at.groups():
            method = of.method.iloc[0]
            if base in ("", of.base.iloc[0]) or method == "full":
                levels += _curve(ax, of, at.of(of), column, x, MARKS[drawn[method] % len(MARKS)])
                drawn[method] += 1
        if column != "train/loss":
            log_scale(ax.yaxis)
        elif levels:  # not the first losses, which would flatten the curve
            room = 0.04 * (max(levels) - min(levels)) or 0.1
            ax.set_ylim(min(levels) - room, max(levels) + room)
        ax.xaxis.set_major_formatter(lambda value, _: amount(value, 4) if value else "0")
        ax.set(title=base, xlabel=LABELS[x], ylabel=LABELS[column])
        legend(ax)
    told = "means over the finished seeds, with their standard deviation. A line ends where a seed has diverged"
    return save(figure, folder, name, f"{caption}: {told}; unfinished runs are thin.")


def _curve(ax, of: pd.DataFrame, metrics: pd.DataFrame, column: str, x: str, mark: str = "o") -> list[float]:
    """Draw a group: mean and band, unfinished runs, evaluations. Returns the losses that the axes should show.

    ``mark`` tells it from other groups of its method, which have its colour.
    """
    style, last = look(of.method.iloc[0]), final(of, "ppl")
    label = textwrap.fill(f"{of.label.iloc[0]}: {last.text(',.1f') if last else 'unfinished'}", 44)
    wide, at = metrics.pivot(index="step", columns="run", values=column), metrics.groupby("step")[x].mean()
    is_evaluation = column.startswith("eval/")
    if is_evaluation:
        wide = wide.dropna(how="all")
    else:
        wide = wide.rolling(max(1, len(wide) // 50), center=True, min_periods=1).median().where(wide.notna())
    both = [run for run in ended(of).run if run in wide]
    shown: list[float] = []
    for runs in filter(None, [both, *([run] for run in wide if run not in both)]):
        lines = wide[runs].dropna()
        lines = lines.iloc[:: max(1, len(lines) // POINTS)]
        mean, std = lines.mean(axis=1), lines.std(axis=1)
        marks = {
            "linewidth": 1.6 if runs is both else 0.6,
            "marker": mark if is_evaluation or mark != MARKS[0] else None,
        }
        every = 1 if is_evaluation else max(1, len(mean) // 6)
        ax.plot(at[mean.index], mean, **style, **marks, markersize=4, markevery=every, label=label)
        ax.fill_between(at[mean.index], mean - std, mean + std, color=style["color"], alpha=0.2, linewidth=0)
        label = None
        shown += mean.iloc[len(mean) // 20 :].tolist()
    if column == "train/loss":
        evaluated = metrics.dropna(subset="eval/loss")
        ax.plot(evaluated[x], evaluated["eval/loss"], mark, color=style["color"], markersize=3)
        shown += evaluated["eval/loss"].tolist()
    return shown


# ----------------------------------------------------------------------------------------------------
# Other figures


def draw_paths(found: Runs, folder: Path) -> Iterator[Picture]:
    """rho of each probed projection over the updates, a figure for each run."""
    for i, (run, of) in enumerate(probed(found.of(found.runs)).groupby("run", sort=False)):
        figure, (ax,) = subplots(1, 8.0, 4.5)
        for projection, at in of.groupby("projection", sort=False):
            (line,) = ax.plot(at.step, at.rho, marker="o", markersize=4, label=projection)
            ax.plot(at.step, at.isotropic, color=line.get_color(), linestyle="--", linewidth=1)
        ax.axhline(1, color=GREY, linewidth=0.8)
        log_scale(ax.xaxis)
        ax.set(title=Path(run).resolve().name, xlabel="update", ylabel="rho = |beta R g| / |B$^T$ g|")
        legend(ax)
        yield save(figure, folder, f"gradient_paths_{i}" if i else "gradient_paths", PATHS)


def draw_rates(found: dict, folder: Path) -> Iterator[Picture]:
    """Held-out perplexity against the learning rate, as ``curve``; nothing for a comparison with one rate."""
    design = found["design"]
    if len(design["rates"]) == 1:
        return
    figure, (ax,) = subplots(1)
    grid = pd.DataFrame(found["trials"], columns=["method", "lr", "seed", "state", "loss_b"])
    grid = grid[grid.seed.isin(design["seeds"])]
    grid["ppl"] = grid.loss_b.map(perplexity, na_action="ignore")
    for method in design["methods"]:
        of, style = grid[grid.method == method], look(method)
        means = of.groupby("lr").ppl.apply(lambda values: values.mean(skipna=False)).dropna()
        ax.plot(of.lr, of.ppl, "o", color=style["color"], alpha=0.4, markersize=4)
        ax.plot(means.index, means, **style, marker="o", markersize=5, label=method)
        if (best := found["chosen"][method]["lr"]) in means:
            ax.plot(best, means[best], "o", color=style["color"], markersize=13, markerfacecolor="none")
        lost = of.lr[of.state == "diverged"]
        ax.plot(lost, np.full(len(lost), 0.98), "x", color=style["color"], transform=ax.get_xaxis_transform())
    log_scale(ax.yaxis)
    ax.set(xscale="log", xlabel="peak learning rate", ylabel="perplexity on held-out text")
    ax.set_xticks(design["rates"], [f"{lr:g}" for lr in design["rates"]])
    ax.set_xticks([], minor=True)
    legend(ax)
    caption = (
        "Perplexity on held-out text against the learning rate. Faint points are seeds, lines join means, a ring marks "
        "the rate that the other half chose, a cross a diverged run."
    )
    yield save(figure, folder, "curve", caption)
