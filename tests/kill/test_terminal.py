"""A terminal that closes asks the run to stop, and takes away what it writes to."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from contextlib import suppress

import pytest

from dlr_pretrain.util.errors import EXIT_STOPPED
from dlr_pretrain.util.history import read_metrics
from tests.conftest import ROOT

LONG = ("train.steps=100000", "checkpoint.every=100000", "eval.every=100000")


def take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup


@pytest.mark.full
def test_a_run_whose_terminal_closes_saves_and_says_so_by_its_code(words, tmp_path):
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *words(f"run.dir={tmp_path}/run", *LONG)],
        stdin=its, stdout=its, stderr=its, start_new_session=True, preexec_fn=take_terminal,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    os.close(its)
    shown = b""
    with suppress(OSError):  # where it ends before
        while b"step      5/100000" not in shown:
            shown += os.read(ours, 1 << 16)
    os.close(ours)
    assert process.wait() == EXIT_STOPPED, shown.decode()
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert [d.name for d in (tmp_path / "run" / "checkpoints").glob("step_*")] == [f"step_{last:08d}"]
