"""How a check runs: within a time limit, in this process or in a child that can be killed.

A check is a function that returns what it ``Found``, or raises a UserError that says what is wrong and how to mend it.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from dataclasses import dataclass

from dlr_pretrain.util.errors import UserError, first_line
from dlr_pretrain.util.text import fill

OK, WARN, FAIL = LEVELS = ("ok", "warn", "FAIL")


@dataclass(frozen=True)
class Found:
    """What a check found. With ``warning`` the run works, but may be slow or end early."""

    text: str
    warning: str = ""


@dataclass(frozen=True)
class Line:
    """The line of a check."""

    name: str
    level: str
    text: str

    def __str__(self) -> str:
        return fill(f"{self.level:<6}{self.name:<12}{self.text}", indent=18)


def perform(name: str, seconds: float, act: Callable[[], Found]) -> Line:
    """The line of a check that may take so many ``seconds``. Whatever it raises, it stops no other check."""

    def late(_number: int, _frame: object) -> None:
        raise UserError(f"no answer within {seconds:g} s. Look at what it waits for")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        found = act()
    except Exception as error:
        return Line(name, FAIL, _told(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return Line(name, WARN if found.warning else OK, ". ".join(filter(None, (found.text, found.warning))))


def _told(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror or error}"
    return f"{type(error).__name__}: {first_line(error)}"


def in_child(act: Callable[[], Found], seconds: float, start: str = "fork") -> Found:
    """The answer of ``act`` in a process of its own, which is killed after ``seconds``.

    ``start`` is "spawn" for an ``act`` that uses a GPU; it must then be picklable.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context(start).Process(target=_answer, args=(act, sender), daemon=True)
    child.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise UserError(f"no answer within {seconds:g} s: its process was killed")
        answer = receiver.recv()
    except EOFError:
        child.join()
        raise UserError(f"its process ended with code {child.exitcode}") from None
    finally:
        child.kill()
        child.join(5)  # a process that waits for a disk may not even be killed
    if isinstance(answer, str):
        raise UserError(answer)
    return answer


def _answer(act: Callable[[], Found], sender) -> None:
    try:
        sender.send(act())
    except Exception as error:
        sender.send(_told(error))
