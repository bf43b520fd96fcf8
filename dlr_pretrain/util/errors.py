"""Errors that a user can fix. Each ends a command with one clear message and an exit code, without a traceback."""

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn, TextIO

from dlr_pretrain.util.process import STOPPED, spin_briefly
from dlr_pretrain.util.secrets import redact

EXIT_CONFIG = 2  # the configuration is wrong: nothing was started
EXIT_FAILED = 3  # data, files, the hub or another run prevented the run, or it diverged
EXIT_LOST = 4  # a rank was lost or hangs, or data do not arrive: the same command continues
EXIT_INTERRUPTED = 130  # a second Ctrl-C, or one that no handler turns into a stop
EXIT_STOPPED = STOPPED  # stopped early; what had begun is saved: the same command continues
FIXES = {  # by error number
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free space there"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Change its permissions, or name another place"),
    errno.ENOTDIR: "A part of the path is a file: name another place",
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.EREMOTEIO), "Its disk or file server fails: see the system's log"),
}


class UserError(Exception):
    """An error that names the file or key, the rule that it breaks, and the fix. The process exits with ``exit_code``.

    Secrets are hidden in the message, which may quote a signed address.
    """

    exit_code = EXIT_FAILED

    def __init__(self, what: object, rule: str = "", fix: str = ""):
        said = f"{what}: {rule}" if rule else str(what)
        super().__init__(redact(f"{said}. {fix}" if fix else said))


class Diverged(UserError):
    """The run ended because its loss or gradients are not finite."""


class RankLost(UserError):
    """A rank has died or does not advance, and the others wait for it."""

    exit_code = EXIT_LOST


class Stalled(UserError):
    """The disk or hub that the run reads from does not answer. The run saves its state."""

    exit_code = EXIT_LOST


class Stopped(UserError):
    """The run was asked to stop early and has saved its state."""

    exit_code = EXIT_STOPPED


def first_line(error: BaseException | str) -> str:
    """The first line of an error's message, without its full stop; the error's type if the message is empty."""
    line, *_ = str(error).strip().splitlines() or [""]
    return line.strip().rstrip(".") or type(error).__name__


def file_error(error: OSError) -> UserError:
    """The UserError for an error of the file system: it names the file, and the fix if one is known."""
    place, said = error.filename2 or error.filename, error.strerror or str(error)
    message = f"{place}: {said}" if place else said
    fix = FIXES.get(error.errno or 0)
    return UserError(f"{message}. {fix}" if fix else message)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError that names no file, such as that of a read, a write or a flush."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def noting_silence(what: str, first: float, every: float) -> Iterator[None]:
    """Within this context, write to stderr how long ``what`` has lasted: after ``first`` seconds, then ``every``."""
    ended, since = threading.Event(), time.monotonic()

    def write_notes() -> None:
        wait = first
        while not ended.wait(wait):
            write_to_stderr(f"note: {what} for {time.monotonic() - since:.0f} s")
            wait = every

    threading.Thread(target=write_notes, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def record_for_torchrun(error: BaseException) -> None:
    """Write the error to the file that torchrun's summary reads; a UserError goes there without its traceback."""
    if isinstance(error, UserError):
        error.__traceback__, error.__cause__, error.__suppress_context__ = None, None, True
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def say(text: str, stream: TextIO, end: str = "\n") -> None:
    """Print to a stream that may be closed, such as a terminal's. If it is, this and all later output is discarded."""
    try:
        print(redact(text), file=stream, end=end, flush=True)
    except OSError:
        with suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())  # otherwise flushing the buffer fails again when the process ends
            os.close(null)


def write_to_stderr(text: str) -> None:
    """Write a line to stderr, unbuffered. Signal handlers may call this. A closed stderr is not an error."""
    with suppress(OSError):
        os.write(2, f"{redact(text)}\n".encode())


def exit_process(error: UserError, say: bool = True) -> NoReturn:
    """End the process at once, from any thread. Nothing more is written to the run."""
    if say:
        write_to_stderr(f"\n{error}" if isinstance(error, Stopped) else f"\nerror: {error}")
    try:
        raise error  # torchrun's handler records the exception that is being handled
    except UserError:
        record_for_torchrun(error)
    finally:
        os._exit(error.exit_code)


def command(act: Callable[[], int | None]) -> int:
    """Run ``act`` and return the exit code: the value of ``act`` (None: 0), or the code of the error that ended it.

    An error that a user can fix is printed in one line. A closed pipe, as after ``| head``, is not reported. A
    character that the output's encoding lacks is printed as an escape.
    """
    spin_briefly()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a notebook's streams are not
            stream.reconfigure(errors="backslashreplace")
    try:
        code = act() or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # Python discards the rest of the buffer at exit instead of failing again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (UserError, OSError) as error:
        return report_error(error)
    except KeyboardInterrupt:
        say_once("\ninterrupted")
        return EXIT_INTERRUPTED


def report_error(error: UserError | OSError) -> int:
    """Print an error that a user can fix, record it for torchrun, and return its exit code."""
    message = str(file_error(error) if isinstance(error, OSError) else error)
    say_once(message if isinstance(error, Stopped) else f"error: {message}")
    record_for_torchrun(error)
    return getattr(error, "exit_code", EXIT_FAILED)


def say_once(text: str) -> None:
    """Print to stderr on rank 0 alone. torchrun's summary shows the error of a rank that fails alone."""
    if os.environ.get("RANK", "0") == "0":
        say(text, sys.stderr)


def need(package: str, extra: str) -> str:
    """The installed version of ``package``, a dependency of ``extra``. Raises UserError if it is absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        fix = f'Install it with: pip install -e ".[{extra}]"'
        raise UserError(f"this command needs {package}, which is not installed. {fix}") from None
