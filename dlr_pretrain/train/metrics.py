"""Metrics: copied to the host without waiting; one line per completed update in ``metrics.jsonl``; throughput."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dlr_pretrain.config import Config
from dlr_pretrain.data import Batch
from dlr_pretrain.models import Llama
from dlr_pretrain.models.flops import flops_per_token, peak_flops
from dlr_pretrain.optim.schedule import rate
from dlr_pretrain.train.device import peak_memory
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.update import Outcome
from dlr_pretrain.util.files import sound_records, write_durably

WARMUP_STEPS = 10  # first steps of a start, which do not count towards throughput
SPEED_WINDOW = 20  # steps over which it is averaged


class MetricsFile(AbstractContextManager["MetricsFile"]):
    """``metrics.jsonl``: appended line by line by rank 0, cut back to the checkpoint when a run resumes."""

    def __init__(self, path: Path, resumed_step: int = 0, first_step: int = 0):
        """``first_step``: the step that the run began after. ``missing`` is the number of records that were lost."""
        self.path, self.unwritten, self.refusal = path, b"", OSError()
        self._mutex = threading.Lock()  # the saver's thread calls ``sync`` while the training writes
        found, damaged = sound_records(path)
        kept = [record for record in found if record["step"] <= resumed_step]
        self.missing = resumed_step - first_step - len({record["step"] for record in kept})
        if damaged:
            shutil.copyfile(path, path.with_name("metrics.damaged.jsonl"))
        write_durably(path, "".join(_json_line(record) for record in kept))
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115 - open for the life of the run

    def write(self, record: dict) -> None:
        """Append a line. If the disk does not take it now, it stays in ``unwritten``, and the next call tries again."""
        self._append(_json_line(record).encode())

    def _append(self, more: bytes = b"") -> None:
        with self._mutex:
            self.unwritten += more
            try:
                while self.unwritten:
                    self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
            except OSError as error:
                self.refusal = OSError(error.errno, error.strerror, str(self.path))

    def sync(self) -> None:
        """Make every line durable before a checkpoint relies on it. Raises OSError if a line cannot be written."""
        self._append()
        if self.unwritten:
            raise self.refusal
        os.fsync(self.file.fileno())

    def __exit__(self, *_) -> None:
        self._append()
        self.file.close()


def _json_line(record: dict) -> str:
    finite = {name: finite_or_none(v) if isinstance(v, float) else v for name, v in record.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


class Pending:
    """Outcomes of updates on their way to the host: at most ``lag`` steps late, and equally late on every rank."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.lag = 1 if self.on_gpu else 0
        self.queue: deque[tuple[int, Tensor, torch.cuda.Event | None, Batch]] = deque()

    def push(self, step: int, outcome: Outcome[Tensor], batch: Batch) -> None:
        values, copied = torch.stack([value.double() for value in outcome]), None  # fp64 holds any count of tokens
        if self.on_gpu:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values, copied = host.copy_(values, non_blocking=True), torch.cuda.Event()
            copied.record()
        self.queue.append((step, values, copied, batch))

    def ready(self, everything: Callable[[], bool]) -> Iterator[tuple[int, Outcome[float], Batch]]:
        """The steps that are due, oldest first, with outcome and batch: all but ``lag``, or all if ``everything()``.

        Waits until the GPU has finished each step.
        """
        while len(self.queue) > (0 if everything() else self.lag):
            step, values, copied, batch = self.queue.popleft()
            if copied is not None:
                copied.synchronize()
            yield step, Outcome(*values.tolist()), batch


class Meter:
    """The metrics of an update: loss, gradient norm, rate, speed and memory.

    The speed is that of the last steps. Evaluation, saving and the first steps (compilation) do not count.
    """

    def __init__(self, cfg: Config, ranks: Ranks, model: Llama, micro_batch: int):
        self.cfg, self.ranks = cfg, ranks
        self.peak: float | None = None  # tokens per second that all GPUs could train at their peak FLOP/s, if known
        if flops := peak_flops(ranks.device, cfg.precision.name):
            per_token = flops_per_token(cfg, model.lm_head.out_features, micro_batch)
            self.peak = flops * ranks.world_size / per_token
        self.steps = 0
        self.times: deque[float] = deque(maxlen=SPEED_WINDOW)  # seconds of the last steps
        self.clock = time.perf_counter()

    def record(self, step: int, outcome: Outcome[float]) -> dict:
        """The record of update ``step``, which has just ended, without its counts of tokens."""
        now = time.perf_counter()
        self.steps += 1
        if self.steps > WARMUP_STEPS:
            self.times.append(now - self.clock)
        self.clock = now
        seconds = self.seconds_per_step()
        speed = self.cfg.train.global_batch * self.cfg.train.seq_len / seconds if seconds else None
        return {
            "train/loss": finite_or_none(outcome.loss),
            "train/lr": rate(self.cfg, step - 1),
            "train/grad_norm": finite_or_none(outcome.norm),
            "perf/tokens_per_second": speed,
            "perf/mfu": speed / self.peak if speed and self.peak else None,
            "perf/max_memory_gb": peak_memory(self.ranks.device) / 1e9,
            "time": time.time(),
        }

    def seconds_per_step(self) -> float | None:
        """The mean of the last steps; None in the first steps."""
        return sum(self.times) / len(self.times) if self.times else None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent in this context does not count."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.clock += time.perf_counter() - start


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
