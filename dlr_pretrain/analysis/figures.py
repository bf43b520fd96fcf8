"""Figures of runs as PNG, SVG and PDF. Each group of runs is a line, the mean over its seeds, with their deviation.

Each group has one colour in all figures of a scale, and a dashed line has DLR.
"""

import os
import re
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from dlr_pretrain.analysis.runs import METRICS, Runs, ended, spread
from dlr_pretrain.util.errors import naming
from dlr_pretrain.util.text import amount

# matplotlib cannot be imported while MPLBACKEND names a missing backend, as in a process that a notebook started.
_backend = os.environ.pop("MPLBACKEND", None)
import matplotlib  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.colors import to_rgba  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

if _backend is not None:
    os.environ["MPLBACKEND"] = _backend
    with suppress(ValueError):
        matplotlib.rcParams["backend"] = _backend

IMAGES = ("png", "svg", "pdf")
PLAIN_TEXT: Any = {"text.parse_math": False}  # a $ is literal in all that users type, such as the names of runs
POINTS = 1000  # the most that a curve has
TAB20 = matplotlib.colormaps["tab20"](range(20)).tolist()
COLOURS = TAB20[::2] + TAB20[1::2]  # ten hues, then lighter ones
LABELS = {"train/tokens": "tokens seen (with padding)", "flops": "FLOPs", "hours": "hours of training",
          "train/loss": "loss (nats/token)",
          "eval/perplexity": "evaluation perplexity, unbiased", "train/grad_norm": "gradient norm",
          "train/lr": "learning rate", "perf/tokens_per_second": "tokens/s"}  # fmt: skip
LOSS = "loss: training (lines, running medians), evaluations (dots)"
OF_ONE_RUN = (("loss", "train/loss", "loss (dots: evaluations)"), ("learning_rate", "train/lr", "learning rate"),
              ("gradient_norm", "train/grad_norm", "gradient norm before clipping"),
              ("throughput", "perf/tokens_per_second", "tokens/s"))  # fmt: skip
FROM_0 = ("train/lr", "train/grad_norm", "perf/tokens_per_second")  # of a single run
SHOWN = {*METRICS, "train/lr", "train/real_tokens", "train/skipped", "eval/perplexity_galore", "eval/loss_a",
         "eval/loss_b", "run", "flops", "hours"}  # fmt: skip
OF_SETS = re.compile(r"data/.*|eval/.+/(loss_[ab]|perplexity)")  # of the sources of a mixture and of validation sets
FIGURES = (
    ("loss_tokens", "train/loss", "train/tokens", LOSS),
    ("loss_flops", "train/loss", "flops", LOSS),
    ("loss_hours", "train/loss", "hours", LOSS),
    ("perplexity", "eval/perplexity", "train/tokens", "evaluation perplexity, unbiased"),
    ("gradient_norm", "train/grad_norm", "train/tokens", "norm of the gradient before clipping (running medians)"),
)


@dataclass(frozen=True)
class Picture:
    """A figure: its caption, and the ``path`` of its PNG. The other formats lie beside it.

    A page shows ``small`` ones side by side.
    """

    path: Path
    caption: str
    small: bool = False


