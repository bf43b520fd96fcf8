"""A rank that hangs or dies: the others end with its name, the stacks are on disk, and the next start goes on."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dlr_pretrain.train.guard import Guard
from dlr_pretrain.util.errors import EXIT_LOST
from dlr_pretrain.util.history import read_metrics
from tests.conftest import forked
from tests.kill.test_kill import start, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_export")]  # one runs by default, the others are full
SECONDS = 3
LIMIT = ("eval.every=100", f"run.timeout_minutes={SECONDS / 60}")
RUN = (*LIMIT, "checkpoint.every=5")
LAST_SEEN = rf"rank {{}} on host {re.escape(socket.gethostname())} was last seen at step {{}}"


def steps(folder: Path) -> list[int]:
    return [record["step"] for record in read_metrics(folder / "metrics.jsonl")]


def ranks_of(process: subprocess.Popen) -> dict[int, int]:
    """The processes of torchrun's ranks."""
    found = {}
    for pid in os.popen(f"pgrep -P {process.pid}").read().split():
        variables = dict(v.split("=", 1) for v in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in v)
        found[int(variables["RANK"])] = int(pid)
    return found


def break_rank_1(monkeypatch, at_step: int, act) -> None:
    """Let rank 1 ``act`` instead of taking the batch of a step."""
    real, steps = Guard.next_batch, itertools.count(1)

    def next_batch(self, loader):
        if self.ranks.rank == 1 and next(steps) == at_step:
            act()
        return real(self, loader)

    monkeypatch.setattr(Guard, "next_batch", next_batch)


@pytest.mark.full
def test_a_suspended_process_is_named_by_the_others_and_the_next_start_goes_on(words, tmp_path):
    folder = tmp_path / "run"
    given = words(f"run.dir={folder}", *LIMIT, "checkpoint.every=30", "train.steps=100000")
    process = start(given, ranks=2)
    wait_for_step(folder, 32, process)  # far from the next save, in which ranks may wait long for rank 0
    ranks = ranks_of(process)
    os.kill(ranks[0], signal.SIGSTOP)  # the one that writes, and speaks
    with suppress(FileNotFoundError):  # until the other one has ended itself
        while "State:\tZ" not in Path(f"/proc/{ranks[1]}/status").read_text():
            time.sleep(0.1)
    os.kill(ranks[0], signal.SIGKILL)  # which torchrun does half a minute later
    _, err = process.communicate()
    assert process.returncode != 0
    assert re.search(
        rf"error: {LAST_SEEN.format(0, '[0-9]+')}; the others wait at \d+ \(no step for \d+ s\)\. ", err
    ), err
    assert f"exitcode  : {EXIT_LOST} " in err
    stacks = (folder / "stacks" / "rank_1.txt").read_text()
    collective = r"in (_engine_run_backward|all_reduce|all_gather_object|broadcast_object_list)\b"
    assert "no progress for" in stacks and re.search(collective, stacks), stacks
    before = steps(folder)[-1]
    again = start([*given, f"train.stop_after={before + 10}"], ranks=2)
    again.communicate()
    assert steps(folder) == list(range(1, before + 11))


def test_a_rank_that_hangs_is_named_with_the_place(words, tmp_path, monkeypatch):
    given = words(f"run.dir={tmp_path}/run", *RUN)
    with monkeypatch.context() as broken:
        break_rank_1(broken, at_step=8, act=lambda: time.sleep(600))
        with pytest.raises(AssertionError) as ended:
            forked(given, ranks=2)
    place = r", in train/loop\.py:\d+ \(fit\)"
    message = rf"{LAST_SEEN.format(1, 7)}{place}; the others wait at 8 \(no step for \d+ s\)\. "
    assert len(re.findall(message, str(ended.value))) == 1, ended.value  # one rank speaks
    for rank in (0, 1):
        assert "no progress for" in (tmp_path / "run" / "stacks" / f"rank_{rank}.txt").read_text()
    assert "in next_batch" in (tmp_path / "run" / "stacks" / "rank_1.txt").read_text()
    forked(given, ranks=2)
    assert steps(tmp_path / "run") == list(range(1, 21))


@pytest.mark.full
@pytest.mark.parametrize("step", [1, 8])
def test_a_rank_that_dies_is_named_by_the_others(words, tmp_path, monkeypatch, step):
    given = words(f"run.dir={tmp_path}/run", *RUN)
    break_rank_1(monkeypatch, at_step=step, act=lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(AssertionError) as ended:
        forked(given, ranks=2)
    message = rf"RankLost: {LAST_SEEN.format(1, '[0-7]')}; the others wait at {step} \(.+\)\. "
    assert re.search(message, str(ended.value)), str(ended.value)[-2000:]
    assert "RuntimeError" in (tmp_path / "run" / "stacks" / "rank_0.txt").read_text()


@pytest.mark.full
def test_a_long_wait_for_rank_0_is_no_hang(words, tmp_path, monkeypatch):
    """Its saves and its fold take longer than a step may."""
    from dlr_pretrain.train import run

    real = run.finish

    def slow(*given, **named):
        time.sleep(1.5 * SECONDS)
        return real(*given, **named)

    monkeypatch.setattr(run, "finish", slow)
    forked(words(f"run.dir={tmp_path}/run", *RUN), ranks=2)
    assert steps(tmp_path / "run") == list(range(1, 21))
    assert not (tmp_path / "run" / "stacks").exists()
