"""The command behind ``scripts/tune.py``: train a grid of methods, rates and seeds, choose each rate, and compare.

One half of the validation text (A) chooses a method's rate, the other half (B) is reported. Methods are compared with
the first one, seed by seed. The result is one mapping, as in ``tune.json``:

    design        methods, rates (ascending), seeds, fresh (seeds of --confirm, which alone are reported)
    trials        of each run: method, lr, seed, run, state, tokens, and loss_a and loss_b of a complete one
    chosen        of each method: lr (null if none can be chosen), losses (on B by seed; null if it diverged), reason
    comparisons   of each other method: against, method, by_seed, difference, better ("none shown", or null), reason

Losses are in nats per token; a difference is a method's loss minus the first method's, so a negative one favours the
method.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from dlr_pretrain.analysis.figures import draw_rates
from dlr_pretrain.analysis.report import write_page
from dlr_pretrain.analysis.runs import TEXT, method_name, spread
from dlr_pretrain.analysis.tables import Table, table
from dlr_pretrain.config.command_line import key_of
from dlr_pretrain.config.written import ORIGIN, identity, read_record
from dlr_pretrain.launch.runs import PlannedRun, load_runs, read_table
from dlr_pretrain.launch.state import status_of
from dlr_pretrain.launch.submit import parser_of, read, start
from dlr_pretrain.util.errors import EXIT_FAILED, UserError, command
from dlr_pretrain.util.files import read_metrics
from dlr_pretrain.util.text import perplexity

EPILOG = """examples:
  tune.py backbone=cola dlr=off,on train.lr=0.001,0.002,0.004 seed=41,42,43 scale=60m --output cola --local --limit 8
  tune.py backbone=cola dlr=off,on train.lr=0.001,0.003,0.01 seed=41 --confirm 42,43,44 scale=60m --output cola \\
      -- --gpus-per-node=8 --cpus-per-gpu=8 --mem=0

