"""Writes the tables and figures of docs/evidence.md from the tables of runs beside this file.

    python -m benchmarks.evidence.report                             # the page, and docs/evidence/
    python -m benchmarks.evidence.report page.md folder-of-tables    # another page, from other tables
    python -m benchmarks.evidence.report folder/smoke.jsonl.gz       # prints the verdict of that piece

The text between ``<!-- pairs/tune -->`` and ``<!-- end -->`` is replaced by the table ``tune`` of ``pairs.jsonl.gz``. A
link such as ``(evidence/pairs/tune.csv)`` writes that table beside the page; ``(evidence/pairs/rates.png)`` draws a
figure. ``collect.py`` describes the tables of runs. Losses are in nats/token; a difference is a method's loss minus
that of the first method in its comparison.
"""

import csv
import gzip
import io
import json
import math
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, combinations
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from scipy.stats import ttest_1samp

from benchmarks.protocol import paired
from dlr_pretrain.analysis.choice import LEVEL, compare, estimate
from dlr_pretrain.analysis.runs import spread
from dlr_pretrain.util.text import markdown_table
from scripts.paper.items import published_numbers

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "evidence.md"
PIECES = ("pairs", "paper", "mechanism", "ablations", "longer", "paths")
SCALES = ("60m", "130m", "350m", "1b")
BACKBONES = ("lost", "lax", "cola_lax", "lowrank", "cola")
LONGER = {"": "", "train.steps=4000": ", 16.4M tokens", "scale.hidden_size=256": ", 3.4M parameters"}


class Comparison:
    """Methods at one or several rates; see ``analysis/choice.py``."""

    def __init__(self, line: dict, runs: dict[str, dict]):
        self.words = shlex.split(line["shared"])
        trials = []
        for trial in line["trials"]:
            metrics = runs[trial["run"]]["metrics"]
            last = {f"loss_{half}": metrics[f"eval/loss_{half}"][-1] for half in "ab"}
            trials.append(trial | {"state": "finished"} | last)
        self.trials = pd.DataFrame(trials)
        compared = compare(trials)
        self.chosen, self.methods = compared["chosen"], list(compared["chosen"])
        self.effects = {c["method"]: c for c in compared["comparisons"] if c["better"]}

    def grid(self, method: str) -> pd.Series:
        """The losses of a method on half B with the seeds of the grid, by rate."""
        t = self.trials
        return t[(t.method == method) & t.seed.isin(self.chosen[method]["seeds"])].set_index("lr").loss_b

    def held_out(self, method: str) -> list[float]:
        return list(self.chosen[method]["losses"].values())


def together(effects: Sequence[dict]) -> list[dict]:
    """The differences of a table, with intervals that hold jointly at LEVEL (Bonferroni) and Holm's ``p``.

    ``better`` is the method favoured at p < 1 - LEVEL, or "none shown". Runs that are compared twice count once.
    """
    losses = {(e["method"], *e["by_seed"].items()): list(e["by_seed"].values()) for e in effects}
    alone = {key: float(ttest_1samp(values, 0).pvalue) for key, values in losses.items()}
    ascending = sorted(alone, key=alone.__getitem__)
    steps = (min(1.0, (len(alone) - i) * alone[key]) for i, key in enumerate(ascending))
    holm = dict(zip(ascending, accumulate(steps, max), strict=True))
    found = []
    for e in effects:
        key = (e["method"], *e["by_seed"].items())
        d = estimate(losses[key], 1 - (1 - LEVEL) / len(alone)) | {"p": holm[key]}
        better = e["method"] if d["mean"] < 0 else e["against"]
        found.append(d | {"better": better if d["p"] < 1 - LEVEL else "none shown", "of": len(alone)})
    return found


def cells(d: dict) -> list[str]:
    return [f"{d['mean']:+.4f} ({d['n']})", f"{d['low']:+.3f} to {d['high']:+.3f}", f"{d['p']:.3f}", d["better"]]


def interval_note(found: Sequence[dict], which: str = "the row's method is") -> str:
    """The note on the intervals of a table; ``which`` says what is better if a difference is negative."""
    level, n = 100 * found[0]["level"], found[0]["of"]
    return (
        f"Differences are in nats/token, between runs with the same seed (number in brackets); negative: {which} "
        f"better. All {n} intervals hold jointly at {LEVEL:.0%} (Student's t over seeds, each at {level:.4g}%); "
        f"p is Holm's for these {n}. A method is called better where p < {1 - LEVEL:.2g}."
    )


