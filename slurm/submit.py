"""Queue a table of runs as one job array, and show its state: ``python slurm/submit.py --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dlr_pretrain.launch.runs import load_runs, read_table
from dlr_pretrain.launch.state import status_of
from dlr_pretrain.launch.submit import parser_of, read_options, start
from dlr_pretrain.util.errors import EXIT_FAILED, command

EPILOG = """examples:
  submit.py scale=60m backbone=lowrank,cola dlr=off,on seed=41,42 -- --gpus-per-node=8 --cpus-per-gpu=8 --mem=0
  submit.py my.runs scale=60m seed=41,42,43 --limit 4 -- --gpus-per-node=8 --cpus-per-gpu=8 --mem=0
  submit.py my.runs scale=60m seed=41,42,43 --status

Overrides with several values make one run per combination. With a file, an override selects the runs that have the
same value, and is added to the runs that have none. Runs that are complete, diverged, running or pending are left out.
Options after -- are those of sbatch."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0; EXIT_FAILED if a local run has failed; or that of a UserError."""
    parser = parser_of("submit.py", "Train a table of runs as one SLURM job array, or on this machine.", EPILOG)
    return command(lambda: act(read_options(parser, sys.argv[1:] if argv is None else argv)))


def act(given: argparse.Namespace) -> int:
    """Check every run, then queue or train those that are due."""
    runs = load_runs(read_table(given.what), machine=given.local)
    start(runs, given)
    trained = runs if given.local and not given.status else []
    return EXIT_FAILED if any(status_of(run, {}).state not in ("complete", "diverged") for run in trained) else 0


if __name__ == "__main__":
    sys.exit(main())
