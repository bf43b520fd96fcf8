"""Runs on this machine, several at once: each is a process of ``train.py`` with a log and, if there are any, a GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import dlr_pretrain
from dlr_pretrain.launch.runs import PlannedRun
from dlr_pretrain.launch.slurm import note
from dlr_pretrain.launch.state import look
from dlr_pretrain.util.errors import Stopped
from dlr_pretrain.util.process import cores, stop_signals

TRAIN = Path(dlr_pretrain.__file__).parent.parent / "train.py"


def train(runs: Sequence[PlannedRun], at_once: int, check: Callable[[], object] = lambda: None) -> None:
    """Train ``runs``, ``at_once`` at a time, and print how each has ended. ``check`` is called after each.

    After a signal, or if ``check`` raises, it waits until the running ones have saved; after a signal it raises
    Stopped.
    """
    waiting, free, done = list(runs), list(range(at_once)), 0
    running: dict[subprocess.Popen, tuple[PlannedRun, int, float]] = {}
    with _passing_signals(running) as asked:
        while running or (waiting and not asked):
            while waiting and free and not asked:
                run, slot, since = waiting.pop(0), free.pop(0), time.time()
                process = _start(run, slot, at_once, since)
                running[process] = run, slot, since
                if asked:  # the signal came while the process was started
                    process.terminate()
            for process in [process for process in running if process.poll() is not None]:
                run, slot, since = running.pop(process)
                _note(run, since, ended=time.time(), code=process.returncode)
                free.append(slot)
                done += 1
                print(f"{done}/{len(runs)}  {run.dir.name}: {look(run, {})}", flush=True)
                check()
            time.sleep(0.05)
    if asked:
        raise Stopped("asked to stop; what had begun is saved. The same command continues")


def _start(run: PlannedRun, slot: int, at_once: int, since: float) -> subprocess.Popen:
    environment = {"OMP_NUM_THREADS": str(max(1, cores() // at_once))} | os.environ
    if devices := _gpus():
        environment["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    _note(run, since)
    with open(_log(run), "ab") as log:
        return subprocess.Popen(
            [sys.executable, str(TRAIN), *run.line.words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,  # Ctrl-C at the terminal then reaches the run once, through _passing_signals
        )


def _note(run: PlannedRun, since: float, **end: float) -> None:
    note(run.dir, {"time": since, "job": f"local_{since}", "log": str(_log(run).absolute())} | end)


def _log(run: PlannedRun) -> Path:
    return run.dir / "local.log"


def _gpus() -> list[str]:
    """This machine's GPUs, or those that CUDA_VISIBLE_DEVICES names."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [device for device in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if device]
    return [str(i) for i, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]


@contextmanager
def _passing_signals(running: Iterable[subprocess.Popen]) -> Iterator[list[int]]:
    """On each of ``stop_signals``, and at the end, let the runs save and end. Yields the list of signals that came."""
    asked: list[int] = []

    def stop(number: int, _frame) -> None:
        asked.append(number)
        for process in list(running):
            process.terminate()

    before = {number: signal.signal(number, stop) for number in stop_signals()}
    try:
        yield asked
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
