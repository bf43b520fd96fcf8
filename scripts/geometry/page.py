"""Tables and figures of a study, from its frames, and its page."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from dlr_pretrain.analysis.choice import LEVEL, estimate
from dlr_pretrain.analysis.figures import as_file, axes_of_methods, save_methods
from dlr_pretrain.analysis.report import Part, Section, write_csv, write_page, write_tables
from dlr_pretrain.analysis.runs import spread
from dlr_pretrain.analysis.tables import Table, table
from dlr_pretrain.util.errors import UserError


class Quantity(NamedTuple):
    """What is shown of a part: a ``column`` of some ``rows``, against ``x`` in a figure, and at its end in a table."""

    part: str
    rows: str
    column: str
    x: str
    title: str


MAIN = "matrix in ['W', 'B'] and of == "
RANDOM = "direction.str.startswith('random')"
KINDS = ("seeds", "backbone", "reference")
QUANTITIES = (
    Quantity("spectra", f"{MAIN}'weights'", "effective_rank", "step", "effective rank of W or B"),
    Quantity("spectra", f"{MAIN}'weights'", "stable_rank", "step", "stable rank of W or B"),
    Quantity("spectra", f"{MAIN}'weights'", "energy", "step", "energy in the first 8 values"),
    Quantity("spectra", f"{MAIN}'update'", "effective_rank", "step", "effective rank of W_t - W_0"),
    Quantity("spectra", f"{MAIN}'value' and value > 1e-5", "value", "number", "singular values / the largest"),
    Quantity("residuals", "", "share", "step", "share of beta R^T"),
    Quantity("residuals", "", "angle", "step", "angle of B and R^T"),
    Quantity("residuals", "", "rho", "step", "rho"),
    Quantity("landscape", RANDOM, "rise", "t", "rise along random directions"),
    Quantity("landscape", "direction == 'principal 0'", "rise", "t", "rise along the first principal direction"),
    Quantity("landscape", RANDOM, "hessian", "", "curvature, random"),
    Quantity("landscape", "direction == 'principal 0'", "hessian", "", "curvature, principal"),
    Quantity("landscape", "direction == 'sharpest'", "hessian", "", "sharpness"),
    Quantity("interpolation", "kind == 'checkpoints'", "barrier", "", "barrier, last checkpoints"),
    *(Quantity("interpolation", f"kind == '{kind}'", "loss", "t", f"loss on the line, {kind}") for kind in KINDS),
    *(Quantity("interpolation", f"kind == '{kind}'", "barrier", "", f"barrier, {kind}") for kind in KINDS),
    *(Quantity("activations", f"kind == '{kind}'", "cka", "block", f"CKA, {kind}") for kind in KINDS),
)
PAIRED = "Seeds: of one method. Backbone: with DLR and without. Reference: full, or the first method without DLR."
NOTES = {
    "spectra": "Means over the matrices: W, or B where a projection is no single matrix.",
    "residuals": "Means over the projections. Share: |beta R^T|_F / |B + beta R^T|_F. Angle: in degrees. rho: the "
    "gradient through the residual over that through B.",
    "landscape": "Second derivatives of the mean loss, over the projections alone. Random: each row has the norm of "
    "the row of weights; principal: the norm of all weights; sharpness: the Hessian's largest eigenvalue.",
    "interpolation": "Loss on a line between two models; the barrier is its height above the line between its ends.",
    "activations": "Linear CKA, unbiased; in the table after the last block.",
}
SPREAD = "Mean ± standard deviation (runs, or pairs of runs)."
MANY = (
    "With DLR minus without, between runs of one seed. The intervals of one number, Student's t, hold together at 95 % "
    "(Bonferroni). There are several numbers: one in twenty is shown by chance. None: no difference is shown."
)
UNITS = {"t": "t (1: all of the way, or the norm of the weights)", "loss": "nats/token", "rise": "nats/token"}


def rows_of(frames: dict[str, pd.DataFrame], q: Quantity) -> pd.DataFrame:
    """The rows of a quantity, those of the last step alone unless it is drawn against steps."""
    frame = frames.get(q.part, pd.DataFrame())
    if q.column not in frame:
        return pd.DataFrame({"scale": []})
    rows = (frame.query(q.rows) if q.rows else frame).dropna(subset=[q.column])
    last = "step" in rows and q.x != "step" and len(rows)
    return rows[rows.step == rows.groupby(["run", "kind"]).step.transform("max")] if last else rows


def numbers(frames: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """What the tables show: a row for each number of a run, or of a pair of runs."""
    found = []
    for q in QUANTITIES:
        if len(rows := rows_of(frames, q)) and q.x in ("step", "block", ""):
            ends = rows[rows[q.x] == rows.groupby("run")[q.x].transform("max")] if q.x else rows
            means = ends.groupby(["scale", "method", "dlr", "seed", "run", "kind"], sort=False)[q.column].mean()
            found.append(means.reset_index(name="value").assign(section=q.part, number=q.title))
    if not found:
        raise UserError("nothing to show: residuals need DLR, and activations two runs that can be compared")
    return pd.concat(found, ignore_index=True)


def tables(every: pd.DataFrame, frames: dict[str, pd.DataFrame]) -> Iterator[Table]:
    """The table of each section: a row for each method."""
    every = every.rename(columns={"scale": "Scale", "method": "Method"})
    for section, frame in frames.items():
        here, notes = every[every.section == section], [NOTES[section], SPREAD]
        cells = here.groupby(["Scale", "Method", "number"], sort=False).value.apply(spread, spec=".3g")
        if factors := ", ".join(frame.method[frame.space == "A, B"].unique()) if "space" in frame else "":
            notes.append(f"Where A and B are moved instead of W, values compare only with their like: {factors}.")
        if "refused" in frame:
            pairs = frame.dropna(subset=["refused"]).drop_duplicates(["method", "against"])
            notes += [PAIRED, *(f"{p.method} with {p.against} is refused: {p.refused}." for p in pairs.itertuples())]
        rows = cells.unstack(sort=False).reset_index().to_dict("records") if len(here) else [{"Method": "none"}]
        yield table(section, section.title(), rows, notes)


def differences(every: pd.DataFrame) -> Iterator[Table]:
    """With DLR minus without, between runs of one seed, for each number of a run that both have."""
    alone = every[~every.kind.isin(KINDS)].assign(base=every.method.str.replace("+dlr", "", n=1, regex=False))
    same = ["scale", "base", "seed", "number"]
    both = alone[alone.dlr].merge(alone[~alone.dlr], on=same, suffixes=("", "_plain"))
    both["difference"], rows = both.value - both.value_plain, []
    for number, here in both.groupby("number", sort=False):
        several = [(key, group) for key, group in here.groupby(["scale", "method"], sort=False) if len(group) > 1]
        for (scale, method), group in several:
            d = estimate(group.difference.tolist(), 1 - (1 - LEVEL) / len(several))
            shown = "none" if d["low"] <= 0 <= d["high"] else "higher" if d["mean"] > 0 else "lower"
            row = {"Scale": scale, "Method": method, "Number": number, "Difference": f"{d['mean']:+.3g} ({d['n']})"}
            rows.append(row | {"Interval": f"{d['low']:+.3g} to {d['high']:+.3g}", "With DLR": shown})
    if rows:
        yield table("with_dlr", "With and without DLR", rows, [MANY])


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
        for q in [q for q in QUANTITIES if q.part == section and q.x]:
            for scale, rows in rows_of(frames, q).groupby("scale", sort=False):
                ax = axes_of_methods(rows, q.x, q.column)
                ax.set(xlabel=UNITS.get(q.x, q.x), ylabel=UNITS.get(q.column, q.title))
                name, title = f"{as_file(q.title)}_{as_file(scale)}", f"{scale}: {q.title}"
                parts.append(save_methods(ax, output / "figures", name, title))
    write_page("What the methods change", remarks, parts, command, output, "geometry")
