"""Runs on this machine, several at once: logs, outcomes, GPUs and signals, with a stand-in of train.py."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from dlr_pretrain.launch import local
from dlr_pretrain.launch.grid import read_grid
from dlr_pretrain.launch.queue import last_job
from dlr_pretrain.launch.runs import PlannedRun, load_runs
from dlr_pretrain.launch.state import look
from dlr_pretrain.util.errors import Stopped, UserError

STAND_IN = """
import os, signal, sys, time
words = dict(word.split("=", 1) for word in sys.argv[1:])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
with open(words["run.root"] + "/order", "a") as file:
    file.write(words["seed"] + " " + os.environ.get("CUDA_VISIBLE_DEVICES", "none") + "\\n")
deadline = time.monotonic() + float(words["train.lr"]) * 60
while time.monotonic() < deadline:
    time.sleep(0.01)
print("error: step 3: loss nan, gradient norm nan: not finite")
print("a line that is cut", end="", flush=True)
sys.exit(3)
"""


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Four runs for a stand-in of train.py that lasts 0.06 s or, from rates of 0.1 on, seconds, and diverges."""
    (tmp_path / "train.py").write_text(STAND_IN)
    monkeypatch.setattr(local, "TRAIN", tmp_path / "train.py")

    def of(lr: float) -> list[PlannedRun]:
        grid = read_grid(["pair=cola", f"lr={lr}", "seeds=1,2,3,4", f"run.root={tmp_path}", "scale=tiny"])
        return load_runs([grid.line(*cell) for cell in grid.cells()], 1)

    return of


def test_runs_leave_logs_and_outcomes(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    ended = []
    for _ in range(2):  # the log of the second start is that of the second job
        local.train(runs(0.001), 2, lambda run, seconds: ended.append(run.cfg.seed))
    assert sorted(ended) == [1, 1, 2, 2, 3, 3, 4, 4]
    for run in runs(0.001):
        status = look(run, {})
        assert status.state == "failed" and status.reason == "step 3: loss nan, gradient norm nan: not finite"
        text = (run.dir / "local.log").read_text()
        assert text.count("ended with exit code 3") == text.count(", start 1: ") == 2
        assert last_job(run.dir)["job"].startswith("0_")
    assert {line.split()[1] for line in (tmp_path / "order").read_text().splitlines()} == {"6", "7"}


def test_what_still_runs_ends_with_an_error(runs, tmp_path):
    """Nobody would hear of it any more, and its GPU would be another's."""
    first, second, *_ = [*runs(0.001)[:1], *runs(1.0)[1:]]

    def ended(run: PlannedRun, _seconds: float) -> None:
        raise UserError("one validation sequence has no halves")

    with pytest.raises(UserError, match="no halves"):
        local.train([first, second], 2, ended)
    assert not os.popen(f"pgrep -f '[r]un.root={tmp_path}'").read()


def test_a_signal_ends_what_runs_and_starts_nothing_more(runs, tmp_path):
    def ask() -> None:
        while not (tmp_path / "order").exists() or len((tmp_path / "order").read_text().splitlines()) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    before, ended = signal.getsignal(signal.SIGTERM), []
    with pytest.raises(Stopped, match="The same command continues"):
        local.train(runs(1.0), 2, lambda run, _: ended.append(look(run, {}).state))
    assert ended == ["stopped", "stopped"] and signal.getsignal(signal.SIGTERM) is before
    assert len((tmp_path / "order").read_text().splitlines()) == 2
