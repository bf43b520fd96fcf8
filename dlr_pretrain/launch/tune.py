"""The command behind ``scripts/tune.py``: train the grid, choose, train the fresh seeds, compare, and write it down."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dlr_pretrain.analysis.tuning import ENDED, Trial, choose, compare
from dlr_pretrain.analysis.tuning_view import console, write
from dlr_pretrain.config import Config
from dlr_pretrain.launch.command import Parser, summary
from dlr_pretrain.launch.grid import Grid, budgets, read_grid, require_comparable
from dlr_pretrain.launch.local import train
from dlr_pretrain.launch.queue import Array, Queued, queue, resources, warn_without_gpus
from dlr_pretrain.launch.runs import PlannedRun, load_runs
from dlr_pretrain.launch.show import duration
from dlr_pretrain.launch.state import AGAIN, Status, look
from dlr_pretrain.launch.trained import require_comparable_records
from dlr_pretrain.util.command import at_least_1, command, refuse
from dlr_pretrain.util.errors import EXIT_FAILED, UserError
from dlr_pretrain.util.history import newest_first, perplexity

USAGE = "tune.py pair=A,B lr=... seeds=... [confirm=...] [key=value ...] [options] [--slurm -- options of sbatch]"
EPILOG = """examples:
  tune.py pair=cola,cola+dlr lr=0.001,0.002,0.004 seeds=41,42,43 scale=tiny data=sample logger=jsonl --jobs 2
  tune.py pair=cola,cola+dlr lr=0.001,0.003,0.01 seeds=41 confirm=42,43,44 scale=60m \\
      --slurm -- --gpus-per-node=8 --cpus-per-gpu=8 --mem=0

