"""Views of a run's metrics beside ``metrics.jsonl``: W&B and TensorBoard. Neither can delay or end a run."""

from __future__ import annotations

import os
import queue
import re
import shlex
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from dlr_pretrain.config import Config, to_dict
from dlr_pretrain.train.console import Console
from dlr_pretrain.util.errors import Stopped, first_line
from dlr_pretrain.util.files import read_metrics, write_durably
from dlr_pretrain.util.secrets import redact

INIT_SECONDS, FINISH_SECONDS = 20.0, 15.0  # for the answers of a W&B server at the start and at the end
CLOSE_SECONDS = 60.0  # for a view to end: a W&B start that fails, the same start offline, and the finish
VARIABLES = {"project": "WANDB_PROJECT", "entity": "WANDB_ENTITY", "group": "WANDB_RUN_GROUP",
             "tags": "WANDB_TAGS", "name": "WANDB_NAME", "notes": "WANDB_NOTES"}  # fmt: skip
# Settings of wandb that the environment may change (WANDB_CONSOLE, ...). The command line, the code, the git state and
# the installed packages are not sent: they may hold secrets.
SETTINGS: dict[str, Any] = {
    "console": "off",
    "init_timeout": INIT_SECONDS,
    "finish_timeout": FINISH_SECONDS,
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_save_requirements": False,
    "x_transaction_log_flush_interval": 2.0,  # seconds: a kill loses the records since the last flush
}


class View(AbstractContextManager["View"]):
    """Passes the record of each step to a sink in a thread of its own: training never waits for the sink.

    Every call of the sink may block or fail.
    """

    def __init__(self, label: str, console: Console, start: Callable[[], TensorBoard | Wandb]):
        self.label, self.console, self.start = label, console, start
        self.records: queue.SimpleQueue[dict | int] = queue.SimpleQueue()  # the last item is an int, the exit code
        self.thread = threading.Thread(target=self._show, name=f"view of {label}", daemon=True)
        self.thread.start()

    def log(self, record: dict) -> None:
        if self.thread.is_alive():
            self.records.put(record)

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        """Give the sink ``CLOSE_SECONDS`` to take the waiting records."""
        self.records.put(0 if kind in (None, Stopped) else 1)
        self.thread.join(CLOSE_SECONDS)
        if self.thread.is_alive():
            self.console.say(f"warning: {self.label} does not answer and was abandoned. metrics.jsonl is complete")

    def _show(self) -> None:
        try:
            sink = self.start()
            while not isinstance(record := self.records.get(), int):
                sink.log(record)
            sink.close(record)
        except Exception as error:  # training goes on
            end_wandb()
            why = redact(first_line(error))
            self.console.say(f"warning: {self.label} has stopped ({why}). metrics.jsonl continues and stays complete")


def open_view(cfg: Config, run_dir: Path, console: Console, resumed_step: int) -> View | None:
    """The view that ``cfg.logger`` chooses, if any. ``resumed_step`` is the last step of earlier starts."""
    if cfg.logger.view == "tensorboard":
        folder = run_dir / "tensorboard"
        console.summary({"tensorboard": f"tensorboard --logdir {shlex.quote(str(folder))}"})
        return View("TensorBoard", console, lambda: TensorBoard(folder, resumed_step + 1))
    disabled = os.environ.get("WANDB_DISABLED", "").lower() in ("1", "on", "yes", "true")
    if cfg.logger.view == "wandb" and not disabled and os.environ.get("WANDB_MODE") != "disabled":
        return View("W&B", console, lambda: Wandb(cfg, run_dir, console))
    return None


class TensorBoard:
    """Writes scalars for ``tensorboard --logdir``; hides those of earlier starts from ``first_step`` on."""

    def __init__(self, folder: Path, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, record: dict) -> None:
        for name, value in record.items():
            if isinstance(value, (int, float)) and name not in ("step", "time"):
                self.writer.add_scalar(name, value, record["step"], walltime=record["time"])

    def close(self, exit_code: int) -> None:
        self.writer.close()


