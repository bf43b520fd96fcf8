"""Compares methods, each at its best learning rate of a grid that ``scripts/tune.py`` trains.

One half of the validation text (A) chooses a method's rate, and the other half (B) is reported. Methods are compared
with the first one, seed by seed. The result is one mapping, as in ``tune.json``:

    design        methods, rates (ascending), seeds, fresh (the seeds of --confirm; only these are reported)
    trials        for each run: method, lr, seed, run, state, tokens, loss_a and loss_b (null unless it is complete)
    chosen        for each method: lr (null if none can be chosen), losses (on B by seed; null if diverged), reason
    comparisons   for each other method: against, method, by_seed, difference, better ("none shown", or null), reason

Losses are in nats per token. A difference is a method's loss minus the first method's, so a negative one favours the
method.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

from dlr_pretrain.analysis.figures import draw_rates
from dlr_pretrain.analysis.report import write_page
from dlr_pretrain.analysis.runs import TEXT, method_name, spread
from dlr_pretrain.analysis.tables import Table, table
from dlr_pretrain.config.command_line import key_of
from dlr_pretrain.config.identity import ORIGIN, identity
from dlr_pretrain.launch.runs import PlannedRun
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import NUMBER, misfit, read_metrics
from dlr_pretrain.util.text import perplexity

LEVEL = 0.95
ENDED = ("complete", "diverged")


# ----------------------------------------------------------------------------------------------------
# The grid


def own_words(run: PlannedRun) -> tuple[str, ...]:
    """The overrides that define a run's method: all but train.lr and seed."""
    return tuple(word for word in run.line.words if key_of(word) not in ("train.lr", "seed"))


def method_names(runs: Sequence[PlannedRun]) -> dict[tuple[str, ...], str]:
    """The name of each method by its own words, as in reports. Where methods share a name, differing words follow."""
    names, found = {}, {}
    for run in runs:
        names[own_words(run)] = method_name(run.cfg.backbone.name, run.cfg.dlr.name, run.cfg.optimizer.name)
    for words, name in names.items():
        others = [other for other in names if names[other] == name]
        apart = " ".join(word for word in words if not all(word in other for other in others))
        found[words] = f"{name} ({apart})" if apart else name
    return found


def grid(names: dict[tuple[str, ...], str], runs: Sequence[PlannedRun], fresh: Sequence[int]) -> dict:
    """The design. Raises UserError if the methods cannot be compared."""
    cells = {(names[own_words(run)], run.cfg.train.lr, run.cfg.seed): run for run in runs}
    rates, seeds = sorted({lr for _, lr, _ in cells}), list(dict.fromkeys(seed for _, _, seed in cells))
    for method, lr, seed in product(names.values(), rates, seeds):
        if (method, lr, seed) not in cells:
            rule = "a fair comparison gives all methods the same rates and seeds"
            raise UserError(f"{method} has no run with train.lr={lr:g} seed={seed}: {rule}")
    if both := set(seeds) & set(fresh):
        raise UserError(f"--confirm: the rates are chosen with seed {min(both)}. Give seeds that are not in seed=")
    configured = {method: identity(run.cfg) for (method, _, _), run in cells.items()}
    require_one_text(configured, (*TEXT, *ORIGIN, "scale.vocab_size"))
    return {"methods": list(names.values()), "rates": rates, "seeds": seeds, "fresh": list(fresh)}


def require_one_text(identities: dict[str, dict], keys: Iterable[str]) -> None:
    """Raise UserError if ``identities`` differ in one of the ``keys`` that decide what is evaluated."""
    first = next(iter(identities), "")
    for other, key in product(identities, keys):
        if identities[other].get(key) != identities[first].get(key):
            rule = "their losses cannot be compared. Set it for all methods, or move away runs on an earlier text"
            raise UserError(f"{key} of {other} is not that of {first}: {rule}")


def trial_of(method: str, run: PlannedRun, state: str) -> dict:
    """A run as an entry of ``trials``. It has diverged if its last loss is not finite."""
    train = run.cfg.train
    found = {"method": method, "lr": train.lr, "seed": run.cfg.seed, "run": str(run.dir), "state": state}
    found["tokens"] = train.steps * train.global_batch * train.seq_len
    if state != "complete":
        return found | {"loss_a": None, "loss_b": None}
    last = next((r for r in reversed(read_metrics(run.dir / "metrics.jsonl")) if "eval/loss" in r), {})
    if last.get("step") != train.steps:
        raise UserError(f"{run.dir}: complete, but metrics.jsonl has no evaluation of its last step. Move it away")
    if wrong := misfit(last, dict.fromkeys(("eval/loss", "eval/loss_a", "eval/loss_b"), NUMBER | None)):
        raise UserError(f"{run.dir}/metrics.jsonl: damaged at its last step: {wrong}. Move it away")
    found |= {"loss_a": last["eval/loss_a"], "loss_b": last["eval/loss_b"]}
    if last["eval/loss"] is None:
        return found | {"state": "diverged"}
    if None in (found["loss_a"], found["loss_b"]):
        fix = "Set eval.packing=packed or a larger data.held_out for all methods"
        raise UserError(f"{run.dir}: its validation text is one sequence, but two halves are compared. {fix}")
    return found


# ----------------------------------------------------------------------------------------------------
# The verdict


