"""A comparison made by ``tuning``, as words, tables and the curve of perplexity against learning rate."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from dlr_pretrain.analysis.drawing import MARKS, SERIES, save, subplots, unframe
from dlr_pretrain.analysis.tuning import LEVEL
from dlr_pretrain.util.history import perplexity
from dlr_pretrain.util.text import diverged_of, fill, plural, table

COLUMNS = ("method", "lr", "seed", "state", "loss_a", "loss_b", "loss", "perplexity_a", "perplexity_b", "chosen", "run")


def write(found: dict, folder: Path) -> None:
    """Write ``tune.json``, ``curve.csv`` (a line for each run), ``curve.png``, ``curve.svg`` and ``report.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tune.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    with open(folder / "curve.csv", "w", encoding="utf-8", newline="") as file:
        lines = csv.DictWriter(file, COLUMNS)
        lines.writeheader()
        lines.writerows(curve(found))
    plot(found, folder)
    (folder / "report.md").write_text(report(found), encoding="utf-8")


def curve(found: dict) -> list[dict]:
    """Every run with the perplexities of both halves; ``chosen`` says whether its rate is its method's chosen one."""
    rows = []
    for trial in found["trials"]:
        row = {name: trial[name] for name in COLUMNS if name in trial}
        row |= {f"perplexity_{half}": _perplexity(trial[f"loss_{half}"]) for half in "ab"}
        rows.append(row | {"chosen": trial["lr"] == found["chosen"][trial["method"]]["lr"]})
    return rows


# ----------------------------------------------------------------------------------------------------
# Words


def verdicts(found: dict) -> list[str]:
    """A sentence for each method that is compared."""
    said = []
    for c in found["comparisons"]:
        pair = f"{c['method']} against {c['against']}"
        if c["better"] is None:
            said.append(f"{pair}: not decided: {c['reason']}.")
            continue
        d = c["difference"]
        verdict = "no difference shown" if c["better"] == "none shown" else f"{c['better']} is better"
        said.append(f"{pair}: {verdict}. {_difference(d)} over {d['n']} seeds.")
    return said


def remarks(found: dict) -> list[str]:
    """What a reader must know before quoting a verdict."""
    said, rates = [], found["design"]["rates"]
    if len(rates) == 1:
        said.append(f"One rate, {rates[0]:g}, was given to all: none was chosen.")
    for method, choice in found["chosen"].items():
        if choice["edge"] in ("lowest", "highest"):
            beyond = "below" if choice["edge"] == "lowest" else "above"
            end = f"its best rate, {choice['lr']:g}, is the {choice['edge']} of the grid"
            said.append(f"{method}: {end}, and a better one may lie {beyond} it. Widen lr= and give the command again.")
    spent = found["budgets"]
    if len({tuple(budget.values()) for budget in spent.values()}) > 1:
        each = ", ".join(f"{method} {b['steps']:,} steps, {b['tokens']:,} tokens" for method, b in spent.items())
        said.append(f"The budgets are not equal: {each}.")
    diverged = [t for t in found["trials"] if t["state"] == "diverged"]
    for method in found["design"]["methods"]:
        if own := [f"{t['lr']:g} (seed {t['seed']})" for t in diverged if t["method"] == method]:
            said.append(f"{method} diverged at {', '.join(own)}.")
    if not found["design"]["fresh"] and len(rates) > 1:
        said.append(
            "The rates were chosen with the same seeds that are reported, though on other text, so the reported losses "
            "are slightly optimistic. Give confirm=<seeds> to report seeds that chose nothing."
        )
    return said


