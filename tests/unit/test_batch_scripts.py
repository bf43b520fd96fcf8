"""The batch scripts without a scheduler: what they refuse, and what they do while SLURM does not answer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

JOB = {"SLURM_JOB_ID": "5", "SLURMD_NODENAME": "localhost", "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "1"}


@pytest.fixture
def batch(tmp_path):
    """Runs a batch script where each command of SLURM does what it is given here, and waiting takes no time.

    Its run has saved the first of ``steps`` when the job starts, and the second when it ends. Returns the exit code,
    what the commands were asked, and the job's log, which is appended to over calls.
    """

    def run(
        script: str, *words: str, steps: str = "0 0", srun: str = "", squeue: str = "echo RUNNING", **variables: str
    ):
        answers, asked, log = (tmp_path / name for name in ("answers", "asked", "log"))
        answers.write_text(steps.replace(" ", "\n") + "\n")
        asked.write_text("")
        does = {"srun": srun, "squeue": squeue, "my_python": f"head -n 1 {answers}; sed -i 1d {answers}"}
        for name, what in (dict.fromkeys(("sleep", "scancel", "scontrol"), ":") | does).items():
            stub = tmp_path / name
            stub.write_text(f'#!/bin/bash\n[[ $0 == *python ]] || echo ${{0##*/}} "$@" >> {asked}\n{what}\n')
            stub.chmod(0o755)
        outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "my_python"}
        with open(log, "a") as out:
            command = ["bash", f"slurm/{script}", *words]
            done = subprocess.run(command, cwd=ROOT, env=outside | own | variables, stdout=out, stderr=out)
        return done.returncode, asked.read_text().splitlines(), log.read_text()

    return run


@pytest.mark.parametrize(("code", "steps", "why"), [
    *((code, "0 500", "") for code in (0, 2, 3, 130)),  # finished, or said why it ended
    *((code, "500 1000", f"exit code {code}, after a checkpoint at step 1000") for code in (1, 4, 134, 137)),
    (1, "500 500", ""), (75, "0 500", "exit code 75, after a checkpoint at step 500"),
    *((code, "500 500", f"exit code {code}, without a checkpoint") for code in (4, 75, 137)),
])  # fmt: skip
def test_a_job_returns_to_the_queue_if_its_start_got_further(batch, code, steps, why):
    got, asked, said = batch("train.sbatch", "scale=tiny", steps=steps, srun=f"exit {code}", **JOB)
    assert got == code and (asked[-1] == "scontrol requeue 5") is bool(why)
    assert said.endswith(f"job 5: {why}; back to the queue\njob 5: ended with exit code {code}\n") is bool(why)


@pytest.mark.parametrize(("history", "again"), [("", 1), ("0", 1), ("00", 0), ("0010", 1), ("1000", 0)])
def test_a_job_stopped_without_a_checkpoint_comes_back_twice(batch, tmp_path, history, again):
    lines = {"0": "exit code 4, without a checkpoint", "1": "exit code 75, after a checkpoint at step 3"}
    cut_off = "".join(f"job 5: {lines[start]}; back to the queue\nstep 7  lo" for start in history)
    (tmp_path / "log").write_text(cut_off.replace("lojob", "lo\njob"))
    _, asked, said = batch("train.sbatch", "scale=tiny", steps="500 500", srun="exit 75", **JOB)
    assert (asked[-1] == "scontrol requeue 5") == again
    assert said.count(", without a checkpoint; back") == history.count("0") + again


def test_a_run_that_cannot_save_in_time_is_requeued(batch):
    slow = "kill -USR1 $PPID; exec tail -f /dev/null --pid=$PPID"
    code, asked, said = batch("train.sbatch", "scale=tiny", srun=slow, SLURM_JOB_END_TIME="9", **JOB)
    assert (code, asked[-1]) == (75, "scontrol requeue 5") and "job 5: exit code 75, without a checkpoint; back" in said


def test_a_saved_run_is_requeued_by_a_slow_scheduler(batch, tmp_path: Path):
    slow = f"echo >> {tmp_path}/calls; [[ $(wc -l < {tmp_path}/calls) -gt 2 ]] || exit 1; echo RUNNING"
    code, asked, _ = batch("train.sbatch", "scale=tiny", steps="0 5", srun="exit 75", squeue=slow, **JOB)
    assert [line.split()[0] for line in asked] == ["srun", "squeue", "sleep", "squeue", "sleep", "squeue", "scontrol"]
    assert asked[-1] == "scontrol requeue 5" and code == 75


@pytest.mark.parametrize("squeue", ["exit 1", "echo CANCELLED", ":"])
def test_a_job_not_known_to_run_is_not_requeued(batch, squeue):
    code, asked, _ = batch("train.sbatch", "scale=tiny", steps="0 5", srun="exit 75", squeue=squeue, **JOB)
    assert code == 75 and not any(line.startswith("scontrol") for line in asked)


@pytest.mark.parametrize(
    ("script", "words", "variables"),
    [("train.sbatch", ["scale=1b"], {}), ("train.sbatch", [], JOB), ("array.sbatch", ["my.runs"], JOB),
     ("array.sbatch", [], JOB | {"SLURM_ARRAY_TASK_ID": "1"})],
)  # fmt: skip
def test_a_start_that_cannot_be_meant_is_refused(batch, script, words, variables):
    code, asked, said = batch(script, *words, **variables)
    assert (code, asked) == (2, []) and said.startswith("error: this is a") and f"slurm/{script}" in said


def test_a_node_that_cannot_resolve_the_first_ends_the_job(batch, tmp_path):
    node = {
        "SLURM_CPUS_ON_NODE": "1",
        "RANKS_PER_NODE": "1",
        "RENDEZVOUS": "nowhere.invalid:20000",
        "TMPDIR": str(tmp_path),
    }
    code, _, said = batch("node.sh", "scale=1b", **JOB | node | {"SLURM_NNODES": "2"})
    assert code == 2 and said.startswith("error: ") and "cannot resolve nowhere.invalid, where the nodes meet" in said
