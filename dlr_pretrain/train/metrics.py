"""The record of a run: ``metrics.jsonl``, one line a completed update, and W&B as a view of it."""

from __future__ import annotations

import json
import math
import netrc
import os
import time
import uuid
from collections import deque
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dlr_pretrain.config import Config, to_dict
from dlr_pretrain.errors import UserError

SETTLING_STEPS = 10  # steps after a start that no throughput counts
WINDOW = 20  # steps over which throughput is averaged


class MetricsFile:
    """``metrics.jsonl``: appended line by line, cut back to the checkpoint when a run resumes."""

    def __init__(self, path: Path, resumed_step: int):
        self.path = path
        kept = [line for line in read_metrics(path) if line["step"] <= resumed_step]
        aside = path.with_suffix(".tmp")
        aside.write_text("".join(_line(record) for record in kept))
        os.replace(aside, path)
        self.file = open(path, "a")  # noqa: SIM115 - open for the life of the run

    def write(self, record: dict) -> None:
        self.file.write(_line(record))
        self.file.flush()

    def sync(self) -> None:
        """Durable before the checkpoint that counts on it."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
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
        yield
        self.clock += time.perf_counter() - start


class WandbView:
    """W&B as a view of ``metrics.jsonl``: it never stops the run, and never asks for anything."""

    def __init__(self, cfg: Config, run_dir: Path):
        try:
            import wandb
        except ImportError:
            raise UserError("logger=wandb: wandb is not installed. Install it, or use logger=jsonl") from None
        self.mode = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
        self.run = wandb.init(
            project=cfg.logger.project,
            entity=cfg.logger.entity,
            name=run_dir.name,
            id=_run_id(run_dir),
            resume="allow",
            dir=run_dir,
            mode=self.mode,
            config=to_dict(cfg),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.run.define_metric("*", step_metric="step")

    def describe(self) -> str:
        """Where the curves are."""
        if self.mode == "online":
            return f"online, {self.run.url}"
        return f"{self.mode} (no API key found: set WANDB_API_KEY for online), under {self.run.dir}"

    def write(self, record: dict) -> None:
        self.run.log({name: value for name, value in record.items() if value is not None})

    def close(self) -> None:
        self.run.finish()


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _run_id(run_dir: Path) -> str:
    """The W&B id of this run, drawn once in its life."""
    path = run_dir / "wandb_id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text().strip()


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
