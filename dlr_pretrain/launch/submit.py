"""The command behind ``slurm/submit.py``: check a table of runs, show how they stand, and queue or train them."""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from dlr_pretrain.launch.local import train
from dlr_pretrain.launch.runs import PlannedRun, load_runs, read_table
from dlr_pretrain.launch.state import DUE, JOB, STATES, ask, last_job, queue, status_of
from dlr_pretrain.util.errors import EXIT_FAILED, at_least_1, command
from dlr_pretrain.util.files import write_durably
from dlr_pretrain.util.text import plural

EPILOG = """examples:
  submit.py scale=60m backbone=lowrank,cola dlr=off,on seed=41,42 -- --gpus-per-node=8 --cpus-per-gpu=8 --mem=0
  submit.py slurm/table1.runs scale=60m seed=41,42,43 --limit 4 -- --gpus-per-node=8 --cpus-per-gpu=8 --mem=0
  submit.py slurm/table1.runs scale=60m seed=41,42,43 --status

Overrides with several values make a run of each combination. Beside a file they select its runs that have the same
value, and are added to those that have none. Runs that are complete, have diverged, run or wait are left out. Options
after -- are those of sbatch."""


def main(argv: Sequence[str]) -> int:
    """The exit code: 0; EXIT_FAILED if a local run has failed; or that of a UserError."""
    about = "Train a table of runs as one SLURM job array, or on this machine."
    return command(lambda: act(*read(parser_of("submit.py", about, EPILOG), argv)))


def parser_of(name: str, about: str, epilog: str) -> argparse.ArgumentParser:
    """The parser of a command that trains a table of runs."""
    parser = argparse.ArgumentParser(
        name, f"{name} [options] [FILE.runs] [key=value,... ...] [-- options of sbatch]", about, epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("what", nargs="+", help="a runs file, and overrides of train.py by Hydra's sweep grammar")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder of your own options, as of train.py")
    parser.add_argument("--status", "--dry-run", action="store_true", help="show how the runs stand and what is due")
    parser.add_argument("--local", action="store_true", help="train on this machine")
    parser.add_argument("--limit", type=at_least_1, metavar="N", help="runs at once (default: SLURM's; 1 if local)")
    return parser


def read(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of a command, and those for sbatch, which follow a lone ``--``."""
    cut = argv.index("--") if "--" in argv else len(argv)
    given, for_sbatch = parser.parse_intermixed_args(argv[:cut]), list(argv[cut + 1 :])
    if given.local and for_sbatch:
        parser.error("--local has no use for options of sbatch")
    if given.config_dir:
        given.what.append(f"--config-dir={given.config_dir}")
    return given, for_sbatch


def act(given: argparse.Namespace, for_sbatch: list[str]) -> int:
    """Nothing is queued or trained before every run has been checked."""
    runs = load_runs(read_table(given.what), machine=given.local)
    start(runs, given, for_sbatch)
    trained = runs if given.local and not given.status else []
    return EXIT_FAILED if any(status_of(run, {}).state not in ("complete", "diverged") for run in trained) else 0


def start(
    runs: Sequence[PlannedRun], given: argparse.Namespace, for_sbatch: list[str],
    after_each: Callable[[], None] = lambda: None,
) -> dict[str, str]:  # fmt: skip
    """Show how ``runs`` stand, and queue or train those that are due; returns SLURM's state of each job.

    ``after_each`` is called whenever a run has ended on this machine.
    """
    jobs = {} if given.local or (given.status and shutil.which("squeue") is None) else queue()
    stands = [status_of(run, jobs) for run in runs]
    for run, at in zip(runs, stands, strict=True):
        own = [word for word in run.line.words if not all(word in other.line.words for other in runs)]
        print(f"{run.number:>3}  {run.dir}: {at}" + (f"  ({shlex.join(own)})" if own else ""))
    counts = Counter(at.state for at in stands)
    said = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    print(f"{plural(len(runs), 'run')}: {said}", flush=True)
    due = [run for run, at in zip(runs, stands, strict=True) if at.state in DUE]
    if due and given.local and not given.status:
        train(due, given.limit or 1, after_each)
    elif due and not given.local:
        print(submit(runs, due, given, for_sbatch))
        jobs |= {last_job(run.dir).get("job", ""): "PENDING" for run in due if not given.status}
    return jobs


def submit(
    runs: Sequence[PlannedRun], due: Sequence[PlannedRun], given: argparse.Namespace, options: Sequence[str]
) -> str:
    """Queue an array job that trains those of ``runs`` that are ``due``, and note its tasks in the run directories.

    Returns a line about it.
    """
    name = next((Path(word).stem for word in given.what if "=" not in word), "matrix")
    text = "".join(f"{run.line}\n" for run in runs)
    # named by its content: another table must not overwrite the file that queued tasks will read
    folder = Path(runs[0].cfg.run.root, "arrays", f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}")
    tasks = ",".join(str(run.number) for run in due) + (f"%{given.limit}" if given.limit else "")
    own = [f"--array={tasks}", f"--job-name={name}", f"--output={folder}/%A_%a.log"]  # last, so that they hold
    command = ["sbatch", "--parsable", *options, *own, "slurm/array.sbatch", f"{folder}/runs.txt"]
    if given.status:
        return f"Would submit {len(due)} of {len(runs)}: {shlex.join(command)}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "runs.txt").write_text(text, encoding="utf-8")
    for run in due:  # fail before queueing: a job that is not noted would be queued again
        run.dir.mkdir(parents=True, exist_ok=True)
        (run.dir / JOB).touch()
    job = ask(*command).strip().split(";")[0]
    for run in due:
        task = f"{job}_{run.number}"
        noted = {"time": time.time(), "job": task, "log": str(folder.absolute() / f"{task}.log")}
        write_durably(run.dir / JOB, json.dumps(noted))
    return f"Submitted {len(due)} of {len(runs)} as job {job}: {shlex.join(command)}"
