"""Kills 2-rank runs at random instants and restarts them until they are done; each must end as an undisturbed one does.

Who is killed: one rank, the agent and all ranks, the agent alone (and the run started again at once), or all of them
some time after they were asked to stop. When: after a random time, inside a save, an evaluation, or the fold.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from dlr_pretrain.util.history import read_metrics
from tests.conftest import ROOT

STEPS = 120
LONG = (f"train.steps={STEPS}", "eval.every=20", "checkpoint.every=3", "backbone=cola",
        "dlr=on")  # fmt: skip
VICTIMS = ("one rank", "all", "agent alone", "asked to stop")
MOMENTS, WEIGHTS = ("any", "save", "evaluation", "fold"), (3, 4, 2, 1)
STARTING_SECONDS = 60.0


def command(words: list[str], folder: Path) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*launch, str(ROOT / "train.py"), *words, f"run.dir={folder}"]


def start(words: list[str], folder: Path) -> subprocess.Popen:
    log = open(folder.with_suffix(".log"), "a")  # noqa: SIM115 - of the process
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(words, folder), stdout=log, stderr=log, env=environment, start_new_session=True)
    log.close()
    return process


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def last_step(folder: Path) -> int:
    """The last step that the run has logged; read from the end, so that watching costs nothing."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(folder / "metrics.jsonl", "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2000))
        return int(file.read().splitlines()[-1].split(b'"step": ')[1].split(b",")[0])
    return 0


def inside(moment: str, folder: Path) -> bool:
    """Whether the run is at ``moment`` now, as far as its directory shows."""
    if moment == "save":
        return any(folder.glob("checkpoints/.writing_*"))
    if moment == "evaluation":
        return last_step(folder) % 20 == 19
    return any(folder.glob(".folded.partial")) or last_step(folder) == STEPS


def wait_until(reached: Callable[[], bool], process: subprocess.Popen, seconds: float = STARTING_SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if reached():
            return True
        time.sleep(0.0005)
    return False


def kill(process: subprocess.Popen, victim: str, rng: random.Random) -> None:
    """Kill, and wait for the end of those that are left; but not where the next start is to meet them."""
    workers = children(process.pid)
    if victim == "one rank" and workers:
        os.kill(rng.choice(workers), signal.SIGKILL)
    elif victim == "agent alone":
        process.kill()
    elif victim == "asked to stop":
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0, 0.4))
        workers += children(process.pid)
        for pid in (*workers, process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    else:
        os.killpg(process.pid, signal.SIGKILL)
        for pid in workers:  # torchrun gives them sessions of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait(120)


def soak(words: list[str], scratch: Path, whole: Path, kills: int, seed: int) -> Iterator[str]:
    """Runs below ``scratch``, killed ``kills`` times in all and compared with ``whole``; a line for each run."""
    rng, done, number = random.Random(seed), 0, 0
    while done < kills:
        number += 1
        folder, told = scratch / f"run_{number}", Counter()
        while done < kills and (how := start_and_kill(words, folder, rng)):
            done += 1
            told[how] += 1
        process = start(words, folder)
        assert process.wait(300) == 0, f"{folder}: {folder.with_suffix('.log').read_text()[-3000:]}"
        assert_equal(folder, whole)
        yield f"{folder.name}: {sum(told.values())} kills ({dict(told)}): as the undisturbed run"


def start_and_kill(words: list[str], folder: Path, rng: random.Random) -> str | None:
    """One life of a run: who was killed, and where; None where it was done before."""
    victim, moment = rng.choice(VICTIMS), rng.choices(MOMENTS, WEIGHTS)[0]
    target = min(last_step(folder) + rng.randint(1, STEPS // 5), STEPS)
    process = start(words, folder)
    if wait_until(lambda: last_step(folder) >= target, process) and moment != "any":
        wait_until(lambda: inside(moment, folder), process)
    time.sleep(rng.random() * 0.02)
    if process.poll() is not None:
        assert process.returncode == 0, folder.with_suffix(".log").read_text()[-3000:]
        return None
    kill(process, victim, rng)
    return f"{victim}, {moment}"


def assert_equal(folder: Path, whole: Path) -> None:
    """Weights and losses bit for bit; a line for each step, once."""
    a, b = (load_file(f / "folded" / "model.safetensors") for f in (folder, whole))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b), folder
    one, other = (read_metrics(f / "metrics.jsonl") for f in (folder, whole))
    assert [r["step"] for r in one] == list(range(1, len(other) + 1)), folder
    for name in ("train/loss", "train/grad_norm", "eval/loss", "train/tokens"):
        assert [r.get(name) for r in one] == [r.get(name) for r in other], (folder, name)
    assert not [p for p in folder.rglob("*") if p.name.startswith((".writing", ".folded"))], folder