def axes(inches: tuple[float, float] = (8.0, 4.8), dpi: int = 150) -> Axes:
    """The axes of a new figure, with faint lines at the ticks."""
    with matplotlib.rc_context(PLAIN_TEXT):
        ax = Figure(figsize=inches, dpi=dpi).subplots()
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def save(ax: Axes, folder: Path, name: str, caption: str) -> Picture:
    """Save the figure of ``ax``, with its legend beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = cast(Figure, ax.figure)
    with matplotlib.rc_context(PLAIN_TEXT):  # saving makes the texts of ticks
        if ax.get_legend_handles_labels()[1]:
            ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        for kind in IMAGES:
            with naming(path := folder / f"{name}.{kind}"):
                figure.savefig(path, bbox_inches="tight")
    return Picture(folder / f"{name}.png", caption)


# ----------------------------------------------------------------------------------------------------
# Curves


def draw(all_runs: Runs, folder: Path) -> Iterator[Picture]:
    """Write to ``folder`` the figures for which the runs have numbers."""
    for scale, runs in all_runs.runs[all_runs.runs.step > 0].groupby("scale", sort=False):
        of_scale = Runs(runs, all_runs.metrics[all_runs.metrics.run.isin(runs.run)], [], all_runs.of_set)
        file = as_file(scale)
        for name, column, x, what in FIGURES:
            if of_scale.metrics[[column, x]].notna().all(axis=1).any():
                yield curves(of_scale, folder, f"{name}_{file}", column, x, f"{scale}, {what}")


def as_file(scale: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", scale)[:60]


def axes_of_methods(rows: pd.DataFrame, x: str, y: str) -> Axes:
    """New axes with a line for each ``method``: the mean over its runs of each ``run``'s mean of ``y`` at ``x``."""
    ax, palette, colours = axes(), cycle(COLOURS), dict[str, tuple]()
    for method, group in rows.groupby("method", sort=False):
        runs = group.pivot_table(index=x, columns="run", values=y)
        mean, std = runs.mean(axis=1), runs.std(axis=1).fillna(0)
        base = method.replace("+dlr", "", 1)
        colour = colours[base] = colours.get(base) or next(palette)
        line = ("o" if len(mean) < 9 else "") + ("--" if group.dlr.all() else "-")
        ax.plot(mean.index, mean, line, color=colour, label=f"{method} ({group.run.nunique()})", markersize=3)
        ax.fill_between(mean.index, mean - std, mean + std, color=to_rgba(colour, 0.15))
    return ax


def save_methods(ax: Axes, folder: Path, name: str, title: str) -> Picture:
    ax.set_title(title, fontsize=10, loc="left")
    note = "Means over runs (in brackets: how many), with standard deviations; dashed lines have DLR."
    return save(ax, folder, name, f"{title}. {note}")


def draw_run(all_runs: Runs, folder: Path) -> Iterator[Picture]:
    """Write the small figures of a single run. Each metric that the user has added has its own."""
    added = [(re.sub(r"\W+", "_", name), name, name) for name in all_runs.metrics
             if name not in SHOWN and not OF_SETS.fullmatch(name)]  # fmt: skip
    for name, column, what in (*OF_ONE_RUN, *added):
        if name == "loss" or (column in all_runs.metrics and all_runs.metrics[column].notna().any()):
            ax = axes((3.2, 2.5), dpi=300)
            draw_group(ax, all_runs.runs, all_runs.metrics, column, "train/tokens", COLOURS[0], legend=False)
            if column in FROM_0:
                ax.set_ylim(bottom=0)
            _label(ax, "train/tokens", what)
            ax.locator_params("x", nbins=4)
            yield replace(save(ax, folder, name, ""), small=True)


