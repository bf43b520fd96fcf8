"""A process that has imported what a run imports, and forks itself for each requested run.

Each line of stdin is a JSON object with the arguments of ``run``; the answer is one with what it returns. Where
``layer.c`` was loaded before, it lies between the run and its files.
"""

import ctypes
import importlib
import json
import os
import sys
from contextlib import suppress
from functools import cache

from dlr_pretrain.__main__ import run_and_report
from dlr_pretrain.cli import load
from dlr_pretrain.train import saver, start
from dlr_pretrain.util import process
from dlr_pretrain.util.errors import command
from tests.kill.driven import Follower, signal_at_the_moment

configuration = cache(lambda words: load(list(words)))  # Hydra would take half of the time of a run


def run(
    words: list[str], output: str, layer: dict | None = None, modules: str = "",
    moment: tuple[str, int] | None = None, number: int = 0,
) -> tuple[int, str, str]:  # fmt: skip
    """Run ``words`` in a fork. Returns the exit code, negative if a signal has ended the run, and what the run told.

    ``output`` is the file for what it prints, ``layer`` has the arguments of ``arm``, and ``modules`` names a file for
    the names of the modules that it has imported. At ``moment`` it gets the signal ``number``: see ``driven``.
    """
    cfg, (ours, theirs) = configuration(tuple(words)), os.pipe()
    if (pid := os.fork()) == 0:
        os.close(ours)
        for number in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
        process.prepare()
        follower = Follower(theirs, moment)
        if moment:
            sys.setprofile(follower.see)
        if layer is not None:
            arm(**layer)
        code = 1
        try:
            code = command(lambda: run_and_report(cfg) and 0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        if moment:
            follower.end()
        if modules:
            with open(modules, "w") as file:
                file.write("\n".join(sys.modules))
        sys.stdout.flush()
        os._exit(code)
    os.close(theirs)
    told = signal_at_the_moment(pid, ours, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), *told


def arm(folder: str, deadly: int = 0, torn: bool = False, kind: str = "", part: str = "", error: int = 0,
        log: str = "") -> None:  # fmt: skip
    """``layer_arm`` of the layer; ``log`` is the file for a line of each operation."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644) if log else -1
    texts = (folder.encode(), kind.encode(), part.encode())
    ctypes.CDLL(None).layer_arm(texts[0], ctypes.c_long(deadly), torn, *texts[1:], error, descriptor)


def serve() -> None:
    saver.MAX_ATTEMPTS, saver.RETRY_SECONDS, start.CHECKPOINT_WAIT = 2, 0.1, 0.0  # as in ``conftest.impatient``
    for line in sys.stdin:
        asked = json.loads(line)
        answer = run(**asked)
        if "modules" in asked:
            with open(asked["modules"]) as file:
                for name in file.read().split():
                    with suppress(Exception):
                        importlib.import_module(name)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
