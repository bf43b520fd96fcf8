"""A fair comparison of methods, each at the learning rate that is best for it, and its report.

One half of the validation set (A) chooses the rate, the other half (B) is reported. Methods are compared seed by seed.
The result is one mapping, as in ``tune.json``. Losses are in nats per token; a difference is a method's loss minus the
first method's, so a negative one favours the method.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from dlr_pretrain.analysis.figures import draw_rates
from dlr_pretrain.analysis.report import write_page
from dlr_pretrain.analysis.runs import spread
from dlr_pretrain.analysis.tables import Table, table
from dlr_pretrain.util.history import perplexity

LEVEL = 0.95
ENDED = ("finished", "diverged")


@dataclass(frozen=True)
class Trial:
    """A run of the grid, or of a fresh seed, with its last losses on both halves and on the whole validation set."""

    method: str
    lr: float
    seed: int
    state: str  # one of ENDED, or another state of ``launch.state``
    run: str = ""
    loss_a: float | None = None  # of half A, on which rates are chosen
    loss_b: float | None = None  # of half B, which is reported
    loss: float | None = None
    remark: str = ""


@dataclass(frozen=True)
class Design:
    """The runs of a comparison: every method at every rate with every seed, then at its chosen rate with fresh seeds.

    The other methods are compared with the first one. Rates ascend.
    """

    methods: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    fresh: tuple[int, ...] = ()

    @property
    def level(self) -> float:
        """The confidence of each interval: higher for more methods, so that all hold together (Bonferroni)."""
        return 1 - (1 - LEVEL) / max(1, len(self.methods) - 1)


# ----------------------------------------------------------------------------------------------------
# Verdicts


def compare(design: Design, trials: Sequence[Trial]) -> dict:
    """Each method's rate and held-out losses, and the differences from the first method, with verdicts."""
    chosen = {method: choose(design, trials, method) for method in design.methods}
    for method, choice in chosen.items():
        choice["held_out"] = held_out(trials, method, choice["lr"], design.fresh or design.seeds)
    first, *others = design.methods
    verdicts = [verdict((first, method), chosen, design.level) for method in others]
    return {"design": asdict(design), "chosen": chosen, "comparisons": verdicts, "trials": [*map(asdict, trials)]}


def choose(design: Design, trials: Sequence[Trial], method: str) -> dict:
    """The rate with the lowest mean loss on half A over the seeds of the grid.

    A rate with a diverged run is not chosen. If none can be chosen, ``lr`` is None and ``reason`` says why. ``edge`` is
    the end of the grid at which the rate lies, if any: a better rate may lie beyond it.
    """
    grid = {(t.lr, t.seed): t for t in trials if t.method == method and t.state in ENDED}
    cells = list(product(design.rates, design.seeds))
    chosen = {"lr": None, "edge": None, "reason": "every rate has a diverged run", "loss_a": None}
    if missing := sum(cell not in grid for cell in cells):
        return chosen | {"reason": f"{missing} of the {len(cells)} runs of the grid have not ended"}
    losses = {cell: math.inf if grid[cell].state == "diverged" else grid[cell].loss_a for cell in cells}
    means = {lr: statistics.fmean(losses[lr, seed] for seed in design.seeds) for lr in design.rates}
    best = min(means, key=means.__getitem__)
    if means[best] == math.inf:
        return chosen
    ends = {design.rates[-1]: "highest", design.rates[0]: "lowest"}
    edge = "only" if len(design.rates) == 1 else ends.get(best)
    return {"lr": best, "edge": edge, "reason": "", "loss_a": means[best]}


def held_out(trials: Sequence[Trial], method: str, lr: float | None, seeds: Sequence[int]) -> dict:
    """The losses on half B at a rate by seed, with the seeds that have diverged and those without a result."""
    found = {t.seed: t for t in trials if (t.method, t.lr) == (method, lr) and t.seed in seeds}
    return {
        "losses": {seed: t.loss_b for seed, t in found.items() if t.state == "finished"},
        "diverged": [seed for seed, t in found.items() if t.state == "diverged"],
        "missing": [seed for seed in seeds if seed not in found or found[seed].state not in ENDED],
    }


