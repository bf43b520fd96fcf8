"""The command behind ``scripts/tune.py``: train a grid of methods, rates and seeds, choose each rate, and compare."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from dlr_pretrain.analysis.runs import TEXT, method_name
from dlr_pretrain.analysis.verdict import ENDED, Design, Trial, choose, compare, methods_table, remarks, write
from dlr_pretrain.config.command_line import key_of
from dlr_pretrain.config.written import ORIGIN, identity, read_record
from dlr_pretrain.launch.runs import Line, PlannedRun, load_runs, read_table
from dlr_pretrain.launch.state import Status, status_of
from dlr_pretrain.launch.submit import parser_of, read, start
from dlr_pretrain.util.errors import EXIT_FAILED, UserError, command
from dlr_pretrain.util.history import read_metrics

EPILOG = """examples:
  tune.py backbone=cola dlr=off,on train.lr=0.001,0.002,0.004 seed=41,42,43 scale=60m --output cola --local --limit 8
  tune.py backbone=cola dlr=off,on train.lr=0.001,0.003,0.01 seed=41 --confirm 42,43,44 scale=60m --output cola \\
      -- --gpus-per-node=8 --cpus-per-gpu=8 --mem=0

The table is that of submit.py. Runs that differ in train.lr and seed alone are one method; every method needs the same
rates and seeds, and the others are compared with the first. --confirm trains fresh seeds at each method's chosen rate
alone, and reports them instead of the grid's. The same command continues where this one stopped."""

