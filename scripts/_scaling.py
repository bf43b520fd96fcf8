"""Does the gain survive scale? Losses of runs at several sizes or token counts, and DLR's difference, in a report."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.ticker import NullFormatter

from dlr_pretrain.analysis.choice import LEVEL
from dlr_pretrain.analysis.figures import COLOURS, Picture, axes, axes_of_methods, save, save_methods
from dlr_pretrain.analysis.report import Part, Section
from dlr_pretrain.analysis.runs import Runs, differing_text, spread
from dlr_pretrain.analysis.tables import table
from dlr_pretrain.util.text import amount

LEAST = 3  # sizes
EXPONENTS = np.linspace(-3, 3, 601)
RESAMPLES = 2000
NOTE = (
    "With DLR minus without, in nats/token, between runs of one seed: mean ± standard deviation (seeds). The law "
    "is c (N / N0)^k, fitted to means of one sign, with k from -3 to 3 (the data do not bound an interval that ends "
    "there). Brackets: 95 % percentile bootstrap over seeds, too narrow for fewer than ten or so. Nothing is predicted "
    "further than one step, as long as the last, beyond the sizes."
)


class PowerLaw:
    """c (N / N0)^k, fitted by least squares to the mean differences at at least two ``sizes``, which ascend.

    ``samples`` are the differences of at least two seeds at each. N0 is the sizes' geometric mean.
    """

    def __init__(self, sizes: Sequence[float], samples: Sequence[Sequence[float]]):
        from scipy.stats import bootstrap

        self.sizes = np.array(sizes, float)
        self.centre = float(np.exp(np.log(self.sizes).mean()))
        self.reach = float(self.sizes[-1] ** 2 / self.sizes[-2])  # one step beyond the data, as long as the last
        rng = np.random.default_rng(0)
        drawn = bootstrap(samples, self._fitted, n_resamples=RESAMPLES, method="percentile", rng=rng)
        fits = [self._fitted(*map(np.array, samples))[:, None], drawn.bootstrap_distribution]
        self.c, self.k = np.concatenate(fits, axis=1)  # of the data first, then of the bootstrap

    def _fitted(self, *drawn: np.ndarray, axis: int = -1) -> np.ndarray:
        """c and k [2, ...] of the means of ``drawn``, of any sign. For each of EXPONENTS, c has a closed form."""
        means = np.stack([sample.mean(axis) for sample in drawn], -1)
        basis = (self.sizes / self.centre) ** EXPONENTS[:, None]
        c = means @ basis.T / (basis**2).sum(1)
        best = ((means[..., None, :] - c[..., None] * basis) ** 2).sum(-1).argmin(-1)
        return np.stack([np.take_along_axis(c, best[..., None], -1)[..., 0], EXPONENTS[best]])

    def exponent(self) -> tuple[float, float, float]:
        return interval(self.k)

    def __call__(self, size: float) -> tuple[float, float, float]:
        """The difference at ``size`` and its interval. Raises ValueError further than one step beyond the sizes."""
        if not self.sizes[0] <= size <= self.reach * (1 + 1e-9):
            about = f"the data end at {self.sizes[-1]:g}, and one step beyond at {self.reach:g}"
            raise ValueError(f"{size:g}: {about}")
        return interval(self.c * (size / self.centre) ** self.k)


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """The first value, and the interval that holds LEVEL of the others."""
    low, high = np.quantile(values[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(values[0]), float(low), float(high)


def parts(all_runs: Runs, folder: Path) -> list[Part]:
    """The section of a report; empty unless a method has LEAST sizes, or else token counts, scored on the same text."""
    runs = all_runs.runs[all_runs.runs.state == "finished"]
    counts = runs.groupby("method")[["parameters", "planned_tokens"]].nunique().max()
    if runs.empty or counts.max() < LEAST or differing_text(runs, all_runs.of_set):
        return []
    by, unit = ("parameters", "parameters") if counts.parameters >= LEAST else ("planned_tokens", "tokens")
    several = runs.groupby(["method", by]).key.transform("nunique") > 1
    left_out = dict.fromkeys(f"{run.method} at {amount(run[by])} {unit}" for _, run in runs[several].iterrows())
    notes = [NOTE, *([f"Left out, as they have several settings: {', '.join(left_out)}."] if left_out else [])]
    runs = runs[~several].assign(dlr=runs.dlr != "off", size=runs[by])
    both = runs[runs.dlr].merge(runs[~runs.dlr][["pair", "seed", "loss"]], on=["pair", "seed"], suffixes=("", "_plain"))
    rows, differences, laws = [], {}, {}
    for method, group in both.assign(difference=both.loss - both.loss_plain).groupby("method", sort=False):
        by_size = {size: here.tolist() for size, here in group.groupby("size").difference if len(here) > 1}
        differences[method], signs = by_size, {np.sign(np.mean(values)) for values in by_size.values()}
        row = {"Method": method} | {amount(size): spread(values, "+.4f") for size, values in by_size.items()}
        if len(by_size) >= LEAST and signs not in ({1}, {-1}):
            row["k"] = "no law: the means differ in sign"
        elif len(by_size) >= LEAST:
            law = laws[method] = PowerLaw([*by_size], [*by_size.values()])
            row |= {"k": "{:+.2f} [{:+.2f}, {:+.2f}]".format(*law.exponent())}
            row |= {f"{amount(law.reach)} by the law": "{:+.4f} [{:+.4f}, {:+.4f}]".format(*law(law.reach))}
        rows.append(row)
    shown: list[Part] = [Section("scale", "Does the gain survive scale?", [])]
    shown += [table("scale", f"DLR's difference by {unit}", rows, notes)] if rows else []
    return [*shown, *draw_losses(runs, by, unit, folder), *draw_differences(differences, laws, unit, folder)]


def draw_losses(runs: pd.DataFrame, by: str, unit: str, folder: Path) -> Iterator[Picture]:
    """Each method's loss against parameters or tokens, FLOPs and hours, of which runs of one size have the mean."""
    for x, what in {by: unit, "flops": "FLOPs", "hours": "hours of training"}.items():
        means = runs.assign(**{x: runs.groupby(["method", "size"])[x].transform("mean")}).dropna(subset=[x])
        if len(means):
            ax = axes_of_methods(means, x, "loss")
            logarithmic(ax, what)
            ax.set_ylabel("nats/token")
            yield save_methods(ax, folder, f"scale_{x}", f"loss against {what}")


