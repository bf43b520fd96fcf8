"""A fair comparison of methods, each at the learning rate that is best for it.

One half of the validation set (A) chooses the rate, the other half (B) is reported. Methods are compared seed by seed.
The result is one mapping, as in ``tune.json``. Losses are in nats a token; a difference is a method's loss minus the
first method's, so a negative one favours the method.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from dlr_pretrain.analysis.student import estimate
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


def compare(design: Design, trials: Sequence[Trial]) -> dict:
    """Each method's rate and held-out losses, and the differences from the first method, with verdicts."""
    chosen = {method: choose(design, trials, method) for method in design.methods}
    for method, choice in chosen.items():
        choice["held_out"] = held_out(design, trials, method, choice["lr"])
    first, *others = design.methods
    return {
        "design": asdict(design),
        "chosen": chosen,
        "comparisons": [
            {"method": method, "against": first, **verdict(design, chosen[first], chosen[method], (first, method))}
            for method in others
        ],
        "at_equal_rates": [
            {"method": method, "against": first, "lr": lr, **at_equal_rate(trials, (first, method), lr, design.seeds)}
            for method in others
            for lr in design.rates
        ],
        "trials": [asdict(trial) for trial in trials],
    }


def choose(design: Design, trials: Iterable[Trial], method: str) -> dict:
    """The rate with the lowest mean loss on half A over the seeds of the grid.

    A rate with a diverged run is not chosen. If none can be chosen, ``lr`` is None and ``reason`` says why. ``edge`` is
    the end of the grid at which the rate lies, if any: a better rate may lie beyond it.
    """
    grid = {(t.lr, t.seed): t for t in trials if t.method == method and t.seed in design.seeds}
    asked = [(lr, seed) for lr in design.rates for seed in design.seeds]
    missing = sum(grid[cell].state not in ENDED if cell in grid else True for cell in asked)
    losses = {
        lr: statistics.fmean(_loss(grid.get((lr, seed)), "loss_a") for seed in design.seeds) for lr in design.rates
    }
    best = min(losses, key=losses.__getitem__)
    if missing:
        reason = f"{missing} of the {len(asked)} runs of the grid have not ended"
    else:
        reason = "" if losses[best] < math.inf else "every rate has a diverged run"
    if reason:
        return {"lr": None, "edge": None, "reason": reason, "loss_a": None}
    return {"lr": best, "edge": edge(design.rates, best), "reason": "", "loss_a": losses[best]}


def edge(rates: Sequence[float], chosen: float) -> str | None:
    """The end of the grid at which a rate lies: lowest, highest or only; None inside the grid."""
    if len(rates) == 1:
        return "only"
    return {rates[0]: "lowest", rates[-1]: "highest"}.get(chosen)


def held_out(design: Design, trials: Iterable[Trial], method: str, lr: float | None) -> dict:
    """The losses on half B at the chosen rate by seed, and their estimate. Fresh seeds, if any, replace the grid's.

    There is no estimate if a seed has diverged: it is never left out of a mean.
    """
    seeds = design.fresh or design.seeds
    found = {t.seed: t for t in trials if (t.method, t.lr) == (method, lr) and t.seed in seeds}
    losses = {seed: t.loss_b for seed, t in found.items() if t.state == "finished"}
    diverged = [seed for seed, t in found.items() if t.state == "diverged"]
    values = [] if diverged else list(losses.values())
    return {
        "seeds": list(seeds),
        "losses": losses,
        "diverged": diverged,
        "missing": [seed for seed in seeds if seed not in found or found[seed].state not in ENDED],
        "loss": estimate(values, LEVEL).as_dict() if values else None,
        "perplexity": estimate(list(map(perplexity, values)), LEVEL).as_dict() if values else None,
    }


def verdict(design: Design, first: dict, other: dict, names: tuple[str, str]) -> dict:
    """Which of two methods is better on half B: its name if the interval of the mean difference excludes zero.

    "none shown" if the interval includes zero; None, with the reason, if nothing can be said.
    """
    for name, choice in zip(names, (first, other), strict=True):
        out = choice["held_out"]
        if choice["lr"] is None:
            return _undecided(f"{name}: {choice['reason']}")
        if out["diverged"]:
            return _undecided(f"{name} diverges at its chosen rate with seed {_listed(out['diverged'])}")
        if out["missing"]:
            return _undecided(f"{name}: no result yet at its chosen rate with seed {_listed(out['missing'])}")
    a, b = first["held_out"]["losses"], other["held_out"]["losses"]
    found = differences({seed: b[seed] - a[seed] for seed in a}, design.level)
    mean = found["difference"]
    if mean["low"] is None:
        return {"better": None, "reason": "one seed: it says nothing of what another would give", **found}
    better = names[1] if mean["high"] < 0 else names[0] if mean["low"] > 0 else "none shown"
    return {"better": better, "reason": "", **found}


def at_equal_rate(trials: Iterable[Trial], names: tuple[str, str], lr: float, seeds: Sequence[int]) -> dict:
    """The paired differences on half B at one rate, over the seeds of the grid for which both methods have finished.

    Their mean has no estimate if a seed has diverged with either method: it is never left out of a mean.
    """
    at_rate = [t for t in trials if t.lr == lr and t.method in names and t.seed in seeds]
    losses = {(t.method, t.seed): t.loss_b for t in at_rate if t.state == "finished"}
    both = [seed for seed in seeds if all((name, seed) in losses for name in names)]
    found = differences({seed: losses[names[1], seed] - losses[names[0], seed] for seed in both}, LEVEL)
    diverged = sorted({t.seed for t in at_rate if t.state == "diverged"})
    return found | {"diverged": diverged} | ({"difference": None} if diverged else {})


def differences(by_seed: dict[int, float], level: float) -> dict:
    """The differences and the estimate of their mean, which is None if there is no difference."""
    return {"by_seed": by_seed, "difference": estimate(list(by_seed.values()), level).as_dict() if by_seed else None}


def _undecided(reason: str) -> dict:
    return {"better": None, "reason": reason, "by_seed": {}, "difference": None}


def _loss(trial: Trial | None, half: str) -> float:
    return getattr(trial, half) if trial is not None and trial.state == "finished" else math.inf


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
