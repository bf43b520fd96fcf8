"""Train a table of runs, show its state, and write its report: ``python slurm/submit.py --help``."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dlr_pretrain.config.arguments import OVERRIDES, Parser, at_least_1, integers
from dlr_pretrain.config.command_line import key_of
from dlr_pretrain.launch.runs import PlannedRun, load_runs, read_table
from dlr_pretrain.launch.status import status_of
from dlr_pretrain.launch.submit import start
from dlr_pretrain.util.errors import EXIT_FAILED, UserError, command, say
from dlr_pretrain.util.files import claim

EPILOG = """examples:
  submit.py scale=60m backbone=lowrank,cola dlr=off,on seed=41,42 -- --gpus-per-node=8 --cpus-per-gpu=8 --mem=0
  submit.py my.runs scale=60m seed=41,42,43 --limit 4 -- --gpus-per-node=8 --cpus-per-gpu=8 --mem=0
  submit.py my.runs scale=60m seed=41,42,43 --status
  submit.py backbone=cola dlr=off,on train.lr=0.001,0.002,0.004 seed=41,42,43 scale=60m --local --report cola

Overrides with several values make one run per combination. With a file, an override selects the runs that have the
same value, and is added to the runs that have none. Runs that are complete, diverged, running or pending are left out.
--report compares methods at their best learning rates, once runs have ended: repeat the command. Options after -- are
those of sbatch."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0; EXIT_FAILED if a local run has failed; or that of a UserError."""
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(
        "submit.py", "%(prog)s [options] [FILE.runs] [key=value,... ...] [-- options of sbatch]",
        "Train a table of runs as one SLURM job array, or on this machine.", EPILOG, keys=OVERRIDES,
    )  # fmt: skip
    add = parser.add_argument
    add("what", nargs="+", help="a list of runs (a file), and overrides of train.py in Hydra's sweep grammar")
    add("--config-dir", metavar="DIR", help="a folder of your own options, as for train.py")
    add("--status", "--dry-run", action="store_true", help="show the states of the runs, and which are due")
    add("--local", action="store_true", help="train on this machine")
    add("--limit", type=at_least_1, metavar="N", help="runs at once (default: SLURM's; 1 if local)")
    add("--report", type=Path, metavar="DIR", help="write the report of the table's runs, as report.py does")
    confirm = "then train fresh seeds (such as 44,45,46) at each method's chosen rate, and report these"
    add("--confirm", type=integers, metavar="SEEDS", help=f"with --report: {confirm}")
    about = "with --report: the validation set that decides, one of eval.sets or a source of a mixture"
    add("--set", dest="of_set", default="", metavar="NAME", help=about)
    cut = argv.index("--") if "--" in argv else len(argv)
    given = parser.parse_intermixed_args(argv[:cut])
    given.for_sbatch = argv[cut + 1 :]
    if given.local and given.for_sbatch:
        parser.error("--local has no use for options of sbatch")
    if given.confirm and not given.report:
        parser.error("--confirm needs --report, which chooses the rates")
    if given.of_set and not given.report:
        parser.error("--set is for --report")
    if given.config_dir:
        given.what.append(f"--config-dir={given.config_dir}")
    return command(lambda: act(given, shlex.join(["python", "slurm/submit.py", *argv])))


def act(given: argparse.Namespace, words: str) -> int:
    """Check every run, then queue or train those that are due, and write the report."""
    if given.report and not given.status:
        claim(given.report, "report.py")
    runs = load_runs(read_table(given.what), machine=given.local)
    if both := {str(run.cfg.seed) for run in runs} & {*map(str, given.confirm or ())}:
        raise UserError(f"--confirm: the rates are chosen with seed {min(both)}. Give seeds that are not in seed=")
    start(runs, given)
    if given.report and not given.status:
        lines = report(runs, given, words)
        if fresh := confirming(runs, given) if given.confirm else []:
            start(fresh, given)
            runs += fresh
            lines = report(runs, given, words)
        for line in lines:
            say(line, sys.stdout)
    trained = runs if given.local and not given.status else []
    return EXIT_FAILED if any(status_of(run, {}).state not in ("complete", "diverged") for run in trained) else 0


def report(runs: Sequence[PlannedRun], given: argparse.Namespace, words: str) -> list[str]:
    """Write the report of the runs that have begun; returns lines for a terminal."""
    from dlr_pretrain.analysis.report import write_reports  # torch, after the table is checked

    begun = [run.dir for run in runs if (run.dir / "metrics.jsonl").exists()]
    if not begun:
        return ["no run has begun: repeat the command for the report"]
    return write_reports(begun, given.report, words, given.of_set)


def confirming(runs: Sequence[PlannedRun], given: argparse.Namespace) -> list[PlannedRun]:
    """The runs of ``--confirm`` at each chosen rate, as far as rates are chosen yet."""
    from dlr_pretrain.analysis.report import chosen_runs

    chosen = chosen_runs(given.report)
    lines = [
        replace(run.line, words=(*(word for word in run.line.words if key_of(word) != "seed"), f"seed={seed}"))
        for run in runs if str(run.dir) in chosen for seed in given.confirm
    ]  # fmt: skip
    return load_runs(lines, machine=given.local) if lines else []


if __name__ == "__main__":
    sys.exit(main())
