"""SLURM on a login node: read the queue, interpret the options of sbatch, and submit an array.

Each submission of a run is a line of ``<run>/jobs.jsonl``: {"time", "job", "log"}, where ``job`` is the id of the array
task, such as ``12_3``. Starts of local runs are noted there, too.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlr_pretrain.config.secrets import named_in
from dlr_pretrain.launch.runs import PlannedRun
from dlr_pretrain.util.errors import UserError

JOBS = "jobs.jsonl"
REFUSED = ("-a --array", "-o --output", "-e --error", "-D --chdir", "--parsable", "--wrap", "--test-only")


@dataclass(frozen=True)
class Queued:
    """A job in squeue: SLURM's name of its state, and the reason why it waits."""

    state: str
    reason: str


def queue() -> dict[str, Queued]:
    """This user's jobs by id, each array task separately. Raises UserError if no scheduler answers."""
    if shutil.which("squeue") is None:
        raise UserError("no SLURM here: squeue is not on PATH")
    text = _ask("squeue", "--me", "--array", "--noheader", "--format=%i|%T|%r")
    return {job: Queued(*rest) for job, *rest in (line.strip().split("|", 2) for line in text.splitlines())}


@dataclass(frozen=True)
class Resources:
    """Nodes of a job and ranks on each, as train.sbatch will count them."""

    nodes: int
    per_node: int
    gpus: bool

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.nodes} x {self.per_node}" if self.nodes > 1 else str(self.per_node)


