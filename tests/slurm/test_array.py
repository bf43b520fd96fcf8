"""A table of runs through a real scheduler, with everything that a shared cluster does to it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlr_pretrain.launch.queue import last_job, queue
from dlr_pretrain.launch.runs import PlannedRun, expand, load_runs, read_runs
from dlr_pretrain.launch.state import Status, look
from tests.conftest import ROOT, forked
from tests.slurm.conftest import ask, assert_same_run

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("no_export")]

STEPS = 200  # seconds of training, so that what happens to a run happens in the middle of it
LONG = (f"train.steps={STEPS}", "eval.every=100", "checkpoint.every=40", "backbone=cola")
TWO_RANKS = ("--", "--nodes=1", "--ntasks-per-node=2", "--mem=1G", "--time=10")


class Table:
    """A matrix of runs below one folder, and ``submit.py`` for it."""

    def __init__(self, folder: Path, words: list[str]):
        self.words = [*words, f"run.root={folder}/runs"]
        self.runs: list[PlannedRun] = load_runs(expand(self.words), 2)

    def submit(self, *options: str, code: int = 0) -> str:
        command = [sys.executable, str(ROOT / "slurm" / "submit.py"), *self.words, *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
        assert done.returncode == code, done.stderr
        return done.stdout

    def status(self, number: int) -> Status:
        return look(self.runs[number - 1], queue())

    def job(self, number: int) -> str:
        return last_job(self.runs[number - 1].dir)["job"]

    def restarts(self, number: int) -> int:
        words = ask("scontrol", "--oneliner", "show", "job", self.job(number)).split()
        return int(next(word for word in words if word.startswith("Restarts=")).partition("=")[2])

    def node(self, number: int) -> str:
        return ask("squeue", "--noheader", f"--jobs={self.job(number)}", "--format=%N").strip()

    def log(self, number: int) -> str:
        return Path(last_job(self.runs[number - 1].dir)["log"]).read_text()

    def wait(self, until, seconds: float = 900) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, self.submit("--status")
            time.sleep(0.2)

    def wait_for_step(self, number: int, step: int = 20) -> None:
        self.wait(lambda: self.status(number).step >= step or self.status(number).state in ("failed", "stopped"))
        assert self.status(number).state == "running", (self.status(number), self.log(number)[-3000:])

    def wait_for(self, *states: str) -> None:
        ends = {*states, "failed", "stopped"}
        self.wait(lambda: {look(run, queue()).state for run in self.runs} <= ends)
        assert {look(run, queue()).state for run in self.runs} <= set(states), self.submit("--status")

    def assert_undisturbed(self, folder: Path, ranks: int = 2) -> None:
        """Each run has every step once, and is what its words give with nobody in the way."""
        for run in self.runs:
            whole = folder / "whole" / str(run.number)
            words = [word for word in run.line.words if not word.startswith("run.root=")]
            forked([*words, f"run.dir={whole}"], ranks)
            assert_same_run(run.dir, whole)


@pytest.fixture
def table(tmp_path, words):
    """``table(*words)``; cancels what the test leaves in the queue."""
    tables = []

    def make(*overrides: str) -> Table:
        given = [word for word in words(*overrides) if not word.startswith("run.dir=")]
        tables.append(Table(tmp_path, given))
        return tables[-1]

    yield make
    for job in {last_job(run.dir)["job"].partition("_")[0] for t in tables for run in t.runs if last_job(run.dir)}:
        subprocess.run(["scancel", "--quiet", job], check=False)
    for t in tables:
        t.wait(lambda: not queue())


def test_six_runs_with_a_preemption_a_cancellation_and_a_lost_node(table, tmp_path, two_nodes):
    table = table(*LONG, "dlr=off,on", "seed=1,2,3")
    assert "Submitted 6" in table.submit("--limit", "3", *TWO_RANKS)

    table.wait_for_step(1)
    ask("scontrol", "requeue", table.job(1))
    table.wait_for_step(2)
    ask("scancel", table.job(2))
    table.wait(lambda: table.status(2).state not in ("running", "pending"))
    cancelled = table.status(2)
    assert (cancelled.state, 20 <= cancelled.step < STEPS) == ("stopped", True), table.log(2)
    assert "Nothing to submit" in table.submit(*TWO_RANKS)  # all others are in the queue, and that one was meant
    assert "Submitted 1 " in table.submit("--resubmit", *TWO_RANKS)
    assert "Nothing to submit" in table.submit("--resubmit", *TWO_RANKS)

    table.wait_for_step(4)
    node = table.node(4)
    ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    table.wait(lambda: table.restarts(4) == 1)
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], capture_output=True, check=False)

    table.wait_for("finished")
    assert table.restarts(1) >= 1 and "resuming" in table.log(1) and "resuming" in table.log(2)
    shown = table.submit("--status")
    assert "6 runs: 6 finished" in shown and shown.count(f"{STEPS}/{STEPS}") == 6
    assert max(map(len, shown.splitlines())) <= 80
    assert "Nothing to submit" in table.submit(*TWO_RANKS)
    table.assert_undisturbed(tmp_path)


def test_a_run_on_two_nodes_from_a_runs_file(table, tmp_path, two_nodes):
    table = table(*LONG, "dlr=on", "seed=7")
    path = tmp_path / "two.runs"
    table.submit("--write", str(path))
    table.words = [str(path)]
    assert [str(line) for line in read_runs(path)] == [str(table.runs[0].line)]
    table.submit("--", "--nodes=2", "--ntasks-per-node=1", "--mem=1G", "--time=10")
    table.wait_for_step(1)
    ask("scancel", "--signal=USR1", "--batch", table.job(1))
    table.wait_for("finished")
    assert table.restarts(1) == 1 and "2 x 1 ranks" in table.log(1)
    table.assert_undisturbed(tmp_path)


def test_a_failed_run_is_told_with_its_reason_and_resubmitted_on_demand(table):
    table = table("seed=1", "train.steps=20")
    table.words = [word.replace("device=cpu", "device=cuda") for word in table.words]  # passes on the login node
    table.submit(*TWO_RANKS)
    table.wait_for("failed")
    shown = table.submit("--status")
    assert "1 run: 1 failed" in shown and "device=cuda: torch finds no GPU here" in shown
    assert "ended with exit code 3" in table.log(1)
    assert "Nothing to submit" in table.submit(*TWO_RANKS)
    table.words = [word.replace("device=cuda", "device=cpu") for word in table.words]
    assert "Submitted 1 " in table.submit("--resubmit", *TWO_RANKS)
    table.wait_for("finished")


def test_a_wrong_table_is_refused_before_anything_is_queued(table, tmp_path):
    table = table("seed=1")
    before = ask("squeue", "--noheader")
    path = tmp_path / "wrong.runs"
    path.write_text("seed=1\nseed=2 train.lrr=1\n")
    table.words = [str(path), f"run.root={tmp_path}/runs"]
    table.submit(*TWO_RANKS, code=2)
    assert ask("squeue", "--noheader") == before and not (tmp_path / "runs").exists()
