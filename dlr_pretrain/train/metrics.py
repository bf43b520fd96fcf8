"""The record of a run: ``metrics.jsonl``, one line a completed update, and W&B as a view of it."""

from __future__ import annotations

import json
import math
import netrc
import os
import sys
import time
import uuid
from collections import deque
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dlr_pretrain.config import Config, to_dict
from dlr_pretrain.errors import Stopped, UserError
from dlr_pretrain.train.checkpoint import write_durably

SETTLING_STEPS = 10  # steps after a start that no throughput counts
WINDOW = 20  # steps over which throughput is averaged


class MetricsFile:
    """``metrics.jsonl``: appended line by line, cut back to the checkpoint when a run resumes."""

    def __init__(self, path: Path, resumed_step: int):
        self.path = path
        kept = [line for line in read_metrics(path) if line["step"] <= resumed_step]
        write_durably(path, "".join(_line(record) for record in kept))
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115 - open for the life of the run

    def write(self, record: dict) -> None:
        line = _line(record).encode()
        try:
            written = self.file.write(line)
        except OSError as error:
            raise UserError(f"{self.path} could not be written: {error}") from error
        if written != len(line):
            raise UserError(f"{self.path} could not be written: the disk is full")

    def sync(self) -> None:
        """Durable before the checkpoint that counts on it."""
        os.fsync(self.file.fileno())

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_) -> None:
        self.file.close()


def read_metrics(path: Path) -> list[dict]:
    """The complete lines of a metrics file; a last line that a kill cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]


def _line(record: dict) -> str:
    return json.dumps(record, allow_nan=True) + "\n"


class Pending:
    """Device metrics on their way to the host: at most ``lag`` steps late, and the same number on every rank."""

    def __init__(self, device: torch.device):
        self.lag = 1 if device.type == "cuda" else 0
        self.queue: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def push(self, step: int, values: Tensor) -> None:
        if self.lag == 0:
            self.queue.append((step, values, None))
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.queue.append((step, host, event))

    def ready(self, everything: bool = False) -> list[tuple[int, list[float]]]:
        """The steps that are due, oldest first: all but the last ``lag``, or everything."""
        due = []
        while len(self.queue) > (0 if everything else self.lag):
            step, values, event = self.queue.popleft()
            if event is not None:
                event.synchronize()
            due.append((step, values.tolist()))
        return due


class Throughput:
    """Tokens a second over the last steps, without the first ones, compilation, evaluation and saving."""

    def __init__(self):
        self.times: deque[float] = deque(maxlen=WINDOW)
        self.steps = 0
        self.clock = time.perf_counter()

    def step(self, tokens: int) -> float | None:
        """Count one step of ``tokens`` that has just ended; None until enough of them have."""
        now = time.perf_counter()
        self.steps += 1
        if self.steps > SETTLING_STEPS:
            self.times.append(now - self.clock)
        self.clock = now
        return tokens * len(self.times) / sum(self.times) if self.times else None

    def seconds_per_step(self) -> float | None:
        return sum(self.times) / len(self.times) if self.times else None

    @contextmanager
    def paused(self):
        """Time spent within does not count."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.clock += time.perf_counter() - start


class WandbView:
    """W&B as a view of ``metrics.jsonl``: it never stops the run, and never asks for anything."""

    def __init__(self, cfg: Config, run_dir: Path):
        try:
            import wandb
        except ImportError:
            raise UserError("logger=wandb: wandb is not installed. Install it, or use logger=jsonl") from None
        settings = wandb.Settings(silent=True, console="off")

        def start(mode: str):
            return wandb.init(
                project=cfg.logger.project,
                entity=cfg.logger.entity,
                name=run_dir.name,
                id=_run_id(run_dir),
                resume="allow",
                dir=run_dir,
                mode=mode,
                config=to_dict(cfg),
                settings=settings,
            )

        self.mode, self.why = os.environ.get("WANDB_MODE") or "online", "WANDB_MODE"
        if self.mode == "online" and not _has_wandb_key(settings.base_url):  # wandb would ask for one
            self.mode, self.why = "offline", "no API key found: set WANDB_API_KEY for online"
        try:
            self.run = start(self.mode)
        except Exception as error:  # no network, a wrong key, a server that is away
            if self.mode == "offline":
                raise UserError(f"logger=wandb: {error}. Use logger=jsonl") from error
            self.mode, self.why = "offline", f"{self.mode} failed: {str(error).splitlines()[0]}"
            self.run = start(self.mode)
        self.run.define_metric("*", step_metric="step")

    def describe(self) -> str:
        """Where the curves are."""
        if self.mode == "online":
            return f"online, {self.run.url}"
        return f"{self.mode} ({self.why}), under {self.run.dir}"

    def write(self, record: dict) -> None:
        if self.run is None:
            return
        try:
            self.run.log({name: value for name, value in record.items() if value is not None})
        except Exception as error:
            print(f"warning: W&B was left, metrics.jsonl goes on: {error}", file=sys.stderr, flush=True)
            self.run = None

    def __enter__(self) -> WandbView:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        if self.run is not None:
            self.run.finish(exit_code=0 if kind in (None, Stopped) else 1)


def _has_wandb_key(url: str) -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = url.split("//")[-1].split("/")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _run_id(run_dir: Path) -> str:
    """The W&B id of this run, drawn once in its life."""
    path = run_dir / "wandb_id"
    if not path.exists():
        write_durably(path, uuid.uuid4().hex[:12])
    return path.read_text().strip()


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
