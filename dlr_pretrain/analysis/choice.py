"""The first table of a report: differences in loss between methods, by seed, with their intervals.

A method with DLR is compared with the same method without it, if that is there, and any other with the first one.
Losses are in nats per token. A difference is between runs with the same seed. A negative one favours the row's method.

Runs that differ only in train.lr and the seed are one method. If a method has several rates, each is compared at its
best: one half of the validation text (A) chooses the rate, by the mean over the seeds that have run at all its rates.
The other half (B) is reported: of further seeds at the chosen rate if there are any, else of the same seeds.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dlr_pretrain.analysis.runs import Runs, differing_text, ended, spread
from dlr_pretrain.analysis.tables import Table, varying
from dlr_pretrain.util.text import perplexity

LEVEL = 0.95
NOTE = (
    "A difference is in nats/token, between runs with the same seed; a negative one favours the row's method. "
    "Intervals are by Student's t, at 95 % for all differences of a scale together. A method is called better if its "
    "interval, at the level in brackets, excludes zero. PPL is the mean ± standard deviation (seeds)."
)
HELD_OUT = "All numbers are of the half of the validation text that did not choose the learning rate."


def comparisons(all_runs: Runs) -> Iterator[dict]:
    """The comparison of the methods at each scale, in the order in which their runs were read: see ``compare``.

    Nothing for a scale with a single run configuration, or with evaluations of different text.
    """
    for scale, runs in all_runs.runs.sort_values("order").groupby("scale", sort=False):
        if runs.key.nunique() > 1 and not differing_text(runs, all_runs.of_set):
            plain = runs[runs.dlr == "off"].set_index("pair").family.to_dict()
            with_dlr = runs[runs.dlr != "off"].set_index("family").pair.to_dict()
            partners = {family: plain[pair] for family, pair in with_dlr.items() if pair in plain}
            if runs.groupby("family").lr.nunique().max() == 1:  # nothing is chosen: all text is reported
                runs = ended(runs).assign(loss_a=runs.loss, loss_b=runs.loss)
            columns = ["method", "dlr", "lr", "seed", "run", "state", "planned_tokens", "loss_a", "loss_b"]
            trials = runs.assign(method=runs.family)[columns].to_dict("records")
            if trials:
                yield {"scale": scale} | compare(trials, partners)


def compare(trials: Sequence[dict], partners: Mapping[str, str] = MappingProxyType({})) -> dict:
    """Each method's rate and losses, its difference from another method, and the verdict, as JSON has it.

    A method is compared with its entry in ``partners``, or else with the first method that has no other partner.

    ``trials`` has for each run: method, lr, seed, state, loss_a and loss_b (infinite if it diverged). The result:

        tuned         whether a method has several rates
        chosen        for each method what ``choose`` returns
        comparisons   for each other method: against, method, by_seed, difference (see ``estimate``), better (the name
                      of a method, "none shown", or null), reason, if it is null, and alone, seeds without a partner
        trials        the ``trials``; a loss that is not finite is null

    A method is better if the interval of the mean difference excludes zero. All intervals together hold at LEVEL
    (Bonferroni). Methods that are trained on different numbers of tokens are not compared.
    """
    methods = dict.fromkeys(trial["method"] for trial in trials)
    chosen = {method: choose([trial for trial in trials if trial["method"] == method]) for method in methods}
    tuned = any(len(choice["rates"]) > 1 for choice in chosen.values())
    first = next((method for method in methods if partners.get(method, method) == method), next(iter(methods)))
    pairs = {method: partners.get(method, first) for method in methods}
    pairs = {method: against for method, against in pairs.items() if against != method and against in methods}
    budgets = {trial["method"]: trial.get("planned_tokens") for trial in trials}
    results = []
    for method, against in pairs.items():
        choice, other = chosen[method], chosen[against]
        reasons = [f"{name}: {chosen[name]['reason']}" for name in (against, method) if chosen[name]["reason"]]
        designs = [(one["rates"], one["seeds"], {*one["losses"]}) for one in (other, choice)]
        common = [seed for seed in choice["losses"] if seed in other["losses"]]
        if budgets[method] != budgets[against]:
            reasons.append(f"it is trained on {budgets[method]:,} tokens, {against} on {budgets[against]:,}")
        if not reasons and ((tuned and designs[0] != designs[1]) or not common):
            reasons = [f"its rates or seeds are not those of {against}"]
        by_seed = {} if reasons else {seed: choice["losses"][seed] - other["losses"][seed] for seed in common}
        alone = sorted({*choice["losses"]} ^ {*other["losses"]}) if by_seed else []
        results.append({"against": against, "method": method, "by_seed": by_seed, "alone": alone, "better": None,
                        "difference": None, "reason": "; ".join(reasons)})  # fmt: skip
    intervals = sum(len(result["by_seed"]) > 1 for result in results)
    for result in filter(lambda result: result["by_seed"], results):
        difference = estimate(list(result["by_seed"].values()), 1 - (1 - LEVEL) / max(1, intervals))
        low, high = difference["low"], difference["high"]
        result["difference"] = difference
        if low is None:
            result["reason"] = "one seed says nothing about what another would give"
        else:
            result["better"] = result["method"] if high < 0 else result["against"] if low > 0 else "none shown"
    finite = [{key: _finite(value) for key, value in trial.items()} for trial in trials]
    return {"tuned": tuned, "chosen": chosen, "comparisons": results, "trials": finite}


def choose(trials: Sequence[dict]) -> dict:
    """The best rate ``lr`` of a method among ``rates``, by the mean loss over ``seeds``.

    ``losses`` maps each seed to its loss on half B at that rate, or to None if its run diverged. A rate of the grid
    with a diverged run is not chosen. If none can be chosen yet, ``lr`` is None and ``reason`` says why.
    """
    by_seed: dict[object, dict[float, dict]] = {}
    for trial in trials:
        by_seed.setdefault(trial["seed"], {})[trial["lr"]] = trial
    rates = sorted({trial["lr"] for trial in trials})
    seeds = [seed for seed, by_rate in by_seed.items() if len(by_rate) == len(rates)]
    grid = {lr: [by_seed[seed][lr] for seed in seeds] for lr in rates}
    choice: dict[str, Any] = {"rates": rates, "seeds": seeds, "lr": None, "losses": {}, "reason": ""}
    if not seeds:
        return choice | {"reason": "no seed has a run at each of its rates"}
    if waiting := sum(trial["state"] == "unfinished" for at_rate in grid.values() for trial in at_rate):
        return choice | {"reason": f"{waiting} of the {len(rates) * len(seeds)} runs of the grid have not ended"}
    means = {lr: statistics.fmean(trial["loss_a"] for trial in at_rate) for lr, at_rate in grid.items()}
    if any(map(math.isnan, means.values())):
        return choice | {"reason": "its validation text is one sequence, which has no halves: set eval.packing=packed"}
    best = min(means, key=means.__getitem__)
    if math.isinf(means[best]):
        return choice | {"reason": "every rate has a run that diverged"}
    held_out = {seed: by_rate[best]["loss_b"] for seed, by_rate in by_seed.items() if best in by_rate}
    reported = [seed for seed in held_out if seed not in seeds] or seeds
    losses = {seed: _finite(held_out[seed]) for seed in reported}
    lost = [str(seed) for seed, loss in losses.items() if loss is None]  # no mean leaves a seed out
    reason = f"no loss at its chosen rate with seed {', '.join(lost)}" if lost else ""
    return choice | {"lr": best, "losses": losses, "reason": reason}


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def estimate(values: Sequence[float], level: float) -> dict:
    """The mean of ``values`` with its interval at ``level`` by Student's t; one value has no interval (None)."""
    from scipy.stats import t

    n, mean = len(values), statistics.fmean(values)
    if n == 1:
        return {"n": n, "mean": mean, "level": level, "low": None, "high": None}
    reach = float(t.ppf((1 + level) / 2, n - 1)) * statistics.stdev(values) / math.sqrt(n)
    return {"n": n, "mean": mean, "level": level, "low": mean - reach, "high": mean + reach}


