"""The state of a run: what it says of itself in ``manifest.json``, its heartbeat, and the scheduler's word.

python -m dlr_pretrain.launch.state scale=1b dlr=on     the step last saved, for slurm/train.sbatch; 0 if there is none
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dlr_pretrain.cli import load
from dlr_pretrain.config import identity
from dlr_pretrain.config.identity import differences, told
from dlr_pretrain.config.written import read_record
from dlr_pretrain.launch.runs import PlannedRun
from dlr_pretrain.launch.slurm import Queued, ending, last_job
from dlr_pretrain.util.command import command
from dlr_pretrain.util.errors import EXIT_STOPPED, UserError
from dlr_pretrain.util.files import EXPIRY, read_beat
from dlr_pretrain.util.history import newest_first

STATES = ("complete", "diverged", "running", "pending", "failed", "stopped", "not started")
AGAIN = ("failed", "stopped")  # states of the runs that --resubmit takes
WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
USUAL = {"None", "Priority", "Resources", "JobArrayTaskLimit", "BeginTime", "Dependency"}  # reasons that are not shown
FINGERPRINTS = ("data.shards", "tokenizer.pieces", "data.order")  # in a run's identity: text, tokenizer, order


@dataclass(frozen=True)
class Status:
    """One of ``STATES``, the reason, and the last numbers of ``metrics.jsonl`` (None if there are none)."""

    state: str
    reason: str = ""
    step: int = 0
    loss: float | None = None
    perplexity: float | None = None
    hours_left: float | None = None

    def __str__(self) -> str:
        shown = {"step {:,}": self.step or None, "loss {:.3f}": self.loss, "perplexity {:,.2f}": self.perplexity}
        shown |= {"{:.1f} h left": self.hours_left}
        numbers = (form.format(value) for form, value in shown.items() if value is not None)
        return ", ".join(filter(None, [self.state, self.reason, *numbers]))


def look(run: PlannedRun, queue: Mapping[str, Queued]) -> Status:
    """The status of ``run``; ``queue`` has the scheduler's jobs by id."""
    try:
        records = newest_first(run.dir / "metrics.jsonl")
        last = next(records, {})
        evaluated = last if "eval/loss" in last else next((r for r in records if "eval/loss" in r), {})
        state, reason = _state(run, queue)
    except UserError as error:
        return Status("failed", str(error))
    step = last.get("step", 0)
    rate = last.get("perf/tokens_per_second") if state == "running" else None
    left = (run.cfg.train.steps - step) * run.step_tokens / rate / 3600 if rate else None
    return Status(state, reason, step, last.get("train/loss"), evaluated.get("eval/perplexity"), left)


def _state(run: PlannedRun, queue: Mapping[str, Queued]) -> tuple[str, str]:
    record = read_record(run.dir)
    changed = differences(record.get("identity", {}), identity(run.cfg))
    if changed and "saved" in record:
        return "failed", f"its directory holds another run: {told(changed)}"
    said = {} if changed else record.get("state", {})
    job = last_job(run.dir) or {}
    if said.get("name") == "complete":
        return "complete", ""
    if queued := queue.get(job.get("job", "")):
        waits = queued.state in WAITING
        return "pending" if waits else "running", queued.reason if waits and queued.reason not in USUAL else ""
    if _beat(run.dir) > max(job.get("ended", 0.0), time.time() - EXPIRY):
        return "running", ""
    if said and said["name"] != "running" and said["time"] > job.get("time", 0.0):
        return said["name"], said["reason"]
    return _death(job) if job else ("failed", "it ended without a word") if said else ("not started", "")


def _death(job: dict) -> tuple[str, str]:
    """The state of a job that ended without a word from its run, and where its log is."""
    how = f"exit code {job['code']}" if "code" in job else ending(job["job"]) or "its job has left the queue"
    stopped = job.get("code") == EXIT_STOPPED or how in ("CANCELLED", "PREEMPTED", "TIMEOUT", "NODE_FAIL")
    return "stopped" if stopped else "failed", f"{how}: see {job['log']}"


def _beat(run_dir: Path) -> float:
    """The time when a process, perhaps on another machine, last renewed the lease of the run directory; 0 if never."""
    try:
        return float(read_beat(run_dir / ".lock")["beat"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0.0


def last_saved(run_dir: Path) -> int:
    """The step of the last checkpoint that the run in ``run_dir`` has made; 0 if it has made none."""
    record = read_record(run_dir)
    saved = record.get("saved", 0)
    return 0 if saved == record.get("started_from", {}).get("step") else saved


if __name__ == "__main__":
    sys.exit(command(lambda: print(last_saved(Path(load(sys.argv[1:], ranks=None, machine=False).run.dir)))))