class Piece:
    """The runs and comparisons of one piece of the experiments."""

    def __init__(self, path: Path):
        self.name, self.folder = path.name.partition(".")[0], path.parent
        self.lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        self.runs = {line["run"]: line for line in self.lines if "run" in line}
        self.comparisons = [Comparison(line, self.runs) for line in self.lines if "comparison" in line]
        self.effects = [effect for c in self.comparisons for effect in c.effects.values()]

    def settings(self) -> list[str]:
        """For each comparison, those of its shared words that not every comparison has."""
        all_words = [c.words for c in self.comparisons]
        return [" ".join(w for w in c.words if not all(w in other for other in all_words)) for c in self.comparisons]


def perplexities(losses: Iterable[float]) -> str:
    """Mean ± standard deviation (number) of the perplexities of ``losses``."""
    return spread(np.exp(pd.Series(losses)))


def paper() -> pd.DataFrame:
    """The perplexities of the paper's Table 1, by method and scale."""
    table = published_numbers().query("item == 'table1' and column == 'ppl'")
    return table.pivot(index="row", columns="scale", values="value").astype(float)


@dataclass
class Table:
    """A table of the page, or a CSV file beside it. ``right`` has the indices of right-aligned columns."""

    header: list[str]
    rows: list[list[str]]
    notes: Sequence[str] = ()
    right: Iterable[int] = ()

    def __post_init__(self):
        if self.header[0] == "Setting" and len({row[0] for row in self.rows}) == 1:  # the column is constant
            self.header, self.rows = self.header[1:], [row[1:] for row in self.rows]
            self.right = [i - 1 for i in self.right]

    def markdown(self) -> str:
        shown = markdown_table(self.header, self.rows, self.right)
        return "\n".join([shown, "", *(f"* {note}" for note in self.notes)])

    def csv(self) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.header, *self.rows])
        return text.getvalue()


def headline(folder: Path) -> list[tuple[Comparison, str, dict]]:
    """Every comparison of a backbone with and without DLR: (comparison, setting, difference)."""
    found = []
    for name, setting in (("pairs", "best rate"), ("paper", "rate")):
        own = {c.methods[0]: c for c in read(folder / f"{name}.jsonl.gz").comparisons}
        for backbone in BACKBONES:
            rates = dict.fromkeys(choice["lr"] for choice in own[backbone].chosen.values())  # first without DLR
            words = f"{setting}{'s' * (len(rates) > 1)} {' and '.join(map('{:g}'.format, rates))}"
            found.append((own[backbone], words, own[backbone].effects[f"{backbone}+dlr"]))
    piece = read(folder / "longer.jsonl.gz")
    for c, words in zip(piece.comparisons, piece.settings(), strict=True):
        rate, more = c.chosen["cola"]["rates"][0], LONGER[words.partition(" ")[0]]
        if more or rate != 0.01:  # the rest are in `paper`: three of its five seeds
            found.append((c, f"rate {rate:g}{more}", c.effects["cola+dlr"]))
    comparisons, settings, effects = zip(*found, strict=True)
    return list(zip(comparisons, settings, together(effects), strict=True))


def differences(piece: Piece) -> Table:
    """Every comparison of a backbone with and without DLR, in one table."""
    rows, found = [], headline(piece.folder)
    for c, setting, d in found:
        means = [f"{np.exp(c.held_out(method)).mean():.1f}" for method in c.methods]
        mean, interval, p, better = cells(d)
        shown = "none" if better == "none shown" else "better" if better.endswith("+dlr") else "worse"
        rows.append([c.methods[0], setting, *means, mean, interval, p, shown])
    header = ["Backbone", "Setting", "PPL", "with DLR", "Difference", "Interval", "p", "Shown"]
    note = (
        "PPL is the mean perplexity over seeds; the difference is between losses. Where seeds scatter, as at 0.01, it "
        "need not be the logarithm of the PPLs' ratio. Of two rates, the first is without DLR, the second with it."
    )
    return Table(header, rows, [interval_note([d for _, _, d in found], "with DLR is"), note], (2, 3, 4, 6))


