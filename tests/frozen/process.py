"""Starts commands of a checkout, each in a process of its own that finds torch imported already.

``Commands`` talks to a process that imports the libraries once and forks for every command (a start then takes tenths
of a second instead of seconds). The fork runs the script with its own ``sys.argv``, ``sys.path`` and environment, as
Python would. ``python process.py`` is that process: a line of JSON is a command, and it answers with two lines, the
forks' ids and their exit statuses.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LIBRARIES = ("torch", "torch._dynamo", "torch.distributed.fsdp", "numpy", "hydra", "omegaconf", "safetensors.torch",
             "sentencepiece", "matplotlib.pyplot")  # fmt: skip
PATIENCE = 240  # seconds until a command that does not end is killed


class Ended(NamedTuple):
    codes: list[int]  # of each rank; minus the number of the signal that ended it
    said: str  # standard output and error of all ranks


class Commands:
    """The commands of the checkout ``tree``; logs lie in ``folder``, which is the commands' working directory."""

    def __init__(self, tree: Path, folder: Path):
        self.tree, self.folder, self.number = tree.resolve(), folder.resolve(), 0
        self.folder.mkdir(parents=True, exist_ok=True)
        quiet = {"CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
        self.environment |= quiet | {"PYTHONPATH": str(self.tree), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        here = [sys.executable, str(Path(__file__).resolve())]
        hidden = self.folder / "hidden" / "transformers"
        hidden.mkdir(parents=True)
        (hidden / "__init__.py").write_text("raise ImportError('hidden by the frozen suite')\n")
        self.server = subprocess.Popen(here, env=self.environment, cwd=self.folder, **pipe)

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stdin.close()
        self.server.wait()

    def run(
        self, *words: str, script: str = "train.py", ranks: int = 1, meanwhile=None, transformers: bool = True
    ) -> Ended:
        """Run a script on so many ranks; ``meanwhile(pids)`` is called once it has started.

        Without ``transformers``, a run cannot import it, and so does not verify its export, which takes seconds.
        """
        self.number += 1
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        jobs, logs = [], []
        for rank in range(ranks):
            group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
            logs.append(self.folder / f"{self.number:03d}.{rank}.log")
            environment = {name: str(value) for name, value in group.items()} if ranks > 1 else {}
            if not transformers:
                environment["PYTHONPATH"] = f"{self.folder / 'hidden'}{os.pathsep}{self.tree}"
            jobs.append({"script": str(self.tree / script), "tree": str(self.tree), "words": words,
                         "environment": environment, "log": str(logs[-1])})  # fmt: skip
        self.server.stdin.write(json.dumps(jobs) + "\n")
        self.server.stdin.flush()
        pids = json.loads(self.server.stdout.readline())
        late = threading.Timer(PATIENCE, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids])
        late.start()
        try:
            if meanwhile is not None:
                meanwhile(pids)
            codes = json.loads(self.server.stdout.readline())
        finally:
            late.cancel()
        return Ended(codes, "\n".join(log.read_text(errors="replace") for log in logs))

    def torchrun(self, *words: str, ranks: int) -> Ended:
        """``torchrun train.py`` as a user types it, without the forks."""
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command, how = [*launch, str(self.tree / "train.py"), *words], {"capture_output": True, "text": True}
        done = subprocess.run(command, env=self.environment, cwd=self.folder, timeout=PATIENCE, **how)
        return Ended([done.returncode], done.stdout + done.stderr)


def serve() -> dict | None:
    """Fork for every command until there are no more (None); in a fork, return the command."""
    for name in LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(name)
    while line := sys.stdin.readline():
        pids = []
        for job in json.loads(line):
            pid = os.fork()
            if pid == 0:
                return job
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        print(json.dumps([os.waitstatus_to_exitcode(status) for status in statuses]), flush=True)
    return None


def become(job: dict) -> None:
    """Run the command in this process, which ends as Python ends after a script."""
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    os.environ |= job["environment"]
    own = str(Path(__file__).parent)
    sys.path[:] = [str(Path(job["script"]).parent), job["tree"], *(entry for entry in sys.path if entry != own)]
    sys.argv[:] = [job["script"], *job["words"]]
    runpy.run_path(job["script"], run_name="__main__")


if __name__ == "__main__" and (command := serve()) is not None:
    become(command)
