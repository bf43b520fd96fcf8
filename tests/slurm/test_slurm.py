"""Runs under a real scheduler, with preemptions, killed ranks and lost nodes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlr_pretrain.launch.runs import PlannedRun, expand, load_runs
from dlr_pretrain.launch.status import Status, last_job, last_saved, queue, status_of
from dlr_pretrain.util.files import read_metrics
from tests.conftest import ROOT, forked
from tests.resume.test_resume import assert_same, final
from tests.slurm.conftest import ask, both_up, wait

pytestmark = [pytest.mark.slurm, pytest.mark.full]

STEPS = 400  # seconds of training, so that a signal arrives in the middle of it
RUN = (f"train.steps={STEPS}", "eval.every=200", "backbone=cola")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL"}


def quietly(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=False)


@pytest.fixture(autouse=True)
def idle():
    """Cancel the jobs that a test leaves in the queue, and wait for a node that it has taken down."""
    before = queue().keys()
    yield
    for job in queue().keys() - before:
        quietly("scancel", job)
    wait(lambda: not queue().keys() - before and both_up(), queue)


class Job:
    """One ``sbatch`` of slurm/train.sbatch, in ``folder``."""

    def __init__(self, folder: Path, words: list[str], *options: str):
        self.run, self.log = folder / "run", folder / "job.log"
        others = ("SLURM_", "TORCHINDUCTOR_CACHE", "TRITON_CACHE")  # of another job, or of a test that has compiled
        environment = {k: v for k, v in os.environ.items() if not k.startswith(others) or k == "SLURM_CONF"}
        command = ["sbatch", "--parsable", f"--chdir={ROOT}", f"--output={self.log}", "--time=10", *options]
        submitted = subprocess.run(
            [*command, str(ROOT / "slurm" / "train.sbatch"), *words, f"run.dir={self.run}"],
            env=environment | {"PYTHON": sys.executable, "TMPDIR": str(folder)},
            check=True,
            capture_output=True,
            text=True,
        )
        self.id = submitted.stdout.strip().split(";")[0]

    def facts(self, *names: str) -> tuple[str, ...]:
        """Fields of the job, from the scheduler."""
        said = ask("scontrol", "--oneliner", "show", "job", self.id).split()
        known = dict(word.split("=", 1) for word in said if "=" in word)
        return tuple(known[name] for name in names)

    def wait(self, until: Callable[[], object] = lambda: False) -> None:
        """Wait for an event, or for the end of the job."""
        wait(lambda: until() or self.facts("JobState")[0] in ENDED, self.text)

    def step(self) -> int:
        return next((record["step"] for record in reversed(read_metrics(self.run / "metrics.jsonl"))), 0)

    def processes(self) -> list[int]:
        """The processes of this start: node.sh, launch.py and the ranks, all on this machine."""
        words = f"^(bash slurm/node.sh|[^ ]+ (scripts/launch.py|-u train.py)) .*run.dir={self.run}( |$)"
        return [int(pid) for pid in ask("pgrep", "--full", words).split()]

    def seen(self, *names: str) -> set[tuple[str | None, ...]]:
        """The values of these environment variables in each rank of this start."""
        texts = [Path(f"/proc/{pid}/environ").read_text() for pid in self.processes()]
        known = [dict(word.split("=", 1) for word in text.split("\0") if "=" in word) for text in texts]
        return {tuple(map(rank.get, names)) for rank in known if "LOCAL_RANK" in rank}

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else "(no output)"


@pytest.mark.parametrize(("nodes", "more", "same"), [(1, (), ()), (2, ("parallel=hsdp",), ("parallel.shards=2",))])
def test_a_preemption_and_a_killed_rank_change_no_bit(words, tmp_path, nodes, more, same):
    """Under hsdp, each node holds a copy by default, here in two shards. Every start finds the same compiled code."""
    given = words(*RUN, "dlr=on", "checkpoint.every=50", *more)
    job = Job(tmp_path, given, f"--nodes={nodes}", "--ntasks-per-node=2")
    job.wait(lambda: job.step() >= 20)
    first = job.processes()
    compiled = tmp_path / f"dlr_pretrain_compiled.{os.getuid()}"
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{compiled}/inductor", "TRITON_CACHE_DIR": f"{compiled}/triton"}
    assert job.seen(*caches) == {tuple(caches.values())} and len(job.seen("SLURMD_NODENAME")) == nodes
    ask("scancel", "--signal=USR1", "--batch", job.id)

    def requeued_under_more_signals() -> bool:
        """No signal may kill a process that is ending. They go to pids, because the next start must not get one."""
        for pid in first:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        return job.facts("Restarts") == ("1",)

    job.wait(requeued_under_more_signals)
    stopped_at = job.step()
    assert 20 <= stopped_at < STEPS, job.text()

    job.wait(lambda: last_saved(job.run) > stopped_at)
    assert job.seen(*caches) == {tuple(caches.values())}
    rank = f"-u [t]rain.py .*run.dir={job.run}"  # does not match this command's own words
    step = ("srun", f"--jobid={job.id}", "--overlap", "--nodes=1", "--ntasks=1")
    ask(*step, "pkill", "-KILL", "--newest", "--full", "--", rank)
    job.wait()
    assert job.facts("JobState", "Restarts") == ("COMPLETED", "2"), job.text()
    assert f"{nodes} x 2 ranks" in job.text() and "resuming" in job.text()
    assert f"stopped after step {stopped_at} " in job.text()
    assert re.search(r"exit code \d+, after a checkpoint at step \d+; back to the queue", job.text()), job.text()
    assert not list(tmp_path.glob("dlr_pretrain.*")), "the nodes' local folders (TMPDIR, here) are left"
    assert oct(compiled.stat().st_mode) == "0o40700"
    forked([*given, *same, f"run.dir={tmp_path}/whole"], ranks=2 * nodes)
    assert_same(final(job.run), final(tmp_path / "whole"))


@pytest.mark.parametrize(("more", "facts"), [
    ("train.lrr=1", ("FAILED", "0", "2:0")), ("train.stop_after=3", ("COMPLETED", "0", "0:0")),
])  # fmt: skip
def test_a_run_that_ends_by_itself_is_not_requeued(words, tmp_path, more, facts):
    job = Job(tmp_path, words(*RUN, more), "--nodes=1", "--ntasks-per-node=2")
    job.wait()
    assert job.facts("JobState", "Restarts", "ExitCode") == facts, job.text()


def test_an_array_with_a_preemption_and_a_lost_node(words, tmp_path):
    given = [*words(*RUN, "checkpoint.every=40"), "dlr=off,on", "seed=1,2", f"run.root={tmp_path}"]
    runs: list[PlannedRun] = load_runs(expand(given))

    def submit(*options: str) -> str:
        command = [sys.executable, str(ROOT / "slurm" / "submit.py"), *given, *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def table() -> str:
        return submit("--status")

    def status(number: int) -> Status:
        return status_of(runs[number - 1], queue())

    def job(number: int) -> str:
        return last_job(runs[number - 1].dir)["job"]

    def restarts(number: int) -> int:
        return int(re.search(r"Restarts=(\d+)", ask("scontrol", "show", "job", job(number)))[1])

    def wait_for_step(number: int) -> None:
        wait(lambda: (status(number).step or 0) >= 20 or status(number).state in ("failed", "stopped"), table)
        assert status(number).state == "running", table()

    options = ("--", "--nodes=1", "--ntasks-per-node=2", "--mem=1G", "--time=10")
    assert "Submitted 4 of 4" in submit("--limit", "2", *options)
    in_the_way = runs[2].dir / "config.yaml"  # before the third starts: a submission would refuse it
    in_the_way.mkdir()
    wait_for_step(1)
    ask("scontrol", "requeue", job(1))
    wait_for_step(2)
    ask("scancel", job(2))
    wait(lambda: status(2).state not in ("running", "pending"), table)
    cancelled = status(2)
    assert (cancelled.state, 20 <= cancelled.step < STEPS) == ("stopped", True), table()
    wait(lambda: status(3).state == "failed", table)
    assert "config.yaml" in Path(last_job(runs[2].dir)["log"]).read_text(), table()
    in_the_way.rmdir()
    assert "Submitted 2 of 4" in submit(*options)

    wait_for_step(3)  # it starts now; the fourth may have ended long ago
    node = ask("squeue", "--noheader", f"--jobs={job(3)}", "--format=%N").strip()
    ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    wait(lambda: restarts(3) == 1, table)
    quietly("scontrol", "update", f"nodename={node}", "state=resume")
    wait(lambda: {status(i).state for i in range(1, 5)} <= {"complete", "failed", "stopped"}, table)
    assert "4 runs: 4 complete" in table() and restarts(1) >= 1
    steps = [[record["step"] for record in read_metrics(run.dir / "metrics.jsonl")] for run in runs]
    assert steps == [list(range(1, STEPS + 1))] * 4
