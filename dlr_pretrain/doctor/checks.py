"""Runs checks: each in a process of its own, within a time limit. A check that fails does not stop the others.

A check is a function that returns an ``Outcome`` or raises. It runs in a fork of this process, so that a check that
crashes, hangs, runs out of memory or holds a GPU leaves nothing behind for the next one. Ranks tell each other their
outcomes, and the address at which their checks meet, through a store that the checks themselves do not use.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import DistError, TCPStore

from dlr_pretrain.util.errors import UserError, first_line
from dlr_pretrain.util.text import fill

OK, WARN, FAIL = LEVELS = ("ok", "warn", "FAIL")
LATE = 30.0  # seconds that ranks wait for each other beyond a check's own time
LABEL = 6 + 12  # columns before the text


@dataclass(frozen=True)
class Outcome:
    """What a check found; ``fix`` says what to do about it."""

    level: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.text}. {self.fix}" if self.fix else self.text


@dataclass(frozen=True)
class Check:
    """Runs ``act`` for at most ``limit`` seconds: on all ranks if ``everywhere``, able to meet if ``together``."""

    name: str
    limit: float
    act: Callable[[], Outcome]
    everywhere: bool = False
    together: bool = False


class Ranks:
    """This rank, the number of ranks, and the store through which they talk; None for a process that is alone."""

    def __init__(self):
        self.rank, self.count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.store: TCPStore | None = None
        if self.count > 1:
            hosts = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self.store = TCPStore(address, port, self.count, hosts, timedelta(seconds=60), wait_for_workers=False)

    def tell(self, key: str, value: object) -> None:
        if self.store is not None:
            self.store.set(f"doctor/{key}", json.dumps(value))

    def ask(self, key: str, seconds: float) -> object | None:
        """What a rank tells under ``key``; None if it does not do so within ``seconds``."""
        try:
            self.store.wait([f"doctor/{key}"], timedelta(seconds=max(seconds, 0.01)))
            return json.loads(self.store.get(f"doctor/{key}"))
        except (DistError, RuntimeError):
            return None

    def meet(self, check: Check) -> dict[str, str]:
        """Wait for all ranks, and return the environment variables with which the check's processes find each other.

        Raises UserError if a rank does not come.
        """
        if self.count == 1:
            return {}
        if self.rank == 0:
            local = os.environ.get("LOCAL_WORLD_SIZE", str(self.count)) == str(self.count)
            with socket.socket() as free:
                free.bind(("", 0))
                address = "127.0.0.1" if local else socket.gethostname(), free.getsockname()[1]
            self.tell(f"{check.name}/address", address)
        self.tell(f"{check.name}/here/{self.rank}", True)
        end = time.monotonic() + check.limit + LATE
        absent = [r for r in range(self.count) if not self.ask(f"{check.name}/here/{r}", end - time.monotonic())]
        if absent:
            raise UserError(f"ranks {absent} did not reach this check")
        address, port = self.ask(f"{check.name}/address", LATE)
        return {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def run(checks: Iterable[Check], ranks: Ranks, say: Callable[[str], object] = print) -> bool:
    """Run all checks and say on rank 0 what they found. Returns whether none failed; on other ranks always True."""
    sound = True
    for check in checks:
        if not (check.everywhere or ranks.rank == 0):
            continue
        began = time.monotonic()
        try:
            outcome = alone(check, ranks.meet(check) if check.together else {})
        except UserError as error:
            outcome = Outcome(FAIL, str(error))
        if check.everywhere and ranks.count > 1:
            ranks.tell(f"{check.name}/found/{ranks.rank}", asdict(outcome))
            outcome = _worst(check, ranks, outcome) if ranks.rank == 0 else outcome
        if ranks.rank == 0:
            say(line(check.name, outcome, time.monotonic() - began))
            sound = sound and outcome.level != FAIL
    return sound


def line(name: str, outcome: Outcome, seconds: float | None = None) -> str:
    took = f" ({seconds:.0f} s)" if seconds is not None and seconds >= 1 else ""
    return fill(f"{outcome.level:<6}{name:<12}{outcome}{took}", indent=LABEL)


def _worst(check: Check, ranks: Ranks, own: Outcome) -> Outcome:
    """The worst outcome of all ranks; rank 0's own if no other is worse."""
    found, end = own, time.monotonic() + check.limit + LATE
    for rank in range(1, ranks.count):
        told = ranks.ask(f"{check.name}/found/{rank}", end - time.monotonic())
        other = Outcome(**told) if told else Outcome(FAIL, "no answer")
        if LEVELS.index(other.level) > LEVELS.index(found.level):
            found = Outcome(other.level, f"rank {rank}: {other.text}", other.fix)
    return found


# ----------------------------------------------------------------------------------------------------
# One check


def alone(check: Check, environment: dict[str, str]) -> Outcome:
    """Run ``check`` in a process of its own, which is killed at the time limit, and return its outcome."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryFile("w+") as said:
        process = multiprocessing.get_context("fork").Process(
            target=_within, args=(check, environment, sender, said), daemon=False
        )
        process.start()
        sender.close()
        try:
            there = receiver.poll(check.limit)
            outcome = receiver.recv() if there else None
        except EOFError:  # the process ended without an answer
            there, outcome = True, None
        finally:
            _end(process)
        if outcome is not None:
            return outcome
        if not there:
            fix = "Look at what it waits for, or give it more time with --patience"
            return Outcome(FAIL, f"no answer within {check.limit:.0f} s", fix)
        said.seek(0)
        last = (said.read().strip().splitlines() or [""])[-1]
        code = process.exitcode
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with code {code}"
        return Outcome(FAIL, f"the check ended {how}{f': {last}' if last else ''}")


def _within(check: Check, environment: dict[str, str], sender, said) -> None:
    """Run ``check`` in its own process, and send the outcome."""
    os.setsid()  # so that the processes that the check starts are killed with it
    os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
    sys.stdout = sys.stderr = said
    os.environ |= environment
    try:
        outcome = check.act()
    except UserError as error:
        outcome = Outcome(FAIL, str(error))
    except OSError as error:
        outcome = Outcome(FAIL, f"{error.filename or 'a file'}: {error.strerror or error}")
    except Exception as error:
        outcome = Outcome(FAIL, f"{type(error).__name__}: {first_line(error)}")
    sender.send(outcome)
    sender.close()
    said.flush()
    os._exit(0)  # skips the parent's exit handlers and collectives that would wait for other ranks


def _end(process: multiprocessing.Process) -> None:
    if process.is_alive():
        process.join(0.5)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
