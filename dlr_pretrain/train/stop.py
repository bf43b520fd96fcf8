"""Requests to stop: a signal asks this rank, and the ranks agree on it in their next update."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager

from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import record_stop
from dlr_pretrain.util import process
from dlr_pretrain.util.errors import Stopped, exit_process, write_to_stderr

BEFORE, AFTER = "before the first step of this start", "after the last step, before the folded checkpoint"


class StopRequest(AbstractContextManager["StopRequest"]):
    """Whether this rank was ``asked`` to stop. Within this context, signals ask it.

    A run stops at the next step boundary. Before the first step of this start, and when all steps are saved, nothing
    would be lost: the process ends at once, from the signal handler. An exception raised there would land in foreign
    code, such as a compiler or a client of the hub, which may swallow it or make another error of it. A second Ctrl-C
    leaves at once, too.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.asked = self.trained = False

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._ask) for number in process.stop_signals()}
        self.asked = self.asked or bool(process.stop_requests)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _frame: object) -> None:
        """The signal handler."""
        again, self.asked = self.asked, True
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if again:
            return
        if self.trained or not self.ranks.heartbeat.step:
            stopped = _stopped(AFTER if self.trained else BEFORE)
            if self.ranks.heartbeat.holds:
                record_stop(self.ranks.heartbeat.folder, stopped)
            exit_process(stopped, say=self.ranks.is_main)
        if self.ranks.is_main:
            write_to_stderr("\nasked to stop: saving after this step; Ctrl-C once more leaves at once")

    def finishing(self) -> None:
        """Note that all steps are saved: the run stops at once if it was asked to, or is from now on."""
        self.trained = True
        self.raise_if_asked(AFTER)

    def raise_if_asked(self, when: str) -> None:
        """Between the stages of a run: raise ``Stopped`` on every rank if any rank was asked to stop."""
        if any(self.ranks.gather(self.asked)):
            raise _stopped(when)


def _stopped(when: str) -> Stopped:
    return Stopped(f"stopped {when} (asked to stop). The same command continues")
