"""The command behind ``slurm/submit.py``: check a table of runs, show how they stand, and queue or train them."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dlr_pretrain.launch.local import train
from dlr_pretrain.launch.runs import combine, expand, load_runs, read_runs
from dlr_pretrain.launch.slurm import queue, submit
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
    files = [Path(word) for word in given.what if "=" not in word and not word.startswith("~")]
    if len(files) > 1:
        raise UserError(f"{files[1]}: a second runs file. Write overrides as key=value")
    lines = expand([word for word in given.what if Path(word) not in files])
    if files:
        lines = combine(read_runs(files[0]), lines)
    runs = load_runs(lines, 1 if given.local else None, machine=given.local)
    jobs = {}
    try:
        jobs = {} if given.local else queue()
    except UserError as error:
        if not (given.status or given.dry_run):
            raise
        print(f"warning: {error}. What follows is from the run directories alone", file=sys.stderr)
    stands = [look(run, jobs) for run in runs]
    for run, at in zip(runs, stands, strict=True):
        print(f"{run.number:>3}  {run.dir}: {at}")
    print(summary(stands))
    if given.status:
        return None
    wanted = (*AGAIN, "not started") if given.resubmit or given.local else ("not started",)
    chosen = [run for run, status in zip(runs, stands, strict=True) if status.state in wanted]
    if not chosen:
        print("Nothing to submit.")
    elif not given.local:
        name = files[0].stem if files else "matrix"
        print(submit(runs, chosen, name, for_sbatch, given.limit, given.dry_run))
    elif not given.dry_run:
        train(chosen, given.limit or 1)
        return EXIT_FAILED if any(look(run, {}).state in AGAIN for run in chosen) else 0
    return None


class Parser(argparse.ArgumentParser):
    def __init__(self, name: str, usage: str, description: str, epilog: str):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(name, f"{name} {usage}", description, epilog, formatter_class=form, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        super().error(f"{message}. Options of sbatch follow a lone --")


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The command's own words, and the options of sbatch, which follow a lone ``--``."""
    cut = argv.index("--") if "--" in argv else len(argv)
    return argv[:cut], argv[cut + 1 :]


def _read(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of submit.py, and those for sbatch."""
    parser = Parser("submit.py", "[options] [FILE.runs] [key=value,... ...] [-- options of sbatch]",
                    "Train a table of runs as one SLURM job array, or on this machine.", EPILOG)  # fmt: skip
    parser.add_argument("what", nargs="+", help="a runs file, and overrides of train.py by Hydra's sweep grammar")
    parser.add_argument("--dry-run", action="store_true", help="show what would be submitted")
    parser.add_argument("--status", action="store_true", help="show how the runs stand")
    parser.add_argument("--resubmit", action="store_true", help="also those that failed, were cancelled, or stopped")
    parser.add_argument("--local", action="store_true", help="train on this machine all that have not ended")
    parser.add_argument("--limit", type=at_least_1, metavar="N", help="runs at once (default: SLURM's; 1 with --local)")
    own, for_sbatch = split(argv)
    given = parser.parse_intermixed_args(own)
    if given.status:
        refuse(parser, given, ("--dry-run", "--resubmit", "--local", "--limit"), "has no place beside --status")
    if given.local:
        refuse(parser, given, ("--resubmit",), "is what --local does anyway")
    return given, for_sbatch


def summary(stands: Sequence[Status]) -> str:
    """The number of runs in each state, such as "3 runs: 2 complete, 1 failed"."""
    counts = Counter(status.state for status in stands)
    parts = [f"{counts[state]} {state}" for state in STATES if counts[state]]
    return f"{len(stands)} run{'s' * (len(stands) > 1)}: {', '.join(parts)}"
