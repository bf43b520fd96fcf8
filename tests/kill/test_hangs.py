"""A rank hangs or dies: the other ranks end with its name, the stacks are on disk, and the next start continues."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from dlr_pretrain.config.run_folder import read_record
from dlr_pretrain.train import checkpoint, run, saver
from dlr_pretrain.train.guard import Guard
from dlr_pretrain.util.files import read_metrics
from tests.conftest import forked

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_export")]
SECONDS = 3
RUN = ("eval.every=100", f"run.timeout_minutes={SECONDS / 60}", "checkpoint.every=5")
SEEN = rf"RankLost: rank 1 on host {re.escape(socket.gethostname())} was last seen at step "
SEEN_HERE = SEEN.removeprefix("RankLost: ") + r"7, in train/loop\.py:\d+ \(fit\)"
AWAY = r"[0-7], in [^;]*"


def steps(folder: Path) -> list[int]:
    return [record["step"] for record in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.parametrize(("how", "seen", "why"), [
    ("sleep", SEEN_HERE, r"no step for \d+ s"),
    pytest.param("SIGSTOP", SEEN.removeprefix("RankLost: ") + AWAY, r"no step for \d+ s", marks=pytest.mark.full),
    pytest.param("SIGKILL", SEEN + AWAY, ".+", marks=pytest.mark.full),
], ids=["sleeps", "is suspended", "dies"])  # fmt: skip
def test_a_hanging_rank_is_named(words, tmp_path, monkeypatch, how, seen, why):
    """Rank 1 hangs, with or without its thread, or dies, instead of taking the batch of step 8."""
    folder, real, batches = tmp_path / "run", Guard.next_batch, itertools.count(1)

    def next_batch(self, loader):
        if self.ranks.rank == 1 and next(batches) == 8:
            time.sleep(600) if how == "sleep" else os.kill(os.getpid(), signal.Signals[how])
        return real(self, loader)

    given = words(f"run.dir={folder}", *RUN)
    with monkeypatch.context() as broken:
        broken.setattr(Guard, "next_batch", next_batch)
        with pytest.raises(AssertionError) as ended:
            forked(given, ranks=2)
    assert len(re.findall(rf"{seen}; the others wait at 8 \({why}\)\. ", str(ended.value))) == 1, ended.value
    stacks = {path.stem: path.read_text() for path in (folder / "stacks").iterdir()}
    assert ("RuntimeError" if how == "SIGKILL" else "no progress for") in stacks["rank_0"]
    assert how != "sleep" or "in next_batch" in stacks["rank_1"]
    forked(given, ranks=2)
    assert steps(folder) == list(range(1, 21))


@pytest.mark.full
def test_a_long_wait_for_rank_0_is_not_a_hang(words, tmp_path, monkeypatch):
    """The fold takes longer than a step may."""
    real = run.finish

    def slow(*given, **named):
        time.sleep(1.5 * SECONDS)
        return real(*given, **named)

    monkeypatch.setattr(run, "finish", slow)
    forked(words(f"run.dir={tmp_path}/run", *RUN), ranks=2)
    assert steps(tmp_path / "run") == list(range(1, 21))
    assert not (tmp_path / "run" / "stacks").exists()


def test_a_save_that_never_returns_ends_the_run(words, tmp_path, monkeypatch):
    """It is told while training waits, ends with the code of a hang, and the manifest says so."""
    folder = tmp_path / "run"
    with monkeypatch.context() as broken:
        broken.setattr(checkpoint, "write_part", lambda *_: threading.Event().wait())
        broken.setattr(saver, "NOTE_SECONDS", 0.1)
        with pytest.raises(AssertionError) as ended:
            forked(words(f"run.dir={folder}", *RUN), ranks=1)
    said = str(ended.value)
    assert re.search(rf"note: the save to {folder}/checkpoints has not ended for \d+ s", said), said
    assert re.search(r"was last seen at step 10, in train/saver\.py:\d+ \(wait\) \(no step for \d+ s\)", said), said
    state = read_record(folder)["state"]
    assert state["name"] == "failed" and "in train/saver.py" in state["reason"]
    forked(words(f"run.dir={folder}", *RUN), ranks=1)
    assert steps(folder) == list(range(1, 21))
