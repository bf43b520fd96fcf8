"""The command behind ``slurm/submit.py``: check a table of runs, show how they stand, and queue or train them."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dlr_pretrain.launch.local import train
from dlr_pretrain.launch.runs import Line, PlannedRun, combine, expand, load_runs, read_runs
from dlr_pretrain.launch.slurm import Queued, queue, resources, submit
from dlr_pretrain.launch.state import AGAIN, STATES, Status, look
from dlr_pretrain.util.command import at_least_1, command, refuse
from dlr_pretrain.util.errors import EXIT_FAILED, UserError

EPILOG = """examples:
  submit.py scale=60m backbone=lowrank,cola dlr=off,on seed=41,42 -- --gpus-per-node=8 --cpus-per-gpu=8 --mem=0
  submit.py slurm/table1.runs scale=60m seed=41,42,43 --limit 4 -- --gpus-per-node=8 --cpus-per-gpu=8 --mem=0
  submit.py slurm/table1.runs scale=60m seed=41,42,43 --status

Overrides with several values make a run of each combination. Beside a file they select its runs that have the same
value, and are added to those that have none."""


def main(argv: list[str]) -> int:
    """The exit code: 0; EXIT_FAILED if a local run has failed; or that of a UserError."""
    return command(lambda: act(argv))


def act(argv: list[str]) -> int | None:
    """Run the command. Nothing is queued or trained before every run has been checked."""
    given, for_sbatch = _read(argv)
    name, lines = _lines(given.what, given.config_dir)
    runs = load_runs(lines, None if given.status else resources(for_sbatch).ranks, machine=given.local)
    jobs = {} if given.local else _queue(must_answer=not (given.status or given.dry_run))
    stands = [look(run, jobs) for run in runs]
    print(states(runs, stands))
    if given.status:
        return None
    wanted = (*AGAIN, "not started") if given.resubmit or given.local else ("not started",)
    chosen = [run for run, status in zip(runs, stands, strict=True) if status.state in wanted]
    if not chosen:
        print("Nothing to submit.")
    elif not given.local:
        print(submit(runs, chosen, name, for_sbatch, given.limit, given.dry_run))
    elif not given.dry_run:
        train(chosen, given.limit or 1)
        return EXIT_FAILED if any(look(run, {}).state in AGAIN for run in chosen) else 0
    return None


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(f"{message}. Options of sbatch follow a lone --")


def _read(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of submit.py, and those for sbatch."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(
        prog="submit.py",
        usage="submit.py [options] [FILE.runs] [key=value,... ...] [-- options of sbatch]",
        epilog=EPILOG,
        description="Train a table of runs as one SLURM job array, or on this machine.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", nargs="+", help="a runs file, and overrides of train.py by Hydra's sweep grammar")
    parser.add_argument("--dry-run", action="store_true", help="show what would be submitted")
    parser.add_argument("--status", action="store_true", help="show how the runs stand")
    parser.add_argument("--resubmit", action="store_true", help="also those that failed, were cancelled, or stopped")
    parser.add_argument("--local", action="store_true", help="train on this machine all that have not ended")
    parser.add_argument("--limit", type=at_least_1, metavar="N", help="runs at once (default: SLURM's; 1 with --local)")
    parser.add_argument("--config-dir", metavar="DIR", help="as for train.py")
    given = parser.parse_intermixed_args(argv[:cut])
    if given.status:
        refuse(parser, given, ("--dry-run", "--resubmit", "--local", "--limit"), "has no place beside --status")
    if given.local:
        refuse(parser, given, ("--resubmit",), "is what --local does anyway")
    return given, argv[cut + 1 :]


def _lines(what: list[str], config_dir: str | None) -> tuple[str, list[Line]]:
    """A name for the table, and its lines."""
    files = [Path(word) for word in what if "=" not in word and not word.startswith("~")]
    words = [word for word in what if "=" in word or word.startswith("~")]
    if len(files) > 1:
        raise UserError(f"{files[1]}: a second runs file. Write overrides as key=value")
    matrix = expand([*(["--config-dir", config_dir] if config_dir else []), *words])
    return (files[0].stem, combine(read_runs(files[0]), matrix)) if files else ("matrix", matrix)


def _queue(must_answer: bool) -> dict[str, Queued]:
    try:
        return queue()
    except UserError as error:
        if must_answer:
            raise
        print(f"warning: {error}. What follows is from the run directories alone", file=sys.stderr)
        return {}


def states(runs: Sequence[PlannedRun], stands: Sequence[Status]) -> str:
    """A line for each run: its number, directory, steps and status. Then the number of runs in each state."""
    lines = [f"{run.number:>3}  {run.dir}: {at}" for run, at in zip(runs, stands, strict=True)]
    return "\n".join([*lines, summary(stands)])


def summary(stands: Sequence[Status]) -> str:
    """The number of runs in each state, such as "3 runs: 2 complete, 1 failed"."""
    counts = Counter(status.state for status in stands)
    parts = [f"{counts[state]} {state}" for state in STATES if counts[state]]
    return f"{len(stands)} run{'s' * (len(stands) > 1)}: {', '.join(parts)}"