def draw_differences(
    differences: Mapping[str, Mapping[float, list[float]]], laws: Mapping[str, PowerLaw], unit: str, folder: Path
) -> Iterator[Picture]:
    """The differences of each method at each size, and the law through them, dotted beyond the data, or their means."""
    ax = axes()
    for (method, by_size), colour in zip(differences.items(), cycle(COLOURS)):
        for size, seeds in by_size.items():
            ax.plot([size] * len(seeds), seeds, "o", color=colour, markersize=4)
        if (law := laws.get(method)) is None:
            ax.plot([*by_size], [np.mean(seeds) for seeds in by_size.values()], "--", color=colour, label=method)
            continue
        places = np.geomspace(law.sizes[0], law.reach, 60)
        values, lows, highs = np.array([law(place) for place in places]).T
        within = places <= law.sizes[-1]
        ax.plot(places[within], values[within], "--", color=colour, label=method)
        ax.plot(places[~within], values[~within], ":", color=colour)
        ax.fill_between(places, lows, highs, color=to_rgba(colour, 0.15))
    ax.axhline(0, color="black", linewidth=0.8)
    logarithmic(ax, unit)
    ax.set_ylabel("loss with DLR minus loss without, nats/token")
    if any(differences.values()):
        about = "Points are seeds, and lines their means, or a law: dotted one step beyond the data, with a band that "
        about += "holds 95 % of the bootstrap's laws."
        yield save(ax, folder, "scale_difference", f"DLR's difference by {unit}. {about}")


def logarithmic(ax: Axes, label: str) -> None:
    """Make the x axis logarithmic, with plain numbers: a figure's texts are not read as formulas."""
    ax.set(xscale="log", xlabel=label)
    ax.xaxis.set_major_formatter(lambda value, _: amount(value) if value >= 1000 else f"{value:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())
