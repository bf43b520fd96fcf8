"""scripts/launch.py: signals reach the workers, which need time to save, and it returns their exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dlr_pretrain.util.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_LOST, EXIT_STOPPED
from scripts import launch as launcher
from tests.conftest import ROOT
from tests.kill.test_kill import children

pytestmark = pytest.mark.slow
WORKER = """
import os, signal, sys, time
def save(number, frame):
    signal.signal(number, signal.SIG_IGN)
    time.sleep(1)
    open(f"{sys.argv[1]}/saved{os.environ['RANK']}", "w").close()
    sys.exit(int(sys.argv[2]))
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, save)
open(f"{sys.argv[1]}/ready{os.environ['RANK']}", "w").close()
parent = os.getppid()
while os.getppid() == parent:
    time.sleep(0.1)
"""


def launch(*words: str) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "scripts" / "launch.py"), "--nproc-per-node", "2", *words]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
    )


@contextmanager
def launch_workers(folder, code: int = EXIT_STOPPED) -> Iterator[subprocess.Popen]:
    """Two workers that are ready, and end with ``code`` when they have saved, or with their parent."""
    (folder / "worker.py").write_text(WORKER)
    with launch(str(folder / "worker.py"), str(folder), str(code)) as process:
        try:
            while len(list(folder.glob("ready*"))) < 2 and process.poll() is None:
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "code", "repeated"), [
    (signal.SIGUSR1, EXIT_STOPPED, False),
    *(pytest.param(n, EXIT_STOPPED, False, marks=pytest.mark.full) for n in (signal.SIGTERM, signal.SIGHUP)),
    pytest.param(signal.SIGUSR1, EXIT_FAILED, True, marks=pytest.mark.full),  # to the very end
])  # fmt: skip
def test_a_signal_reaches_all_workers_and_their_code_comes_out(tmp_path, number, code, repeated):
    with launch_workers(tmp_path, code) as process:
        process.send_signal(number)
        while repeated and process.poll() is None:
            process.send_signal(number)
            time.sleep(0.001)
        _, err = process.communicate(timeout=600)
    assert process.returncode == code, err
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1"}
    assert repeated or "Traceback" not in err


@pytest.mark.full
def test_a_killed_worker_gives_the_code_of_its_signal(tmp_path):
    with launch_workers(tmp_path) as process:
        workers = children(process)
        os.kill(workers[1], signal.SIGKILL)
        _, err = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGKILL
    assert "Signal 9 (SIGKILL) received" in err
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)


def test_codes_of_workers_and_restarts_by_torchrun(monkeypatch, capsys):
    assert [launcher.exit_code(code, {15}) for code in (0, 3, 75, -15, -9)] == [0, 3, 75, EXIT_STOPPED, 137]
    monkeypatch.setattr(sys, "argv", ["launch.py", "--max-restarts", "2", "train.py"])
    assert launcher.launch(set()) == EXIT_CONFIG
    assert "--max-restarts: a run that has stopped would be started again" in capsys.readouterr().err


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
def test_the_launcher_ends_with_its_workers_if_a_node_is_lost():
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=600)
    assert done.returncode == EXIT_LOST, done.stderr
    assert "torchrun has not ended" in done.stderr
