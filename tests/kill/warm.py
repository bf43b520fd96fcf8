"""A process that has imported what a run imports, and forks itself for each run that it is asked for.

It is started with ``layer.c`` between itself and its files. Each line of stdin is a JSON object: ``words`` of a run, the
file for its ``output``, and how the layer is to be armed (``layer``). The answer is a line with the run's exit code.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from contextlib import suppress

from dlr_pretrain.__main__ import main
from dlr_pretrain.train import saver, start


def arm(folder: str, deadly: int = 0, torn: bool = False, kind: str = "", part: str = "", error: int = 0,
        log: str = "") -> None:  # fmt: skip
    """See ``layer_arm`` of the layer; ``log`` is the file for a line of each operation."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644) if log else -1
    texts = (folder.encode(), kind.encode(), part.encode())
    ctypes.CDLL(None).layer_arm(texts[0], ctypes.c_long(deadly), torn, *texts[1:], error, descriptor)


def run(words: list[str], output: str, layer: dict | None = None, modules: str = "") -> int:
    """In a fork: the exit code of the run of ``words``, negative if a signal has ended it.

    ``modules`` names a file for the names of all modules that it has imported.
    """
    if (pid := os.fork()) == 0:
        for number in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
        sys.argv = ["train.py", *words]
        if layer is not None:
            arm(**layer)
        code = 1
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush(), sys.stderr.flush()
        if modules:
            with open(modules, "w") as file:
                file.write("\n".join(sys.modules))
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def serve() -> None:
    saver.TRIES, saver.PAUSE, start.CHECKPOINT_WAIT = 2, 0.1, 0.0  # as in ``conftest.impatient``
    for line in sys.stdin:
        asked = json.loads(line)
        code = run(**asked)
        if "modules" in asked and code == 0:
            with open(asked["modules"]) as file:
                for name in file.read().split():
                    with suppress(Exception):
                        importlib.import_module(name)
        print(code, flush=True)


if __name__ == "__main__":
    serve()
