"""Show the states of a table of runs, and queue or train those that are due."""

import argparse
import hashlib
import json
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dlr_pretrain.config.run_folder import JOB, require_run_folder
from dlr_pretrain.launch.local import train_here
from dlr_pretrain.launch.runs import PlannedRun
from dlr_pretrain.launch.status import DUE, STATES, Status, ask, queue, shipped, status_of
from dlr_pretrain.util.errors import UserError, write_to_stderr
from dlr_pretrain.util.files import claim, write_durably
from dlr_pretrain.util.secrets import redact
from dlr_pretrain.util.text import plural


def start(runs: Sequence[PlannedRun], given: argparse.Namespace) -> None:
    """Show the states of ``runs``, and queue or train those that are due.

    ``given`` has ``local``, ``status`` (whether to show only), ``limit``, ``for_sbatch``, and ``what``, for the name.
    """
    jobs: dict[str, str] = {}
    try:
        jobs = {} if given.local else queue()
    except UserError as error:
        if not given.status:
            raise
        write_to_stderr(f"note: queued jobs are not counted: {error}")
    statuses = [status_of(run, jobs) for run in runs]
    for run, status in zip(runs, statuses, strict=True):
        apart = [word for word in run.line.words if not all(word in other.line.words for other in runs)]
        print(f"{run.number:>3}  {run.dir}: {status}" + (f"  ({shlex.join(apart)})" if apart else ""))
    print(f"{plural(len(runs), 'run')}: {counted(statuses)}", flush=True)
    due = [run for run, status in zip(runs, statuses, strict=True) if status.state in DUE]
    for run in due if not given.status else ():
        require_run_folder(run.dir, run.cfg.data.cache)
    if due and given.local and not given.status:
        train_here(due, given.limit or 1)
        if not getattr(given, "report", True):
            print("compare     the same command with --report DIR")
    elif due and not given.local:
        print(submit(runs, due, given))


def counted(statuses: Sequence[Status]) -> str:
    """How many runs are in each state: 3 complete, 1 running."""
    counts = Counter(status.state for status in statuses)
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
    ours = [f"--array={tasks}", f"--job-name={name}", f"--output={logs}"]  # after the user's, which they override
    files = [f"{shipped('slurm')}/array.sbatch", f"{folder}/runs.txt"]
    command = ["sbatch", "--parsable", *given.for_sbatch, *ours, *files]
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
