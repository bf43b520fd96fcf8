"""Draws the tables and figures of docs/evidence.md again, from the tables of runs that stand beside this file.

    python -m benchmarks.evidence.report                             # docs/evidence.md and docs/evidence/
    python -m benchmarks.evidence.report page.md folder-of-tables    # another page, from other tables

The text between ``<!-- pairs/tune -->`` and ``<!-- end -->`` is replaced by the table ``tune`` of ``pairs.jsonl.gz``. A
link such as ``(evidence/pairs/tune_rates.png)`` draws that figure beside the page. ``collect.py`` says what the tables
of runs hold. Losses are in nats/token; a difference is a method's loss minus the first method's of its comparison.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from benchmarks.protocol import paired
from dlr_pretrain.analysis.paper import facts
from dlr_pretrain.analysis.runs import spread
from dlr_pretrain.analysis.verdict import LEVEL, Design, Trial, compare, estimate, remarks
from dlr_pretrain.util.text import table as markdown_table

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "evidence.md"
PIECES = ("pairs", "paper", "mechanism", "ablations", "longer", "paths")
SCALES = ("60m", "130m", "350m", "1b")
BACKBONES = ("lowrank", "cola", "lost", "lax", "cola_lax")


# ----------------------------------------------------------------------------------------------------
# Runs and comparisons


class Comparison:
    """Methods at one or several rates, as ``scripts/tune.py`` compares them; see ``analysis/verdict.py``."""

    def __init__(self, line: dict, runs: dict[str, dict]):
        self.words = shlex.split(line["shared"])
        trials = []
        for trial in line["trials"]:
            metrics = runs[trial["run"]]["metrics"]
            last = {f"loss_{half}": metrics[f"eval/loss_{half}"][-1] for half in "ab"}
            trials.append(Trial(**trial, state="finished", **last))
        self.design = Design(**line["design"])
        self.found = compare(self.design, trials)
        self.trials = pd.DataFrame(self.found["trials"])
        self.chosen = self.found["chosen"]
        self.effects = {c["method"]: c for c in self.found["comparisons"] if c["better"]}

    def grid(self, method: str) -> pd.Series:
        """The losses of a method on half B with the seeds of the grid, by rate."""
        t = self.trials
        return t[(t.method == method) & t.seed.isin(self.design.seeds)].set_index("lr").loss_b

    def held_out(self, method: str) -> list[float]:
        return list(self.chosen[method]["held_out"]["losses"].values())


def cells(effect: dict) -> list[str]:
    d = effect["difference"]
    return [f"{d['mean']:+.4f} ({d['n']})", f"{d['low']:+.4f} to {d['high']:+.4f}"]


class Piece:
    """The table of runs of one piece of the programme."""

    def __init__(self, path: Path):
        self.name = path.name.partition(".")[0]
        self.lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        self.runs = {line["run"]: line for line in self.lines if "run" in line}
        self.comparisons = [Comparison(line, self.runs) for line in self.lines if "comparison" in line]

    def settings(self) -> list[str]:
        """How each comparison differs from the others: its shared words that not all comparisons have."""
        all_words = [c.words for c in self.comparisons]
        return [" ".join(w for w in c.words if not all(w in other for other in all_words)) for c in self.comparisons]


def perplexities(losses: Iterable[float]) -> str:
    """Mean ± standard deviation (number) of the perplexities."""
    return spread(np.exp(pd.Series(losses)))


def paper() -> pd.DataFrame:
    """The perplexities of the paper's Table 1: a row a method, a column a scale."""
    return facts("table1").pivot(index="method", columns="scale", values="ppl")


# ----------------------------------------------------------------------------------------------------
# Tables


def table(header: list[str], rows: list[list[str]], notes: Sequence[str], right: Iterable[int]) -> str:
    """Markdown; the columns whose indices are in ``right`` are aligned to the right. Settings that are all the same are
    left out."""
    alike = header[0] == "Setting" and len({row[0] for row in rows}) == 1
    shown = markdown_table(header[alike:], [row[alike:] for row in rows], [i - alike for i in right])
    return "\n".join([shown, "", *(f"* {note}" for note in notes)])