def resources(words: Sequence[str]) -> Resources:
    """The nodes and ranks that options of sbatch ask for.

    Raises UserError for options that an array of runs cannot take, and for passwords and tokens.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for flags in REFUSED:
        parser.add_argument(*flags.split(), dest="refused", nargs="?", action="append")
    for flags in ("-N --nodes", "-n --ntasks", "--ntasks-per-node", "--gpus-per-node", "--gres", "-G --gpus"):
        parser.add_argument(*flags.split())
    parser.add_argument("--gpus-per-task")
    try:
        asked, _ = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UserError(f"the options of sbatch, {shlex.join(words)}: {error}") from None
    if name := next(filter(None, map(named_in, words)), None):
        rule = f"{name} is a password or a token, and the command line is recorded and shown"
        raise UserError(f"of the options of sbatch: {rule}. Export it where you submit: sbatch passes it on")
    if asked.refused is not None:
        rule = f"array, logs and script are chosen for you, so {', '.join(REFUSED)} cannot be given"
        raise UserError(f"of the options of sbatch, {shlex.join(words)}: {rule}")
    nodes = _number(asked.nodes or "1", "--nodes")
    gres = [entry for entry in (asked.gres or "").split(",") if entry.partition(":")[0] == "gpu"]
    gpus = asked.gpus_per_node or (str(sum(map(_gpus, gres))) if gres else None)

    def tasks() -> int:
        if asked.ntasks_per_node is not None:
            return _number(asked.ntasks_per_node, "--ntasks-per-node")
        return _a_node(asked.ntasks or str(nodes), "--ntasks", nodes)

    if gpus is None and asked.gpus_per_task is not None:
        of_a_task = _number(asked.gpus_per_task.rpartition(":")[2], "--gpus-per-task")
        gpus = str(of_a_task * tasks())
    per_node = os.environ.get("RANKS_PER_NODE")
    if per_node is None and gpus is not None:
        per_node = gpus.rpartition(":")[2]
    elif per_node is None and asked.gpus is not None:
        per_node = str(_a_node(asked.gpus.rpartition(":")[2], "--gpus", nodes))
    elif per_node is None:
        per_node = str(tasks())
    return Resources(nodes, _number(per_node, "the ranks of a node"), gpus is not None or asked.gpus is not None)


def warn_without_gpus(asked: Resources, runs: Sequence[PlannedRun]) -> None:
    if not asked.gpus and any(run.cfg.device != "cpu" for run in runs):
        print("warning: no GPUs are asked for. Add --gpus-per-node=N behind --, or device=cpu to the overrides")


def _gpus(entry: str) -> int:
    """The GPUs of an entry of --gres: gpu, gpu:4, gpu:h100 or gpu:h100:4."""
    count = entry.rpartition(":")[2]
    return int(count) if count.isdecimal() else 1


def _a_node(text: str, name: str, nodes: int) -> int:
    """The share of a node; UserError if the nodes have unequal ones."""
    in_all = _number(text, name)
    if in_all % nodes:
        raise UserError(f"{name}={in_all}: nodes would have unequal shares. Make it a multiple of --nodes={nodes}")
    return in_all // nodes


def _number(text: str, name: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{name}: {text} is not a whole number above 0, which submit.py needs to know the ranks")
    return int(text)


@dataclass(frozen=True)
class Array:
    """An array job that trains the ``chosen`` ones of ``runs``: its files, and the command that queues it."""

    runs: Sequence[PlannedRun]
    chosen: Sequence[PlannedRun]
    name: str
    limit: int | None
    words: Sequence[str]

    @property
    def text(self) -> str:
        return "".join(f"{run.line}\n" for run in self.runs)

    @property
    def folder(self) -> Path:
        """Holds the runs file and the logs. Its name has a hash of that file: other runs must not overwrite the file
        that queued tasks will read."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:8]
        return Path(self.runs[0].cfg.run.root, "arrays", f"{self.name}-{digest}")

    @property
    def command(self) -> list[str]:
        tasks = spans([run.number for run in self.chosen]) + (f"%{self.limit}" if self.limit else "")
        own = [f"--array={tasks}", f"--job-name={self.name}", f"--output={self.folder}/%A_%a.log"]
        return ["sbatch", "--parsable", *own, *self.words, "slurm/array.sbatch", f"{self.folder}/runs.txt"]

    def submit(self) -> str:
        """Write the runs file, queue the array, and note its tasks in the run directories. Returns the job's id."""
        if shutil.which("sbatch") is None:
            raise UserError("no SLURM here: sbatch is not on PATH")
        if not (Path("train.py").exists() and Path("slurm/array.sbatch").exists()):
            raise UserError(f"{Path.cwd()} is not the root of the repository: submit from there")
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self.folder / f"runs.{os.getpid()}"
        aside.write_text(self.text, encoding="utf-8")
        aside.replace(self.folder / "runs.txt")
        for run in self.chosen:  # fail before queueing: a job that is not noted would be queued again
            run.dir.mkdir(parents=True, exist_ok=True)
            (run.dir / JOBS).touch()
        job = _ask(*self.command).strip().split(";")[0]
        for run in self.chosen:
            name = f"{job}_{run.number}"
            note(run.dir, name, self.folder / f"{name}.log")
        return job


def note(run_dir: Path, job: str, log: Path) -> None:
    """Add a job to a run's ``jobs.jsonl``."""
    entry = {"time": time.time(), "job": job, "log": str(log.absolute())}
    run_dir.mkdir(parents=True, exist_ok=True)
    append_line(run_dir / JOBS, json.dumps(entry))


def append_line(path: Path, line: str) -> None:
    """Append a line to a file. A last line that a kill or a full disk cut off is ended first, or both would be lost."""
    with open(path, "ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else f"\n{line}"
        file.write(f"{line}\n".encode())


def last_job(run_dir: Path) -> dict | None:
    """The newest sound line of ``jobs.jsonl``; None if there is none."""
    with contextlib.suppress(FileNotFoundError):
        for line in reversed((run_dir / JOBS).read_text(encoding="utf-8").splitlines()):
            with contextlib.suppress(ValueError):  # a line that a kill or a full disk cut off
                return json.loads(line)
    return None


def spans(numbers: Sequence[int]) -> str:
    """[1, 2, 3, 5] -> "1-3,5"."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return ",".join("-".join(map(str, span)) for span in found)


def _ask(*command: str) -> str:
    # inside a job, the new job would inherit that job's variables and take them for its own
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k == "SLURM_CONF"}
    environment.setdefault("PYTHON", sys.executable)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UserError(f"{command[0]} failed: {said}")
    return done.stdout
