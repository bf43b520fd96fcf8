"""A run that is killed or asked to stop, however often, ends like an undisturbed run.

Who is killed: one rank, the agent and all ranks, the agent alone (and the run started again at once), or all of them
some time after they were asked to stop. When: after a random time, inside a save, an evaluation, or the fold.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dlr_pretrain.util.errors import EXIT_STOPPED
from dlr_pretrain.util.files import read_metrics
from tests.conftest import ROOT
from tests.resume.test_resume import assert_same, final

pytestmark = pytest.mark.slow
STEPS = 120
RUN = (f"train.steps={STEPS}", "eval.every=20", "backbone=cola", "dlr=on")
KILLS, SEED = int(os.environ.get("DLR_KILLS", "20")), int(os.environ.get("DLR_KILL_SEED", "4"))
VICTIMS = ("one rank", "all", "agent alone", "asked to stop")
MOMENTS, WEIGHTS = ("any", "save", "evaluation", "fold"), (3, 4, 2, 1)


def start(words: list[str], ranks: int = 1, log=subprocess.PIPE) -> subprocess.Popen:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return subprocess.Popen(
        [sys.executable, *launch, str(ROOT / "train.py"), *words], stdout=log, stderr=log, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
    )  # fmt: skip


def children(process: subprocess.Popen) -> list[int]:
    return [int(pid) for pid in os.popen(f"pgrep -P {process.pid}").read().split()]


def last_step(folder: Path) -> int:
    """The last step that the run has logged, read from the end of the file, so that watching is cheap."""
    with suppress(OSError, ValueError, IndexError), open(folder / "metrics.jsonl", "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2000))
        return int(file.read().splitlines()[-1].split(b'"step": ')[1].split(b",")[0])
    return 0


def wait_until(reached: Callable[[], bool], process: subprocess.Popen) -> None:
    while process.poll() is None and not reached():
        time.sleep(0.0005)


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    wait_until(lambda: last_step(folder) >= step, process)


@pytest.mark.parametrize("name", ["TERM", *(pytest.param(n, marks=pytest.mark.full) for n in ("INT", "HUP", "USR1"))])
def test_a_signal_saves_and_gives_its_exit_code(words, tmp_path, name):
    process = start(words(f"run.dir={tmp_path}/run", *RUN[:2], "checkpoint.every=1000"))
    wait_for_step(tmp_path / "run", 5, process)
    process.send_signal(signal.Signals[f"SIG{name}"])
    _, err = process.communicate()
    assert process.returncode == EXIT_STOPPED, err
    assert "saved. The same command continues" in err and "Traceback" not in err
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert [d.name for d in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{last:08d}"]


@pytest.mark.parametrize(("ranks", "kills", "every"), [(1, 1, 15), pytest.param(2, KILLS, 3, marks=pytest.mark.full)])
def test_a_soak_of_kills(train, words, tmp_path, ranks, kills, every):
    """``DLR_KILLS`` is the number of kills under ``full``, ``DLR_KILL_SEED`` their seed."""
    choices = (*RUN, f"checkpoint.every={every}")
    whole = final(train(tmp_path / "whole", *choices, ranks=ranks))
    rng, done, number, log = random.Random(SEED), 0, 0, tmp_path / "log"
    with log.open("a") as out:
        while done < kills:
            number += 1
            folder, killed = tmp_path / f"run_{number}", Counter()
            given = words(*choices, f"run.dir={folder}")
            while done < kills and (how := start_and_kill(given, folder, ranks, rng, out)):
                done += 1
                killed[how] += 1
            assert start(given, ranks, out).wait() == 0, f"{folder}: {log.read_text()[-3000:]}"
            assert_same(final(folder), whole)
            assert not [p for p in folder.rglob("*") if p.name.startswith((".writing", ".folded"))], folder
            print(f"{folder.name}: {killed.total()} kills ({dict(killed)}): as the undisturbed run", flush=True)


def start_and_kill(words: list[str], folder: Path, ranks: int, rng: random.Random, log) -> str | None:
    """Start the run and kill it. Returns who was killed and where; None if the run was complete before."""
    victim, moment = rng.choice(VICTIMS), rng.choices(MOMENTS, WEIGHTS)[0]
    process = start(words, ranks, log)
    wait_for_step(folder, min(last_step(folder) + rng.randint(1, STEPS // 5), STEPS), process)
    wait_until(lambda: is_at(moment, folder), process)
    time.sleep(rng.random() * 0.02)
    if process.poll() is not None:
        assert process.returncode == 0, folder
        return None
    if victim == "asked to stop":
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0, 0.4))
    workers = children(process)
    killed = {"one rank": [rng.choice(workers or [process.pid])], "agent alone": [process.pid]}
    for pid in killed.get(victim, [process.pid, *workers]):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    return f"{victim}, {moment}"


def is_at(moment: str, folder: Path) -> bool:
    """Whether the run directory shows that the run is at ``moment``."""
    if moment == "save":
        return any(folder.glob("checkpoints/.writing_*"))
    if moment == "evaluation":
        return last_step(folder) % 20 == 19
    return moment == "any" or any(folder.glob(".folded.partial")) or last_step(folder) == STEPS