def tune(piece: Piece) -> Table:
    """Each method at its own rate, and its difference from the first method in its comparison."""
    rows = []
    effects = together(piece.effects)
    left = iter(effects)
    for c, setting in zip(piece.comparisons, piece.settings(), strict=True):
        for method, choice in c.chosen.items():
            shown = cells(next(left)) if method in c.effects else [""] * 4
            rows.append([setting, method, f"{choice['lr']:g}", perplexities(c.held_out(method)), *shown])
    header = ["Setting", "Method", "Rate", "Perplexity", "Difference", "Interval", "p", "Better"]
    return Table(header, rows, [interval_note(effects)], (3, 4, 6))


def mechanism(piece: Piece) -> Table:
    """Two losses minus that of ``cola`` with DLR, by rounding and decay: those of ``cola`` started at DLR's offset and
    of plain ``cola``."""
    shown = {id(effect): cells(d)[:2] for effect, d in zip(piece.effects, together(piece.effects), strict=True)}
    rows = []
    for c in piece.comparisons:
        config = piece.runs[c.trials.run[0]]["config"]
        precision, optimizer = config["precision"]["name"], config["optimizer"]
        rounded = "" if optimizer["name"] == "adamw" else ", after each operation"
        offset, plain = (shown[id(c.effects[method])] for method in ("cola+init_offset", "cola"))
        rows.append([precision + rounded, str(optimizer["weight_decay"]), *offset, *plain])
    header = ["Rounding", "Decay", "Offset minus DLR", "Interval", "Without minus DLR", "Interval"]
    return Table(header, sorted(rows), right=(2, 4))


def paths(piece: Piece) -> Table:
    """The paths by which the gradient reaches the latents of three projections, every hundred updates."""
    rows = []
    for run in piece.runs.values():
        metrics, config = run["metrics"], run["config"]
        for name in metrics:
            if not name.endswith("/rho"):
                continue
            values = [metrics[name.removesuffix("rho") + of] for of in ("rho", "rho_mean", "isotropic", "cosine")]
            method, rate = f"{config['backbone']['name']}+dlr", f"{config['train']['lr']:g}"
            for step, *measured in zip(metrics["step"], *values, strict=True):
                if measured[0] is not None:
                    *norms, cosine = measured
                    shown = [*(f"{norm:.3f}" for norm in norms), f"{cosine:+.3f}"]
                    rows.append([method, rate, name.split("/")[1], str(step), *shown])
    return Table(
        ["Method", "Rate", "Projection", "Before update", "rho", "Mean of ratios", "Isotropic", "Cosine"], rows
    )


def tune_rates(piece: Piece) -> Table:
    rates = sorted({lr for c in piece.comparisons for lr in c.trials.lr})
    rows = [
        [setting, method, *(perplexities(c.grid(method)[[lr]]) for lr in rates)]
        for c, setting in zip(piece.comparisons, piece.settings(), strict=True)
        for method in c.chosen
    ]
    header = ["Setting", "Method", *map("{:g}".format, rates)]
    return Table(header, rows, right=range(2, len(header)))


def tune_order(piece: Piece) -> Table:
    """The methods in order of perplexity, ours and the paper's."""
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
        f"Of the {len(pairs)} pairs of these methods, the paper orders as we do: {', '.join(alike)}.",
    ]
    return Table(["Method", "Ours", *(f"{scale} paper" for scale in SCALES)], rows, notes, range(1, 6))


def tune_effect(piece: Piece) -> Table:
    """The change due to DLR, in our runs and in the paper."""
    theirs = np.log(paper())
    rows = [
        [e["method"], *cells(d)[:2], *(f"{theirs[s][e['method']] - theirs[s][e['against']]:+.4f}" for s in SCALES)]
        for e, d in zip(piece.effects, together(piece.effects), strict=True)
    ]
    note = "The paper's changes are from its printed perplexities, whose convention makes them one percent too small."
    header = ["Method", "Ours", "Interval", *(f"{scale} paper" for scale in SCALES)]
    return Table(header, rows, [note], (1, 3, 4, 5, 6))


