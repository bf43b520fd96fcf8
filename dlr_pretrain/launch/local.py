"""Runs on this machine, several at once. Each is a process of ``train.py`` with a log like that of a SLURM job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dlr_pretrain.config import CONFIG_DIR
from dlr_pretrain.launch.queue import append_line, note
from dlr_pretrain.launch.runs import PlannedRun
from dlr_pretrain.util.errors import Stopped, UserError
from dlr_pretrain.util.process import cores, stop_signals

TRAIN = CONFIG_DIR.parent / "train.py"


def train(runs: Iterable[PlannedRun], at_once: int, ended: Callable[[PlannedRun, float], None]) -> None:
    """Train ``runs``, ``at_once`` at a time. Calls ``ended(run, seconds)`` when one has ended, for whatever reason.

    After a signal it waits until the running ones have saved, and raises Stopped.
    """
    if not TRAIN.is_file():
        raise UserError(f"{TRAIN}: no such file. Install the package with pip install -e from its repository")
    waiting, free = list(runs), list(range(at_once))
    running: dict[subprocess.Popen, tuple[PlannedRun, int, str, float]] = {}
    with _ended_with(running), _passed_on(running) as asked:
        while running or (waiting and not asked):
            while waiting and free and not asked:
                run, slot, job = waiting.pop(0), free.pop(0), f"0_{time.time_ns()}"  # no job of SLURM's has that name
                process = _start(run, slot, at_once, job)
                running[process] = run, slot, job, time.monotonic()
                if asked:  # the signal came while the process was started
                    process.terminate()
            for process in [process for process in running if process.poll() is not None]:
                run, slot, job, since = running.pop(process)
                append_line(_log(run), f"job {job}: ended with exit code {process.returncode}")
                free.append(slot)
                ended(run, time.monotonic() - since)
            time.sleep(0.05)
    if asked:
        raise Stopped("asked to stop; what had begun is saved. The same command continues")


def _start(run: PlannedRun, slot: int, at_once: int, job: str) -> subprocess.Popen:
    run.dir.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": str(max(1, cores() // at_once))} | os.environ
    if devices := _gpus():
        environment["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    note(run.dir, job, _log(run))
    append_line(_log(run), f"job {job}, start 1: {run.line}")
    with open(_log(run), "ab") as log:
        return subprocess.Popen(
            [sys.executable, str(TRAIN), *run.line.words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,  # Ctrl-C at the terminal then reaches the run once, through _passed_on
        )


def _log(run: PlannedRun) -> Path:
    return run.dir / "local.log"


def _gpus() -> list[str]:
    """This machine's GPUs, or those that CUDA_VISIBLE_DEVICES names."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [device for device in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if device]
    return [str(i) for i, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]


@contextmanager
def _ended_with(running: Iterable[subprocess.Popen]) -> Iterator[None]:
    """When an error leaves this context, let the runs save and end: nobody would report on them."""
    try:
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


@contextmanager
def _passed_on(running: Iterable[subprocess.Popen]) -> Iterator[list[int]]:
    """On each of ``stop_signals``, let the runs save and end. Yields the list of the signals that came."""
    asked: list[int] = []

    def stop(number: int, _frame) -> None:
        asked.append(number)
        for process in list(running):
            process.terminate()

    before = {number: signal.signal(number, stop) for number in stop_signals()}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