def curves(all_runs: Runs, folder: Path, name: str, column: str, x: str, caption: str) -> Picture:
    """Draw a line for each group, and thin lines for unfinished runs."""
    ax = axes()
    for (group, runs), colour in zip(all_runs.groups(), cycle(COLOURS)):
        metrics = all_runs.metrics[all_runs.metrics.run.isin(runs.run)]
        draw_group(ax, runs, metrics, column, x, colour, "-" if group.dlr == "off" else "--")
    heights = [np.asarray(line.get_ydata()) for line in ax.get_lines()]
    late = np.concatenate([[], *(height[len(height) // 20 :] for height in heights)])
    if len(late):  # without the first losses, which would flatten the curves
        room = 0.04 * np.ptp(late) or 0.1
        ax.set_ylim(late.min() - room, late.max() + room)
    ax.set_ylabel(LABELS.get(column, column))
    _label(ax, x, caption)
    notes = (
        "means over finished seeds ± their standard deviation; dashed lines have DLR. A line ends where a seed has "
        "diverged; unfinished runs are thin. The legend gives perplexities at the end."
    )
    return save(ax, folder, name, f"{caption}: {notes}")


def _label(ax: Axes, x: str, title: str) -> None:
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if x == "hours" or not value else amount(value, 4))
    ax.set_xlabel(LABELS[x])
    ax.set_title(title, fontsize=10, loc="left")


def draw_group(
    ax: Axes, group: pd.DataFrame, metrics: pd.DataFrame, column: str, x: str, colour: tuple, line: str = "-",
    legend: bool = True,
) -> None:  # fmt: skip
    """Draw a group: mean and band, unfinished runs, evaluations."""
    last = spread(ended(group).ppl) if len(ended(group)) else "unfinished"
    name = textwrap.fill(f"{group.label.iloc[0]}: {last}", 44)
    label: str | None = f" {name}" if name.startswith("_") else name  # matplotlib would leave it out of the legend
    label = label if legend else None
    wide, places = metrics.pivot(index="step", columns="run", values=column), metrics.groupby("step")[x].mean()
    if column.startswith("eval/"):
        wide, mark = wide.dropna(how="all"), "o"
    else:
        wide, mark = wide.rolling(max(1, len(wide) // 50), center=True, min_periods=1).median().where(wide.notna()), ""
    both = [run for run in ended(group).run if run in wide]
    alone = [[run] for run in wide if run not in both]
    for runs in filter(None, [both, *alone]):
        lines = wide[runs].dropna()
        lines = lines.iloc[:: max(1, len(lines) // POINTS)]
        mean, std, width = lines.mean(axis=1), lines.std(axis=1), 1.6 if runs is both else 0.6
        ax.plot(places[mean.index], mean, line, color=colour, linewidth=width, marker=mark, markersize=4, label=label)
        ax.fill_between(places[mean.index], mean - std, mean + std, facecolor=to_rgba(colour, 0.15),
                        edgecolor=to_rgba(colour, 0.6), linewidth=0.6)  # fmt: skip
        label = None
    if column == "train/loss":
        evaluated = metrics.dropna(subset="eval/loss")
        for _, points in evaluated.groupby("run"):
            ax.plot(points[x], points["eval/loss"], f"o{line}", color=colour, markersize=3, linewidth=0.7, alpha=0.8)


# ----------------------------------------------------------------------------------------------------
# Learning rates


def draw_rates(compared: dict, folder: Path) -> Iterator[Picture]:
    """Perplexity against the learning rate (see ``choice.py``); nothing if no method has several rates."""
    ax, trials = axes(), pd.DataFrame(compared["trials"])
    trials = trials.assign(ppl=lambda frame: np.exp(frame.loss_b.astype(float)))
    rates = sorted(trials.lr.unique())
    if not compared["tuned"]:
        return
    for (method, choice), colour in zip(compared["chosen"].items(), cycle(COLOURS)):
        runs, style = trials[trials.method == method], {"color": colour}
        runs = runs[runs.seed.isin(choice["seeds"])]
        means = runs.groupby("lr").ppl.apply(lambda values: values.mean(skipna=False)).dropna()
        ax.plot(runs.lr, runs.ppl, "o", alpha=0.4, markersize=4, **style)
        line = "--" if (runs.dlr != "off").all() else "-"
        ax.plot(means.index, means, line, marker="o", markersize=5, label=method, **style)
        if choice["lr"] is not None:
            ax.plot(choice["lr"], means[choice["lr"]], "o", markersize=13, markerfacecolor="none", **style)
        lost = runs.lr[runs.state == "diverged"]
        ax.plot(lost, [0.98] * len(lost), "x", transform=ax.get_xaxis_transform(), **style)
    ax.set(xscale="log", xlabel="peak learning rate", ylabel="perplexity on held-out text")
    ax.set_xticks(rates, [f"{lr:g}" for lr in rates])
    ax.set_xticks([], minor=True)
    caption = (
        "Perplexity on held-out text against the learning rate. Faint points are seeds, and lines join means. A ring "
        "marks the rate that the other half chose, a cross a diverged run."
    )
    yield save(ax, folder, f"rates_{as_file(compared['scale'])}", caption)