def smoke(piece: Piece) -> Table:
    """The difference of ``lost`` at update 250, and the interval that ``pairs`` predicts for it at that update."""
    pairs = read(HERE / "pairs.jsonl.gz")
    (lost,) = (c for c in pairs.comparisons if c.methods[0] == "lost")
    of = lost.trials[lost.trials.seed.isin(lost.chosen["lost"]["losses"])]
    there = dlr_at_250({t.seed: [pairs.runs[r] for r in of[of.seed == t.seed].run] for t in of.itertuples()})
    seeds = sorted({run["config"]["seed"] for run in piece.runs.values()})
    here = dlr_at_250({seed: [r for r in piece.runs.values() if r["config"]["seed"] == seed] for seed in seeds})
    known, mean = estimate(list(there.values()), LEVEL), float(np.mean(list(here.values())))
    reach = (known["high"] - known["mean"]) * math.sqrt(1 + len(there) / len(here))  # Student's t, for the new mean
    low, high = known["mean"] - reach, known["mean"] + reach
    rows = [[str(seed), f"{difference:+.4f}"] for seed, difference in here.items()]
    notes = [
        f"Predicted for the mean, from the seeds of `pairs` at this update: {low:+.4f} to {high:+.4f} ({LEVEL:.0%}).",
        f"Found: {mean:+.4f}, {'inside' if low <= mean <= high else 'outside'} this range.",
    ]
    return Table(["Seed", "Difference of the loss with DLR, nats/token"], rows, notes, (1,))


def dlr_at_250(runs: dict[int, list[dict]]) -> dict[int, float]:
    """The loss on half B with DLR minus that without it, at update 250, by seed."""
    found = {}
    for seed, both in runs.items():
        columns = {run["config"]["dlr"]["enabled"]: run["metrics"] for run in both}
        on, off = (columns[dlr]["eval/loss_b"][columns[dlr]["step"].index(250)] for dlr in (True, False))
        found[seed] = on - off
    return found


def cost(piece: Piece) -> Table:
    """A row for each backbone. ``ratio`` is the seconds with DLR over those without it in the same round: median [95 %
    interval]. The last column has the same for a second step without DLR."""
    rows = []  # the variants of a line are: without DLR, again without DLR, with DLR
    for plain, again, dlr in (line.get("variants") or line["arms"] for line in piece.lines):
        ratios = [paired(variant["seconds"], plain["seconds"]) for variant in (dlr, again)]
        shown = ("{median:.4f} [{low:.4f}, {high:.4f}]".format(**ratio) for ratio in ratios)
        speeds = [f"{v['ms']:.1f}" for v in (plain, dlr)] + [f"{v['tokens_per_second']:,.0f}" for v in (plain, dlr)]
        given = dict(word.split("=") for word in plain.get("overrides") or plain["words"])
        rows.append([given["backbone"], *speeds, *shown])
    speeds = [f"{unit}{dlr}" for unit in ("ms/step", "positions/s") for dlr in ("", " with DLR")]
    header = ["backbone", *speeds, "ratio", "the same once more"]
    return Table(header, rows)


def spent(pieces: Sequence[Piece]) -> Table:
    """The cost of each piece. A run that several pieces share counts in each.

    Hours of one core are from the first update to the last, with evaluations, saves and the machine's idle time in
    between; minutes are those of the shortest, the median and the longest run.
    """
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
    header = ["Piece", "Runs", "Seeds", "Precision", "Tokens per run", "Hours", "Minutes per run", "Commits"]
    return Table(header, rows)


def listed(values: Iterable) -> str:
    return ", ".join(map(str, sorted(set(values))))


# The colours of Okabe and Ito (2008), which people with any kind of colour vision can tell apart.
COLOURS = dict(zip(BACKBONES, ("#0072B2", "#D55E00", "#CC79A7", "#E69F00", "#009E73"), strict=True))
EDGE = 0.36  # nats/token: an arrow marks an interval that goes beyond