def report(found: dict) -> str:
    """The text of ``report.md``."""
    design = found["design"]
    seeds = f"seeds {_listed(design['fresh'] or design['seeds'])}"
    sections = [
        f"# {' / '.join(design['methods'])}",
        "\n".join(f"* **{line}**" for line in verdicts(found)),
        "\n".join(f"* {line}" for line in remarks(found)),
        f"## At each method's own rate, on held-out text ({seeds})",
        _chosen_table(found),
        "![perplexity against learning rate](curve.png)",
        f"## Perplexity on held-out text by rate, mean ± std (seeds {_listed(design['seeds'])})",
        _rate_table(found),
        "## At equal rates",
        _equal_table(found),
        "## How it was done",
        _method(found),
        "```\n" + f"python {found['command']}" + "\n```",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def console(found: dict) -> str:
    """The table of the methods, the verdicts and the remarks, in 80 columns unless names of methods are long."""
    width = max(map(len, ["method", *found["chosen"]]))
    lines = [f"{'method':{width}}  {'lr':>9}  {'held-out perplexity':>20}  seeds"]
    for method, choice in found["chosen"].items():
        lr = f"{choice['lr']:g}" if choice["lr"] is not None else "-"
        lines.append(f"{method:{width}}  {lr:>9}  {_spread(choice['held_out']['perplexity']):>20}  {_count(choice)}")
    said = [*verdicts(found), *(f"note: {line}" for line in remarks(found))]
    return "\n".join([*lines, "", *(fill(line, indent=2) for line in said)])


def _method(found: dict) -> str:
    design = found["design"]
    k = len(design["methods"]) - 1
    level = f"{100 * (1 - (1 - LEVEL) / max(1, k)):g} %"
    wider = f" ({100 * LEVEL:g} % for the {k} comparisons together, by Bonferroni)" if k > 1 else ""
    if found["ordered_by_seed"]:
        seeds = "A seed changes the initial weights and the order of the data; the intervals cover both."
    else:
        seeds = (
            "A seed changes only the initial weights: all runs of a method see the data in one order, and the "
            "intervals say nothing about others."
        )
    words = "\n".join(f"* `{method}`: `{text}`" for method, text in found["words"].items())
    return (
        f"Every method was trained at {plural(len(design['rates']), 'rate')} with "
        f"{plural(len(design['seeds']), 'seed')}. Its rate is the one with the lowest mean loss on half A of the "
        "validation set; half B is reported. Differences are between runs with the same seed; intervals are Student's "
        f"t over seeds, at {level}{wider}. A method is called better if its interval excludes zero. {seeds} A rate "
        "with a diverged run is not chosen.\n\n"
        f"{words}\n* all: `{found['shared']}`"
    )


def _chosen_table(found: dict) -> str:
    rows = []
    for method, choice in found["chosen"].items():
        out = choice["held_out"]
        lr = f"{choice['lr']:g}" if choice["lr"] is not None else f"none: {choice['reason']}"
        loss = out["loss"]
        interval = f"{loss['low']:.4f} to {loss['high']:.4f}" if loss and loss["low"] is not None else "none"
        mean = f"{loss['mean']:.4f}" if loss else "-"
        rows.append([method, lr, _spread(out["perplexity"]), mean, interval, _count(choice)])
    header = ["method", "rate", "perplexity, mean ± std", "loss", f"{100 * LEVEL:g} % interval of the loss", "seeds"]
    return table(header, rows)


def _rate_table(found: dict) -> str:
    design, rows = found["design"], []
    for lr in design["rates"]:
        row = [f"{lr:g}"]
        for method in design["methods"]:
            own = [t for t in _grid(found, method) if t["lr"] == lr]
            values = [_perplexity(t["loss_b"]) for t in own if t["loss_b"] is not None]
            states = [t["state"] for t in own if t["loss_b"] is None]
            diverged = states.count("diverged")
            mean = diverged_of(diverged, len(values) + diverged) if diverged else _mean_and_std(values)
            others = [f"{states.count(state)} {state}" for state in dict.fromkeys(states) if state != "diverged"]
            cell = ", ".join(filter(None, [mean, *others]))
            row.append(f"**{cell}**" if lr == found["chosen"][method]["lr"] else cell)
        rows.append(row)
    return table(["rate", *design["methods"]], rows)


def _equal_table(found: dict) -> str:
    rows = [
        [c["method"], c["against"], f"{c['lr']:g}", _at_equal_rate(c), str(len(c["by_seed"]))]
        for c in found["at_equal_rates"]
    ]
    header = ["method", "against", "rate", f"difference, {100 * LEVEL:g} % of each by itself", "seeds"]
    return table(header, rows) if rows else ""


def _at_equal_rate(c: dict) -> str:
    diverged = len(c["diverged"])
    return diverged_of(diverged, len(c["by_seed"]) + diverged) if diverged else _difference(c["difference"])


def _difference(d: dict | None) -> str:
    """The mean difference of the loss with its interval, and the change of the perplexity in percent."""
    if d is None:
        return "-"
    percent = f"perplexity {100 * math.expm1(d['mean']):+.2f} %"
    if d["low"] is None:
        return f"{d['mean']:+.4f} nats a token, no interval ({percent})"
    interval = f"{100 * d['level']:g} % interval {d['low']:+.4f} to {d['high']:+.4f}"
    return f"{d['mean']:+.4f} nats a token, {interval} ({percent})"


def _spread(e: dict | None) -> str:
    if e is None:
        return "-"
    return f"{e['mean']:.2f}" + (f" ± {e['std']:.2f}" if e["std"] is not None else " (one seed)")


def _mean_and_std(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def _count(choice: dict) -> str:
    """The number of seeds, such as "3", or "2 of 3, 1 diverged"."""
    out = choice["held_out"]
    lost = [f"{len(out[name])} {name}" for name in ("diverged", "missing") if out[name]]
    return ", ".join([f"{len(out['losses'])} of {len(out['seeds'])}" if lost else str(len(out["seeds"])), *lost])


def _grid(found: dict, method: str) -> list[dict]:
    """The method's runs, without those of fresh seeds."""
    return [t for t in found["trials"] if t["method"] == method and t["seed"] in found["design"]["seeds"]]


def _perplexity(loss: float | None) -> float | None:
    return None if loss is None else perplexity(loss)


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


# ----------------------------------------------------------------------------------------------------
# The curve


def plot(found: dict, folder: Path) -> None:
    """Write ``curve.png`` and ``curve.svg``, held-out perplexity against learning rate.

    Each seed is a faint point. A line connects the means of the rates at which all seeds have finished. A ring marks
    the chosen rate, and a cross at the top each diverged run.
    """
    design = found["design"]
    figure, (axes,) = subplots(1, width=7, height=4.5)
    for i, method in enumerate(design["methods"]):
        draw_method(axes, found, method, (i, len(design["methods"])))
    scale_of_rates(axes, design["rates"])
    axes.set(xlabel="peak learning rate", ylabel="perplexity on held-out text")
    unframe(axes, which="both")
    axes.legend(frameon=False, title=f"seeds {_listed(design['seeds'])}; ring: rate chosen on the other half")
    save(figure, folder, "curve", "")


def scale_of_rates(axes, rates: Sequence[float]) -> None:
    """Logarithmic axes, with a tick at each rate."""
    from matplotlib.ticker import FixedLocator, NullLocator

    if not any(len(line.get_xdata()) for line in axes.lines):
        axes.set_ylim(1, 10)  # without data, a logarithmic axis needs limits
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_locator(FixedLocator(rates))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for which in ("major", "minor"):
        getattr(axes.yaxis, f"set_{which}_formatter")(lambda value, _: f"{value:.4g}")
    if len(rates) > 8:
        axes.tick_params(axis="x", rotation=45)


def draw_method(axes, found: dict, method: str, place: tuple[int, int]) -> None:
    """Draw one method. ``place`` is (its index, the number of methods).

    The index determines colour and marker, and shifts the points so that those of one rate stand side by side.
    """
    colour, mark = SERIES[place[0] % len(SERIES)], MARKS[place[0] % len(MARKS)]
    grid = _grid(found, method)
    aside = 1 + 0.015 * (place[0] - (place[1] - 1) / 2)
    points = [(t["lr"], _perplexity(t["loss_b"])) for t in grid if t["loss_b"] is not None]
    means = {}
    for lr in found["design"]["rates"]:
        losses = [t["loss_b"] for t in grid if t["lr"] == lr]
        if losses and None not in losses:
            means[lr] = fmean(map(perplexity, losses))
    axes.plot([lr * aside for lr, _ in points], [y for _, y in points], mark, color=colour, alpha=0.35, markersize=4)
    axes.plot(list(means), list(means.values()), color=colour, marker=mark, markersize=5, linewidth=1.6, label=method)
    if (best := found["chosen"][method]["lr"]) in means:
        ring = {"markersize": 13, "markerfacecolor": "none", "markeredgewidth": 1.6, "linestyle": "none"}
        axes.plot([best], [means[best]], "o", color=colour, **ring)
    lost = [t["lr"] * aside for t in grid if t["state"] == "diverged"]
    if lost:
        top = {"transform": axes.get_xaxis_transform(), "label": f"{method}, diverged"}
        axes.plot(lost, [0.98] * len(lost), "x", color=colour, **top)