def compare(design: dict, trials: Sequence[dict]) -> dict:
    """Each method's rate and losses, its difference from the first method, and the verdict.

    A method is better if the interval of the mean difference excludes zero. All intervals together hold at LEVEL
    (Bonferroni).
    """
    chosen = {method: choose(design, trials, method) for method in design["methods"]}
    first, *others = design["methods"]
    comparisons = []
    for method in others:
        reasons = [f"{name}: {chosen[name]['reason']}" for name in (first, method) if chosen[name]["reason"]]
        by_seed, difference, better = {}, None, None
        if not reasons:
            losses = chosen[first]["losses"]
            by_seed = {seed: loss - losses[seed] for seed, loss in chosen[method]["losses"].items()}
            difference = estimate(list(by_seed.values()), 1 - (1 - LEVEL) / len(others))
            low, high = difference["low"], difference["high"]
            if low is None:
                reasons = ["one seed says nothing about what another would give"]
            else:
                better = method if high < 0 else first if low > 0 else "none shown"
        found = {"against": first, "method": method, "by_seed": by_seed, "difference": difference}
        comparisons.append(found | {"better": better, "reason": "; ".join(reasons)})
    return {"design": design, "chosen": chosen, "comparisons": comparisons, "trials": list(trials)}


def choose(design: dict, trials: Sequence[dict], method: str) -> dict:
    """The rate with the lowest mean loss on half A over the seeds of the grid, and the losses on half B at this rate.

    A rate with a diverged run is not chosen. ``reason`` says why the method has no result, or has none yet.
    """
    ended = {(t["lr"], t["seed"]): t for t in trials if t["method"] == method and t["state"] in ENDED}
    cells = list(product(design["rates"], design["seeds"]))
    if missing := sum(cell not in ended for cell in cells):
        return {"lr": None, "losses": {}, "reason": f"{missing} of the {len(cells)} runs of the grid have not ended"}
    means = {}
    for lr in design["rates"]:
        losses = [ended[lr, seed]["loss_a"] for seed in design["seeds"]]
        if None not in losses:
            means[lr] = statistics.fmean(losses)
    if not means:
        return {"lr": None, "losses": {}, "reason": "every rate has a run that diverged"}
    best, reported = min(means, key=means.__getitem__), design["fresh"] or design["seeds"]
    held_out = {seed: ended[best, seed]["loss_b"] for seed in reported if (best, seed) in ended}
    lost = [str(seed) for seed in reported if held_out.get(seed) is None]  # no mean leaves a seed out
    reason = f"no loss at its chosen rate with seed {', '.join(lost)}" if lost else ""
    return {"lr": best, "losses": held_out, "reason": reason}


def estimate(values: Sequence[float], level: float) -> dict:
    """The mean of ``values`` with its interval at ``level`` by Student's t; one value has no interval (None)."""
    from scipy.stats import t

    n, mean = len(values), statistics.fmean(values)
    if n == 1:
        return {"n": n, "mean": mean, "level": level, "low": None, "high": None}
    reach = float(t.ppf((1 + level) / 2, n - 1)) * statistics.stdev(values) / math.sqrt(n)
    return {"n": n, "mean": mean, "level": level, "low": mean - reach, "high": mean + reach}


# ----------------------------------------------------------------------------------------------------
# The report


def methods_table(found: dict) -> Table:
    """Each method at its own rate, with its difference from the first method, and the verdict."""
    rows, verdicts = [], {c["method"]: c for c in found["comparisons"]}
    for method, choice in found["chosen"].items():
        rate = choice["reason"] if choice["lr"] is None else f"{choice['lr']:g}"
        ppl = spread(math.inf if loss is None else perplexity(loss) for loss in choice["losses"].values())
        row = {"Method": method, "Learning rate": rate, "PPL (held out)": ppl}
        if c := verdicts.get(method):
            if d := c["difference"]:
                row["Δ loss"] = f"{d['mean']:+.4f} ({d['n']})"
            if c["better"]:
                row["Interval"] = f"{d['low']:+.4f} to {d['high']:+.4f} ({100 * d['level']:.4g} %)"
            row["Better"] = c["better"] or f"not decided: {c['reason']}"
        rows.append(row)
    note = (
        "PPL (held out) is on the half of the validation text that did not choose the rate: mean ± standard deviation "
        "(seeds). Differences are in nats/token from the first method, between runs with the same seed; a negative one "
        "favours the row's method. Intervals are by Student's t. A method is called better if its interval excludes "
        "zero."
    )
    return table("tune", "Each method at its own learning rate, on half of the validation text", rows, [note])


def remarks(found: dict) -> list[str]:
    """What a reader must know before quoting a verdict."""
    said, rates = [], found["design"]["rates"]
    for method, choice in found["chosen"].items():
        if len(rates) > 1 and choice["lr"] in (rates[0], rates[-1]):
            rule = f"its best rate, {choice['lr']:g}, is at an end of the grid, and a better one may lie beyond"
            said.append(f"{method}: {rule}. Widen train.lr= in the same command.")
    budgets = {t["method"]: t["tokens"] for t in found["trials"]}
    if len(set(budgets.values())) > 1:
        shown = "; ".join(f"{method} {tokens:,} tokens" for method, tokens in budgets.items())
        said.append(f"The budgets are not equal: {shown}.")
    return said


def write(found: dict, folder: Path) -> None:
    """Write ``tune.json``, the curve as a figure, ``report.md`` and ``report.html``."""
    parts = [methods_table(found), *draw_rates(found, folder)]
    write_page(" / ".join(found["design"]["methods"]), remarks(found), parts, found["command"], folder)
    (folder / "tune.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
