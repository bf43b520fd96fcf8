"""Comparisons of ``tune.py`` in a report of runs: tables of all comparisons, their curves, and their differences."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from dlr_pretrain.analysis.drawing import BLACK, BLUE, GREY, VERMILLION, Picture, label_axes, save, subplots, wrapped
from dlr_pretrain.analysis.groups import Spread, spread
from dlr_pretrain.analysis.paper import SCALES, fact
from dlr_pretrain.analysis.tables import Cell, Figure, Table, figure, published
from dlr_pretrain.analysis.tuning import ENDED
from dlr_pretrain.analysis.tuning_view import draw_method, remarks, scale_of_rates
from dlr_pretrain.util.history import perplexity
from dlr_pretrain.util.text import plural

Compared = Sequence[tuple[Path, dict]]  # the folder of each comparison, and its tune.json


def comparison_tables(compared: Compared) -> Iterator[Table]:
    """Each method at its own rate; all methods by rate; the differences at each rate, if rates have several seeds.

    Then the methods beside the paper's Table 1. No table if there is no comparison.
    """
    if not compared:
        return
    founds, settings = [found for _, found in compared], _settings(compared)
    yield _own_rates(founds, settings)
    if any(len(found["design"]["rates"]) > 1 for found in founds):
        yield _by_rate(founds, settings)
    if any(_has_intervals(found) for found in founds):
        yield _equal_rates(founds, settings)
    yield from _beside_the_paper(founds)


def _settings(compared: Compared) -> list[str]:
    """How each comparison differs from the others: its shared words that not all comparisons have."""
    words = [shlex.split(found["shared"]) for _, found in compared]
    return [" ".join(word for word in own if not all(word in other for other in words)) for own in words]


def _own_rates(founds: Sequence[dict], settings: Sequence[str]) -> Table:
    rows: list[list[Cell]] = []
    for found, setting in zip(founds, settings, strict=True):
        verdicts = {c["method"]: c for c in found["comparisons"]}
        for method, choice in found["chosen"].items():
            lr = choice["reason"] if choice["lr"] is None else f"{choice['lr']:g}"
            edge = {"lowest": ", the lowest", "highest": ", the highest"}.get(choice["edge"], "")
            rows.append([setting, method, lr + edge, figure(_held_out(choice)), *_verdict(verdicts.get(method))])
    header = ["Setting", "Method", "Learning rate", "Perplexity", "Difference of the loss", "Interval", "Better"]
    notes = [
        "Perplexity is on the half of the validation text that chose no rate: mean ± standard deviation (number of "
        "seeds). Differences are in nats per token from the first method of the same comparison, between runs with "
        "the same seed; negative means that the method of the row is better. A method is called better if its "
        "interval excludes zero."
    ]
    if levels := sorted({c["difference"]["level"] for f in founds for c in f["comparisons"] if c["difference"]}):
        notes.append(f"Intervals are Student's t over seeds, at {', '.join(f'{100 * x:.4g} %' for x in levels)}.")
    notes += [*_by_chance(founds), *dict.fromkeys(line for found in founds for line in remarks(found))]
    missing = [f for f in founds if any(choice["held_out"]["missing"] for choice in f["chosen"].values())]
    fill = [f"python {found['command']}" for found in missing]
    return _table("tune", "Each method at its own learning rate", header, rows, notes, fill)


def _by_chance(founds: Sequence[dict]) -> list[str]:
    """The probability that some method is called better though none is, as a note if there are several comparisons.

    The intervals of one ``tune.json`` hold together, those of several do not. The same runs in two count once.
    """
    levels: dict[tuple, float] = {}
    several = set()
    for i, found in enumerate(founds):
        for c in found["comparisons"]:
            if c["difference"] and c["difference"]["low"] is not None:
                several.add(i)
                levels[c["method"], *c["by_seed"].items()] = c["difference"]["level"]
    if len(several) < 2 or len(levels) < 2:
        return []
    return [
        f"There are {len(levels)} comparisons, each with an interval of its own. If nothing differed, the chance that "
        f"at least one of them excludes zero would be {100 * (1 - math.prod(levels.values())):.0f} %."
    ]


def _held_out(choice: dict) -> Spread | None:
    """The perplexities at the chosen rate; infinite for a diverged seed."""
    out = choice["held_out"]
    return spread([*map(perplexity, out["losses"].values()), *[None] * len(out["diverged"])])


def _verdict(c: dict | None) -> list[Cell]:
    """Difference, interval and the better method; nothing for a comparison's first method."""
    if c is None:
        return ["", "", ""]
    return [*_difference(c["difference"]), c["better"] or f"not decided: {c['reason']}"]


