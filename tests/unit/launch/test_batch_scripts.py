"""The batch scripts without a scheduler: what they refuse, and what they do while SLURM does not answer."""

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
        does = {
            "srun": srun,
            "squeue": squeue,
            # it answers last: the script goes on with the answer, and the next one may be asked for at once
            "my_python": f"step=$(head -n 1 {answers}); sed -i 1d {answers}; echo $step {tmp_path}/run",
        }
        for name, what in (dict.fromkeys(("sleep", "scancel", "scontrol"), ":") | does).items():
            stub = tmp_path / name
            stub.write_text(f'#!/bin/bash\n[[ $0 == *python ]] || echo ${{0##*/}} "$@" >> {asked}\n{what}\n')
            stub.chmod(0o755)
        set_elsewhere = ("SLURM", "TORCHINDUCTOR", "TRITON")  # also in this process, by tests before this one
        outside = {name: value for name, value in os.environ.items() if not name.startswith(set_elsewhere)}
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
    """Wherever its log goes: here it is deleted before each start."""
    starts = {"0": ("500 500", "exit 4"), "1": ("500 503", "exit 75")}
    for start in (*history, "0"):
        (tmp_path / "log").unlink(missing_ok=True)
        steps, srun = starts[start]
        _, asked, said = batch("train.sbatch", "scale=tiny", steps=steps, srun=srun, **JOB)
    assert (asked[-1] == "scontrol requeue 5") == again
    assert ("three times in a row" in said) != again
    (tmp_path / "log").unlink()
    _, asked, _ = batch("train.sbatch", "scale=tiny", steps="500 500", srun="exit 75", **JOB | {"SLURM_JOB_ID": "6"})
    assert asked[-1] == "scontrol requeue 6", "another job has its own count"


def test_a_job_whose_restarts_cannot_be_counted_is_not_requeued(batch, tmp_path):
    (tmp_path / "run").write_text("a file")
    _, asked, said = batch("train.sbatch", "scale=tiny", steps="500 500", srun="exit 75", **JOB)
    assert not any(line.startswith("scontrol requeue") for line in asked) and "run/.requeued cannot be written" in said


@pytest.mark.parametrize("mode", [0o700, 0o770, 0o702])
def test_a_cache_that_others_can_write_to_is_not_used(batch, tmp_path, mode):
    cache = tmp_path / f"dlr_pretrain_compiled.{os.getuid()}"
    cache.mkdir()
    cache.chmod(mode)
    node = {"SLURM_CPUS_ON_NODE": "1", "RANKS_PER_NODE": "1", "TMPDIR": str(tmp_path), "PYTHON": "env"}
    _, _, said = batch("node.sh", "scale=1b", **JOB | node | {"PYTHON": str(shows(tmp_path))})
    assert (f"cache {cache}/inductor" in said) == (mode == 0o700), said


@pytest.mark.parametrize("age", ["before the node failed", "since"])
def test_code_that_a_power_failure_has_emptied_is_set_aside(batch, tmp_path, age):
    cache = tmp_path / f"dlr_pretrain_compiled.{os.getuid()}"
    cache.mkdir(mode=0o700)
    empty, lock = cache / "kernel.so", cache / "a.lock"
    for path in (empty, lock):
        path.touch()
        os.utime(path, (1, 1) if age != "since" or path is lock else None)
    node = {"SLURM_CPUS_ON_NODE": "1", "RANKS_PER_NODE": "1", "TMPDIR": str(tmp_path)}
    _, _, said = batch("node.sh", "scale=1b", **JOB | node | {"PYTHON": str(shows(tmp_path))})
    assert (f"note: {empty} is empty since this node has failed" in said) == (age != "since"), said
    assert empty.exists() == (age == "since") and f"cache {cache}/inductor" in said
    assert f"if compiled code is at fault, delete {cache}" in said


def shows(folder: Path) -> Path:
    """An interpreter that prints where compiled code is cached, and fails."""
    path = folder / "shows"
    path.write_text("#!/bin/bash\necho cache $TORCHINDUCTOR_CACHE_DIR\nexit 1\n")
    path.chmod(0o755)
    return path


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