def tune(piece: Piece) -> str:
    """Each method at its own rate, and its difference from the first of its comparison."""
    rows = []
    for c, setting in zip(piece.comparisons, piece.settings(), strict=True):
        for method, choice in c.chosen.items():
            end = f", the {choice['edge']}" if choice["edge"] in ("lowest", "highest") else ""
            effect = c.effects.get(method)
            verdict = [*cells(effect), effect["better"]] if effect else ["", "", ""]
            rows.append([setting, method, f"{choice['lr']:g}{end}", perplexities(c.held_out(method)), *verdict])
    levels = sorted({effect["difference"]["level"] for c in piece.comparisons for effect in c.effects.values()})
    notes = [
        "Perplexity is on the half of the validation text that chose no rate: mean ± standard deviation (number of "
        "seeds). Differences are in nats per token from the first method of the same comparison, between runs with "
        "the same seed; negative means that the method of the row is better. A method is called better if its "
        "interval excludes zero.",
        f"Intervals are Student's t over seeds, at {', '.join(f'{100 * level:.4g} %' for level in levels)}.",
        *by_chance(piece),
        *dict.fromkeys(remark for c in piece.comparisons for remark in remarks(c.found)),
    ]
    header = ["Setting", "Method", "Learning rate", "Perplexity", "Difference of the loss", "Interval", "Better"]
    return table(header, rows, notes, (3, 4))


def by_chance(piece: Piece) -> list[str]:
    """How often chance alone would have some interval exclude zero. The intervals of one comparison hold together,
    those of several do not; the same runs compared twice count once."""
    several = [c.effects for c in piece.comparisons if c.effects]
    found = [effect for effects in several for effect in effects.values()]
    levels = {(e["method"], *e["by_seed"].items()): e["difference"]["level"] for e in found}
    chance = 100 * (1 - math.prod(levels.values()))
    return [
        f"There are {len(levels)} comparisons, each with an interval of its own. If nothing differed, the chance that "
        f"at least one of them excludes zero would be {chance:.0f} %."
    ] * (len(several) > 1)


def tune_rates(piece: Piece) -> str:
    rates = sorted({lr for c in piece.comparisons for lr in c.design.rates})
    rows = [
        [setting, method, *(perplexities(c.grid(method)[[lr]]) for lr in rates)]
        for c, setting in zip(piece.comparisons, piece.settings(), strict=True)
        for method in c.chosen
    ]
    notes = ["Perplexity on held-out text: mean ± standard deviation over the seeds of the grid (their number)."]
    header = ["Setting", "Method", *map("{:g}".format, rates)]
    return table(header, rows, notes, range(2, len(header)))


def tune_order(piece: Piece) -> str:
    """The order of the methods, ours and the paper's."""
    held_out = {method: c.held_out(method) for c in piece.comparisons for method in c.chosen}
    ranked = sorted(held_out, key=lambda method: np.exp(held_out[method]).mean())
    theirs = paper().loc[ranked]
    ranks = theirs.rank().astype(int)
    rows = [
        [method, f"{perplexities(held_out[method])} [{place}]",
         *(f"{theirs[scale][method]:.2f} [{ranks[scale][method]}]" for scale in SCALES)]
        for place, method in enumerate(ranked, 1)
    ]  # fmt: skip
    pairs = list(combinations(ranked, 2))
    alike = (f"{sum(theirs[s][a] < theirs[s][b] for a, b in pairs)} at {s}" for s in SCALES)
    notes = [
        "Perplexities, with the rank among the methods of this table in brackets. Text and model sizes differ.",
        f"Of the {len(pairs)} pairs of these methods, the paper orders like ours: {', '.join(alike)}.",
    ]
    return table(["Method", "Ours", *(f"{scale} paper" for scale in SCALES)], rows, notes, range(1, 6))