def _difference(d: dict | None) -> list[Cell]:
    if d is None:
        return [None, None]
    interval = None if d["low"] is None else f"{d['low']:+.4f} to {d['high']:+.4f}"
    return [Figure(d["mean"], None, d["n"], 4, signed=True), interval]


def _by_rate(founds: Sequence[dict], settings: Sequence[str]) -> Table:
    rates = sorted({lr for found in founds for lr in found["design"]["rates"]})
    rows: list[list[Cell]] = []
    for found, setting in zip(founds, settings, strict=True):
        for method in found["design"]["methods"]:
            rows.append([setting, method, *(_at_rate(found, method, lr) for lr in rates)])
    notes = ["Perplexity on held-out text: mean ± standard deviation over the seeds of the grid (their number)."]
    return _table("tune_rates", "By learning rate", ["Setting", "Method", *map("{:g}".format, rates)], rows, notes)


def _at_rate(found: dict, method: str, lr: float) -> Figure | None:
    ended = [
        t for t in found["trials"]
        if (t["method"], t["lr"]) == (method, lr) and t["seed"] in found["design"]["seeds"]
        and t["state"] in ENDED
    ]  # fmt: skip
    return figure(spread(None if t["loss_b"] is None else perplexity(t["loss_b"]) for t in ended))


def _has_intervals(found: dict) -> bool:
    return len(found["design"]["rates"]) > 1 and any(
        len(c["by_seed"]) + len(c["diverged"]) > 1 for c in found["at_equal_rates"]
    )


def _equal_rates(founds: Sequence[dict], settings: Sequence[str]) -> Table:
    rows: list[list[Cell]] = [
        [setting, c["method"], c["against"], f"{c['lr']:g}", *_at_equal_rate(c)]
        for found, setting in zip(founds, settings, strict=True)
        if _has_intervals(found)
        for c in found["at_equal_rates"]
    ]
    header = ["Setting", "Method", "Against", "Learning rate", "Difference of the loss", "Interval"]
    notes = ["Nats per token on held-out text, between runs with the same seed; Student's t, 95 % for each row alone."]
    return _table("tune_equal", "At equal learning rates", header, rows, notes)


def _at_equal_rate(c: dict) -> list[Cell]:
    if c["diverged"]:
        return [figure(spread([*c["by_seed"].values(), *[None] * len(c["diverged"])])), None]
    return _difference(c["difference"])


def _beside_the_paper(founds: Sequence[dict]) -> Iterator[Table]:
    """The order of the methods and the effect of DLR, beside those of Table 1.

    No table for fewer than two methods of Table 1, or if one of them is compared more than once.
    """
    chosen = [(method, _held_out(choice)) for found in founds for method, choice in found["chosen"].items()]
    ours = {method: own for method, own in chosen if own and _published(method, SCALES[0])}
    if len(ours) < 2 or len(ours) < sum(method in ours for method, _ in chosen):
        return
    ranked = sorted(ours, key=lambda method: ours[method].mean)
    order = {s: sorted(ours, key=lambda method, s=s: _published(method, s) or math.inf) for s in SCALES}
    rows: list[list[Cell]] = []
    for place, method in enumerate(ranked, 1):
        theirs = [(published(_published(method, scale)), order[scale].index(method) + 1) for scale in SCALES]
        cells = [(figure(ours[method]), place), *theirs]
        rows.append([method, *(cell and replace(cell, note=f"{cell.note} [{at}]".strip()) for cell, at in cells)])
    header = ["Method", "Ours", *(f"{scale} paper" for scale in SCALES)]
    alike = ", ".join(f"{_in_this_order(ranked, scale)} at {scale}" for scale in SCALES)
    notes = [
        "Perplexities, with the rank among the methods of this table in brackets. Text and model sizes differ.",
        f"Of the {plural(math.comb(len(ranked), 2), 'pair')} of these methods, the paper orders like ours: {alike}.",
    ]
    yield Table("tune_order", "The order of the methods, ours and the paper's", header, rows, notes)
    effects = [
        [c["method"], *_difference(c["difference"]), *(_effect(c["against"], c["method"], s) for s in SCALES)]
        for found in founds
        for c in found["comparisons"]
        if c["method"] == f"{c['against']}+dlr" and c["method"] in ours
    ]
    if effects:
        header = ["Method", "Ours", "Interval", *(f"{scale} paper" for scale in SCALES)]
        notes = [
            "Difference of the loss from the backbone without DLR, in nats per token. The paper's are computed from "
            "its printed perplexities, whose convention makes a difference one percent too small."
        ]
        yield Table("tune_effect", "What DLR changes, ours and the paper's", header, effects, notes)


