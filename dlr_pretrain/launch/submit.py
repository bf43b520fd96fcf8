"""Show the states of a table of runs, and queue or train those that are due."""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from dlr_pretrain.config.run_folder import JOB, require_run_folder
from dlr_pretrain.launch.local import train
from dlr_pretrain.launch.runs import PlannedRun
from dlr_pretrain.launch.state import DUE, STATES, Status, ask, last_job, queue, shipped, status_of
from dlr_pretrain.util.errors import Parser, UserError, at_least_1, write_to_stderr
from dlr_pretrain.util.files import claim, write_durably
from dlr_pretrain.util.secrets import redact
from dlr_pretrain.util.text import plural


def parser_of(name: str, about: str, epilog: str) -> argparse.ArgumentParser:
    """The parser of a command that trains a table of runs."""
    parser = Parser(
        name, f"{name} [options] [FILE.runs] [key=value,... ...] [-- options of sbatch]", about, epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("what", nargs="+", help="a runs file, and overrides of train.py in Hydra's sweep grammar")
    add("--config-dir", metavar="DIR", help="a folder of your own options, as for train.py")
    add("--status", "--dry-run", action="store_true", help="show the states of the runs, and which are due")
    add("--local", action="store_true", help="train on this machine")
    add("--limit", type=at_least_1, metavar="N", help="runs at once (default: SLURM's; 1 if local)")
    return parser


def read_options(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The options of a command. Those of sbatch, which follow a lone ``--``, are ``for_sbatch``."""
    cut = argv.index("--") if "--" in argv else len(argv)
    given = parser.parse_intermixed_args(argv[:cut])
    given.for_sbatch = argv[cut + 1 :]
    if given.local and given.for_sbatch:
        parser.error("--local has no use for options of sbatch")
    if given.config_dir:
        given.what.append(f"--config-dir={given.config_dir}")
    return given


def start(
    runs: Sequence[PlannedRun], given: argparse.Namespace, after_each: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """Show the states of ``runs``, and queue or train those that are due; returns SLURM's state of each job.

    ``after_each`` is called after each run that has ended on this machine.
    """
    jobs: dict[str, str] = {}
    try:
        jobs = {} if given.local else queue()
    except UserError as error:
        if not given.status:
            raise
        write_to_stderr(f"note: queued jobs are not counted: {error}")
    stands = [status_of(run, jobs) for run in runs]
    for run, at in zip(runs, stands, strict=True):
        own = [word for word in run.line.words if not all(word in other.line.words for other in runs)]
        print(f"{run.number:>3}  {run.dir}: {at}" + (f"  ({shlex.join(own)})" if own else ""))
    print(f"{plural(len(runs), 'run')}: {counted(stands)}", flush=True)
    due = [run for run, at in zip(runs, stands, strict=True) if at.state in DUE]
    for run in due if not given.status else ():
        require_run_folder(run.dir, run.cfg.data.cache)
    if due and given.local and not given.status:
        train(due, given.limit or 1, after_each)
    elif due and not given.local:
        print(submit(runs, due, given))
        jobs |= {last_job(run.dir).get("job", ""): "PENDING" for run in due if not given.status}
    return jobs


def counted(stands: Sequence[Status]) -> str:
    """How many runs are in each state: 3 complete, 1 running."""
    counts = Counter(at.state for at in stands)
    return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])


def submit(runs: Sequence[PlannedRun], due: Sequence[PlannedRun], given: argparse.Namespace) -> str:
    """Queue an array job for those of ``runs`` that are ``due``, and note its tasks in the run directories.

    Returns a line for the user.
    """
    name = next((Path(word).stem for word in given.what if "=" not in word), "matrix")
    text = "".join(f"{run.line}\n" for run in runs)
    # named by its content, because another table must not overwrite the file that queued tasks will read
    folder = Path(runs[0].cfg.run.root, "arrays", f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}")
    tasks = ranges([run.number for run in due]) + (f"%{given.limit}" if given.limit else "")
    logs = str(folder).replace("%", "%%") + "/%A_%a.log"
    own = [f"--array={tasks}", f"--job-name={name}", f"--output={logs}"]  # after the user's, which they override
    files = [f"{shipped('slurm')}/array.sbatch", f"{folder}/runs.txt"]
    command = ["sbatch", "--parsable", *given.for_sbatch, *own, *files]
    if given.status:
        return f"Would submit {len(due)} of {len(runs)}: {redact(shlex.join(command))}"
    claim(folder, "submit.py")
    (folder / "runs.txt").write_text(text, encoding="utf-8")
    for run in due:  # fail before queueing: a job without a note would be queued again
        run.dir.mkdir(parents=True, exist_ok=True)
        (run.dir / JOB).touch()
    job = ask(*command).strip().split(";")[0]
    for run in due:
        task = f"{job}_{run.number}"
        noted = {"time": time.time(), "job": task, "log": str(folder.absolute() / f"{task}.log")}
        write_durably(run.dir / JOB, json.dumps(noted))
    return f"Submitted {len(due)} of {len(runs)} as job {job}: {redact(shlex.join(command))}"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in the notation of SLURM: 1-4,7."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
