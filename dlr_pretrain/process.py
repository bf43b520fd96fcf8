"""What a process owes its launcher (to end with it, and to hear requests to stop), and the memory that it takes."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
_heard: list[int] = []


def cores() -> int:
    """CPU cores that this process may use: in a job, those of its allocation."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def stop_signals() -> tuple[signal.Signals, ...]:
    """What asks a run to stop; a terminal that is closed does unless this process ignores it, as under nohup."""
    always = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    return always if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*always, signal.SIGHUP)


def prepare() -> None:
    """To be called first: importing torch takes seconds, in which an agent may die and a signal would end the process.

    A signal is remembered until the run can follow it (``stop_requested``). Not Ctrl-C, which ends an import at once.
    """
    die_with_agent()
    for number in stop_signals():
        if number != signal.SIGINT:
            signal.signal(number, lambda n, _frame: _heard.append(n))


def stop_requested() -> bool:
    """Whether a stop was asked for since ``prepare``, before there was a handler that could see to it."""
    return bool(_heard)


def deafen() -> None:
    """To be called last: a request that is repeated while the interpreter ends would otherwise end the process."""
    for number in stop_signals():
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_IGN)


def die_with_agent() -> None:
    """End with the torchrun agent: its workers otherwise go on training, and writing, after it is killed."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        agent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != agent:  # it died before the kernel knew whom to tell
            os._exit(1)


# ----------------------------------------------------------------------------------------------------
# Memory of the host, in bytes


def resident_memory() -> int:
    """What this process holds; on systems that do not tell, the most that it has held."""
    return _row_of("/proc/self/status", "VmRSS:") or peak_memory()


def peak_memory() -> int:
    """The most that this process has held; on Linux since a 5 was last written to ``/proc/self/clear_refs``."""
    unit = 1 if sys.platform == "darwin" else 1024
    return _row_of("/proc/self/status", "VmHWM:") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_memory() -> int:
    """What processes could still take of the machine's; on systems that do not tell, half of all."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _row_of("/proc/meminfo", "MemAvailable:") or whole // 2


def _row_of(path: str, label: str) -> int | None:
    """A row of a file of the kernel's, in bytes; None where there is none."""
    try:
        rows = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(row.split()[1]) for row in rows if row.startswith(label)), None)
