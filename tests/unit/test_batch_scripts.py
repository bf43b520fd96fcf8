"""The batch scripts without a scheduler: what they refuse, and what they do while SLURM does not answer."""

from __future__ import annotations

import os
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.conftest import ROOT

JOB = {"SLURM_JOB_ID": "5", "SLURMD_NODENAME": "localhost", "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "1"}


@pytest.fixture
def batch(tmp_path):
    """Runs a batch script where each command of SLURM does what it is given here, and waiting takes no time."""

    def run(
        script: str, *words: str, commands: dict[str, str] | None = None, log: Path | None = None, **variables: str
    ):
        for name, does in ({"sleep": ":", "scancel": ":"} | (commands or {})).items():
            stub = tmp_path / name
            stub.write_text(f'#!/bin/bash\necho {name} "$@" >> {tmp_path}/asked\n{does}\n')
            stub.chmod(0o755)
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        command = ["bash", f"slurm/{script}", *words]
        with open(log, "a") if log else nullcontext(subprocess.PIPE) as out:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=outside | path | variables,
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
            )
        asked = tmp_path / "asked"
        return done, asked.read_text().splitlines() if asked.exists() else []

    return run


def fails(tmp_path: Path, times: int, then: str) -> str:
    """A command that does not answer so many times."""
    return f"echo >> {tmp_path}/calls; [[ $(wc -l < {tmp_path}/calls) -gt {times} ]] || exit 1; {then}"


def test_a_saved_run_goes_back_to_the_queue_though_the_scheduler_is_slow_to_answer(batch, tmp_path):
    commands = {"srun": "exit 75", "squeue": fails(tmp_path, 2, "echo RUNNING"), "scontrol": ":"}
    done, asked = batch("train.sbatch", "scale=tiny", commands=commands, **JOB)
    assert [line.split()[0] for line in asked] == ["srun", "squeue", "sleep", "squeue", "sleep", "squeue", "scontrol"]
    assert asked[-1] == "scontrol requeue 5" and done.returncode == 75


@pytest.mark.parametrize("code", [1, 4, 134, 137])
@pytest.mark.parametrize(("steps", "again"), [("0 500", True), ("500 1000", True), ("500 500", False), ("0 0", False)])
def test_a_crash_returns_to_the_queue_where_its_start_has_saved(batch, tmp_path, code, steps, again):
    done, asked = crashed(batch, tmp_path, code, steps)
    assert done.returncode == code and (asked[-1] == "scontrol requeue 5") is again
    assert (f"exit code {code}, after a checkpoint at step {steps.split()[1]}; back to" in done.stdout) is again


@pytest.mark.parametrize(("history", "again"), [("", 1), ("0", 1), ("00", 0), ("0010", 1), ("1000", 0)])
def test_a_job_that_is_stopped_without_a_checkpoint_comes_back_twice_in_a_row(batch, tmp_path, history, again):
    log, before = tmp_path / "log", history.count("0")
    lines = {"0": "stopped without a checkpoint", "1": "saved"}
    log.write_text("".join(f"job 5: {lines[start]}; back to the queue\nstep 7\n" for start in history))
    done, asked = crashed(batch, tmp_path, 75, "500 500", log=log)
    assert done.returncode == 75 and (asked[-1] == "scontrol requeue 5") == again
    assert log.read_text().count("stopped without a checkpoint") == before + 1
    done, asked = crashed(batch, tmp_path, 75, "500 600", log=log)
    assert asked[-1] == "scontrol requeue 5" and "job 5: saved; back to the queue" in log.read_text()


def test_what_a_job_says_stands_on_lines_of_its_own(batch, tmp_path):
    """A kill may cut off what the ranks were writing; the counts of the test above and submit.py read whole lines."""
    log = tmp_path / "log"
    log.write_text("step 7  lo")
    done, _ = batch("train.sbatch", "scale=tiny", commands={"srun": "printf 'step 9  lo'; exit 3"}, log=log, **JOB)
    lines = ["step 7  lo", "job 5, start 1: 1 x 1 ranks: scale=tiny", "step 9  lo", "job 5: ended with exit code 3"]
    assert done.returncode == 3 and log.read_text().splitlines() == lines


@pytest.mark.parametrize("code", [0, 2, 3, 130])
def test_what_has_finished_or_said_why_it_ended_is_not_requeued(batch, tmp_path, code):
    done, asked = crashed(batch, tmp_path, code, "0 500")
    assert done.returncode == code and not any(line.startswith("scontrol") for line in asked)


def crashed(batch, tmp_path: Path, code: int, steps: str, log: Path | None = None):
    """A job that ends with ``code``; its run is asked for the step last saved before it starts and after its end."""
    answers = tmp_path / "answers"
    answers.write_text(steps.replace(" ", "\n") + "\n")
    python = f"head -n 1 {answers}; sed -i 1d {answers}"
    commands = {"srun": f"exit {code}", "squeue": "echo RUNNING", "scontrol": ":", "my_python": python}
    return batch("train.sbatch", "scale=tiny", commands=commands, log=log, PYTHON="my_python", **JOB)


@pytest.mark.parametrize("squeue", ["exit 1", "echo CANCELLED", ":"])
def test_a_job_of_which_it_is_not_known_that_it_runs_is_not_requeued(batch, squeue):
    done, asked = batch("train.sbatch", "scale=tiny", commands={"srun": "exit 75", "squeue": squeue}, **JOB)
    assert done.returncode == 75 and not any(line.startswith("scontrol") for line in asked)


@pytest.mark.parametrize(
    ("script", "words", "variables"),
    [("train.sbatch", ["scale=1b"], {}), ("train.sbatch", [], JOB), ("array.sbatch", ["my.runs"], JOB),
     ("array.sbatch", [], JOB | {"SLURM_ARRAY_TASK_ID": "1"})],
)  # fmt: skip
def test_a_start_that_cannot_be_meant_is_refused_with_the_right_one(batch, script, words, variables):
    done, asked = batch(script, *words, **variables)
    assert done.returncode == 2 and not asked
    assert done.stderr.startswith("error: this is a") and f"slurm/{script}" in done.stderr
