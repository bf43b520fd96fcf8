"""Compare methods fairly, each at its best learning rate of the same grid: ``python scripts/tune.py --help``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from dlr_pretrain.analysis import tune
from dlr_pretrain.analysis.runs import TEXT
from dlr_pretrain.config.command_line import key_of
from dlr_pretrain.config.run_folder import read_record
from dlr_pretrain.launch.runs import PlannedRun, load_runs, read_table
from dlr_pretrain.launch.state import status_of
from dlr_pretrain.launch.submit import parser_of, read_options, start
from dlr_pretrain.util.errors import EXIT_FAILED, command
from dlr_pretrain.util.files import claim
from dlr_pretrain.util.secrets import redact

EPILOG = """examples:
  tune.py backbone=cola dlr=off,on train.lr=0.001,0.002,0.004 seed=41,42,43 scale=60m --output cola --local --limit 8
  tune.py backbone=cola dlr=off,on train.lr=0.001,0.003,0.01 seed=41 --confirm 42,43,44 scale=60m --output cola \\
      -- --gpus-per-node=8 --cpus-per-gpu=8 --mem=0

The table of runs is written as for submit.py. Runs that differ only in train.lr and seed are one method. All methods
need the same rates and seeds, and are compared with the first one. --confirm trains fresh seeds only at each method's
chosen rate, and reports them instead of the grid's. The same command continues where this one stopped."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0; EXIT_FAILED if runs have failed or stopped; or that of a UserError."""
    return command(lambda: run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Train or queue the runs that are due, compare the methods, and write the report."""
    parser = parser_of("tune.py", "Compare methods, each at its best learning rate of the same grid.", EPILOG)
    parser.add_argument("--confirm", type=seed_list, default=[], metavar="SEEDS", help="fresh seeds, such as 44,45,46")
    parser.add_argument("--output", type=Path, metavar="DIR", required=True, help="for the results")
    given = read_options(parser, argv)
    if not given.status:
        claim(given.output, "tune.py")
    runs = load_runs(read_table(given.what), machine=given.local)
    names = tune.method_names(runs)
    design = tune.grid(names, runs, given.confirm)

    def same_text() -> None:
        """Compare the text that saved runs have read, because files may have changed since they were configured."""
        records = {str(run.dir): read_record(run.dir) for run in runs}
        saved = {name: record["identity"] for name, record in records.items() if "saved" in record}
        tune.require_one_text(saved, (*TEXT, "data.order"))

    def train_or_queue(some: Sequence[PlannedRun]) -> list[dict]:
        """Train or queue those of ``some`` that are due; returns the trials of all of them."""
        jobs = start(some, given, same_text)
        same_text()
        return [tune.trial_of(names[tune.own_words(run)], run, status_of(run, jobs).state) for run in some]

    trials = train_or_queue(runs)
    best = {method: tune.choose(design, trials, method)["lr"] for method in names.values()}
    fresh = []
    for run, seed in product(runs, given.confirm):
        if (run.cfg.train.lr, run.cfg.seed) == (best[names[tune.own_words(run)]], design["seeds"][0]):
            words = (*(word for word in run.line.words if key_of(word) != "seed"), f"seed={seed}")
            fresh.append(replace(run.line, words=words))
    if fresh:
        confirming = load_runs(fresh, machine=given.local)
        runs += confirming
        trials += train_or_queue(confirming)
    found = tune.compare(design, trials)
    first, *others = names
    found["shared"] = shlex.join(word for word in first if all(word in other for other in others))
    found["command"] = redact(shlex.join(["python", "scripts/tune.py", *argv]))
    if not given.status:
        tune.write(found, given.output)
    print(tune.methods_table(found).markdown(), *(f"* {line}" for line in tune.remarks(found)), sep="\n")
    if not given.status:
        print(f"\nreport      {given.output / 'report.md'}")
    return EXIT_FAILED if any(t["state"] not in (*tune.ENDED, "running", "pending") for t in trials) else 0


def seed_list(text: str) -> list[int]:
    """Comma-separated seeds, as the type of an argument."""
    return [*map(int, text.split(","))]


if __name__ == "__main__":
    sys.exit(main())
