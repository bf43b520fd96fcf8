"""Runs through a real scheduler. The temporary folder must be one that its nodes share (``--basetemp`` sets it)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlr_pretrain.launch.trained import last_saved
from dlr_pretrain.util.history import read_metrics
from tests.conftest import ROOT
from tests.slurm.conftest import ask, assert_same_run

STEPS = 400  # seconds of training, so that a signal arrives in the middle of it
LONG = (f"train.steps={STEPS}", "eval.every=200", "checkpoint.every=1000", "dlr=on", "backbone=cola")
TWO_RANKS = ("--nodes=1", "--ntasks-per-node=2")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL"}


pytestmark = [pytest.mark.slurm, pytest.mark.slow]


class Job:
    """One ``sbatch`` of slurm/train.sbatch; ended with the test if it has not ended by itself."""

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
            timeout=30,
        )
        self.id = submitted.stdout.strip().split(";")[0]

    def facts(self) -> dict[str, str]:
        """What the scheduler knows of the job."""
        words = ask("scontrol", "--oneliner", "show", "job", self.id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, until, seconds: float = 900) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, f"job {self.id}: {self.facts()['JobState']}\n{self.text()}"
            time.sleep(0.1)

    def ended(self) -> bool:
        return self.facts()["JobState"] in ENDED

    def steps(self) -> int:
        records = read_metrics(self.run / "metrics.jsonl")
        return records[-1]["step"] if records else 0

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else "(no output)"

    def assert_completed(self, restarts: int) -> None:
        facts = self.facts()
        assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", str(restarts)), self.text()
        assert (self.run / "folded" / "config.json").exists()
        assert [record["step"] for record in read_metrics(self.run / "metrics.jsonl")] == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def submit(tmp_path_factory):
    """``submit(words, *options)`` gives the Job."""
    folder, jobs = tmp_path_factory.mktemp("slurm"), []

    def submit(words: list[str], *options: str) -> Job:
        jobs.append(Job(folder / str(len(jobs)), words, *options))
        return jobs[-1]

    yield submit
    for job in jobs:
        if not job.ended():
            ask("scancel", job.id)


whole: dict[str, Job] = {}


@pytest.fixture
def undisturbed(submit, words) -> Job:
    """Two ranks on one node, from the first step to the last; once for all tests."""
    if not whole:
        whole["job"] = submit(words(*LONG), *TWO_RANKS)
    whole["job"].wait(whole["job"].ended)
    return whole["job"]


def assert_nothing_left(job: Job) -> None:
    """The nodes' local folders (TMPDIR, here) are gone."""
    assert not list(job.log.parent.glob("dlr_pretrain.*"))


def test_two_ranks_to_the_folded_checkpoint(undisturbed):
    undisturbed.assert_completed(restarts=0)
    assert "1 x 2 ranks" in undisturbed.text()
    assert_nothing_left(undisturbed)


def test_preempted_requeued_and_bit_identical(submit, words, undisturbed):
    job = submit(words(*LONG), *TWO_RANKS)
    job.wait(lambda: job.steps() >= 20 or job.ended())
    ask("scancel", "--signal=USR1", "--batch", job.id)

    def restarted_while_told_so_again() -> bool:
        """The end of a process is no time to die of another signal."""
        subprocess.run(["scancel", "--quiet", "--signal=USR1", f"{job.id}.0"], check=False)
        return job.facts()["Restarts"] == "1" or job.ended()

    job.wait(restarted_while_told_so_again)
    stopped_at = job.steps()
    assert 20 <= stopped_at < STEPS, job.text()
    job.wait(job.ended)
    job.assert_completed(restarts=1)
    assert f"stopped after step {stopped_at} " in job.text() and "resuming" in job.text()
    assert_same_run(job.run, undisturbed.run)
    assert_nothing_left(job)


def test_a_killed_rank_costs_the_steps_since_the_checkpoint(submit, words, undisturbed):
    every_50 = [word for word in LONG if not word.startswith("checkpoint.every")] + ["checkpoint.every=50"]
    job = submit(words(*every_50), *TWO_RANKS)
    job.wait(lambda: last_saved(job.run) or job.ended())
    rank = f"-u [t]rain.py .*run.dir={job.run}"  # which is no part of this command's own words
    ask("srun", f"--jobid={job.id}", "--overlap", "pkill", "-KILL", "--newest", "--full", "--", rank)
    job.wait(job.ended)
    job.assert_completed(restarts=1)
    assert re.search(r"exit code \d+, after a checkpoint at step \d*[05]0; back to the queue", job.text()), job.text()
    assert_same_run(job.run, undisturbed.run)
    assert_nothing_left(job)


def test_two_nodes(submit, words, two_nodes, undisturbed):
    job = submit(words(*LONG), "--nodes=2", "--ntasks-per-node=1")
    job.wait(lambda: job.steps() >= 20 or job.ended())
    ask("scancel", "--signal=USR1", "--batch", job.id)
    job.wait(job.ended)
    job.assert_completed(restarts=1)
    assert "2 x 1 ranks" in job.text()
    assert_same_run(job.run, undisturbed.run)
    assert_nothing_left(job)


def test_a_cancelled_job_has_saved_and_stays_cancelled(submit, words):
    job = submit(words(*LONG), *TWO_RANKS)
    job.wait(lambda: job.steps() >= 20 or job.ended())
    ask("scancel", job.id)
    job.wait(lambda: "EndTime" in job.facts() and not ask("squeue", "--noheader", "--jobs", job.id).strip())
    facts = job.facts()
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0"), job.text()
    assert f"stopped after step {job.steps()} " in job.text()


def test_a_failed_run_is_not_requeued(submit, words):
    job = submit(words(*LONG, "train.lrr=1"), *TWO_RANKS)
    job.wait(job.ended)
    facts = job.facts()
    assert (facts["JobState"], facts["Restarts"], facts["ExitCode"]) == ("FAILED", "0", "2:0"), job.text()
    assert "train.lrr" in job.text()


def test_a_run_that_stops_where_it_was_told_to_is_neither_failed_nor_requeued(submit, words):
    job = submit(words(*LONG, "train.stop_after=3"), *TWO_RANKS)
    job.wait(job.ended)
    assert (job.facts()["JobState"], job.facts()["Restarts"], job.steps()) == ("COMPLETED", "0", 3), job.text()