def tune_effect(piece: Piece) -> str:
    """What DLR changes, ours and the paper's."""
    theirs = np.log(paper())
    rows = [
        [method, *cells(effect), *(f"{theirs[s][method] - theirs[s][effect['against']]:+.4f}" for s in SCALES)]
        for c in piece.comparisons
        for method, effect in c.effects.items()
    ]
    note = (
        "Difference of the loss from the backbone without DLR, in nats per token. The paper's are computed from its "
        "printed perplexities, whose convention makes a difference one percent too small."
    )
    header = ["Method", "Ours", "Interval", *(f"{scale} paper" for scale in SCALES)]
    return table(header, rows, [note], (1, 3, 4, 5, 6))


def smoke(piece: Piece) -> str:
    """The difference of ``lost`` at update 250, beside what the same update of ``pairs`` predicts for these seeds."""
    pairs = read(HERE / "pairs.jsonl.gz")
    (lost,) = (c for c in pairs.comparisons if c.design.methods[0] == "lost")
    of = lost.trials[lost.trials.seed.isin(lost.design.fresh)]
    there = dlr_at_250({t.seed: [pairs.runs[r] for r in of[of.seed == t.seed].run] for t in of.itertuples()})
    seeds = sorted({run["config"]["seed"] for run in piece.runs.values()})
    here = dlr_at_250({seed: [r for r in piece.runs.values() if r["config"]["seed"] == seed] for seed in seeds})
    known, mean = estimate(list(there.values()), LEVEL), float(np.mean(list(here.values())))
    reach = (known["high"] - known["mean"]) * math.sqrt(1 + len(there) / len(here))  # Student's t, for a mean of these
    low, high = known["mean"] - reach, known["mean"] + reach
    rows = [[str(seed), f"{difference:+.4f}"] for seed, difference in here.items()]
    notes = [
        f"Predicted for the mean, from the seeds of `pairs` at this update: {low:+.4f} to {high:+.4f} ({LEVEL:.0%}).",
        f"Found: {mean:+.4f}, {'inside' if low <= mean <= high else 'outside'}.",
    ]
    return table(["Seed", "Difference of the loss with DLR, nats/token"], rows, notes, (1,))


def dlr_at_250(runs: dict[int, list[dict]]) -> dict[int, float]:
    """By seed: the loss on half B with DLR minus that without, at update 250."""
    found = {}
    for seed, both in runs.items():
        columns = {run["config"]["dlr"]["enabled"]: run["metrics"] for run in both}
        on, off = (columns[dlr]["eval/loss_b"][columns[dlr]["step"].index(250)] for dlr in (True, False))
        found[seed] = on - off
    return found


def probed(piece: Piece) -> dict[str, dict[str, pd.DataFrame]]:
    """Run ("lowrank+dlr (train.lr=0.01)") -> projection -> the numbers of each probe, by the update that follows."""
    (comparison,) = piece.comparisons
    found = {}
    for trial in comparison.trials.sort_values(["method", "lr"], ascending=[False, True]).itertuples():
        metrics = pd.DataFrame(piece.runs[trial.run]["metrics"]).set_index("step")
        layers = dict.fromkeys(name.split("/")[1] for name in metrics if name.startswith("probe/"))
        variant = f" (train.lr={trial.lr:g})" if trial.lr != comparison.design.rates[0] else ""
        found[trial.method + variant] = {
            layer: metrics.filter(like=f"/{layer}/").rename(columns=lambda n: n.split("/")[2]).dropna()
            for layer in layers
        }
    return found


