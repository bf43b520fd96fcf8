"""The numbers of the gradient-path probe, for the report of a run: a figure and a table."""

from __future__ import annotations

import math

from dlr_pretrain.analysis.drawing import GREY, SERIES, subplots, unframe
from dlr_pretrain.util.text import table

CURVES = len(SERIES)  # a figure shows at most this many projections
NUMBERS = ("rho", "rho_mean", "isotropic", "cosine", "through_b", "through_residual")
EXPLAINED = (
    "rho is the mean norm of beta R g, the gradient that reaches a latent through the residual, divided by that of "
    "B^T g, which reaches it through B; the mean of ratios is over single positions. The isotropic value (dashed in "
    "figures) is that of a gradient without a preferred direction at that step's weights: |beta R^T|_F / |B|_F."
)
Probes = dict[str, list[tuple[int, dict[str, float]]]]  # projection -> [(update that follows the look, numbers)]


def probes(metrics: list[dict]) -> Probes:
    """The numbers of every look, in order; NaN for a number that is null or absent."""
    found: Probes = {}
    for record in metrics:
        layers = dict.fromkeys(name.split("/")[1] for name in record if name.startswith("probe/"))
        for layer in layers:
            values = {number: record.get(f"probe/{layer}/{number}") for number in NUMBERS}
            numbers = {number: math.nan if value is None else value for number, value in values.items()}
            found.setdefault(layer, []).append((record["step"], numbers))
    return found


def section(found: Probes) -> str:
    """Markdown: the figure, what it shows, and the numbers of the first and the last look."""
    lines = [
        "## Gradient paths",
        "![gradient paths](plots/gradient_paths.png)",
        f"{EXPLAINED} In brackets: the mean of ratios.",
    ]
    rows = []
    for layer, looks in found.items():
        for step, n in dict([looks[0], looks[-1]]).items():
            ratio = f"{n['rho']:.3f} ({n['rho_mean']:.3f})"
            rows.append([layer, f"{step:,}", ratio, f"{n['isotropic']:.3f}", f"{n['cosine']:+.3f}"])
    header = ["projection", "before update", "rho", "isotropic", "cosine"]
    return "\n\n".join([*lines, table(header, rows, right=range(1, 5))])


def plot_paths(found: Probes, title: str):
    """A figure of rho over the updates, one colour for each projection; the isotropic expectation is dashed."""
    from matplotlib.ticker import StrMethodFormatter

    figure, (axes,) = subplots(1, width=8, height=4.5)
    for colour, (layer, looks) in zip(SERIES, found.items(), strict=False):
        steps = [step for step, _ in looks]
        axes.plot(steps, [n["rho"] for _, n in looks], color=colour, marker="o", markersize=4, label=layer)
        axes.plot(steps, [n["isotropic"] for _, n in looks], color=colour, linestyle="--", linewidth=1)
    axes.plot([], [], color=GREY, linestyle="--", linewidth=1, label="isotropic gradient")
    axes.axhline(1, color=GREY, linewidth=0.8)
    left_out = f" (the first {CURVES} of {len(found)} projections)" if len(found) > CURVES else ""
    axes.set(title=f"{title}{left_out}", xlabel="update", ylabel="rho = |beta R g| / |B$^T$ g|", xscale="log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    unframe(axes)
    axes.legend(frameon=False)
    return figure
