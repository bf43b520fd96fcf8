"""The state of a run, from its ``manifest.json``, its heartbeat, and its job in SLURM's queue.

    python -m dlr_pretrain.launch.status scale=1b dlr=on

prints the last saved step, or 0, and the run directory, for slurm/train.sbatch.

``<run>/job.json`` holds the job that was queued last for a run as {"time", "job", "log"}; ``job`` is the id of the
array task, such as ``12_3``.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dlr_pretrain.cli import load
from dlr_pretrain.config import identity
from dlr_pretrain.config.identity import describe_differences, differences
from dlr_pretrain.config.run_folder import JOB, JOB_SHAPE, read_record
from dlr_pretrain.config.tree import PACKAGE
from dlr_pretrain.launch.runs import PlannedRun
from dlr_pretrain.util.errors import UserError, command
from dlr_pretrain.util.files import EXPIRY, NUMBER, last_record, read_beat, read_json

STATES = ("complete", "diverged", "running", "pending", "failed", "stopped", "not started")
DUE = ("failed", "stopped", "not started")  # a run in one of these states is queued or trained


def shipped(name: str) -> Path:
    """A folder of the wheel or of a checkout, relative to the working directory if it is below it."""
    folder = next(folder for folder in (PACKAGE / name, PACKAGE.parent / name) if folder.is_dir())
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


@dataclass(frozen=True)
class Status:
    """One of ``STATES``, the reason, and the last numbers of ``metrics.jsonl`` (None if it has none)."""

    state: str
    reason: str = ""
    step: int | None = None
    loss: float | None = None

    def __str__(self) -> str:
        step = "" if self.step is None else f"step {self.step:,}"
        loss = "" if self.loss is None else f"training loss {self.loss:.3f}"
        return ", ".join(filter(None, [self.state, self.reason, step, loss]))


def status_of(run: PlannedRun, queue: Mapping[str, str]) -> Status:
    """The status of ``run``; ``queue`` maps the id of each job to SLURM's state."""
    last = last_record(run.dir / "metrics.jsonl")
    try:
        state, reason = _state(run, queue)
    except UserError as error:
        state, reason = "failed", str(error)
    loss = last.get("train/loss")
    return Status(state, reason, last.get("step"), loss if isinstance(loss, NUMBER) else None)


def _state(run: PlannedRun, queue: Mapping[str, str]) -> tuple[str, str]:
    record = read_record(run.dir)
    changed = differences(record["identity"], identity(run.cfg)) if record else {}
    if changed and "saved" in record:
        return "failed", f"its directory holds another run: {describe_differences(changed)}"
    said = {} if changed else record.get("state", {})
    job = last_job(run.dir)
    if said.get("name") == "complete":
        return "complete", ""
    if queued := queue.get(job.get("job", "")):
        return "running" if queued in ("RUNNING", "COMPLETING") else "pending", ""
    if read_beat(run.dir, 0).get("time", 0.0) > time.time() - EXPIRY:  # of a process, perhaps on another machine
        return "running", ""
    if said and said["name"] != "running" and said["time"] > job.get("time", 0.0):
        return said["name"], said["reason"]
    if job:
        return "failed", f"its job has left the queue: see {job['log']}"
    return ("failed", "it ended without a word") if said else ("not started", "")


def last_job(run_dir: Path) -> dict:
    """The job that was queued last for a run, as in ``job.json``; empty if none is noted."""
    with suppress(FileNotFoundError, ValueError):
        return read_json(run_dir / JOB, JOB_SHAPE)
    return {}


def last_saved(run_dir: Path) -> int:
    """The step of the last checkpoint that the run in ``run_dir`` has made itself; 0 if it has made none."""
    record = read_record(run_dir)
    saved = record.get("saved", 0)
    return 0 if saved == record.get("started_from", {}).get("step") else saved


def queue() -> dict[str, str]:
    """SLURM's state of each job and array task of this user, by id. Raises UserError if no SLURM answers."""
    said = ask("squeue", "--me", "--array", "--noheader", "--format=%i %T")
    return dict(line.split() for line in said.splitlines())


def ask(*command: str) -> str:
    """What a command of SLURM prints; raises UserError if the command is missing or fails."""
    if shutil.which(command[0]) is None:
        raise UserError(f"no SLURM here: {command[0]} is not on PATH. --local trains on this machine")
    # inside a job, the new job would inherit this job's variables and take them for its own
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k == "SLURM_CONF"}
    environment.setdefault("PYTHON", sys.executable)
    environment["DLR_SLURM"] = str(shipped("slurm").absolute())
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{command[0]} failed with exit code {done.returncode}: {' '.join(done.stderr.split())}")
    return done.stdout


def print_saved(words: list[str]) -> None:
    folder = Path(str(load(words, ranks=None, machine=False).run.dir))
    print(last_saved(folder), folder)


if __name__ == "__main__":
    sys.exit(command(lambda: print_saved(sys.argv[1:])))
