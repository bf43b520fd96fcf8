"""The process beside the trainer that sends ``metrics.jsonl`` to W&B: a failure of W&B affects this process alone.

``WandbView`` starts it. It reads an ``Order`` as a line of JSON, and later ``finish <exit code>``, from standard input,
and answers in lines of JSON: ``{"connected": where the curves are}`` or ``{"warning": what went wrong}``.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dlr_pretrain.config.secrets import redact
from dlr_pretrain.util.errors import first_line

POLL = 1.0  # seconds between looks at metrics.jsonl
INIT_TIMEOUT = 30.0  # seconds that wandb.init may take; wandb may double them
SHORTEST_PAUSE, LONGEST_PAUSE = 1.0, 3600.0  # seconds between attempts to reach W&B, each twice the last


@dataclass
class Order:
    """What to send: the metrics of ``run_dir``, as the W&B run ``run_id`` with ``config``.

    ``offset``, in bytes, is where the lines of this start begin in ``metrics.jsonl``. ``trainer`` is a process id.
    """

    run_dir: str
    run_id: str
    config: dict
    offset: int
    trainer: int


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the whole job gets them, and the trainer says when to finish
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what wandb prints must not mix with the answers
    order = Order(**json.loads(sys.stdin.buffer.raw.readline()))
    threading.Thread(target=_end_with, args=(order.trainer,), daemon=True).start()
    return Sender(order, lambda **answer: print(json.dumps(answer), file=answers, flush=True)).send()


def _end_with(trainer: int) -> None:
    """End this process when the trainer has died; the next start of the run sends what is missing."""
    while os.getppid() == trainer:
        time.sleep(POLL)
    os._exit(1)


class Sender:
    """Sends metrics until the trainer's command to finish; ``say`` answers the trainer."""

    def __init__(self, order: Order, say: Callable[..., None]):
        self.order, self.say = order, say
        self.mode, self.why = choose_mode(), "WANDB_MODE"
        self.command: str | None = None  # the trainer's, once it has come
        self.said: set[type] = set()

    def send(self) -> int:
        """Try to send everything for as long as the run lasts. Returns the exit code: 1 if W&B did not take it all."""
        pause = SHORTEST_PAUSE
        while True:
            try:
                self.attempt()
                return 0
            except Exception as error:
                if self.mode == "online" and lacks_key(error):
                    self.mode, self.why = "offline", "no API key found: set WANDB_API_KEY for online"
                    continue
                self.warn(error)
            if self.command is not None:
                return 1
            self.command = told(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def attempt(self) -> None:
        """Send the records so far, and those that come until the command. Each attempt opens the W&B run anew."""
        if self.mode == "disabled":
            return self.say(connected=f"disabled ({self.why})")
        order, path = self.order, Path(self.order.run_dir)
        run = open_run(path, order.run_id, order.config, self.mode, x_stats_pid=order.trainer)
        online = self.mode == "online"
        self.say(connected=f"online, {run.url}" if online else f"{self.mode} ({self.why}), under {run.dir}")
        # A server knows its last step, and gets the rest of the whole file. An offline run on disk holds one start.
        lines, last = Lines(path / "metrics.jsonl", 0 if online else order.offset), last_step(run)
        while self.command is None:
            last = log(run, lines.new(), last)
            self.command = told(POLL)
        log(run, lines.new(), last)
        run.finish(exit_code=int(self.command.split()[1]))

    def warn(self, error: Exception) -> None:
        """Say what went wrong, once for each type of error, and shut down what is left of wandb."""
        if type(error) not in self.said:
            self.said.add(type(error))
            self.say(warning=f"W&B: {redacted(error)}. metrics.jsonl goes on, and W&B is tried again")
        if "wandb" in sys.modules:
            with suppress(Exception):
                sys.modules["wandb"].teardown(exit_code=1)


def told(seconds: float) -> str | None:
    """The trainer's command, if it comes within ``seconds``."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return sys.stdin.buffer.raw.readline().decode() if ready else None


class Lines:
    """The records of a growing file from byte ``offset`` on."""

    def __init__(self, path: Path, offset: int = 0):
        self.file = open(path, "rb")  # noqa: SIM115 - open for the life of the process
        self.file.seek(offset)

    def new(self) -> Iterator[dict]:
        """The records whose lines were completed since the last call."""
        while (line := self.file.readline()).endswith(b"\n"):
            yield json.loads(line)
        self.file.seek(-len(line), os.SEEK_CUR)


# ----------------------------------------------------------------------------------------------------
# Calls of W&B; wandb_replay.py uses them as well


def choose_mode() -> str:
    """online, offline or disabled, as WANDB_MODE says."""
    mode = os.environ.get("WANDB_MODE") or "online"
    return {"run": "online", "dryrun": "offline"}.get(mode, mode)


def lacks_key(error: Exception) -> bool:
    """Whether wandb failed because it has no API key and nobody to ask for one."""
    return type(error).__name__ == "UsageError" and re.search("api.key", str(error), re.IGNORECASE) is not None


def open_run(run_dir: Path, run_id: str, config: dict, mode: str, **settings):
    """Open the W&B run ``run_id`` of a run directory, new or resumed; its curves are drawn over the records' "step".

    The command line, the code, git's state and the installed packages are not sent.
    """
    import wandb

    quiet = {"silent": True, "console": "off", "init_timeout": INIT_TIMEOUT}
    private = {"disable_git": True, "disable_code": True, "save_code": False, "x_save_requirements": False}
    run = wandb.init(
        project=config["logger"]["project"],
        entity=config["logger"]["entity"],
        name=run_dir.resolve().name,
        id=run_id,
        resume="allow",
        dir=run_dir,
        mode=mode,
        config=config,
        settings=wandb.Settings(**quiet, **private, **settings),
    )
    run.define_metric("*", step_metric="step")  # log(step=...) would drop steps that are not beyond W&B's count
    return run


def last_step(run) -> int:
    """The last step of a resumed run that the server holds; 0 for a new run."""
    return run.summary.get("step") or 0


def log(run, records: Iterable[dict], after: int) -> int:
    """Log the records of steps beyond ``after``; returns the last step that is now logged."""
    for record in records:
        if record["step"] > after:
            row = {name: value for name, value in record.items() if value is not None and name != "time"}
            run.log(row | {"_timestamp": record["time"]})  # the time of the step; W&B would take the current time
            after = record["step"]
    return after


def redacted(error: Exception) -> str:
    """The first line of an error, without secrets."""
    return redact(first_line(error))


if __name__ == "__main__":
    sys.exit(main())