def paths(piece: Piece) -> str:
    """The first and the last probe of each projection."""
    rows = [
        [f"tiny {run}", layer, str(step), *(f"{n[key]:.3f}" for key in ("rho", "rho_mean", "isotropic")),
         f"{n.cosine:+.3f}"]
        for run, layers in probed(piece).items() for layer, found in layers.items()
        for step, n in found.iloc[[0, -1]].iterrows()
    ]  # fmt: skip
    note = (
        "rho is the mean norm of beta R g, the gradient that reaches a latent through the residual, divided by that of "
        "B^T g, which reaches it through B; the mean of ratios is over single positions. The isotropic value (dashed "
        "in figures) is that of a gradient without a preferred direction at that step's weights: |beta R^T|_F / |B|_F."
    )
    header = ["Run", "Projection", "Before update", "rho", "Mean of ratios", "Isotropic", "Cosine"]
    return table(header, rows, [note], (3, 4, 5, 6))


def cost(piece: Piece) -> str:
    """A row a backbone, whose variants are: without DLR, again without DLR, with DLR."""
    rows = []
    for plain, again, dlr in (line.get("variants") or line["arms"] for line in piece.lines):
        ratios = [paired(variant["seconds"], plain["seconds"]) for variant in (dlr, again)]
        shown = ("{:.4f} [{:.4f}, {:.4f}]".format(*ratio) for ratio in ratios)
        speeds = [f"{v['ms']:.1f}" for v in (plain, dlr)] + [f"{v['tokens_per_second']:,.0f}" for v in (plain, dlr)]
        given = dict(word.split("=") for word in plain.get("overrides") or plain["words"])
        rows.append([given["backbone"], *speeds, *shown])
    note = (
        "ratio: seconds with DLR over those without in the same round, median [its 95 % interval]. The last column is "
        "the same of a second step without DLR."
    )
    header = ["backbone", "ms/step", "with DLR", "positions/s", "with DLR", "ratio", "the same once more"]
    return table(header, rows, [note], range(1, 7))


def spent(pieces: Sequence[Piece]) -> str:
    """What the runs of each piece took."""
    rows = []
    for piece in pieces:
        runs = list(piece.runs.values())
        train = [run["config"]["train"] for run in runs]
        tokens = {t["steps"] * t["global_batch"] * t["seq_len"] for t in train}
        hours = pd.Series([run["hours"] for run in runs])
        rows.append([
            piece.name,
            str(len(runs)),
            listed(run["config"]["seed"] for run in runs),
            listed(run["config"]["precision"]["name"] for run in runs),
            ", ".join(f"{n / 1e6:.3g}M" for n in sorted(tokens)),
            f"{hours.sum():.{max(0, 2 - math.floor(math.log10(hours.sum())))}f}",
            ", ".join(f"{60 * x:.2g}" for x in (hours.min(), hours.median(), hours.max())),
            listed(commit[:7] for run in runs for commit in run["commits"]),
        ])  # fmt: skip
    note = (
        "Hours of one core per run, from the first update to the last, with evaluations, saves, and what a machine "
        "stood still in between; minutes are the shortest, the median and the longest. A run of several pieces counts "
        "in each."
    )
    header = ["Piece", "Runs", "Seeds", "Precision", "Tokens per run", "Hours", "Minutes per run", "Commits"]
    return table(header, rows, [note], (1, 5))


def listed(values: Iterable) -> str:
    return ", ".join(map(str, sorted(set(values))))


# ----------------------------------------------------------------------------------------------------
# Figures, in the colours of Okabe and Ito (2008), which every kind of colour vision tells apart

BLACK, BLUE, VERMILLION, GREEN, PINK, GREY = "#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#767676"
SERIES, MARKS = (BLUE, VERMILLION, GREEN, PINK), "osD^"


