"""The command behind ``slurm/submit.py``: expand, check, show and submit a table of runs, or show their states."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dlr_pretrain.config.arguments import key_of
from dlr_pretrain.config.tree import GROUPS
from dlr_pretrain.launch.queue import Array, Queued, Resources, queue, resources, warn_without_gpus
from dlr_pretrain.launch.runs import Line, PlannedRun, combine, expand, load_runs, read_runs
from dlr_pretrain.launch.show import duration, number, table
from dlr_pretrain.launch.state import AGAIN, STATES, Status, Throughputs, look
from dlr_pretrain.util.command import at_least_1, command, refuse
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.text import amount

USAGE = "submit.py [options] [FILE.runs] [key=value,... ...] [-- options of sbatch]"
EPILOG = """examples:
  submit.py scale=60m backbone=lowrank,cola dlr=off,on seed=41,42 -- --gpus-per-node=8 --cpus-per-gpu=8 --mem=0
  submit.py slurm/table1.runs seed=41,42,43,44,45 --limit 4 -- --gpus-per-node=8 --cpus-per-gpu=8 --mem=0
  submit.py slurm/table1.runs seed=41,42,43,44,45 --status

Overrides with several values make a run of each combination; beside a file they are added to each of its runs."""


def main(argv: list[str]) -> int:
    """The exit code: 0, or that of a UserError."""
    return command(lambda: submit(argv))


def submit(argv: list[str]) -> None:
    """Run the command. Nothing is queued before every run has been checked."""
    given, for_sbatch = _read(argv)
    asked = resources(for_sbatch)
    name, lines = _lines(given.what, given.config_dir)
    runs = load_runs(lines, None if given.status else asked.ranks)
    if given.write:
        return _write(Path(given.write), lines, argv)
    jobs = _queue(must_answer=not (given.status or given.dry_run))
    stands = [look(run, jobs) for run in runs]
    width = shutil.get_terminal_size((80, 24)).columns
    if given.status:
        return print(status_table(runs, stands, width))
    wanted = AGAIN if given.resubmit else ("not started",)
    chosen = [run for run, status in zip(runs, stands, strict=True) if status.state in wanted]
    measured = Throughputs(runs) if given.time else None
    print(plan_table(runs, stands, asked, measured, width))
    print(summary(stands, "--resubmit" if not given.resubmit else ""))
    warn_without_gpus(asked, chosen)
    if not chosen:
        return print("Nothing to submit.")
    array = Array(runs, chosen, name, given.limit, for_sbatch)
    if given.dry_run:
        return print(f"Would submit {len(chosen)}: {shlex.join(array.command)}")
    job = array.submit()
    print(f"Submitted {len(chosen)} as job {job}: {shlex.join(array.command)}")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(f"{message}. Options of sbatch follow a lone --")


def _read(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of submit.py, and those for sbatch."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(
        prog="submit.py",
        usage=USAGE,
        epilog=EPILOG,
        description="Queue a table of runs as one job array.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", nargs="*", help="a runs file, and overrides of train.py by Hydra's sweep grammar")
    parser.add_argument("--dry-run", action="store_true", help="show what would be submitted")
    parser.add_argument("--status", action="store_true", help="show how the runs stand")
    parser.add_argument("--resubmit", action="store_true", help="those that failed, were cancelled, or stopped")
    parser.add_argument("--time", action="store_true", help="estimate, where such a run has been timed in run.root")
    parser.add_argument("--limit", type=at_least_1, metavar="N", help="tasks of the array that run at once")
    parser.add_argument("--write", metavar="FILE", help="write the runs to a new runs file, and submit nothing")
    parser.add_argument("--config-dir", metavar="DIR", help="as for train.py")
    given = parser.parse_intermixed_args(argv[:cut])
    if not given.what:
        parser.error("name a runs file, or overrides such as scale=60m,130m")
    if given.write:
        refuse(
            parser, given, ("--status", "--dry-run", "--resubmit", "--time", "--limit"), "has no place beside --write"
        )
    elif given.status:
        refuse(parser, given, ("--resubmit", "--time"), "has no place beside --status, which submits nothing")
    return given, argv[cut + 1 :]


def _lines(what: list[str], config_dir: str | None) -> tuple[str, list[Line]]:
    """A name for the table, and its lines."""
    files = [Path(word) for word in what if "=" not in word and not word.startswith("~")]
    words = [word for word in what if "=" in word or word.startswith("~")]
    if len(files) > 1:
        raise UserError(f"{files[1]}: a second runs file. Write overrides as key=value")
    matrix = expand([*(["--config-dir", config_dir] if config_dir else []), *words])
    return (files[0].stem, combine(read_runs(files[0]), matrix)) if files else ("matrix", matrix)


def _write(path: Path, lines: list[Line], argv: list[str]) -> None:
    if path.exists():
        raise UserError(f"{path} exists already. Remove it, or choose another name")
    path.write_text("".join([f"# submit.py {shlex.join(argv)}\n", *(f"{line}\n" for line in lines)]), encoding="utf-8")
    print(f"{path}: {len(lines)} runs")


def _queue(must_answer: bool) -> dict[str, Queued]:
    try:
        return queue()
    except UserError as error:
        if must_answer:
            raise
        print(f"warning: {error}. What follows is from the run directories alone", file=sys.stderr)
        return {}


# ----------------------------------------------------------------------------------------------------
# Showing


def plan_table(
    runs: Sequence[PlannedRun], stands: Sequence[Status], asked: Resources, measured: Throughputs | None, width: int
) -> str:
    """The table of what the runs will take."""
    header = ["#", "run directory", ">steps", ">tokens", ">GPUs" if asked.gpus else ">ranks", "state", ">time"]
    rows, machines = [], set()
    for run, status in zip(runs, stands, strict=True):
        steps = run.cfg.train.steps
        row = [str(run.number), str(run.dir), f"{steps:,}", amount(steps * run.positions), str(asked), status.state, ""]
        if measured and status.state != "finished" and (found := measured.estimate(run, asked.ranks, status.step)):
            row[-1] = duration(found[0])
            machines.add(found[1])
        rows.append(row)
    timed = f"\ntime: for what is left, from runs on {', '.join(sorted(machines))}" if machines else ""
    return table(header, rows, width, _apart(runs)) + timed


def _apart(runs: Sequence[PlannedRun]) -> list[str]:
    """Each run's overrides that not all runs share, except those that the name of its directory shows."""
    shared = set.intersection(*(set(run.line.words) for run in runs))
    named = (*GROUPS, "seed")
    own = ([w for w in run.line.words if w not in shared and key_of(w) not in named] for run in runs)
    return [shlex.join(words) for words in own]