Cell = tuple[str, float, int]  # method, learning rate, seed


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0; EXIT_FAILED if runs have failed or stopped; or that of a UserError."""
    return command(lambda: tune(sys.argv[1:] if argv is None else argv))


def tune(argv: Sequence[str]) -> int:
    parser = parser_of("tune.py", "Compare methods, each at its best learning rate of the same grid.", EPILOG)
    parser.add_argument("--confirm", type=seed_list, default=(), metavar="SEEDS", help="fresh seeds, such as 44,45,46")
    parser.add_argument("--output", type=Path, metavar="DIR", required=True, help="of the results")
    given, for_sbatch = read(parser, argv)
    methods = by_method(load_runs(read_table(given.what), machine=given.local))
    design, runs = grid(methods, given.confirm)

    def same_text() -> None:
        """The files may have changed since the runs were configured: what those that have saved have read decides."""
        records = {str(run.dir): read_record(run.dir) for run in runs.values()}
        require_one_text({name: of["identity"] for name, of in records.items() if "saved" in of}, (*TEXT, "data.order"))

    def train_or_queue(some: dict[Cell, PlannedRun]) -> list[Trial]:
        """Train, or queue, the runs that have not ended and are not in the queue. Returns the trials of all."""
        jobs = start(sorted(some.values(), key=lambda run: run.number), given, for_sbatch, same_text)
        same_text()
        return [trial(cell, run, status_of(run, jobs)) for cell, run in some.items()]

    trials = train_or_queue(runs)
    fresh: dict[Cell, Line] = {}
    for method in methods:
        lr = choose(design, trials, method)["lr"]
        for seed in design.fresh if lr is not None else ():
            line = runs[method, lr, design.seeds[0]].line
            words = (*(word for word in line.words if key_of(word) != "seed"), f"seed={seed}")
            fresh[method, lr, seed] = replace(line, words=words)
    if fresh:
        confirming = dict(zip(fresh, load_runs(list(fresh.values()), machine=given.local), strict=True))
        runs |= confirming
        trials += train_or_queue(confirming)
    found = compare(design, trials) | {"remarks": about(methods, runs.values())}
    words = [own_words(of[0]) for of in methods.values()]
    found["shared"] = shlex.join(word for word in words[0] if all(word in own for own in words))
    found["command"] = shlex.join(["python", "scripts/tune.py", *argv])
    write(found, given.output)
    print(methods_table(found).markdown(), *(f"* {line}" for line in remarks(found)), sep="\n")
    print(f"\nreport      {given.output / 'report.md'}")
    broken = [at for at in trials if at.state in ("failed", "stopped") or (given.local and at.state not in ENDED)]
    for at in broken:
        print(f"{at.method} lr={at.lr:g} seed={at.seed}: {at.state} {at.remark}".rstrip())
    return EXIT_FAILED if broken else 0


def seed_list(text: str) -> tuple[int, ...]:
    """Seeds with commas between them, as the type of an argument."""
    return tuple(map(int, text.split(",")))


# ----------------------------------------------------------------------------------------------------
# The grid


def by_method(runs: Sequence[PlannedRun]) -> dict[str, list[PlannedRun]]:
    """The runs of each method, which differ in train.lr and seed alone.

    A method is named as in reports. Where several have one name, its own overrides are added.
    """
    found: dict[str, dict[tuple[str, ...], list[PlannedRun]]] = {}
    for run in runs:
        name = method_name(run.cfg.backbone.name, run.cfg.dlr.name, run.cfg.optimizer.name)
        found.setdefault(name, {}).setdefault(own_words(run), []).append(run)
    methods = {}
    for name, alike in found.items():
        for words, of in alike.items():
            apart = " ".join(word for word in words if not all(word in others for others in alike))
            methods[f"{name} ({apart})" if apart else name] = of
    return methods


def own_words(run: PlannedRun) -> tuple[str, ...]:
    return tuple(word for word in run.line.words if key_of(word) not in ("train.lr", "seed"))


def grid(methods: dict[str, list[PlannedRun]], fresh: tuple[int, ...]) -> tuple[Design, dict[Cell, PlannedRun]]:
    """The design, and the run of each of its cells; raises UserError if the methods do not compare."""
    cells = {(method, run.cfg.train.lr, run.cfg.seed): run for method, of in methods.items() for run in of}
    rates, seeds = sorted({lr for _, lr, _ in cells}), tuple(dict.fromkeys(seed for _, _, seed in cells))
    for method, lr, seed in product(methods, rates, seeds):
        if (method, lr, seed) not in cells:
            rule = "a fair comparison gives all methods the same rates and seeds"
            raise UserError(f"{method} has no run with train.lr={lr:g} seed={seed}: {rule}")
    if both := set(seeds) & set(fresh):
        raise UserError(f"--confirm: the rates are chosen with seed {min(both)}. Give seeds that are not in seed=")
    configured = {method: identity(of[0].cfg) for method, of in methods.items()}
    require_one_text(configured, (*TEXT, *ORIGIN, "scale.vocab_size"))
    return Design(tuple(methods), tuple(rates), seeds, fresh), cells


def about(methods: dict[str, list[PlannedRun]], runs: Iterable[PlannedRun]) -> list[str]:
    """What a reader must know of the runs that are compared."""
    said, budgets = [], {}
    for method, (run, *_) in methods.items():
        steps, tokens = run.cfg.train.steps, run.cfg.train.global_batch * run.cfg.train.seq_len
        budgets[method] = f"{steps:,} steps, {steps * tokens:,} tokens"
    if len(set(budgets.values())) > 1:
        said.append(f"The budgets are not equal: {'; '.join(f'{m} {budget}' for m, budget in budgets.items())}.")
    seeds = {(run.cfg.seed, run.cfg.data.seed) for run in runs}
    if len(seeds) == 1 or any(seed != order for seed, order in seeds):
        said.append("A seed changes only the initial weights: all runs of a method see the data in one order.")
    return said


# ----------------------------------------------------------------------------------------------------
# The runs


def trial(cell: Cell, run: PlannedRun, status: Status) -> Trial:
    """The result of a run. A run that ended because its numbers were not finite has diverged, which is a result, too.

    Raises UserError if the run is complete without the numbers that a comparison needs.
    """
    if status.state != "complete":
        return Trial(*cell, status.state, str(run.dir), remark=status.reason)
    last = next((r for r in reversed(read_metrics(run.dir / "metrics.jsonl")) if "eval/loss" in r), {})
    a, b, loss = (last.get(f"eval/loss{half}") for half in ("_a", "_b", ""))
    if last.get("step") == run.cfg.train.steps and loss is None:  # it was not finite
        return Trial(*cell, "diverged", str(run.dir))
    if last.get("step") != run.cfg.train.steps or None in (a, b):
        raise UserError(
            f"{run.dir}: complete, and its last step has no losses of both halves of the validation text. Move it "
            f"away; raise eval.tokens={run.cfg.eval.tokens} if that is a single sequence"
        )
    return Trial(*cell, "finished", str(run.dir), a, b, loss)


def require_one_text(identities: dict[str, dict], keys: Iterable[str]) -> None:
    """Raises UserError if one of the ``keys`` that decide what is evaluated is not the same in all ``identities``."""
    first = next(iter(identities), "")
    for other, key in product(identities, keys):
        if identities[other].get(key) != identities[first].get(key):
            rule = "their losses do not compare. Give it for all methods, or move away runs of what the text was before"
            raise UserError(f"{key} of {other} is not that of {first}: {rule}")