class Wandb:
    """The W&B run of a run directory, new or resumed, with its curves plotted against "step".

    The run is offline if WANDB_MODE says so, if there is no API key (nobody is asked for one), or if the server does
    not answer. Online, it first sends the steps of earlier starts that W&B lacks.
    """

    def __init__(self, cfg: Config, run_dir: Path, console: Console):
        self.console, mode, why = console, os.environ.get("WANDB_MODE") or "online", "WANDB_MODE"
        try:
            self.run = init(cfg, run_dir, mode)
        except Exception as error:
            end_wandb()
            self.run, why = init(cfg, run_dir, "offline"), redact(first_line(error))
        self.run.define_metric("*", step_metric="step")  # log(step=...) would drop steps that are below W&B's own
        self.folder, self.last, self.loss = Path(self.run.dir).parent, 0, None  # the step and eval/loss sent last
        if self.run.offline:
            return console.summary({"wandb": f"offline ({why}), in {self.folder}"})
        console.summary({"wandb": f"online, {self.run.url}"})
        self.last, self.loss = self.run.summary.get("step") or 0, self.run.summary.get("eval/loss")
        for record in read_metrics(run_dir / "metrics.jsonl"):
            self.log(record)

    def log(self, record: dict) -> None:
        """Log a step, unless W&B has it already. A resumed run may add the evaluation of the step that was last."""
        step, loss = record["step"], record.get("eval/loss")
        if step > self.last or (step == self.last and loss not in (None, self.loss)):
            self.last, self.loss = step, loss
            row = {name: value for name, value in record.items() if value is not None and name != "time"}
            self.run.log(row | {"_timestamp": record["time"]})  # the time of the step, not the current time

    def close(self, exit_code: int) -> None:
        """Let W&B send the rest within ``FINISH_SECONDS``, and say how to send what it still lacks."""
        try:
            self.run.finish(exit_code=exit_code)
        except TimeoutError:
            sends = f"wandb sync {shlex.quote(str(self.folder))}"
            self.console.say(f"warning: W&B does not answer and lacks the last metrics. To send them: {sends}")
        else:
            if self.run.offline:  # each start has a folder; wandb skips folders that it has sent
                folders = f"{shlex.quote(str(self.folder.parent))}/offline-run-*-{self.run.id}"
                self.console.summary({"wandb": f"to send this run: wandb sync {folders}"})


def end_wandb() -> None:
    """End wandb's own process after a failure: it would delay the end of this process."""
    if "wandb" in sys.modules:
        with suppress(Exception):
            sys.modules["wandb"].teardown(exit_code=1)


def init(cfg: Config, run_dir: Path, mode: str):
    """``wandb.init`` with the keys of ``logger``, else with the environment's variables, else with the run's name."""
    import wandb

    name = run_dir.resolve().name
    usual = {"project": "dlr_pretrain", "name": name, "group": re.sub(rf"-s{cfg.seed}(?=-|$)", "", name)}
    chosen = {key: getattr(cfg.logger, key) or unless(variable, usual.get(key)) for key, variable in VARIABLES.items()}
    chosen |= {"resume": unless("WANDB_RESUME", "allow"), "dir": unless("WANDB_DIR", str(run_dir)), "mode": mode}
    given = {key for key in SETTINGS if os.environ.get(f"WANDB_{key.removeprefix('x').upper()}")}
    ours = {key: value for key, value in SETTINGS.items() if key not in given}
    wandb.setup(settings=wandb.Settings(silent=True))  # before wandb looks for the key: it would ask on a terminal
    settings = wandb.Settings(silent=True, finish_timeout_raises=True, **ours)
    return wandb.init(id=wandb_id(run_dir), config=to_dict(cfg), settings=settings, **chosen)


def unless(variable: str, usual: str | None) -> Any:
    """``usual``, or None if the environment has ``variable``, which wandb reads itself."""
    return None if os.environ.get(variable) else usual


def wandb_id(run_dir: Path) -> str:
    """The W&B id of a run directory: WANDB_RUN_ID, else the id of its earlier starts, else a new id."""
    path, given = run_dir / "wandb_id", os.environ.get("WANDB_RUN_ID")
    if given or not path.exists():
        write_durably(path, given or uuid.uuid4().hex[:12])
    return path.read_text().strip()
