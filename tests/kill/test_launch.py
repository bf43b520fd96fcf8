"""scripts/launch.py: signals reach the workers, which take their time to save, and their exit code comes out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from dlr_pretrain.util.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_LOST, EXIT_STOPPED
from dlr_pretrain.util.history import read_metrics
from tests.conftest import ROOT
from tests.kill.test_kill import wait_for_step

pytestmark = pytest.mark.slow
WORKER = """
import os, signal, sys, time
def save(number, frame):
    time.sleep(float(sys.argv[2]))
    open(f"{sys.argv[1]}/saved{os.environ['RANK']}", "w").close()
    signal.signal(number, signal.SIG_IGN)
    sys.exit(int(sys.argv[3]))
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, save)
open(f"{sys.argv[1]}/ready{os.environ['RANK']}", "w").close()
time.sleep(6000)
"""


def launch(*words: str) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "scripts" / "launch.py"), "--nproc-per-node", "2", *words]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
    )


def launch_stub(folder, seconds: float = 0, code: int = 75) -> subprocess.Popen:
    """Two workers that save for ``seconds``, once they are ready, and end with ``code``."""
    (folder / "worker.py").write_text(WORKER)
    process = launch(str(folder / "worker.py"), str(folder), str(seconds), str(code))
    while len(list(folder.glob("ready*"))) < 2 and process.poll() is None:
        time.sleep(0.05)
    return process


@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, *(pytest.param(n, marks=pytest.mark.full) for n in (signal.SIGTERM, signal.SIGHUP))]
)
def test_a_signal_goes_on_to_all_workers_and_their_code_comes_out(tmp_path, number):
    process = launch_stub(tmp_path, seconds=1)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == EXIT_STOPPED, err
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1"}
    assert "Traceback" not in err


@pytest.mark.full
def test_a_signal_that_is_repeated_to_the_very_end_changes_no_exit_code(tmp_path):
    process = launch_stub(tmp_path, code=EXIT_FAILED)
    while process.poll() is None:
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.001)
    assert process.returncode == EXIT_FAILED, process.communicate()[1]


@pytest.mark.full
def test_a_killed_worker_gives_the_code_of_its_signal_and_the_others_end(tmp_path):
    process = launch_stub(tmp_path)
    workers = [int(pid) for pid in os.popen(f"pgrep -P {process.pid}").read().split()]
    os.kill(workers[1], signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == 128 + signal.SIGKILL
    assert "Signal 9 (SIGKILL) received" in err
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)


@pytest.mark.full
def test_restarts_by_torchrun_are_refused():
    _, err = (process := launch("--max-restarts", "2", "train.py")).communicate()
    assert process.returncode == EXIT_CONFIG and "--max-restarts: a run that has stopped would be started again" in err


def test_codes_of_workers():
    sys.path.insert(0, str(ROOT / "scripts"))
    from launch import exit_code

    assert [exit_code(code, {15}) for code in (0, 3, 75, -15, -9)] == [0, 3, 75, EXIT_STOPPED, 137]


@pytest.mark.full
def test_a_run_is_refused_and_stopped_under_its_own_codes(words, tmp_path):
    run = words(f"run.dir={tmp_path}/run", "train.steps=100000", "checkpoint.every=100000", "eval.every=100000")
    refused = launch(str(ROOT / "train.py"), *run, "train.lrr=1")
    _, err = refused.communicate()
    assert refused.returncode == EXIT_CONFIG and "Did you mean train.lr?" in err and "Traceback" not in err

    stopped = launch(str(ROOT / "train.py"), *run)
    wait_for_step(tmp_path / "run", 5, stopped)
    stopped.send_signal(signal.SIGUSR1)
    _, err = stopped.communicate()
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert stopped.returncode == EXIT_STOPPED, err
    assert f"stopped after step {last} of 100000 (asked to stop); saved" in err and "Traceback" not in err
    assert [d.name for d in (tmp_path / "run" / "checkpoints").glob("step_*")] == [f"step_{last:08d}"]


STUCK = f"""
import subprocess, sys, time
sys.path.insert(0, {str(ROOT / "scripts")!r})
import launch
import torch.distributed.run
def run(given):
    subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(4)"])
    time.sleep(6000)
torch.distributed.run.run = run
launch.GRACE = 0.5
sys.argv[1:] = ["worker.py"]
sys.exit(launch.main())
"""


@pytest.mark.full
def test_it_ends_with_its_workers_where_torchrun_waits_for_a_node_that_is_gone():
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True)
    assert done.returncode == EXIT_LOST, done.stderr
    assert "torchrun has not ended" in done.stderr
