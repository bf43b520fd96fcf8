"""The state of a run, from its directory, the queue, and the log of its last job."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dlr_pretrain.config import flatten, to_dict
from dlr_pretrain.config.written import read_config, read_record
from dlr_pretrain.launch.queue import Queued, last_job
from dlr_pretrain.launch.runs import PlannedRun
from dlr_pretrain.launch.trained import another, diverged
from dlr_pretrain.util import heartbeat
from dlr_pretrain.util.errors import EXIT_STOPPED, UserError
from dlr_pretrain.util.history import newest_first

STATES = ("finished", "diverged", "running", "pending", "failed", "stopped", "not started")
AGAIN = ("failed", "stopped")  # states of the runs that --resubmit takes
WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
USUAL = {"None", "Priority", "Resources", "JobArrayTaskLimit", "BeginTime", "Dependency"}  # reasons that are not shown
LOG_TAIL = 1 << 17  # bytes of a log that are read, from its end: torchrun's summary follows the error


@dataclass(frozen=True)
class Status:
    """One of ``STATES``, the reason, and the last numbers of ``metrics.jsonl`` (None if there are none)."""

    state: str
    reason: str = ""
    step: int = 0
    loss: float | None = None
    perplexity: float | None = None
    seconds_left: float | None = None


def look(run: PlannedRun, queue: Mapping[str, Queued]) -> Status:
    """The status of ``run``; ``queue`` has the scheduler's jobs by id."""
    try:
        records = newest_first(run.dir / "metrics.jsonl")
        last = next(records, {})
        evaluated = last if "eval/loss" in last else next((r for r in records if "eval/loss" in r), {})
    except UserError as error:
        return Status("failed", str(error))
    step = last.get("step", 0)
    state, reason = _state(run, step, queue)
    rate = last.get("perf/tokens_per_second") if state == "running" else None
    left = (run.cfg.train.steps - step) * run.positions / rate if rate else None
    return Status(state, reason, step, last.get("train/loss"), evaluated.get("eval/perplexity"), left)


def _state(run: PlannedRun, step: int, queue: Mapping[str, Queued]) -> tuple[str, str]:
    if changed := another(run):
        return "failed", f"its directory holds another run: {changed}"
    if step >= run.cfg.train.steps and _folded(run.dir):
        return "finished", ""
    job = last_job(run.dir)
    queued = queue.get(job["job"]) if job else None
    if queued:
        waits = queued.state in WAITING
        return "pending" if waits else "running", queued.reason if waits and queued.reason not in USUAL else ""
    last = _last_start(Path(job["log"])) if job else None
    if (beat := _beat(run.dir)) > time.time() - heartbeat.EXPIRY and not (last and last.ended and beat <= last.written):
        return "running", ""
    if what := diverged(run):  # the manifest says so, whether or not a job or a log of it is known
        return "diverged", " ".join(what.split())
    if job:
        return _ending(last)
    return ("stopped", "") if step else ("not started", "")


def _folded(run_dir: Path) -> bool:
    """Whether the run has ended: its exported model exists."""
    weights = ("model.safetensors", "model.safetensors.index.json")
    return any((run_dir / "folded" / name).exists() for name in weights)