def panels(n: int, x: str, y: str, width: float = 3.6, height: float = 3.1) -> tuple[Figure, list]:
    """A figure and its ``n`` panels, three in a row, with the same ranges and outer labels."""
    columns = min(n, 3)
    rows = -(-n // columns)
    figure = Figure(figsize=(max(5.0, width * columns), height * rows), dpi=150, layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for empty in axes[n:]:
        empty.remove()
    for i, ax in enumerate(axes[:n]):
        lowest = i + columns >= n
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelbottom=lowest)
        ax.set(xlabel=x if lowest else "", ylabel="" if i % columns else y)
    return figure, list(axes[:n])


def draw_differences(piece: Piece, _name: str) -> Figure:
    """Each difference once, with its interval: blue is better, red is worse, grey is undecided."""
    found = [
        ((" ".join(filter(None, (method, setting))), f" at {c.chosen[method]['lr']:g}", f" against {e['against']}"),
         e["difference"])
        for c, setting in zip(piece.comparisons, piece.settings(), strict=True)
        for method, e in c.effects.items()
    ]  # fmt: skip
    points = [point for i, point in enumerate(found) if point not in found[:i]]
    names = [parts[0] for parts, _ in points]
    for more in (1, 2):  # a name that several share is given its rate, then what it is compared with
        several = Counter(names)
        names = [name + parts[more] * (several[name] > 1) for name, (parts, _) in zip(names, points, strict=True)]
    names = [textwrap.fill(name, 48, break_long_words=False, subsequent_indent="  ") for name in names]
    row = max(0.32, 0.04 + 0.14 * max(name.count("\n") + 1 for name in names))  # inches: no name reaches the next
    axis = "difference of the loss, nats per token (left of 0 is better)"
    figure, (ax,) = panels(1, axis, "", width=7.0, height=1.0 + row * len(points))
    for y, (_, d) in enumerate(points):
        colour = VERMILLION if d["low"] > 0 else BLUE if d["high"] < 0 else GREY
        error = [[d["mean"] - d["low"]], [d["high"] - d["mean"]]]
        ax.errorbar(d["mean"], y, xerr=error, fmt="o", color=colour, markersize=5, capsize=3)
    ax.axvline(0, color=BLACK, linewidth=0.8)
    ax.set_yticks(range(len(points)), names, fontsize=8)
    ax.set_ylim(len(points) - 0.5, -0.5)
    return figure


def draw_rates(piece: Piece, _name: str) -> Figure:
    """Perplexity against the rate, a panel a comparison; points are seeds, lines means, a ring the chosen rate."""
    figure, axes = panels(len(piece.comparisons), "peak learning rate", "perplexity on held-out text")
    for c, ax in zip(piece.comparisons, axes, strict=True):
        for i, (method, choice) in enumerate(c.chosen.items()):
            losses, style = np.exp(c.grid(method)), {"color": SERIES[i], "marker": MARKS[i]}
            shifted = losses.index * (1 + 0.015 * (i - (len(c.chosen) - 1) / 2))  # points of one rate side by side
            means = losses.groupby(level=0).mean()
            ax.plot(shifted, losses, linestyle="none", alpha=0.35, markersize=4, **style)
            ax.plot(means, markersize=5, linewidth=1.6, label=method, **style)
            ring = {"markersize": 13, "markerfacecolor": "none", "markeredgewidth": 1.6, "linestyle": "none"}
            ax.plot([choice["lr"]], [means[choice["lr"]]], "o", color=SERIES[i], **ring)
        ax.set(xscale="log", yscale="log", title=c.design.methods[0])
        ax.xaxis.set(major_locator=FixedLocator(c.design.rates), minor_locator=NullLocator())
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        for which in ("major", "minor"):
            getattr(ax.yaxis, f"set_{which}_formatter")(lambda value, _: f"{value:.4g}")
        ax.grid(axis="y", which="minor", alpha=0.15)
        ax.legend(frameon=False, fontsize=8)
    return figure


def draw_losses(piece: Piece, _name: str) -> Figure:
    """Training loss (running medians of each seed) and evaluations (dots), a panel a backbone, with the dense model."""
    methods = {method: c.trials.run[c.trials.method == method] for c in piece.comparisons for method in c.chosen}
    figure, axes = panels(len(BACKBONES), "tokens seen (positions)", "loss (nats/token)")
    shown: list[float] = []
    for name, ax in zip(BACKBONES, axes, strict=True):
        for method, color, dash in ((name, BLUE, "-"), (f"{name}+dlr", VERMILLION, "-"), ("full", BLACK, "--")):
            runs = [pd.DataFrame(piece.runs[run]["metrics"]) for run in methods[method]]
            last = np.exp([run["eval/loss"].iloc[-1] for run in runs]).mean()
            for i, (run, metrics) in enumerate(zip(methods[method], runs, strict=True)):
                train = piece.runs[run]["config"]["train"]
                tokens = metrics.step * train["global_batch"] * train["seq_len"] / 1e6
                median = metrics["train/loss"].rolling(5, center=True, min_periods=3).median()
                title = None if i else f"{method}  {last:,.1f}"
                ax.plot(tokens, median, color=color, linestyle=dash, linewidth=1.1, alpha=0.75, label=title)
                ax.plot(tokens, metrics["eval/loss"], "o", color=color, markersize=3.5, zorder=3)
                shown += [*median[len(median) // 20 :], *metrics["eval/loss"].dropna()]
        ax.set_title(name)
        ax.legend(frameon=False, fontsize=8)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:.4g}M" if value else "0")
    room = 0.04 * (max(shown) - min(shown))
    axes[0].set_ylim(min(shown) - room, max(shown) + room)  # the first steps would flatten the curves
    return figure


def draw_paths(piece: Piece, name: str) -> Figure:
    """rho over the updates of one run; dashed: a gradient without a preferred direction."""
    found = {re.sub(r"\W+", "_", f"gradient_paths_tiny_{run}").strip("_"): run for run in probed(piece)}
    figure, (ax,) = panels(1, "update", "rho = |beta R g| / |B$^T$ g|", width=8, height=4.5)
    for colour, (layer, numbers) in zip(SERIES, probed(piece)[found[name]].items(), strict=False):
        ax.plot(numbers.rho, color=colour, marker="o", markersize=4, label=layer)
        ax.plot(numbers.isotropic, color=colour, linestyle="--", linewidth=1)
    ax.plot([], [], color=GREY, linestyle="--", linewidth=1, label="isotropic gradient")
    ax.axhline(1, color=GREY, linewidth=0.8)
    ax.set(title=f"tiny {found[name]}", xscale="log")
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.legend(frameon=False)
    return figure


# ----------------------------------------------------------------------------------------------------
# The page

TABLES = {function.__name__: function for function in (tune, tune_rates, tune_order, tune_effect, paths, cost)}
FIGURES = {"tune_differences": draw_differences, "tune_rates": draw_rates, "loss_tokens": draw_losses,
           "gradient_paths": draw_paths}  # fmt: skip
read = cache(Piece)


def insert(text: str, folder: Path) -> str:
    """``text`` with its tables made anew."""

    def body(found: re.Match) -> str:
        if found[2] == "all":
            shown = spent([read(path) for name in PIECES if (path := folder / f"{name}.jsonl.gz").exists()])
        else:
            shown = TABLES[found[3]](read(folder / f"{found[2]}.jsonl.gz"))
        return f"{found[1]}\n{shown}\n\n{found[4]}"

    return re.sub(r"(<!-- (\w+)/(\w+) -->\n).*?(<!-- end -->)", body, text, flags=re.DOTALL)


def main(page: str = str(PAGE), folder: str = str(HERE)) -> None:
    if page.endswith("smoke.jsonl.gz"):
        print(smoke(read(Path(page))))
        return
    text = insert(Path(page).read_text(), Path(folder))
    Path(page).write_text(text)
    matplotlib.rcdefaults()  # whatever the user's style is
    for piece, name in re.findall(rf"\({Path(page).stem}/(\w+)/(\w+)\.png\)", text):
        draw = next(function for start, function in FIGURES.items() if name.startswith(start))
        target = Path(page).with_suffix("") / piece / f"{name}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        draw(read(Path(folder, f"{piece}.jsonl.gz")), name).savefig(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