The table is that of submit.py. Runs that differ in train.lr and seed alone are one method; every method needs the same
rates and seeds, and the others are compared with the first. --confirm trains fresh seeds at each method's chosen rate
alone, and reports them instead of the grid's. The same command continues where this one stopped."""
LEVEL = 0.95
ENDED = ("complete", "diverged")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0; EXIT_FAILED if runs have failed or stopped; or that of a UserError."""
    return command(lambda: tune(sys.argv[1:] if argv is None else argv))


def tune(argv: Sequence[str]) -> int:
    """Train what is due, compare, and write the report."""
    parser = parser_of("tune.py", "Compare methods, each at its best learning rate of the same grid.", EPILOG)
    parser.add_argument("--confirm", type=seed_list, default=[], metavar="SEEDS", help="fresh seeds, such as 44,45,46")
    parser.add_argument("--output", type=Path, metavar="DIR", required=True, help="of the results")
    given, for_sbatch = read(parser, argv)
    runs = load_runs(read_table(given.what), machine=given.local)
    names = method_names(runs)
    design = grid(names, runs, given.confirm)

    def same_text() -> None:
        """The files may have changed since the runs were configured: what those that have saved have read decides."""
        records = {str(run.dir): read_record(run.dir) for run in runs}
        require_one_text({name: of["identity"] for name, of in records.items() if "saved" in of}, (*TEXT, "data.order"))

    def train_or_queue(some: Sequence[PlannedRun]) -> list[dict]:
        """Train, or queue, the runs that have not ended and are not in the queue. Returns the trials of all."""
        jobs = start(some, given, for_sbatch, same_text)
        same_text()
        return [trial(names[own_words(run)], run, status_of(run, jobs).state) for run in some]

    trials = train_or_queue(runs)
    best = {method: choose(design, trials, method)["lr"] for method in names.values()}
    fresh = []
    for run, seed in product(runs, given.confirm):
        if (run.cfg.train.lr, run.cfg.seed) == (best[names[own_words(run)]], design["seeds"][0]):
            words = (*(word for word in run.line.words if key_of(word) != "seed"), f"seed={seed}")
            fresh.append(replace(run.line, words=words))
    if fresh:
        confirming = load_runs(fresh, machine=given.local)
        runs += confirming
        trials += train_or_queue(confirming)
    found = compare(design, trials)
    first, *others = names
    found["shared"] = shlex.join(word for word in first if all(word in other for other in others))
    found["command"] = shlex.join(["python", "scripts/tune.py", *argv])
    write(found, given.output)
    print(methods_table(found).markdown(), *(f"* {line}" for line in remarks(found)), sep="\n")
    print(f"\nreport      {given.output / 'report.md'}")
    return EXIT_FAILED if any(t["state"] not in (*ENDED, "running", "pending") for t in trials) else 0


def seed_list(text: str) -> list[int]:
    """Seeds with commas between them, as the type of an argument."""
    return [*map(int, text.split(","))]


# ----------------------------------------------------------------------------------------------------
# The grid


def own_words(run: PlannedRun) -> tuple[str, ...]:
    """The overrides that a run shares with all runs of its method, which differ in train.lr and seed alone."""
    return tuple(word for word in run.line.words if key_of(word) not in ("train.lr", "seed"))


def method_names(runs: Sequence[PlannedRun]) -> dict[tuple[str, ...], str]:
    """The name of each method by its own words: as in reports. Where several have one name, words are added."""
    names, found = {}, {}
    for run in runs:
        names[own_words(run)] = method_name(run.cfg.backbone.name, run.cfg.dlr.name, run.cfg.optimizer.name)
    for words, name in names.items():
        others = [other for other in names if names[other] == name]
        apart = " ".join(word for word in words if not all(word in other for other in others))
        found[words] = f"{name} ({apart})" if apart else name
    return found


def grid(names: dict[tuple[str, ...], str], runs: Sequence[PlannedRun], fresh: Sequence[int]) -> dict:
    """The design; raises UserError if the methods do not compare."""
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
    """Raises UserError if one of the ``keys`` that decide what is evaluated is not the same in all ``identities``."""
    first = next(iter(identities), "")
    for other, key in product(identities, keys):
        if identities[other].get(key) != identities[first].get(key):
            rule = "their losses do not compare. Give it for all methods, or move away runs of what the text was before"
            raise UserError(f"{key} of {other} is not that of {first}: {rule}")


def trial(method: str, run: PlannedRun, state: str) -> dict:
    """A run as ``trials`` describe it; one whose last loss is not finite has diverged."""
    train = run.cfg.train
    found = {"method": method, "lr": train.lr, "seed": run.cfg.seed, "run": str(run.dir), "state": state}
    found["tokens"] = train.steps * train.global_batch * train.seq_len
    if state != "complete":
        return found | {"loss_a": None, "loss_b": None}
    last = next((r for r in reversed(read_metrics(run.dir / "metrics.jsonl")) if "eval/loss" in r), {})
    if last.get("step") != train.steps:
        raise UserError(f"{run.dir}: complete, and metrics.jsonl has no evaluation of its last step. Move it away")
    found |= {"loss_a": last["eval/loss_a"], "loss_b": last["eval/loss_b"]}
    return found | {"state": "diverged"} if last["eval/loss"] is None else found


# ----------------------------------------------------------------------------------------------------
# The verdict


def compare(design: dict, trials: Sequence[dict]) -> dict:
    """Each method's rate and losses, and the differences from the first method, with verdicts.

    A method is better if the interval of the mean difference excludes zero. All intervals hold together at LEVEL
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
                reasons = ["one seed says nothing of what another would give"]
            else:
                better = method if high < 0 else first if low > 0 else "none shown"
        found = {"against": first, "method": method, "by_seed": by_seed, "difference": difference}
        comparisons.append(found | {"better": better, "reason": "; ".join(reasons)})
    return {"design": design, "chosen": chosen, "comparisons": comparisons, "trials": list(trials)}


def choose(design: dict, trials: Sequence[dict], method: str) -> dict:
    """The rate with the lowest mean loss on half A over the seeds of the grid, and the losses on half B at this rate.

    A rate with a diverged run is not chosen. ``reason`` says why nothing can be said of the method yet, or at all.
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
    lost = [str(seed) for seed in reported if held_out.get(seed) is None]  # a seed is never left out of a mean
    reason = f"no loss at its chosen rate with seed {', '.join(lost)}" if lost else ""
    return {"lr": best, "losses": held_out, "reason": reason}


def estimate(values: Sequence[float], level: float) -> dict:
    """The mean of at least one value, with its interval at ``level`` by Student's t; None for what one value lacks."""
    from scipy.stats import t

    n, mean = len(values), statistics.fmean(values)
    if n == 1:
        return {"n": n, "mean": mean, "level": level, "low": None, "high": None}
    reach = float(t.ppf((1 + level) / 2, n - 1)) * statistics.stdev(values) / math.sqrt(n)
    return {"n": n, "mean": mean, "level": level, "low": mean - reach, "high": mean + reach}


# ----------------------------------------------------------------------------------------------------
# Words


def methods_table(found: dict) -> Table:
    """Each method at its own rate, with its difference from the first, and the verdict."""
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
        "PPL (held out) is on the half of the validation text that chose no rate: mean ± standard deviation (seeds). "
        "Differences are in nats/token from the first method, between runs with the same seed, with intervals by "
        "Student's t; negative: the row's method is better. It is called so if the interval excludes zero."
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