def verdicts(compared: Sequence[dict]) -> Iterator[str]:
    """Yields what each decided comparison shows, as a sentence."""
    for one in compared:
        for result in one["comparisons"]:
            method, against, better = result["method"], result["against"], result["better"]
            if better == "none shown":
                yield f"{one['scale']}: no difference in loss between {method} and {against} is shown"
            elif better:
                other, by = against if better == method else method, abs(result["difference"]["mean"])
                yield f"{one['scale']}: {better} is better than {other}, by {by:.4f} nats/token"


def difference_table(compared: Sequence[dict]) -> Table:
    """Each method's difference in loss, its interval and verdict, and its value for each seed."""
    rows, notes = [], [NOTE, *([HELD_OUT] if any(one["tuned"] for one in compared) else [])]
    for one in compared:
        verdicts = {result["method"]: result for result in one["comparisons"]}
        for method, choice in one["chosen"].items():
            ppl = spread(math.inf if loss is None else perplexity(loss) for loss in choice["losses"].values())
            row = {"Scale": one["scale"], "Method": method, "PPL": ppl}
            if one["tuned"]:
                row["Learning rate"] = choice["reason"] if choice["lr"] is None else f"{choice['lr']:g}"
            if result := verdicts.get(method):
                row["Compared with"] = result["against"]
                if d := result["difference"]:
                    row["Δ loss"] = f"{d['mean']:+.4f} ({d['n']})"
                if result["better"]:
                    row["Interval"] = f"{d['low']:+.4f} to {d['high']:+.4f} ({100 * d['level']:.4g} %)"
                named = {"none shown": "no difference shown", None: f"not decided: {result['reason']}"}
                row["Better"] = named.get(result["better"], result["better"])
                if result["by_seed"]:
                    row["By seed"] = ", ".join(f"{seed}: {value:+.4f}" for seed, value in result["by_seed"].items())
                if alone := ", ".join(map(str, result["alone"])):
                    notes.append(f"{method} at {one['scale']}: without a partner, not in the difference: seed {alone}")
            rows.append(row)
            if len(choice["rates"]) > 1 and choice["lr"] in (choice["rates"][0], choice["rates"][-1]):
                rule = "is at an end of its rates, and a better one may lie beyond: add rates to train.lr="
                notes.append(f"{method} at {one['scale']}: {choice['lr']:g} {rule}")
    return varying("differences", "Differences in loss", rows, notes)