def status_table(runs: Sequence[PlannedRun], stands: Sequence[Status], width: int) -> str:
    """The table of the runs' states. A line under a run has its own overrides and the reason for its state, if any."""
    header = ["#", "run", "state", ">step", ">loss", ">ppl", ">ETA"]
    one_root = len({run.dir.parent for run in runs}) == 1
    rows = [
        [
            str(run.number),
            run.dir.name if one_root else str(run.dir),
            status.state,
            f"{status.step:,}/{run.cfg.train.steps:,}",
            number(status.loss, 3),
            number(status.perplexity, 2),
            duration(status.seconds_left),
        ]
        for run, status in zip(runs, stands, strict=True)
    ]
    notes = ["; ".join(filter(None, of)) for of in zip(_apart(runs), (s.reason for s in stands), strict=True)]
    return table(header, rows, width, notes) + "\n" + summary(stands, "--resubmit")


def summary(stands: Sequence[Status], fix: str) -> str:
    """The number of runs in each state, such as "3 runs: 2 finished, 1 failed (--resubmit takes it)".

    ``fix`` is the option in brackets; "" leaves them out.
    """
    counts = Counter(status.state for status in stands)
    parts = [f"{counts[state]} {state}" for state in STATES if counts[state]]
    again = sum(counts[state] for state in AGAIN)
    hint = f" ({fix} takes {'it' if again == 1 else f'those {again}'})" if again and fix else ""
    return f"{len(stands)} run{'s' * (len(stands) > 1)}: {', '.join(parts)}{hint}"