def _beat(run_dir: Path) -> float:
    """The time when a process, perhaps on another machine, last renewed the lease of the run directory; 0 if never."""
    try:
        return float(heartbeat.read(run_dir / ".lock")["beat"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0.0


# ----------------------------------------------------------------------------------------------------
# How a job that has left the queue ended, by its log

START = re.compile(r"^job [\d_]+, start \d+: ", re.MULTILINE)  # train.sbatch and local.py write START and END
END = re.compile(r"^job [\d_]+: ended with exit code (-?\d+)$", re.MULTILINE)  # < 0: a signal killed a local run
CANCELLED = re.compile(
    r"^slurmstepd\S*: error: \*\*\* JOB \S+ ON \S+ CANCELLED AT \S+ (?:DUE TO (.*?) )?\*\*\*", re.MULTILINE
)
ERROR = re.compile(r"^(?:error|stopped): (.*(?:\n  .*)?)|^slurmstepd\S*: error: (Detected .*)", re.MULTILINE)
PYTHONS = re.compile(
    r"^(?:\[rank\d+\]: ?)?((?!torch\.distributed\.elastic)[\w.]*(?:Error|Exception)\b.*)", re.MULTILINE
)


@dataclass(frozen=True)
class Start:
    """The part of a log since the last start of its job, and when it was written (in seconds since the epoch)."""

    text: str
    written: float

    @property
    def ended(self) -> re.Match | None:
        return END.search(self.text)


def _last_start(log: Path) -> Start | None:
    try:
        with open(log, "rb") as file:
            facts = os.fstat(file.fileno())
            file.seek(-min(LOG_TAIL, facts.st_size), 2)
            return Start(START.split(file.read().decode(errors="replace"))[-1], facts.st_mtime)
    except FileNotFoundError:
        return None


def _ending(last: Start | None) -> tuple[str, str]:
    """The state of a job that has ended, "failed" or "stopped", and the reason."""
    if last is None:
        return "stopped", "cancelled before it started"
    text, end, cancelled = last.text, last.ended, CANCELLED.search(last.text)
    if cancelled:
        return "stopped", (cancelled[1] or "cancelled").lower()
    said = ERROR.findall(text) or PYTHONS.findall(text)
    lines = [line for line in text.splitlines() if line.strip() and not END.match(line)]
    reason = " ".join("".join(said[-1]).split()) if said else lines[-1].strip() if lines else ""
    if end and int(end[1]) < 0 and not said:
        return "failed", f"killed by signal {-int(end[1])}"
    if (end and int(end[1]) not in (0, EXIT_STOPPED)) or (said and not end):  # train.sbatch's own checks write no END
        return "failed", reason
    return "stopped", reason if end else "its job left the queue without a word: cancelled, or its node failed"


# ----------------------------------------------------------------------------------------------------
# Measured throughput

ASIDE = re.compile(  # keys that do not change the speed
    r"seed|run\..*|eval\..*|checkpoint\..*|log\..*|logger\..*|tokenizer\..*|data\.(?!packing).*|dlr\.alpha"
    r"|train\.(steps|lr|warmup_steps|min_lr_ratio|lr_decay|lr_decay_steps|stop_after|init_from|on_nonfinite|max_skipped)"
    r"|backbone\.b_gain|optimizer\.(eps|weight_decay|betas?\d?|b_lr)"
    r"|scale\.(lr|steps|warmup_steps|adam_eps|global_batch|eval_every|eval_tokens|checkpoint_every)"
)


class Throughputs:
    """Tokens a second of all runs in the roots of ``runs``, by the settings that the speed depends on."""

    def __init__(self, runs: list[PlannedRun]):
        self.rates: dict[str, tuple[float, str]] = {}
        for root in {run.cfg.run.root for run in runs}:
            for path in sorted(Path(root).glob("*/config.yaml")):
                self.rates |= dict(_measured(path.parent))

    def estimate(self, run: PlannedRun, ranks: int, step: int) -> tuple[float, str] | None:
        """Seconds for the steps of ``run`` after ``step`` on ``ranks`` ranks, and the device on which such a run was
        timed; None if none was timed."""
        if (found := self.rates.get(_speed(to_dict(run.cfg), ranks))) is None:
            return None
        rate, device = found
        return (run.cfg.train.steps - step) * run.positions / rate, device


def _measured(folder: Path) -> Iterator[tuple[str, tuple[float, str]]]:
    """Yields the key of a run's speed, with its rate and device; nothing if the run has not been timed."""
    try:
        start = read_record(folder)["starts"][-1]
        rate = next((r for r in newest_first(folder / "metrics.jsonl")), {}).get("perf/tokens_per_second")
        tree = read_config(folder)
    except (OSError, LookupError, UserError):
        return
    if rate:
        yield _speed(tree, start["world_size"]), (rate, start["device"])


def _speed(tree: dict, ranks: int) -> str:
    keys = {name: value for name, value in flatten(tree).items() if not ASIDE.fullmatch(name)}
    return json.dumps([ranks, keys], sort_keys=True, default=str)
