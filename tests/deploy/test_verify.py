"""The process that reads an export ends with the one that asks, and a request to stop that it gets is followed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dlr_pretrain.deploy import verify
from dlr_pretrain.util.errors import Stopped, UserError

SECONDS = 300.0  # that a hang would take longer than


@pytest.mark.parametrize(("number", "expected", "message"), [
    (signal.SIGUSR1, Stopped, r"stopped before .*folded was verified .*The same command continues"),
    (signal.SIGTERM, Stopped, r"stopped before"),
    (signal.SIGSEGV, UserError, r"transformers does not load it: exit code -11"),
])  # fmt: skip
def test_a_signal_to_the_reader_is_followed(tmp_path, monkeypatch, number, expected, message):
    """SLURM sends it to every process of a step; the run would otherwise end as one whose export is wrong."""
    reader = tmp_path / "reader.py"
    reader.write_text(f"import os; os.kill(os.getpid(), {int(number)})")
    monkeypatch.setattr(verify, "READER", reader)
    with pytest.raises(UserError, match=message) as raised:
        verify._read_elsewhere(tmp_path / "folded", torch.zeros(1, 2), None, tmp_path)
    assert type(raised.value) is expected


def test_a_reader_that_the_kernel_kills_for_its_memory_leaves_a_run_unverified(tmp_path, monkeypatch):
    reader = tmp_path / "reader.py"
    reader.write_text(f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})")
    monkeypatch.setattr(verify, "READER", reader)
    assert verify._read_elsewhere(tmp_path / "folded", torch.zeros(1, 2), None, tmp_path) is None


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_a_reader_ends_with_the_process_that_asks(tmp_path):
    os.mkfifo(question := tmp_path / "question.pt")  # nobody writes it: the reader waits
    words = [sys.executable, str(verify.READER), "folder", str(question), "answer"]
    code = f"import subprocess; p = subprocess.Popen({words}); print(p.pid, flush=True); p.wait()"
    asks = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    reader, deadline = int(asks.stdout.readline()), time.monotonic() + SECONDS
    try:
        while "libtorch" not in Path(f"/proc/{reader}/maps").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        asks.kill()
        while os.path.exists(f"/proc/{reader}") and state(reader) != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        asks.kill()
        if os.path.exists(f"/proc/{reader}"):
            os.kill(reader, signal.SIGKILL)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
