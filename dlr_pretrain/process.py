"""What a process owes its launcher before it imports anything large: to end with it, and to hear requests to stop."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
_heard: list[int] = []


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
