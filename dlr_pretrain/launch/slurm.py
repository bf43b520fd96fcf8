"""SLURM on a login node: the queue, the ranks that options of sbatch ask for, and the submission of an array.

Each start of a run is noted in ``<run>/jobs.jsonl`` as {"time", "job", "log"}, with ``job`` the id of the array task,
such as ``12_3``. Local runs are noted there, too, and again at their end with "ended", the time, and "code".
"""

from __future__ import annotations

import argparse
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
from itertools import groupby
from pathlib import Path

from dlr_pretrain.config.secrets import named_in
from dlr_pretrain.launch.runs import PlannedRun
from dlr_pretrain.util.errors import UserError

JOBS = "jobs.jsonl"
CHOSEN_HERE = ("-a --array", "-o --output", "-e --error", "-D --chdir", "--parsable", "--wrap", "--test-only")
UNKNOWN_SHARE = ("-n --ntasks", "-G --gpus", "--gpus-per-task")  # the ranks of a node do not follow from these


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


@dataclass(frozen=True)
class Resources:
    """Nodes of a job, ranks on each as train.sbatch will count them, and whether it has GPUs."""

    nodes: int
    per_node: int
    gpus: bool

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


def resources(options: Sequence[str]) -> Resources:
    """What options of sbatch ask for.

    Raises UserError for options that an array of runs cannot take, and for passwords and tokens.
    """
    if name := next(filter(None, map(named_in, options)), None):
        rule = f"{name} is a password or a token, and the command line is recorded and shown"
        raise UserError(f"of the options of sbatch: {rule}. Export it where you submit: sbatch passes it on")
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for flags in (*CHOSEN_HERE, *UNKNOWN_SHARE):
        parser.add_argument(*flags.split(), dest="refused", nargs="?", action="append")
    parser.add_argument("-N", "--nodes", default="1")
    for flag in ("--ntasks-per-node", "--gpus-per-node", "--gres"):
        parser.add_argument(flag)
    try:
        asked, _ = parser.parse_known_args(options)
    except argparse.ArgumentError as error:
        raise UserError(f"the options of sbatch, {shlex.join(options)}: {error}") from None
    if asked.refused is not None:
        raise UserError(
            f"of the options of sbatch, {', '.join(CHOSEN_HERE)} are chosen for you, and {', '.join(UNKNOWN_SHARE)} do "
            "not say how many ranks a node gets. Use --nodes with --gpus-per-node, or with --ntasks-per-node on CPUs"
        )
    of_gres = (entry for entry in (asked.gres or "").split(",") if entry.startswith("gpu:"))
    gpus = asked.gpus_per_node or next(of_gres, None)
    per_node = os.environ.get("RANKS_PER_NODE") or (gpus or asked.ntasks_per_node or "1").rpartition(":")[2]
    for number, name in ((asked.nodes, "--nodes"), (per_node, "the ranks of a node")):
        if not number.isdecimal() or int(number) < 1:
            raise UserError(f"{name}: {number} is not a whole number above 0, which submit.py needs to know the ranks")
    return Resources(int(asked.nodes), int(per_node), gpus is not None)


def submit(
    runs: Sequence[PlannedRun], chosen: Sequence[PlannedRun], name: str, options: Sequence[str],
    limit: int | None = None, dry_run: bool = False,
) -> str:  # fmt: skip
    """Queue an array job that trains the ``chosen`` ones of ``runs``, and note its tasks in the run directories.

    ``limit`` is the number of tasks that run at once. Returns a line about it.
    """
    text = "".join(f"{run.line}\n" for run in runs)
    # named by its content: another table must not overwrite the file that queued tasks will read
    folder = Path(runs[0].cfg.run.root, "arrays", f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}")
    tasks = spans([run.number for run in chosen]) + (f"%{limit}" if limit else "")
    own = [f"--array={tasks}", f"--job-name={name}", f"--output={folder}/%A_%a.log"]
    command = ["sbatch", "--parsable", *own, *options, "slurm/array.sbatch", f"{folder}/runs.txt"]
    if not resources(options).gpus and any(run.cfg.device != "cpu" for run in chosen):
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


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as --array takes them: [1, 2, 3, 5] -> "1-3,5"."""
    groups = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [(pairs[0][1], pairs[-1][1]) for pairs in (list(group) for _, group in groups)]
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ends)


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
