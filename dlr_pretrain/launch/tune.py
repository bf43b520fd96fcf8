"""The command behind ``scripts/tune.py``: train the grid, choose, train the fresh seeds, compare, and write it down."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from dlr_pretrain.analysis.tune import Trial, choose, compare, console, write
from dlr_pretrain.config.written import read_record
from dlr_pretrain.launch.command import Parser, split, summary
from dlr_pretrain.launch.grid import Grid, read_grid, require_comparable
from dlr_pretrain.launch.local import train
from dlr_pretrain.launch.runs import PlannedRun, load_runs
from dlr_pretrain.launch.slurm import queue, submit
from dlr_pretrain.launch.state import AGAIN, FINGERPRINTS, Status, look
from dlr_pretrain.util.command import at_least_1, command, refuse
from dlr_pretrain.util.errors import EXIT_FAILED, UserError
from dlr_pretrain.util.history import newest_first

EPILOG = """examples:
  tune.py pair=cola,cola+dlr lr=0.001,0.002,0.004 seeds=41,42,43 scale=tiny data=sample logger=jsonl --jobs 2
  tune.py pair=cola,cola+dlr lr=0.001,0.003,0.01 seeds=41 confirm=42,43,44 scale=60m \\
      --slurm -- --gpus-per-node=8 --cpus-per-gpu=8 --mem=0

a method is backbone[+dlr][+option][:key=value...], such as cola+dlr, lowrank+init_offset, full+galore or
cola+dlr:dlr.alpha=0.5 (no value with a comma); the others are compared with the first. lr and seeds are the grid, of
the same size for every method; confirm are seeds that are trained only at each method's chosen rate, and reported
instead of the grid's. Everything else is an override of train.py, for all methods. The same command again continues
where this one stopped."""

Cell = tuple[str, float, int]  # method, learning rate, seed


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0; EXIT_FAILED if runs have failed or stopped; or that of a UserError."""
    return command(lambda: tune(sys.argv[1:] if argv is None else argv))


def tune(argv: list[str]) -> int:
    given, for_sbatch = read(argv)
    grid = read_grid(given.words)

    def load(cells: Sequence[Cell]) -> dict[Cell, PlannedRun]:
        lines = [grid.line(*cell) for cell in cells]
        found = load_runs(lines, None if given.slurm else 1, machine=not (given.slurm or given.dry_run))
        return dict(zip(cells, found, strict=True))

    runs = load(grid.cells())
    one_each = {cell[0]: run for cell, run in runs.items()}
    require_comparable({method: run.cfg for method, run in one_each.items()})
    output = given.output or Path(next(iter(runs.values())).cfg.run.root, "tune", grid.name)
    if given.dry_run:
        print("\n".join(f"{run.line.origin}: {run.dir}" for run in runs.values()))
        print(f"{summary([look(run, {}) for run in runs.values()])}; results in {output}")
        return 0
    trials = bring(runs, given, grid.name, for_sbatch)
    if fresh := _fresh(grid, trials):
        runs |= (confirming := load(fresh))
        trials += bring(confirming, given, grid.name, for_sbatch)
    require_one_text(runs.values())
    configs = [run.cfg for run in runs.values()]
    found = compare(grid.design, trials) | {
        "words": {method: shlex.join(words) for method, words in grid.words.items()},
        "shared": shlex.join(grid.shared),
        "budgets": {
            method: {"steps": run.cfg.train.steps, "tokens": run.cfg.train.steps * run.step_tokens}
            for method, run in one_each.items()
        },
        # whether each seed has its own order of the data, which a single seed cannot show
        "ordered_by_seed": len({cfg.seed for cfg in configs}) > 1 and all(cfg.data.seed == cfg.seed for cfg in configs),
        "command": shlex.join(["scripts/tune.py", *argv]),
    }
    write(found, output)
    print(f"\n{console(found)}\n\nreport      {output / 'report.md'}")
    broken = [trial for trial in trials if trial.state in AGAIN]
    for trial in broken:
        print(f"{trial.method} lr={trial.lr:g} seed={trial.seed}: {trial.state} {trial.remark}".rstrip())
    return EXIT_FAILED if broken else 0


