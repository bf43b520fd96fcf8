"""W&B as a view of ``metrics.jsonl``: a process of its own reads the file, so that training never waits for W&B."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import uuid
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import dlr_pretrain
from dlr_pretrain.config import Config, to_dict
from dlr_pretrain.train.console import Console
from dlr_pretrain.train.wandb_sender import Order
from dlr_pretrain.util.errors import Stopped
from dlr_pretrain.util.files import is_there, write_durably

WANDB_ID = "wandb_id"
FINISH_SECONDS = 60.0  # for the last metrics, if the run has finished and the server answers
LEAVE_SECONDS = 10.0  # if it does not answer, or the run was stopped: the next start sends the rest


class WandbView:
    """Sends the lines added to ``metrics.jsonl`` while it is open. It never stops the run or prompts the user."""

    def __init__(self, cfg: Config, run_dir: Path, console: Console):
        self.run_dir, self.console = run_dir, console
        self.connected = False
        offset = (run_dir / "metrics.jsonl").stat().st_size
        order = Order(str(run_dir), wandb_id(run_dir), to_dict(cfg), offset, os.getpid())
        package = str(Path(dlr_pretrain.__file__).parents[1])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dlr_pretrain.train.wandb_sender"],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C asks the run to stop, not this process
        )
        self._tell(json.dumps(asdict(order)))
        self._listener = threading.Thread(target=self._listen, name="wandb-view", daemon=True)
        self._listener.start()

    def __enter__(self) -> WandbView:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        """Let the process send the last metrics, but not for long."""
        self._tell(f"finish {0 if kind in (None, Stopped) else 1}")
        seconds = FINISH_SECONDS if self.connected and kind is None else LEAVE_SECONDS
        try:
            complete = self.process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            complete = False
            self.process.kill()
            self.process.wait()
        self._listener.join(LEAVE_SECONDS)
        if not complete:
            later = ", as does the run's next start that finds it online" if kind else ""
            sends = f"python scripts/replay_wandb.py {self.run_dir} sends them{later}"
            self.console.say(f"warning: W&B lacks the last metrics. {sends}")

    def _tell(self, line: str) -> None:
        with suppress(OSError):  # the process may have ended
            self.process.stdin.write(line.encode() + b"\n")

    def _listen(self) -> None:
        """Show what the process answers, until it ends."""
        for line in self.process.stdout:
            answer = json.loads(line)
            self.connected = "connected" in answer
            if self.connected:
                self.console.summary({"wandb": answer["connected"]})
            else:
                self.console.say(f"warning: {answer['warning']}")


def wandb_id(run_dir: Path) -> str:
    """The W&B id of a run directory; a new one is drawn if there is none."""
    if not is_there(run_dir / WANDB_ID):
        keep_id(run_dir, draw_id())
    return (run_dir / WANDB_ID).read_text().strip()


def draw_id() -> str:
    return uuid.uuid4().hex[:12]


def keep_id(run_dir: Path, chosen: str) -> None:
    """Make ``chosen`` the W&B id of a run directory from now on."""
    write_durably(run_dir / WANDB_ID, chosen)
