"""The process beside the trainer that sends ``metrics.jsonl`` to W&B: whatever W&B does, it does to this one alone.

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
from dlr_pretrain.errors import first_line

POLL = 1.0  # seconds between looks at metrics.jsonl
INIT_TIMEOUT = 30.0  # seconds that wandb.init may take; it may double them
SHORTEST_PAUSE, LONGEST_PAUSE = 1.0, 3600.0  # seconds between attempts to reach W&B, each twice the last


@dataclass
class Order:
    """What is to be sent: the metrics of ``run_dir``, as the W&B run ``run_id`` with ``config``.

    ``offset``, in bytes, is where the lines of this start begin in ``metrics.jsonl``; ``trainer`` a process id.
    """

    run_dir: str
    run_id: str
    config: dict
    offset: int
    trainer: int


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they go to the whole job, and the trainer says when it is over
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what wandb prints is no answer
    order = Order(**json.loads(sys.stdin.buffer.raw.readline()))
    threading.Thread(target=_end_with, args=(order.trainer,), daemon=True).start()
    return Sender(order, lambda **answer: print(json.dumps(answer), file=answers, flush=True)).send()


def _end_with(trainer: int) -> None:
    """A trainer that was killed leaves nobody behind: the next start of the run sends what is missing."""
    while os.getppid() == trainer:
        time.sleep(POLL)
    os._exit(1)


class Sender:
    """Sends until it is told to finish; ``say`` answers the trainer."""

    def __init__(self, order: Order, say: Callable[..., None]):
        self.order, self.say = order, say
        self.mode, self.why = choose_mode(), "WANDB_MODE"
        self.command: str | None = None  # the trainer's, once there is one
        self.said: set[type] = set()

    def send(self) -> int:
        """The exit code: 1 where W&B did not take everything. Attempts go on for as long as the run does."""
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
        """Send all there is, and what comes until the command; again from the start if W&B failed on the way."""
        if self.mode == "disabled":
            return self.say(connected=f"disabled ({self.why})")
        order, path = self.order, Path(self.order.run_dir)
        run = open_run(path, order.run_id, order.config, self.mode, x_stats_pid=order.trainer)
        online = self.mode == "online"
        self.say(connected=f"online, {run.url}" if online else f"{self.mode} ({self.why}), under {run.dir}")
        # A server knows what it has, and is sent the rest of the whole file. A segment on disk holds one start.
        lines, last = Lines(path / "metrics.jsonl", 0 if online else order.offset), last_step(run)
        while self.command is None:
            last = log(run, lines.new(), last)
            self.command = told(POLL)
        log(run, lines.new(), last)
        run.finish(exit_code=int(self.command.split()[1]))

    def warn(self, error: Exception) -> None:
        """Say what went wrong, once of each kind, and let go of what is left of wandb."""
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
        """The lines that have become whole since the last call."""
        while (line := self.file.readline()).endswith(b"\n"):
            yield json.loads(line)
        self.file.seek(-len(line), os.SEEK_CUR)


# ----------------------------------------------------------------------------------------------------
# W&B; scripts/replay_wandb.py uses these as well


def choose_mode() -> str:
    """online, offline or disabled, as WANDB_MODE says."""
    mode = os.environ.get("WANDB_MODE") or "online"
    return {"run": "online", "dryrun": "offline"}.get(mode, mode)


def lacks_key(error: Exception) -> bool:
    """Whether wandb wanted to ask for a key, and had nobody to ask."""
    return type(error).__name__ == "UsageError" and re.search("api.key", str(error), re.IGNORECASE) is not None


def open_run(run_dir: Path, run_id: str, config: dict, mode: str, **settings):
    """The W&B run ``run_id`` of a run directory, new or resumed; its curves are drawn over the records' own "step".

    Nothing of the command line, the code, git or the installed packages goes with it.
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
    run.define_metric("*", step_metric="step")  # log(step=...) would lose what is not beyond W&B's own count
    return run


def last_step(run) -> int:
    """The last step that the server holds of a resumed run; 0 of a new one."""
    return run.summary.get("step") or 0


def log(run, records: Iterable[dict], after: int) -> int:
    """Log the records of steps beyond ``after``; returns the last step that is logged now."""
    for record in records:
        if record["step"] > after:
            row = {name: value for name, value in record.items() if value is not None and name != "time"}
            run.log(row | {"_timestamp": record["time"]})  # when it was trained; W&B's own would be now
            after = record["step"]
    return after


def redacted(error: Exception) -> str:
    """What an error says, in a line and without a key."""
    return redact(first_line(error))


if __name__ == "__main__":
    sys.exit(main())