def _fresh(grid: Grid, trials: Sequence[Trial]) -> list[Cell]:
    """The fresh seeds, if any, at the chosen rate of each method that has one."""
    chosen = {method: choose(grid.design, trials, method)["lr"] for method in grid.design.methods}
    return [(method, lr, seed) for method, lr in chosen.items() if lr is not None for seed in grid.design.fresh]


def require_one_text(runs: Iterable[PlannedRun]) -> None:
    """Raises UserError if runs that have started have read other text, or used another tokenizer, than others.

    Their configurations do not show it: the files themselves may have changed since.
    """
    seen: dict[str, object] = {}
    for run in runs:
        record = read_record(run.dir)
        for name in FINGERPRINTS:
            value = record.get("identity", {}).get(name)
            if "saved" in record and value is not None and seen.setdefault(name, value) != value:
                raise UserError(
                    f"{run.dir}: {name} is not that of the other runs: their losses do not compare. "
                    "Move away those that were trained on what the text was before, or choose another run.root"
                )


def trial(cell: Cell, run: PlannedRun, status: Status) -> Trial:
    """The result of a run. A run that ended because its numbers were not finite has diverged, which is a result, too.

    Raises UserError if the run is complete without the numbers that a comparison needs.
    """
    if status.state != "complete":
        return Trial(*cell, status.state, str(run.dir), remark=status.reason)
    last = next((r for r in newest_first(run.dir / "metrics.jsonl") if "eval/loss" in r), {})
    if last.get("step") != run.cfg.train.steps:
        raise UserError(f"{run.dir}: complete, and metrics.jsonl has no evaluation of its last step. Move it away")
    losses = [last.get(f"eval/loss{half}") for half in ("_a", "_b", "")]
    if None in losses:
        raise UserError(f"{run.dir}: one validation sequence has no halves. Raise eval.tokens={run.cfg.eval.tokens}")
    if not all(map(math.isfinite, losses)):
        return Trial(*cell, "diverged", str(run.dir))
    return Trial(*cell, "finished", str(run.dir), *losses)


def bring(runs: dict[Cell, PlannedRun], given: argparse.Namespace, name: str, for_sbatch: list[str]) -> list[Trial]:
    """Train, or queue, the runs that have not ended and are not in the queue. Returns the trials of all runs."""
    jobs = queue() if given.slurm else {}
    trials = {cell: trial(cell, run, look(run, jobs)) for cell, run in runs.items()}
    due = [cell for cell, at in trials.items() if at.state in (*AGAIN, "not started")]
    chosen = [runs[cell] for cell in due]
    if not due:
        return list(trials.values())
    print(f"{len(due)} of {len(runs)} runs are to be trained", flush=True)
    if given.slurm:
        print(submit(list(runs.values()), chosen, name, for_sbatch, given.limit))
        print("The same command reports, and goes on")
        return [replace(at, state="pending", remark="") if cell in due else at for cell, at in trials.items()]
    train(chosen, given.jobs, lambda: require_one_text(runs.values()))
    return [trial(cell, run, look(run, {})) for cell, run in runs.items()]


def read(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of tune.py, and those for sbatch."""
    parser = Parser("tune.py", "pair=A,B lr=... seeds=... [key=value ...] [options] [--slurm -- options of sbatch]",
                    "Compare methods, each at its best learning rate of the same grid.", EPILOG)  # fmt: skip
    parser.add_argument("words", nargs="*", help="the grid, and overrides of train.py")
    parser.add_argument("--jobs", type=at_least_1, default=1, metavar="N", help="local runs at once (default: 1)")
    parser.add_argument("--slurm", action="store_true", help="queue the runs as a job array")
    parser.add_argument("--limit", type=at_least_1, metavar="N", help="tasks of the array that run at once")
    parser.add_argument("--output", type=Path, metavar="DIR", help="of the results (default: <run.root>/tune/<name>)")
    parser.add_argument("--dry-run", action="store_true", help="name the runs of the grid, and train none")
    own, for_sbatch = split(argv)
    given = parser.parse_intermixed_args(own)
    if given.slurm:
        refuse(parser, given, ("--jobs",), "is of this machine: --limit says how many run at once under --slurm")
    else:
        refuse(parser, given, ("--limit",), "is of a job array: add --slurm")
        if for_sbatch:
            parser.error("options of sbatch belong to --slurm")
    return given, for_sbatch
