"""Runs through a real scheduler, with what a cluster does to them. ``--basetemp`` must be shared by its nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dlr_pretrain.launch.runs import PlannedRun, expand, load_runs
from dlr_pretrain.launch.state import Status, last_job, last_saved, look, queue
from dlr_pretrain.util.history import read_metrics
from tests.conftest import ROOT
from tests.slurm.conftest import ask, wait

pytestmark = [pytest.mark.slurm, pytest.mark.full]

STEPS = 400  # seconds of training, so that a signal arrives in the middle of it
LONG = (f"train.steps={STEPS}", "eval.every=200", "checkpoint.every=1000", "dlr=on", "backbone=cola")
TWO_RANKS = ("--nodes=1", "--ntasks-per-node=2")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL"}


# ----------------------------------------------------------------------------------------------------
# slurm/train.sbatch


class Job:
    """One ``sbatch`` of slurm/train.sbatch."""

    def __init__(self, folder: Path, words: list[str], *options: str):
        self.run, self.log = folder / "run", folder / "job.log"
        folder.mkdir()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k == "SLURM_CONF"}
        command = ["sbatch", "--parsable", f"--chdir={ROOT}", f"--output={self.log}", "--time=10", *options]
        submitted = subprocess.run(
            [*command, str(ROOT / "slurm" / "train.sbatch"), *words, f"run.dir={self.run}"],
            env=environment | {"PYTHON": sys.executable, "TMPDIR": str(folder)},
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.id = submitted.stdout.strip().split(";")[0]

    def facts(self) -> dict[str, str]:
        """What the scheduler knows of the job."""
        words = ask("scontrol", "--oneliner", "show", "job", self.id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def ended(self) -> bool:
        return self.facts()["JobState"] in ENDED

    def wait(self, until: Callable[[], object]) -> None:
        wait(lambda: until() or self.ended(), self.text)

    def steps(self) -> int:
        records = read_metrics(self.run / "metrics.jsonl")
        return records[-1]["step"] if records else 0

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else "(no output)"

    def assert_complete(self, restarts: int) -> None:
        wait(self.ended, self.text)
        facts = self.facts()
        assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", str(restarts)), self.text()
        assert (self.run / "folded" / "config.json").exists()
        assert [record["step"] for record in read_metrics(self.run / "metrics.jsonl")] == list(range(1, STEPS + 1))
        assert not list(self.log.parent.glob("dlr_pretrain.*")), "the nodes' local folders (TMPDIR, here) are left"


@pytest.fixture(scope="module")
def submit(tmp_path_factory):
    """``submit(words, *options)`` gives the Job."""
    folder, jobs = tmp_path_factory.mktemp("slurm"), []

    def submit(words: list[str], *options: str) -> Job:
        jobs.append(Job(folder / str(len(jobs)), words, *options))
        return jobs[-1]

    yield submit
    for job in jobs:  # those that have ended may be forgotten by now
        subprocess.run(["scancel", "--quiet", job.id], check=False)


whole: dict[str, Job] = {}


@pytest.fixture
def undisturbed(submit, words) -> Job:
    """Two ranks on one node, from the first step to the last; once for all tests."""
    if not whole:
        whole["job"] = submit(words(*LONG), *TWO_RANKS)
    whole["job"].assert_complete(restarts=0)
    return whole["job"]


def assert_same_run(one: Path, other: Path) -> None:
    """The same losses and evaluations in two run directories, and the same weights, bit for bit."""
    kept = ("step", "train/loss", "train/grad_norm", "eval/loss")
    records = [[[r.get(key) for key in kept] for r in read_metrics(run / "metrics.jsonl")] for run in (one, other)]
    assert records[0] == records[1]
    a, b = (load_file(run / "folded" / "model.safetensors") for run in (one, other))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("nodes", [1, 2])
def test_preempted_requeued_and_bit_identical(submit, words, undisturbed, nodes, two_nodes):
    job = submit(words(*LONG), f"--nodes={nodes}", f"--ntasks-per-node={2 // nodes}")
    job.wait(lambda: job.steps() >= 20)
    ask("scancel", "--signal=USR1", "--batch", job.id)

    def restarted_while_told_so_again() -> bool:
        """The end of a process is no time to die of another signal."""
        subprocess.run(["scancel", "--quiet", "--signal=USR1", f"{job.id}.0"], check=False)
        return job.facts()["Restarts"] == "1"

    job.wait(restarted_while_told_so_again)
    stopped_at = job.steps()
    assert 20 <= stopped_at < STEPS, job.text()
    job.assert_complete(restarts=1)
    assert f"{nodes} x {2 // nodes} ranks" in job.text()
    assert f"stopped after step {stopped_at} " in job.text() and "resuming" in job.text()
    assert_same_run(job.run, undisturbed.run)


def test_a_killed_rank_costs_the_steps_since_the_checkpoint(submit, words, undisturbed):
    every_50 = [word for word in LONG if not word.startswith("checkpoint.every")] + ["checkpoint.every=50"]
    job = submit(words(*every_50), *TWO_RANKS)
    job.wait(lambda: last_saved(job.run))
    rank = f"-u [t]rain.py .*run.dir={job.run}"  # which is no part of this command's own words
    ask("srun", f"--jobid={job.id}", "--overlap", "pkill", "-KILL", "--newest", "--full", "--", rank)
    job.assert_complete(restarts=1)
    assert re.search(r"exit code \d+, after a checkpoint at step \d*[05]0; back to the queue", job.text()), job.text()
    assert_same_run(job.run, undisturbed.run)


@pytest.mark.parametrize(("more", "facts"), [
    ("train.lrr=1", ("FAILED", "0", "2:0")), ("train.stop_after=3", ("COMPLETED", "0", "0:0")),
])  # fmt: skip
def test_a_run_that_ends_by_itself_is_not_requeued(submit, words, more, facts):
    job = submit(words(*LONG, more), *TWO_RANKS)
    wait(job.ended, job.text)
    assert tuple(job.facts()[name] for name in ("JobState", "Restarts", "ExitCode")) == facts, job.text()


# ----------------------------------------------------------------------------------------------------
# slurm/submit.py


def give(script: str, words: list[str], *options: str) -> str:
    command = [sys.executable, str(ROOT / script), *words, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def empty_queue():
    """Cancels what the test leaves in the queue."""
    before = queue().keys()
    yield
    for job in queue().keys() - before:
        subprocess.run(["scancel", "--quiet", job], check=False)
    wait(lambda: not queue().keys() - before, queue)


def test_an_array_with_a_preemption_a_cancellation_a_failure_and_a_lost_node(words, tmp_path, two_nodes, empty_queue):
    given = [
        *words(*LONG[:2], "checkpoint.every=40", "backbone=cola"),
        "dlr=off,on",
        "seed=1,2",
        f"run.root={tmp_path}",
    ]
    options = ("--", *TWO_RANKS, "--mem=1G", "--time=10")
    runs: list[PlannedRun] = load_runs(expand(given))

    def table() -> str:
        return give("slurm/submit.py", given, "--status")

    def status(number: int) -> Status:
        return look(runs[number - 1], queue())

    def job(number: int) -> str:
        return last_job(runs[number - 1].dir)["job"]

    def restarts(number: int) -> int:
        return int(re.search(r"Restarts=(\d+)", ask("scontrol", "show", "job", job(number)))[1])

    def wait_for_step(number: int) -> None:
        wait(lambda: status(number).step >= 20 or status(number).state in ("failed", "stopped"), table)
        assert status(number).state == "running", table()

    in_the_way = runs[2].dir / "config.yaml"
    in_the_way.mkdir(parents=True)
    assert "Submitted 4 of 4" in give("slurm/submit.py", given, "--limit", "2", *options)
    wait_for_step(1)
    ask("scontrol", "requeue", job(1))
    wait_for_step(2)
    ask("scancel", job(2))
    wait(lambda: status(2).state not in ("running", "pending"), table)
    cancelled = status(2)
    assert (cancelled.state, 20 <= cancelled.step < STEPS) == ("stopped", True), table()
    wait(lambda: status(3).state == "failed", table)
    assert "config.yaml" in status(3).reason, table()
    in_the_way.rmdir()
    assert "Submitted 2 of 4" in give("slurm/submit.py", given, *options)

    wait_for_step(4)
    node = ask("squeue", "--noheader", f"--jobs={job(4)}", "--format=%N").strip()
    ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    wait(lambda: restarts(4) == 1, table)
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], capture_output=True, check=False)
    wait(lambda: {status(i).state for i in range(1, 5)} <= {"complete", "failed", "stopped"}, table)
    assert "4 runs: 4 complete" in table() and restarts(1) >= 1
    steps = [[record["step"] for record in read_metrics(run.dir / "metrics.jsonl")] for run in runs]
    assert steps == [list(range(1, STEPS + 1))] * 4
