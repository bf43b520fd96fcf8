"""A run that tells where it is, and a process that sends it a signal at a given moment.

Run as ``python -m tests.kill.driven PIPE MOMENT WORD ...``, this is a run in a process of its own.
"""

import json
import os
import sys
from contextlib import suppress

# Each phase begins with a call of a function (the first phase with a return), and ends where the next one begins.
PHASES = {
    "start": "return prepare",
    "training": "call Run.train",
    "fold": "call Run.fold",
    "export": "call export",
    "verification": "call agreement",
    "report": "call StopRequest.__exit__",
}


class Follower:
    """Tells ``pipe`` which phase of the run begins, and "here" at ``moment``: a phase and the number of a call in it.

    Calls are those of Python functions and of built-in ones in the main thread.
    """

    def __init__(self, pipe: int, moment: tuple[str, int] | None):
        self.pipe, self.moment, self.phase = pipe, moment, ""
        self.calls = dict.fromkeys(PHASES, 0)
        self.order, self.begins = [*PHASES], {sign: phase for phase, sign in PHASES.items()}

    def tell(self, word: str) -> None:
        os.write(self.pipe, f"{word} ".encode())

    def see(self, frame, event: str, _) -> None:
        """For ``sys.setprofile``."""
        begun = self.begins.get(f"{event} {frame.f_code.co_qualname}")
        if begun and "dlr_pretrain" in frame.f_code.co_filename:
            self.phase = begun
            self.tell(begun)
        if self.phase:
            self.calls[self.phase] += 1
            now = self.order.index(self.phase), self.calls[self.phase]
            if self.moment and now >= (self.order.index(self.moment[0]), self.moment[1]):
                self.moment = None
                self.tell("here")

    def end(self) -> None:
        sys.setprofile(None)
        self.tell(json.dumps(self.calls))


def signal_at_the_moment(pid: int, pipe: int, number: int) -> tuple[str, str]:
    """Send the signal when the run says "here". Returns what the run told in all, and before the signal."""
    told = before = b""
    while more := os.read(pipe, 4096):
        told += more
        if b"here" in told and not before:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            os.set_blocking(pipe, False)
            with suppress(BlockingIOError):
                told += os.read(pipe, 4096)
            os.set_blocking(pipe, True)
            before = told
    os.close(pipe)
    return told.decode(), before.decode()


def main() -> int:
    from dlr_pretrain import __main__

    follower = Follower(int(sys.argv.pop(1)), json.loads(sys.argv.pop(1)))
    sys.setprofile(follower.see)
    code = __main__.main()
    follower.end()
    return code


if __name__ == "__main__":
    sys.exit(main())