def draw_differences(piece: Piece) -> Figure:
    """The differences of docs/evidence.md with intervals, in the backbone's colour; a dot is filled if p shows one."""
    found = headline(piece.folder)
    figure = Figure(figsize=(7.5, 5.2), dpi=150, layout="constrained")
    ax = figure.subplots()
    for y, (c, _, d) in enumerate(found):
        colour = COLOURS[c.methods[0]]
        ax.plot([max(d["low"], -EDGE), min(d["high"], EDGE)], [y, y], color=colour, linewidth=1.8)
        for end, marker in ((d["low"], "<"), (d["high"], ">")):
            ax.plot(np.clip(end, -EDGE, EDGE), y, marker if abs(end) > EDGE else "|", color=colour, markersize=7)
        inside = "white" if d["better"] == "none shown" else colour
        ax.plot(d["mean"], y, "o", color=colour, markerfacecolor=inside, markersize=7, zorder=3)
    ax.axvline(0, color="black", linewidth=0.8, zorder=0)
    for y in (4.5, 9.5):
        ax.axhline(y, color="#cccccc", linewidth=0.8)
    ax.set_yticks(range(len(found)), [f"{c.methods[0]}, {setting}" for c, setting, _ in found])
    for label, (c, _, _) in zip(ax.get_yticklabels(), found, strict=True):
        label.set_color(COLOURS[c.methods[0]])
    ax.set(xlim=(-1.05 * EDGE, 1.05 * EDGE), ylim=(len(found) - 0.5, -0.5))
    ax.set_xlabel("loss with DLR minus loss without, nats/token\n(left of 0: better with DLR)")
    ax.grid(axis="x", alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def draw_rates(piece: Piece) -> Figure:
    """Perplexity against learning rate, by backbone: solid without DLR, dashed with it, a ring at the chosen rate."""
    figure = Figure(figsize=(10, 3.4), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(BACKBONES), sharex=True, sharey=True)
    own = {c.methods[0]: c for c in piece.comparisons}
    for backbone, ax in zip(BACKBONES, axes, strict=True):
        for method, style in zip(own[backbone].methods, ("-", "--"), strict=True):
            losses = np.exp(own[backbone].grid(method))
            best = own[backbone].chosen[method]["lr"]
            ax.plot(losses, style, color=COLOURS[backbone], marker=".", label=method)
            ax.plot(best, losses[best], "o", color=COLOURS[backbone], markersize=11, markerfacecolor="none")
        ax.set(xscale="log", yscale="log", xlabel="peak learning rate")
        ax.xaxis.set(major_locator=FixedLocator([0.001, 0.003, 0.01, 0.03]), minor_locator=NullLocator())
        ax.yaxis.set(major_locator=FixedLocator([100, 200, 400, 700]), minor_locator=NullLocator())
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.tick_params(labelsize=8)
        ax.grid(alpha=0.25)
        ax.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("perplexity on held-out text")
    return figure


TABLES = {
    f.__name__: f for f in (differences, tune, tune_rates, tune_order, tune_effect, mechanism, paths, cost, smoke)
}
FIGURES = {"differences": draw_differences, "rates": draw_rates}
read = cache(Piece)


def made(piece: str, name: str, folder: Path) -> Table | None:
    """The table ``name`` of a ``piece`` or of ``all``; None if the folder has no runs of the piece."""
    if piece == "all":
        return spent([read(path) for of in PIECES if (path := folder / f"{of}.jsonl.gz").exists()])
    path = folder / f"{piece}.jsonl.gz"
    return TABLES[name](read(path)) if path.exists() else None


def insert(text: str, folder: Path) -> str:
    """``text`` with its tables regenerated."""

    def body(found: re.Match) -> str:
        table = made(found[2], found[3], folder)
        shown = f"No runs of `{found[2]}`." if table is None else table.markdown().rstrip()
        return f"{found[1]}\n{shown}\n\n{found[4]}"

    return re.sub(r"(<!-- (\w+)/(\w+) -->\n).*?(<!-- end -->)", body, text, flags=re.DOTALL)


def linked_files(text: str) -> list[tuple[str, str, str]]:
    """The files that the page links to: (piece, table or figure, ``csv`` or ``png``)."""
    return re.findall(r"\(evidence/(\w+)/(\w+)\.(csv|png)\)", text)


def draw(page: Path, folder: Path) -> None:
    text = insert(page.read_text(), folder)
    page.write_text(text)
    matplotlib.rcdefaults()  # the user's style must not change the figures
    for piece, name, kind in linked_files(text):
        target = page.parent / "evidence" / piece / f"{name}.{kind}"
        target.parent.mkdir(parents=True, exist_ok=True)
        if kind == "png":
            FIGURES[name](read(folder / f"{piece}.jsonl.gz")).savefig(target)
        elif table := made(piece, name, folder):
            target.write_text(table.csv())


def main(given: list[str]) -> None:
    if given and given[0].endswith("smoke.jsonl.gz"):
        print(smoke(read(Path(given[0]))).markdown())
    elif given:
        draw(*map(Path, given))
    else:
        draw(PAGE, HERE)


if __name__ == "__main__":
    main(sys.argv[1:])
