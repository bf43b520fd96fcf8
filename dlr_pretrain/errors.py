"""Errors that a user can fix. They end a run with one clear message and no traceback."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TextIO

EXIT_CONFIG = 2  # a configuration problem: nothing was started
EXIT_FAILED = 3  # data, files, the hub or another run stood in the way
EXIT_LOST = 4  # a rank was lost or hangs: the same command continues from the last checkpoint
EXIT_INTERRUPTED = 130  # a second Ctrl-C, or one where there is nothing to save
EXIT_STOPPED = 75  # stopped early and saved: the same command continues the run


class UserError(Exception):
    """What went wrong, with the file or key, and the fix; ``exit_code`` ends the process."""

    exit_code = EXIT_FAILED


class Diverged(UserError):
    """Numbers that are not finite have ended the run."""


class RankLost(UserError):
    """Ranks wait for one that has died or does not advance."""

    exit_code = EXIT_LOST


class Stalled(UserError):
    """What a run reads from does not answer. It has saved its state."""

    exit_code = EXIT_LOST


class Stopped(UserError):
    """The run was asked to stop before its last step, and has saved its state."""

    exit_code = EXIT_STOPPED


def first_line(error: BaseException | str) -> str:
    """The first line that an error says, without a full stop; its type where it says nothing."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return said.rstrip(".") or type(error).__name__


def command(act: Callable[[], int | None]) -> int:
    """What a script exits with: the answer of ``act`` (None: 0), or the code of what has ended it.

    What a user can fix is said in a line, under torchrun with the rank where that is not the first; a reader of the
    output that has gone, such as ``| head``, is no error.
    """
    rank = os.environ.get("RANK", "0")
    try:
        code = act() or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # what is left in the buffer goes nowhere as Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (UserError, OSError) as error:
        kind = "stopped" if isinstance(error, Stopped) else "error"
        print(f"{kind}{'' if rank == '0' else f' on rank {rank}'}: {error}", file=sys.stderr)
        record(error)
        return getattr(error, "exit_code", EXIT_FAILED)
    except KeyboardInterrupt:
        if rank == "0":
            print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def record(error: BaseException) -> None:
    """Write the error where torchrun's summary of failures looks for it; without a traceback where it needs none."""
    if isinstance(error, UserError):
        error.__traceback__, error.__cause__, error.__suppress_context__ = None, None, True
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def say(text: str, stream: TextIO, end: str = "\n") -> None:
    """Write to a stream that may be gone, as a closed terminal is: what follows then goes nowhere, and ends no run."""
    try:
        print(text, file=stream, end=end, flush=True)
    except OSError:
        with suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())  # what is still in the buffer would fail again at the end of the process
            os.close(null)


def tell(text: str) -> None:
    """Write a line to stderr at once, also in a signal handler, and also where stderr is gone."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())


def leave(error: UserError, say: bool = True) -> NoReturn:
    """End the process from any thread, at once and without another write to the run."""
    if say:
        tell(f"\nerror: {error}")
    try:
        raise error  # torchrun's handler looks at what is being handled
    except UserError:
        record(error)
    finally:
        os._exit(error.exit_code)
