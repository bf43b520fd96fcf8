"""What the command-line scripts share: the exit code of a command, and checks of flags that argparse lacks."""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable

from dlr_pretrain.util.errors import EXIT_FAILED, EXIT_INTERRUPTED, Stopped, UserError, record


def command(act: Callable[[], int | None]) -> int:
    """Run ``act`` and return the script's exit code: the value of ``act`` (None: 0), or the code of what ended it.

    An error that a user can fix is printed in one line, which names the rank unless it is rank 0. If the reader of the
    output has gone, as after ``| head``, no error is printed.
    """
    rank = os.environ.get("RANK", "0")
    try:
        code = act() or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # Python discards the rest of the buffer at exit instead of failing again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (UserError, OSError) as error:
        kind = "" if isinstance(error, Stopped) else "error: " if rank == "0" else f"error on rank {rank}: "
        print(f"{kind}{error}", file=sys.stderr)
        record(error)
        return getattr(error, "exit_code", EXIT_FAILED)
    except KeyboardInterrupt:
        if rank == "0":
            print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def at_least_1(text: str) -> int:
    """A whole number above 0, as the type of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return int(text)


def refuse(parser: ArgumentParser, given: Namespace, flags: tuple[str, ...], why: str) -> None:
    """End with the parser's error if one of ``flags`` was given, because it would be ignored silently."""
    for flag in flags:
        name = flag.removeprefix("--").replace("-", "_")
        if getattr(given, name) != parser.get_default(name):
            parser.error(f"{flag} {why}")
