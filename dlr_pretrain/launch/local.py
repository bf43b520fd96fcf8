"""Train runs on this machine, several at once: each is a process of ``train.py`` with a log and, if possible, a GPU."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dlr_pretrain.launch.runs import PlannedRun
from dlr_pretrain.launch.status import status_of
from dlr_pretrain.util.errors import Stopped
from dlr_pretrain.util.process import cores, stop_signals

TRAIN = ("-m", "dlr_pretrain")
LOG = "local.log"  # in the run directory


def train_here(runs: Sequence[PlannedRun], at_once: int) -> None:
    """Train ``runs``, ``at_once`` at a time, and print how each has ended.

    After a signal, wait until the running ones have saved, and raise Stopped.
    """
    waiting, slots, asked = list(runs), list(range(at_once)), []
    running: dict[subprocess.Popen, tuple[PlannedRun, int]] = {}

    def stop(number: int | None = None, _frame: object = None) -> None:
        asked.append(number)
        for process in list(running):
            process.terminate()

    before = {number: signal.signal(number, stop) for number in stop_signals()}
    try:
        while running or (waiting and not asked):
            while waiting and slots and not asked:
                run, slot = waiting.pop(0), slots.pop(0)
                running[process := _start(run, slot, at_once)] = run, slot
                if asked:  # the signal came while the process was started
                    process.terminate()
            for process in [process for process in running if process.poll() is not None]:
                run, slot = running.pop(process)
                slots.append(slot)
                done = len(runs) - len(waiting) - len(running)
                failed = f" (exit code {process.returncode}: see {run.dir / LOG})" if process.returncode else ""
                print(f"{done}/{len(runs)}  {run.dir.name}: {status_of(run, {})}{failed}", flush=True)
            time.sleep(0.05)
        if asked:
            raise Stopped("asked to stop; what had begun is saved. The same command continues")
    finally:
        stop()
        for process in running:
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(run: PlannedRun, slot: int, at_once: int) -> subprocess.Popen:
    environment = {"OMP_NUM_THREADS": str(max(1, cores() // at_once))} | os.environ
    known = [str(i) for i, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]
    if gpus := [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(known)).split(",") if gpu]:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    words = [*run.line.words]
    if 0 < len(gpus) < at_once and run.cfg.train.micro_batch == "auto":
        words.append("train.micro_batch=null")  # or each would take all the memory that is free
    run.dir.mkdir(parents=True, exist_ok=True)
    with open(run.dir / LOG, "ab") as out:  # its own group: Ctrl-C reaches the run only through ``stop``
        return subprocess.Popen(
            [sys.executable, *TRAIN, *words], env=environment, stdin=subprocess.DEVNULL, stdout=out,
            stderr=out, process_group=0,
        )  # fmt: skip
