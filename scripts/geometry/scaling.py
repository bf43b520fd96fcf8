"""Does the gain survive scale? Losses of runs at several sizes or token counts, and DLR's difference, in a report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.colors import to_rgba

from dlr_pretrain.analysis.choice import LEVEL
from dlr_pretrain.analysis.figures import COLOURS, Picture, axes, save
from dlr_pretrain.analysis.report import Part, Section
from dlr_pretrain.analysis.runs import Runs, differing_text, spread
from dlr_pretrain.analysis.tables import table
from dlr_pretrain.util.text import amount

from .page import curves, logarithmic

LEAST = 3  # sizes
EXPONENTS = np.linspace(-3, 3, 601)
RESAMPLES = 2000
NOTE = (
    "With DLR minus without, in nats/token, between runs of one seed: mean ± standard deviation (seeds). The law "
    "is c (N / N0)^k, fitted to the means, with k from -3 to 3. Brackets: 95 % percentile bootstrap over seeds, too "
    "narrow for fewer than ten or so. Nothing is predicted further than one step, as long as the last, beyond them."
)


@dataclass(frozen=True)
class PowerLaw:
    """c (N / N0)^k, fitted by least squares to the means of ``differences`` (of seeds, by ascending size).

    ``fits`` [1 + resamples, 2] are c and k, of the data first, then of the bootstrap. N0 is the sizes' geometric mean.
    """

    differences: dict[float, list[float]]
    fits: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        return np.array([*self.differences])

    @property
    def reach(self) -> float:
        """The largest size for which it speaks: one step beyond the data, as long as the last step within them."""
        return float(self.sizes[-1] ** 2 / self.sizes[-2])

    def exponent(self) -> tuple[float, float, float]:
        return interval(self.fits[:, 1])

    def __call__(self, size: float) -> tuple[float, float, float]:
        """The difference at ``size`` and its interval. Raises ValueError further than one step beyond the sizes."""
        if not self.sizes[0] <= size <= self.reach * (1 + 1e-9):
            about = f"the data end at {self.sizes[-1]:g}, and one step beyond at {self.reach:g}"
            raise ValueError(f"{size:g}: {about}")
        return interval(self.fits[:, 0] * (size / centre(self.sizes)) ** self.fits[:, 1])


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """The first value, and the interval that holds LEVEL of the others."""
    low, high = np.quantile(values[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(values[0]), float(low), float(high)


def centre(sizes: np.ndarray) -> float:
    return float(np.exp(np.log(sizes).mean()))


def fitted(sizes: np.ndarray, means: np.ndarray) -> np.ndarray:
    """c and k [..., 2] for mean differences [..., sizes] of any sign. For each of EXPONENTS, c has a closed form."""
    basis = (sizes / centre(sizes)) ** EXPONENTS[:, None]
    c = means @ basis.T / (basis**2).sum(1)
    best = ((means[..., None, :] - c[..., None] * basis) ** 2).sum(-1).argmin(-1)
    return np.stack([np.take_along_axis(c, best[..., None], -1)[..., 0], EXPONENTS[best]], -1)


def power_law(differences: dict[float, list[float]]) -> PowerLaw:
    """The law of ``differences`` by ascending size, each over at least two seeds."""
    from scipy.stats import bootstrap

    sizes, samples = np.array([*differences]), [*differences.values()]

    def statistic(*drawn: np.ndarray, axis: int) -> np.ndarray:
        return np.moveaxis(fitted(sizes, np.stack([sample.mean(axis) for sample in drawn], -1)), -1, 0)

    drawn = bootstrap(samples, statistic, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(0))
    own = fitted(sizes, np.array([np.mean(sample) for sample in samples]))
    return PowerLaw(differences, np.concatenate([own[None], np.moveaxis(drawn.bootstrap_distribution, 0, -1)]))


def parts(all_runs: Runs, folder: Path) -> list[Part]:
    """The section of a report; empty unless a method has LEAST sizes, or else token counts, scored on the same text."""
    runs = all_runs.runs[all_runs.runs.state == "finished"]
    counts = runs.groupby("method")[["parameters", "planned_tokens"]].nunique().max()
    if runs.empty or counts.max() < LEAST or differing_text(runs, all_runs.of_set):
        return []
    by, unit = ("parameters", "parameters") if counts.parameters >= LEAST else ("planned_tokens", "tokens")
    several = runs.groupby(["method", by]).key.transform("nunique") > 1
    left_out = dict.fromkeys(f"{run.method} at {amount(run[by])} {unit}" for _, run in runs[several].iterrows())
    runs = runs[~several].assign(scale="all scales", dlr=runs.dlr != "off", size=runs[by])
    rows, laws = [], {}
    plain = runs[~runs.dlr].set_index(["pair", "seed"]).loss
    for method, group in runs[runs.dlr].groupby("method", sort=False):
        by_size: dict[float, list[float]] = {}
        for run in group[[key in plain.index for key in zip(group.pair, group.seed, strict=True)]].itertuples():
            by_size.setdefault(run.size, []).append(run.loss - plain[run.pair, run.seed])
        by_size = {size: by_size[size] for size in sorted(by_size) if len(by_size[size]) > 1}
        row = {"Method": method} | {amount(size): spread(values, "+.4f") for size, values in by_size.items()}
        if len(by_size) >= LEAST:
            law = laws[method] = power_law(by_size)
            row |= {"k": "{:+.2f} [{:+.2f}, {:+.2f}]".format(*law.exponent())}
            row |= {f"{amount(law.reach)} by the law": "{:+.4f} [{:+.4f}, {:+.4f}]".format(*law(law.reach))}
        rows.append(row)
    notes = [NOTE, *([f"Left out, as they have several settings: {', '.join(left_out)}."] if left_out else [])]
    shown: list[Part] = [Section("scale", "Does the gain survive scale?", [])]
    shown += [table("scale", f"DLR's difference by {unit}", rows, notes)] if rows else []
    for x, what in {by: unit, "flops": "FLOPs", "hours": "hours of training"}.items():
        means = runs.assign(**{x: runs.groupby(["method", "size"])[x].transform("mean")}).dropna(subset=[x])
        shown += curves(means, x, "loss", folder, f"scale_{x}", f"loss against {what}", log=True)
    return [*shown, *draw(laws, unit, folder)]


def draw(laws: dict[str, PowerLaw], unit: str, folder: Path) -> Iterator[Picture]:
    """The differences of each method and the law through them, dotted beyond the data; nothing without a law."""
    ax = axes()
    for (method, law), colour in zip(laws.items(), cycle(COLOURS)):
        places = np.geomspace(law.sizes[0], law.reach, 60)
        values, lows, highs = np.array([law(place) for place in places]).T
        within = places <= law.sizes[-1]
        ax.plot(places[within], values[within], "--", color=colour, label=method)
        ax.plot(places[~within], values[~within], ":", color=colour)
        ax.fill_between(places, lows, highs, color=to_rgba(colour, 0.15))
        for size, seeds in law.differences.items():
            ax.plot([size] * len(seeds), seeds, "o", color=colour, markersize=4)
    ax.axhline(0, color="black", linewidth=0.8)
    logarithmic(ax)
    ax.set(xlabel=unit, ylabel="loss with DLR minus loss without, nats/token")
    if laws:
        about = "Points are seeds, bands hold 95 % of the bootstrap's laws, and dotted is one step beyond the data."
        yield save(ax, folder, "scale_difference", f"DLR's difference by {unit}. {about}")