a method is backbone[+dlr][+option][:key=value...], such as cola+dlr, lowrank+init_offset, full+galore or
cola+dlr:dlr.alpha=0.5 (no value with a comma); the others are compared with the first. lr and seeds are the grid, of
the same size for every method; confirm are seeds that are trained only at each method's chosen rate, and reported
instead of the grid's. Everything else is an override of train.py, for all methods. The same command again continues
where this one stopped."""


def main(argv: list[str]) -> int:
    """The exit code: 0; EXIT_FAILED if runs have failed or stopped; or that of a UserError."""
    return command(lambda: tune(argv))


def tune(argv: list[str]) -> int:
    given, for_sbatch = read(argv)
    grid = read_grid(given.words, given.config_dir)
    how = Scheduler(grid.name, given.limit, for_sbatch) if given.slurm else Local(given.jobs)
    cells = grid.cells()
    lines = [grid.line(*cell) for cell in cells]
    runs = dict(zip(cells, load_runs(lines, how.ranks, machine=not (given.slurm or given.dry_run)), strict=True))
    one_each = {cell[0]: run for cell, run in runs.items()}
    require_comparable({method: run.cfg for method, run in one_each.items()})
    output = given.output or Path(next(iter(runs.values())).cfg.run.root, "tune", grid.name)
    if given.dry_run:
        print("\n".join(f"{run.line.origin}: {run.dir}" for run in runs.values()))
        print(f"{summary([look(run, {}) for run in runs.values()], '')}; results in {output}")
        return 0
    require_comparable_records(runs.values())
    trials = how.bring(runs)
    if grid.design.fresh and (fresh := _fresh(grid, trials)):
        confirming = load_runs([grid.line(*cell) for cell in fresh], how.ranks)
        runs |= zip(fresh, confirming, strict=True)
        trials += how.bring({cell: runs[cell] for cell in fresh})
    require_comparable_records(runs.values())
    found = compare(grid.design, trials) | {
        "words": {method: shlex.join(words) for method, words in grid.words.items()},
        "shared": shlex.join(grid.shared),
        "budgets": budgets(one_each),
        "ordered_by_seed": _ordered_by_seed([run.cfg for run in runs.values()]),
        "command": shlex.join(["scripts/tune.py", *argv]),
    }
    write(found, output)
    print(f"\n{console(found)}\n\nreport      {output / 'report.md'}")
    broken = [trial for trial in trials if trial.state not in ENDED]
    for trial in broken:
        print(f"{trial.method} lr={trial.lr:g} seed={trial.seed}: {trial.state} {trial.remark}".rstrip())
    return EXIT_FAILED if any(trial.state in AGAIN for trial in broken) else 0


def _ordered_by_seed(configs: Sequence[Config]) -> bool:
    """Whether each seed has its own order of the data; False for a single seed, which cannot show it."""
    return len({cfg.seed for cfg in configs}) > 1 and all(cfg.data.seed == cfg.seed for cfg in configs)


def _fresh(grid: Grid, trials: Sequence[Trial]) -> list[tuple[str, float, int]]:
    """The fresh seeds at the chosen rate of each method that has one."""
    chosen = {method: choose(grid.design, trials, method)["lr"] for method in grid.design.methods}
    return [(method, lr, seed) for method, lr in chosen.items() if lr is not None for seed in grid.design.fresh]


def trial(cell: tuple[str, float, int], run: PlannedRun, stands: Status) -> Trial:
    """The result of a run. A run that ended because its numbers were not finite has diverged, which is a result, too.

    Raises UserError if the run has finished without the numbers that a comparison needs.
    """
    last = next((r for r in newest_first(run.dir / "metrics.jsonl") if "eval/loss" in r), {})
    losses = [last.get(f"eval/loss{half}") for half in ("_a", "_b", "")]
    state = stands.state
    if state == "finished" and last.get("step") != run.cfg.train.steps:
        raise UserError(f"{run.dir}: finished, and metrics.jsonl has no evaluation of its last step. Move it away")
    elif state == "finished" and "eval/loss_a" not in last:
        raise UserError(f"{run.dir}: from an older version, which did not evaluate by halves. Move it away")
    elif state == "finished" and run.cfg.probe.enabled and not _probed(run.dir):
        raise UserError(f"{run.dir}: finished, and without probe=on, which comes too late. Choose another run.root")
    elif state == "finished" and any(loss is None or not math.isfinite(loss) for loss in losses):
        if losses[2] is not None:
            raise UserError(
                f"{run.dir}: one validation sequence has no halves. Raise eval.tokens={run.cfg.eval.tokens}"
            )
        state = "diverged"
    if state != "finished":
        losses = [None] * 3
    return Trial(*cell, state, str(run.dir), *losses, remark=stands.reason if state != "finished" else "")


def _probed(run_dir: Path) -> bool:
    return any(name.startswith("probe/") for record in newest_first(run_dir / "metrics.jsonl") for name in record)


def _trials(runs: dict[tuple[str, float, int], PlannedRun], jobs: dict[str, Queued]) -> dict[tuple, Trial]:
    return {cell: trial(cell, run, look(run, jobs)) for cell, run in runs.items()}


class Local:
    """Runs on this machine, ``at_once`` at a time."""

    ranks = 1

    def __init__(self, at_once: int):
        self.at_once = at_once

    def bring(self, runs: dict[tuple[str, float, int], PlannedRun]) -> list[Trial]:
        """Train the runs that have not ended. Returns the trials of all runs."""
        before = _trials(runs, {})
        due = {cell: run for cell, run in runs.items() if before[cell].state not in ENDED}
        cells, total, done = {run.dir: cell for cell, run in due.items()}, len(runs), len(runs) - len(due)
        if done:
            print(f"{done} of {total} runs have ended before")

        def ended(run: PlannedRun, seconds: float) -> None:
            nonlocal done
            done += 1
            stands = look(run, {})
            at = trial(cells[run.dir], run, stands)
            what = f"perplexity {perplexity(at.loss):.2f}" if at.loss is not None else at.remark
            print(f"{done}/{total}  {run.line.origin}: {at.state}, {what} ({duration(seconds)})", flush=True)

        train(due.values(), self.at_once, ended)
        return list(_trials(runs, {}).values())


class Scheduler:
    """Runs as a SLURM array."""

    def __init__(self, name: str, limit: int | None, words: list[str]):
        self.name, self.limit, self.words = name, limit, words
        self.asked = resources(words)
        self.ranks = self.asked.ranks

    def bring(self, runs: dict[tuple[str, float, int], PlannedRun]) -> list[Trial]:
        """Queue the runs that have not ended and are not in the queue. Returns the trials of all runs."""
        found = _trials(runs, queue())
        due = {cell: run for cell, run in runs.items() if found[cell].state in (*AGAIN, "not started")}
        if due:
            for cell in due:
                if found[cell].state == "failed":
                    print(f"{runs[cell].line.origin}: submitted again, after: {found[cell].remark}")
            warn_without_gpus(self.asked, list(due.values()))
            job = Array(list(runs.values()), list(due.values()), self.name, self.limit, self.words).submit()
            print(f"Submitted {len(due)} of {len(runs)} as job {job}. The same command reports, and goes on")
        return [replace(t, state="pending", remark="") if cell in due else t for cell, t in found.items()]


def read(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of tune.py, and those for sbatch."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(
        prog="tune.py",
        usage=USAGE,
        epilog=EPILOG,
        description="Compare methods, each at its best learning rate of the same grid.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", help="the grid, and overrides of train.py")
    parser.add_argument(
        "--jobs",
        type=at_least_1,
        default=1,
        metavar="N",
        help="runs at once, each a process on a GPU of its own (default: 1)",
    )
    parser.add_argument(
        "--slurm", action="store_true", help="queue the runs as a job array, from the repository's root"
    )
    parser.add_argument("--limit", type=at_least_1, metavar="N", help="tasks of the array that run at once")
    parser.add_argument("--output", type=Path, metavar="DIR", help="of the results (default: <run.root>/tune/<name>)")
    parser.add_argument("--dry-run", action="store_true", help="name the runs of the grid, and train none")
    parser.add_argument("--config-dir", metavar="DIR", help="as for train.py")
    given = parser.parse_intermixed_args(argv[:cut])
    if given.slurm:
        refuse(parser, given, ("--jobs",), "is of this machine: --limit says how many run at once under --slurm")
    else:
        refuse(parser, given, ("--limit",), "is of a job array: add --slurm")
        if argv[cut:]:
            parser.error("options of sbatch belong to --slurm")
    return given, argv[cut + 1 :]
