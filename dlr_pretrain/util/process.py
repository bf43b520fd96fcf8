"""How a process behaves: it dies with its launcher, stops on request, and shares the CPU's cores."""

import ctypes
import logging
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1
STOPPED = 75  # the exit code of a process that was asked to stop
stop_requests: list[int] = []  # stop signals that this process has received
is_worker = False  # whether a sweep's launcher has started this process: if it dies, the launcher kills the others


def spin_briefly() -> None:
    """Make OpenMP's threads sleep after spinning for about a microsecond. Call this before torch is imported.

    By default they spin for milliseconds on cores that other processes need: beside four busy loops on two cores, a
    run trained 5 times slower. A user's own setting is kept.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


def share_compilers() -> None:
    """Limit the compiler processes of this rank to its share of the cores. Call this before torch is imported.

    By default each rank starts up to 32: 256 on a node with eight GPUs. A user's own setting is kept.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks > 1:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, min(32, cores() // ranks))))


def allow_files(count: int) -> bool:
    """Raise this process's soft limit of open files to ``count``; returns whether the hard limit allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count and (hard == resource.RLIM_INFINITY or count <= hard):
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
        soft = count
    return soft == resource.RLIM_INFINITY or count <= soft


def cores() -> int:
    """The number of CPU cores that this process may use; within a job, its allocation."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress the warnings that other packages log, such as during their import."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask a run to stop.

    SIGHUP (a closed terminal) and SIGINT do not if the parent ignores them, as nohup does, or a script for a process in
    the background.
    """
    unless_ignored = (number for number in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(number) != signal.SIG_IGN)
    return (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, *unless_ignored)


def prepare() -> None:
    """Call this first: importing torch takes seconds, in which the agent may die or a signal may arrive.

    Signals are kept in ``stop_requests`` until the run can act on them. Ctrl-C ends the process at once, within the
    handler: an exception would land in other code, such as a compiler, which may swallow it or turn it into another.
    """
    open_standard_streams()
    spin_briefly()
    share_compilers()
    die_with_agent()
    _handle(lambda number, _frame: stop_requests.append(number))
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # not ignored, as it would be in the background
        signal.signal(signal.SIGINT, _leave)


def prepare_worker() -> None:
    """Call this first in each job of a worker of a sweep: stop signals are kept until the run can act on them."""
    global is_worker
    is_worker = True
    _handle(lambda number, _frame: stop_requests.append(number))


@contextmanager
def passing_on_stops(queued: bool) -> Iterator[list[int]]:
    """Within this context, pass stop signals on to the workers of a sweep; yields those received.

    They are passed on as SIGTERM and again and again, to the processes below this one that handle it by then: a worker
    that is still importing would die of it. Jobs that are ``queued`` get their signals from SLURM, so waiting for them
    ends at once.
    """
    asked: list[int] = []
    ended = threading.Event()

    def ask(number: int, _frame: FrameType | None) -> None:
        does = "the queued jobs of the sweep go on" if queued else "waiting until the jobs of the sweep have saved"
        if not asked:
            with suppress(OSError):
                os.write(2, f"\nasked to stop: {does}\n".encode())
        asked.append(number)
        if queued:
            os._exit(STOPPED)

    def pass_on() -> None:
        while not ended.wait(0.5):
            for pid in descendants() if asked else ():
                with suppress(OSError):
                    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
                    if caught and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1:
                        os.kill(pid, signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in stop_signals()}
    _handle(ask)
    threading.Thread(target=pass_on, daemon=True).start()
    try:
        yield asked
    finally:
        ended.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def descendants() -> list[int]:
    """The processes that this one has started, and those that they have (Linux)."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    below = [os.getpid()]
    for above in below:
        below += [pid for pid, parent in parents.items() if parent == above]
    return below[1:]


def _leave(number: int, _frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, b"\ninterrupted\n")
    os._exit(128 + number)


def open_standard_streams() -> None:
    """Open the null device for each closed standard stream: the next file opened would take its descriptor."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # ``os.open`` returns the lowest free descriptor, which is the stream's
            null = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(null, "w" if number else "r", encoding="utf-8"))


def ignore_stop_signals() -> None:
    """Call this last: a repeated request to stop would otherwise kill the process while the interpreter exits."""
    _handle(signal.SIG_IGN)


def _handle(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    for number in stop_signals():
        if number != signal.SIGINT:
            signal.signal(number, handler)


def die_with_agent() -> None:
    """Make this process die with its torchrun agent: a worker would otherwise keep training after the agent's kill."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        agent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != agent:  # the agent died before prctl took effect
            os._exit(1)
