"""The seconds in which a process imports torch: it is nobody's orphan, and hears that it is to stop."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from dlr_pretrain.util.errors import EXIT_FAILED, EXIT_STOPPED
from tests.conftest import ROOT

WORKER = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from dlr_pretrain.util import process
process.prepare()
print("prepared", flush=True)
time.sleep(6000)
"""
AGENT = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
time.sleep(6000)
"""


@pytest.mark.full
def test_a_worker_whose_agent_is_killed_before_torch_is_there_ends_with_it():
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, WORKER],
        env=os.environ | {"TORCHELASTIC_RUN_ID": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    worker = int(agent.stdout.readline())
    agent.kill()
    agent.communicate()
    deadline = time.monotonic() + 300  # a worker that is left alone lives on
    while os.path.exists(f"/proc/{worker}"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


EARLY = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from dlr_pretrain.util import process
process.prepare()
os.kill(os.getpid(), signal.SIGUSR2)
assert "torch" not in sys.modules
from dlr_pretrain import cli
from dlr_pretrain.__main__ import train
sys.exit(cli.main(train))
"""


def test_a_signal_that_comes_before_torch_is_remembered(words, tmp_path):
    command = [sys.executable, "-c", EARLY, *words(f"run.dir={tmp_path}/run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == EXIT_STOPPED, done.stderr
    assert done.stderr == "stopped before the first step (asked to stop). The same command continues\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_ranks_that_cannot_meet_say_why(words, tmp_path):
    alone = {k: v for k, v in os.environ.items() if not k.startswith("MASTER_")} | {"RANK": "0", "WORLD_SIZE": "2"}
    command = [sys.executable, str(ROOT / "train.py"), *words(f"run.dir={tmp_path}/run")]
    done = subprocess.run(command, capture_output=True, text=True, env=alone)
    assert done.returncode == EXIT_FAILED, done.stderr
    assert "error: rank 0 of 2 cannot reach the other ranks: " in done.stderr and "MASTER_ADDR" in done.stderr
    assert "Traceback" not in done.stderr
