"""Tables and figures of a study, from its frames, and its page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.ticker import NullFormatter

from dlr_pretrain.analysis.choice import LEVEL, estimate
from dlr_pretrain.analysis.figures import COLOURS, Picture, axes, save
from dlr_pretrain.analysis.report import Part, Section, write_csv, write_page, write_tables
from dlr_pretrain.analysis.runs import spread
from dlr_pretrain.analysis.tables import Table, table
from dlr_pretrain.util.text import amount


class Quantity(NamedTuple):
    """What is shown of a frame: a ``column`` of some ``rows``, against ``x`` in a figure, and at its end in a table."""

    frame: str
    rows: str
    column: str
    x: str
    title: str


MAIN = "matrix in ['W', 'B'] and of == "
KINDS = ("seeds", "backbone", "reference")
QUANTITIES = (
    Quantity("spectra", f"{MAIN}'weights'", "effective_rank", "step", "effective rank of W or B"),
    Quantity("spectra", f"{MAIN}'weights'", "stable_rank", "step", "stable rank of W or B"),
    Quantity("spectra", f"{MAIN}'weights'", "energy", "step", "energy in the first values"),
    Quantity("spectra", f"{MAIN}'update'", "effective_rank", "step", "effective rank of W_t - W_0"),
    Quantity("spectra", f"{MAIN}'value' and value > 1e-5", "value", "number", "singular values / the largest"),
    *(Quantity("residuals", "step >= 0", *one) for one in (
        ("share", "step", "share of beta R^T"), ("angle", "step", "angle of B and R^T"), ("rho", "step", "rho"))),
    Quantity("landscape", "direction.str.startswith('random')", "rise", "t", "rise along random directions"),
    Quantity("landscape", "direction == 'principal 0'", "rise", "t", "rise along the first principal direction"),
    Quantity("landscape", "direction.str.startswith('random')", "hessian", "", "curvature, random"),
    Quantity("landscape", "direction == 'principal 0'", "hessian", "", "curvature, principal"),
    Quantity("landscape", "direction == 'sharpest'", "hessian", "", "sharpness"),
    Quantity("interpolation", "kind == 'checkpoints'", "barrier", "", "barrier, last checkpoints"),
    *(Quantity("interpolation", f"kind == '{kind}'", "loss", "t", f"loss on the line, {kind}") for kind in KINDS),
    *(Quantity("interpolation", f"kind == '{kind}'", "barrier", "", f"barrier, {kind}") for kind in KINDS),
    *(Quantity("activations", f"kind == '{kind}'", "cka", "block", f"CKA, {kind}") for kind in KINDS),
)  # fmt: skip
SECTIONS = {  # a note for each, and the frames it shows
    "spectra": "Means over the matrices: W, or B where a projection is no single matrix. Share: |beta R^T|_F / |B + "
    "beta R^T|_F. Angle: in degrees. rho: the gradient through the residual over that through B.",
    "landscape": "Second derivatives of the mean loss, over the projections alone. Random: each row has the norm of "
    "the row of weights; principal: the norm of all weights; sharpness: the Hessian's largest eigenvalue.",
    "interpolation": "Loss on a line between two models; the barrier is its height above the line between its ends.",
    "activations": "Linear CKA, unbiased; in the table after the last block.",
}
PAIRED = "Seeds: of one method. Backbone: with DLR and without. Reference: full, or the first method without DLR."
MANY = (
    "With DLR minus without, between runs of one seed. The intervals of one number, Student's t, hold together at 95 % "
    "(Bonferroni). There are several numbers: one in twenty is shown by chance. None: no difference is shown."
)
UNITS = {"t": "t (1: all of the way, or the norm of the weights)", "loss": "nats/token", "rise": "nats/token"}


def section_of(frame: str) -> str:
    return "spectra" if frame == "residuals" else frame


def rows_of(frames: dict[str, pd.DataFrame], q: Quantity) -> pd.DataFrame:
    """The rows of a quantity, those of the last step alone unless it is drawn against steps."""
    frame = frames.get(q.frame, pd.DataFrame())
    if q.column not in frame:
        return pd.DataFrame({"scale": []})
    rows = frame.query(q.rows).dropna(subset=[q.column])
    last = "step" in rows and q.x != "step" and len(rows)
    return rows[rows.step == rows.groupby(["run", "kind"]).step.transform("max")] if last else rows


def numbers(frames: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """What the tables show: a row for each number of a run, or of a pair of runs."""
    found = []
    for q in QUANTITIES:
        if len(rows := rows_of(frames, q)) and q.x in ("step", "block", ""):
            ends = rows[rows[q.x] == rows.groupby("run")[q.x].transform("max")] if q.x else rows
            means = ends.groupby(["scale", "method", "dlr", "seed", "run"], sort=False)[q.column].mean()
            found.append(means.reset_index(name="value").assign(section=section_of(q.frame), number=q.title))
    return pd.concat(found, ignore_index=True)


def tables(every: pd.DataFrame, frames: dict[str, pd.DataFrame]) -> Iterator[Table]:
    """The table of each section: a row for each method."""
    for section, here in every.groupby("section", sort=False):
        rows: dict[tuple, dict] = {}
        for (scale, method, number), group in here.groupby(["scale", "method", "number"], sort=False):
            row = rows.setdefault((scale, method), {"Scale": scale, "Method": method})
            row[number] = spread(group.value, ".3g")
        frame, notes = frames[section], [SECTIONS[section], "Mean ± standard deviation (runs, or pairs of runs)."]
        if "space" in frame:
            factors = ", ".join(frame.method[frame.space == "A, B"].unique())
            notes += [f"Where A and B are moved instead of W, values compare only with their like: {factors}."] * bool(
                factors
            )
        if "refused" in frame:
            pairs = frame.dropna(subset=["refused"]).drop_duplicates(["method", "against"])
            notes += [PAIRED, *(f"{r.method} with {r.against} is refused: {r.refused}." for r in pairs.itertuples())]
        yield table(section, section.title(), [*rows.values()], notes)


def differences(every: pd.DataFrame) -> Iterator[Table]:
    """With DLR minus without, between runs of one seed, for each number of a run that both have."""
    rows = []
    for number, group in every[~every.run.str.contains("--")].groupby("number", sort=False):
        plain = group[~group.dlr].set_index(["scale", "method", "seed"]).value
        found: dict[tuple, list[float]] = {}
        for run in group[group.dlr].itertuples():
            if (key := (run.scale, run.method.replace("+dlr", "", 1), run.seed)) in plain.index:
                found.setdefault((run.scale, run.method), []).append(run.value - plain[key])
        tested = {key: values for key, values in found.items() if len(values) > 1}
        for (scale, method), values in tested.items():
            d = estimate(values, 1 - (1 - LEVEL) / len(tested))
            shown = "none" if d["low"] <= 0 <= d["high"] else "higher" if d["mean"] > 0 else "lower"
            row = {"Scale": scale, "Method": method, "Number": number, "Difference": f"{d['mean']:+.3g} ({d['n']})"}
            rows.append(row | {"Interval": f"{d['low']:+.3g} to {d['high']:+.3g}", "With DLR": shown})
    if rows:
        yield table("with_dlr", "With and without DLR", rows, [MANY])


def curves(
    rows: pd.DataFrame, x: str, y: str, folder: Path, name: str, title: str, log: bool = False
) -> Iterator[Picture]:
    """For each scale a line for each method: the mean over its runs of each run's mean of ``y`` at ``x``."""
    for scale, here in rows.groupby("scale", sort=False):
        ax, palette, colours = axes(), cycle(COLOURS), dict[str, tuple]()
        for method, group in here.groupby("method", sort=False):
            runs = group.pivot_table(index=x, columns="run", values=y)
            mean, deviation = runs.mean(axis=1), runs.std(axis=1).fillna(0)
            base = method.replace("+dlr", "", 1)
            colour = colours[base] = colours.get(base) or next(palette)
            line, mark = "--" if group.dlr.all() else "-", "o" if len(mean) < 9 else ""
            ax.plot(
                mean.index, mean, f"{mark}{line}", color=colour, label=f"{method} ({group.run.nunique()})", markersize=3
            )
            ax.fill_between(mean.index, mean - deviation, mean + deviation, color=to_rgba(colour, 0.15))
        ax.set(xlabel=UNITS.get(x, x), ylabel=UNITS.get(y, title))
        if log:
            logarithmic(ax)
        ax.set_title(f"{scale}: {title}", fontsize=10, loc="left")
        note = "Means over runs (in brackets: how many), with standard deviations; dashed lines have DLR."
        file = re.sub(r"[^\w.+-]", "_", f"{name}_{scale}")
        yield save(ax, folder, file, f"{scale}: {title}. {note}")


def logarithmic(ax: Axes) -> None:
    """Make the x axis logarithmic, with plain labels: a figure's texts are not read as formulas."""
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda value, _: amount(value) if value >= 1000 else f"{value:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())


def write(frames: dict[str, pd.DataFrame], remarks: Sequence[str], command: str, output: Path) -> None:
    """Write ``geometry.html`` and ``.md``, ``tables/``, ``figures/``, ``numbers.csv`` and a CSV for each frame."""
    every = numbers(frames)
    for name, frame in {**frames, "numbers": every}.items():
        write_csv(frame, output / f"{name}.csv")
    compared, shown = [*differences(every)], {one.name: one for one in tables(every, frames)}
    write_tables([*compared, *shown.values()], output / "tables")
    parts: list[Part] = [*compared]
    for section, one in shown.items():
        parts += [Section(section, section.title(), []), one]
        for q in [q for q in QUANTITIES if section_of(q.frame) == section and q.x]:
            name = re.sub(r"\W+", "_", q.title)
            parts += curves(rows_of(frames, q), q.x, q.column, output / "figures", name, q.title)
    write_page("What the methods change", remarks, parts, command, output, "geometry")