def verdict(names: tuple[str, str], chosen: dict[str, dict], level: float) -> dict:
    """Which of two methods is better on half B: its name if the interval of the mean difference excludes zero.

    "none shown" if the interval includes zero; None, with the reason, if nothing can be said.
    """
    first, other = (chosen[name]["held_out"]["losses"] for name in names)
    by_seed = {seed: other[seed] - first[seed] for seed in first if seed in other}
    found = {"against": names[0], "method": names[1], "by_seed": by_seed, "difference": None, "better": None}
    for name in names:
        choice, out = chosen[name], chosen[name]["held_out"]
        if choice["reason"]:
            return found | {"reason": f"{name}: {choice['reason']}"}
        for seeds, said in ((out["diverged"], "diverges"), (out["missing"], "has no result yet")):
            if seeds:  # a seed is never left out of a mean
                return found | {"reason": f"{name} {said} at its chosen rate with seed {', '.join(map(str, seeds))}"}
    mean = found["difference"] = estimate(list(by_seed.values()), level)
    if mean["low"] is None:
        return found | {"reason": "one seed says nothing of what another would give"}
    better = names[1] if mean["high"] < 0 else names[0] if mean["low"] > 0 else "none shown"
    return found | {"better": better, "reason": ""}


def estimate(values: Sequence[float], level: float) -> dict:
    """The mean of at least one value, with its interval at ``level`` by Student's t; None for what one value lacks."""
    from scipy.stats import t

    n, mean = len(values), statistics.fmean(values)
    if n == 1:
        return {"n": n, "mean": mean, "level": level, "std": None, "low": None, "high": None}
    std = statistics.stdev(values)
    reach = float(t.ppf((1 + level) / 2, n - 1)) * std / math.sqrt(n)  # t.interval gives NaN for equal values
    return {"n": n, "mean": mean, "level": level, "std": std, "low": mean - reach, "high": mean + reach}


# ----------------------------------------------------------------------------------------------------
# Words


def methods_table(found: dict) -> Table:
    """Each method at its own rate, with its difference from the first, and the verdict."""
    rows, verdicts = [], {c["method"]: c for c in found["comparisons"]}
    for method, choice in found["chosen"].items():
        rate = choice["reason"] if choice["lr"] is None else f"{choice['lr']:g}"
        edge = " (edge of the grid)" if choice["edge"] in ("lowest", "highest") else ""
        losses = [*choice["held_out"]["losses"].values(), *(math.inf for _ in choice["held_out"]["diverged"])]
        row = {"Method": method, "Learning rate": rate + edge, "PPL (held out)": spread(map(perplexity, losses))}
        if c := verdicts.get(method):
            if d := c["difference"]:
                row["Δ loss"] = f"{d['mean']:+.4f} ({d['n']})"
            if c["better"]:
                row["Interval"] = f"{d['low']:+.4f} to {d['high']:+.4f} ({100 * d['level']:.4g} %)"
            row["Better"] = c["better"] or f"not decided: {c['reason']}"
        rows.append(row)
    note = (
        "PPL (held out) is on the half of the validation text that chose no rate: mean ± standard deviation (seeds). "
        "Differences are in nats/token from the first method, between runs with the same seed; negative means that the "
        "method of the row is better. Intervals are Student's t over seeds. A method is better if its interval "
        "excludes zero."
    )
    return table("tune", "Each method at its own learning rate, on half of the validation text", rows, [note])


def remarks(found: dict) -> list[str]:
    """What a reader must know before quoting a verdict."""
    said, design = [], found["design"]
    if len(design["rates"]) == 1:
        said.append(f"One rate, {design['rates'][0]:g}, was given to all: none was chosen.")
    for method, choice in found["chosen"].items():
        if choice["edge"] in ("lowest", "highest"):
            beyond = "below" if choice["edge"] == "lowest" else "above"
            end = f"its best rate, {choice['lr']:g}, is the {choice['edge']} of the grid"
            said.append(f"{method}: {end}, and a better one may lie {beyond} it. Widen train.lr= in the same command.")
        lost = [t for t in found["trials"] if (t["method"], t["state"]) == (method, "diverged")]
        if lost:
            cells = ", ".join(f"{t['lr']:g} (seed {t['seed']})" for t in lost)
            said.append(f"{method} diverged at {cells}.")
    said += found.get("remarks", [])
    if not design["fresh"] and len(design["rates"]) > 1:
        said.append(
            "The rates were chosen with the same seeds that are reported, though on other text, so the reported losses "
            "are slightly optimistic. Give --confirm <seeds> to report seeds that chose nothing."
        )
    return said


def write(found: dict, folder: Path) -> None:
    """Write ``tune.json``, the curve as a figure, ``report.md`` and ``report.html``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tune.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    parts = [methods_table(found), *draw_rates(found, folder), ("Made by", found["command"])]
    write_page(" / ".join(found["design"]["methods"]), remarks(found), parts, folder, folder)
