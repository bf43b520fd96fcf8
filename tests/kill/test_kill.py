"""A trainer that is killed or asked to stop, as often as it takes, ends where an undisturbed one does."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from dlr_pretrain.util.errors import EXIT_STOPPED
from dlr_pretrain.util.history import read_metrics
from tests.conftest import ROOT
from tests.kill import soak

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_export")]
STEPS = ("train.steps=60", "eval.every=20", "checkpoint.every=3", "dlr=on", "backbone=cola")


def start(words, ranks: int = 1) -> subprocess.Popen:
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    log = subprocess.PIPE
    return subprocess.Popen([*launch, str(ROOT / "train.py"), *words], stdout=log, stderr=log, text=True)


def wait_for_step(folder, step: int, process: subprocess.Popen) -> None:
    """Until the run has logged ``step`` (or ended)."""
    while process.poll() is None:
        records = read_metrics(folder / "metrics.jsonl")
        if records and records[-1]["step"] >= min(step, 60):
            return
        time.sleep(0.01)


def gone(processes: list[int], seconds: float = 300.0) -> bool:
    """Whether these processes, which run for longer if they are left alone, end within some minutes."""
    deadline = time.monotonic() + seconds
    while (left := any(os.path.exists(f"/proc/{pid}") for pid in processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not left


def assert_undisturbed(folder, whole) -> None:
    a, b = (load_file(f / "folded" / "model.safetensors") for f in (folder, whole))
    assert all(torch.equal(a[name], b[name]) for name in b)
    steps, losses = zip(*((r["step"], r["train/loss"]) for r in read_metrics(folder / "metrics.jsonl")), strict=True)
    assert steps == tuple(range(1, 61))
    assert losses == tuple(r["train/loss"] for r in read_metrics(whole / "metrics.jsonl"))


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.full) for n in (signal.SIGINT, signal.SIGUSR1))]
)
def test_a_signal_saves_and_leaves_with_its_exit_code(train, words, tmp_path, number):
    given = words(f"run.dir={tmp_path}/run", *STEPS[:2], *STEPS[3:], "checkpoint.every=1000")
    process = start(given)
    wait_for_step(tmp_path / "run", 5, process)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == EXIT_STOPPED, err
    assert "saved. The same command continues" in err and "Traceback" not in err
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert [d.name for d in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{last:08d}"]


def test_killed_at_random_instants(train, words, tmp_path):
    whole = train(tmp_path / "whole", *STEPS)
    rng, folder = random.Random(0), tmp_path / "run"
    given = words(f"run.dir={folder}", *STEPS)
    for kill in (2, 5):  # the last of them while the finished run is folded
        process = start(given)
        wait_for_step(folder, 12 * kill + rng.randint(1, 12), process)
        time.sleep(rng.random() * 0.05)
        process.kill()
        _, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, err
    process = start(given)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert_undisturbed(folder, whole)


@pytest.mark.full
def test_a_soak_of_kills(words, tmp_path):
    """Two ranks, killed in every way at every moment; ``make kill-soak`` has more of it."""
    given = words(*soak.LONG)
    assert soak.start(given, tmp_path / "whole").wait() == 0, (tmp_path / "whole.log").read_text()[-3000:]
    kills, seed = int(os.environ.get("DLR_KILLS", "20")), int(os.environ.get("DLR_KILL_SEED", "0"))
    for line in soak.soak(given, tmp_path, tmp_path / "whole", kills, seed):
        print(line, flush=True)


@pytest.mark.full
def test_workers_die_with_their_agent(words, tmp_path):
    process = start(words(f"run.dir={tmp_path}/run", *STEPS[1:], "train.steps=1000000"), ranks=2)
    wait_for_step(tmp_path / "run", 2, process)
    workers = [int(pid) for pid in os.popen(f"pgrep -P {process.pid}").read().split()]
    process.kill()
    process.communicate()
    assert workers and gone(workers)