def _in_this_order(ranked: Sequence[str], scale: str) -> int:
    """The number of pairs of ``ranked`` methods that the paper has in the same order."""
    theirs = [_published(method, scale) or math.inf for method in ranked]
    return sum(a < b for a, b in combinations(theirs, 2))


def _published(method: str, scale: str) -> float | None:
    return fact("table1", "ppl", method=method, scale=scale)


def _effect(plain: str, method: str, scale: str) -> Figure | None:
    a, b = (_published(name, scale) for name in (plain, method))
    return None if a is None or b is None else Figure(math.log(b / a), digits=4, signed=True)


def _table(name: str, title: str, header: list[str], rows: list[list[Cell]], notes: list[str], fill=()) -> Table:
    """The table, without the column of settings if all settings are the same."""
    if len({row[0] for row in rows}) == 1:
        header, rows = header[1:], [row[1:] for row in rows]
    return Table(name, title, header, rows, notes, fill)


# ----------------------------------------------------------------------------------------------------
# Figures


def draw_comparisons(compared: Compared, folder: Path) -> list[Picture]:
    """Write the curves against the learning rate, a panel for each comparison, and the differences with intervals."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = _settings(compared)
    curves = [(f, s) for (_, f), s in zip(compared, settings, strict=True) if len(f["design"]["rates"]) > 1]
    found = [_draw_rates(curves, folder)] if curves else []
    points = _points([f for _, f in compared], settings)
    return [*found, *([_draw_differences(points, _by_chance([f for _, f in compared]), folder)] if points else [])]


def _points(founds: Sequence[dict], settings: Sequence[str]) -> list[tuple[str, dict]]:
    """Each difference that has an interval, once, with its name.

    A name that several share is given its rate too, and then what it is compared with.
    """
    found = [
        ((" ".join(filter(None, (c["method"], setting))), f" at {f['chosen'][c['method']]['lr']:g}",
          f" against {c['against']}"), c["difference"])
        for f, setting in zip(founds, settings, strict=True)
        for c in f["comparisons"]
        if c["difference"] and c["difference"]["low"] is not None
    ]  # fmt: skip
    found = [point for i, point in enumerate(found) if point not in found[:i]]
    names = [parts[0] for parts, _ in found]
    for more in (1, 2):
        several = Counter(names)
        names = [name + parts[more] * (several[name] > 1) for name, (parts, _) in zip(names, found, strict=True)]
    return [(name, d) for name, (_, d) in zip(names, found, strict=True)]


def _draw_rates(curves: Sequence[tuple[dict, str]], folder: Path) -> Picture:
    drawn, axes = subplots(len(curves))
    for (found, setting), ax in zip(curves, axes, strict=True):
        methods = found["design"]["methods"]
        for i, method in enumerate(methods):
            draw_method(ax, found, method, (i, len(methods)))
        scale_of_rates(ax, found["design"]["rates"])
        ax.grid(axis="y", which="minor", alpha=0.15)
        ax.set_title(wrapped(setting or methods[0], 40))
        ax.legend(frameon=False, fontsize=8)
    label_axes(axes, "peak learning rate", "perplexity on held-out text", shown=None)
    caption = (
        "Perplexity on held-out text against the learning rate, one panel per comparison. Faint points are seeds, "
        "lines join means, a ring marks the rate that the other half chose, a cross a diverged run."
    )
    return save(drawn, folder, "tune_rates", caption)


def _draw_differences(points: Sequence[tuple[str, dict]], chance: Sequence[str], folder: Path) -> Picture:
    names = [wrapped(name, 48) for name, _ in points]
    row = max(0.32, 0.04 + 0.14 * max(name.count("\n") + 1 for name in names))  # inches: no name reaches the next
    drawn, (ax,) = subplots(1, width=7.0, height=1.0 + row * len(points))
    for y, (_, d) in enumerate(points):
        colour = VERMILLION if d["low"] > 0 else BLUE if d["high"] < 0 else GREY
        error = [[d["mean"] - d["low"]], [d["high"] - d["mean"]]]
        ax.errorbar(d["mean"], y, xerr=error, fmt="o", color=colour, markersize=5, capsize=3)
    ax.axvline(0, color=BLACK, linewidth=0.8)
    ax.set_yticks(range(len(points)), names, fontsize=8)
    ax.set_ylim(len(points) - 0.5, -0.5)
    label_axes([ax], "difference of the loss, nats per token (left of 0 is better)", "", shown=None)
    caption = (
        "Each method at its own rate against the first of its comparison, on held-out text, between runs with the "
        "same seed: the mean and its interval. Blue is better, red is worse, grey is undecided."
    )
    caption += "".join(f" {said}" for said in chance)
    return save(drawn, folder, "tune_differences", caption)
