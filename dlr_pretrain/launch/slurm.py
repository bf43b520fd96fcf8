"""SLURM on a login node: the queue, and the submission of an array.

Each start of a run is noted in ``<run>/jobs.jsonl`` as {"time", "job", "log"}, with ``job`` the id of the array task,
such as ``12_3``. Local runs are noted there, too, and again at their end with "ended", the time, and "code".
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dlr_pretrain.config.secrets import named_in
from dlr_pretrain.launch.runs import PlannedRun
from dlr_pretrain.util.errors import UserError

JOBS = "jobs.jsonl"


@dataclass(frozen=True)
class Queued:
    """A job in squeue: SLURM's name of its state, and the reason why it waits."""

    state: str
    reason: str


def queue() -> dict[str, Queued]:
    """This user's jobs by id, each array task separately. Raises UserError if no scheduler answers."""
    text = _ask("squeue", "--me", "--array", "--noheader", "--format=%i|%T|%r")
    return {job: Queued(*rest) for job, *rest in (line.strip().split("|", 2) for line in text.splitlines())}


def ending(job: str) -> str:
    """How a job that has left the queue ended, such as TIMEOUT; empty if the cluster keeps no accounts."""
    with suppress(UserError):
        states = _ask("sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={job}", "--format=State").split()
        return states[0] if states else ""
    return ""


def refuse_secrets(options: Sequence[str]) -> None:
    if name := next(filter(None, map(named_in, options)), None):
        rule = f"{name} is a password or a token, and the command line is recorded and shown"
        raise UserError(f"of the options of sbatch: {rule}. Export it where you submit: sbatch passes it on")


def submit(
    runs: Sequence[PlannedRun], chosen: Sequence[PlannedRun], name: str, options: Sequence[str],
    limit: int | None = None, dry_run: bool = False,
) -> str:  # fmt: skip
    """Queue an array job that trains the ``chosen`` ones of ``runs``, and note its tasks in the run directories.

    ``limit`` is the number of tasks that run at once. Returns a line about it. Raises UserError for ``options`` with a
    password or a token.
    """
    refuse_secrets(options)
    text = "".join(f"{run.line}\n" for run in runs)
    # named by its content: another table must not overwrite the file that queued tasks will read
    folder = Path(runs[0].cfg.run.root, "arrays", f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}")
    tasks = ",".join(str(run.number) for run in chosen) + (f"%{limit}" if limit else "")
    own = [f"--array={tasks}", f"--job-name={name}", f"--output={folder}/%A_%a.log"]  # last, so that they hold
    command = ["sbatch", "--parsable", *options, *own, "slurm/array.sbatch", f"{folder}/runs.txt"]
    if not any("gpu" in option for option in options) and any(run.cfg.device != "cpu" for run in chosen):
        print("warning: no GPUs are asked for. Add --gpus-per-node=N behind --, or device=cpu to the overrides")
    if dry_run:
        return f"Would submit {len(chosen)} of {len(runs)}: {shlex.join(command)}"
    if not (Path("train.py").exists() and Path("slurm/array.sbatch").exists()):
        raise UserError(f"{Path.cwd()} is not the root of the repository: submit from there")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "runs.txt").write_text(text, encoding="utf-8")
    for run in chosen:  # fail before queueing: a job that is not noted would be queued again
        run.dir.mkdir(parents=True, exist_ok=True)
        (run.dir / JOBS).touch()
    job = _ask(*command).strip().split(";")[0]
    for run in chosen:
        task = f"{job}_{run.number}"
        note(run.dir, {"time": time.time(), "job": task, "log": str(folder.absolute() / f"{task}.log")})
    return f"Submitted {len(chosen)} of {len(runs)} as job {job}: {shlex.join(command)}"


def note(run_dir: Path, entry: dict) -> None:
    """Add a line to a run's ``jobs.jsonl``. It begins with a line feed: a kill may have cut off the last line."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / JOBS, "a", encoding="utf-8") as file:
        file.write(f"\n{json.dumps(entry)}\n")


def last_job(run_dir: Path) -> dict | None:
    """The newest sound line of ``jobs.jsonl``; None if there is none."""
    with suppress(FileNotFoundError):
        for line in reversed((run_dir / JOBS).read_text(encoding="utf-8").splitlines()):
            with suppress(ValueError):  # a line that a kill or a full disk cut off
                return json.loads(line)
    return None


def _ask(*command: str) -> str:
    if shutil.which(command[0]) is None:
        raise UserError(f"no SLURM here: {command[0]} is not on PATH")
    # inside a job, the new job would inherit that job's variables and take them for its own
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k == "SLURM_CONF"}
    environment.setdefault("PYTHON", sys.executable)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UserError(f"{command[0]} failed: {said}")
    return done.stdout
