"""Metrics: copied to the host without waiting; throughput; ``metrics.jsonl``, with one line per completed update."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import write_durably
from dlr_pretrain.util.history import sound_records

SETTLING_STEPS = 10  # first steps of a start, which do not count towards throughput
WINDOW = 20  # steps over which throughput is averaged


class MetricsFile:
    """``metrics.jsonl``: appended line by line, cut back to the checkpoint when a run resumes.

    ``missing`` names the steps from ``first_step`` to ``resumed_step`` whose lines were lost, though they were trained.
    """

    def __init__(self, path: Path, resumed_step: int, first_step: int = 1):
        self.path, self.unwritten, self.refusal = path, b"", ""
        self._lock = threading.Lock()  # the saver's thread calls ``sync`` while the training writes
        kept = [line for line in sound_records(path)[0] if line["step"] <= resumed_step]
        self.missing = missing_steps((line["step"] for line in kept), first_step, resumed_step)
        write_durably(path, "".join(_line(record) for record in kept))
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115 - open for the life of the run

    def write(self, record: dict) -> None:
        """Append a line. If the disk does not take it now, the next call tries again."""
        self._offer(_line(record).encode())

    def _offer(self, more: bytes = b"") -> None:
        with self._lock:
            self.unwritten += more
            try:
                while self.unwritten:
                    self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
            except OSError as error:
                self.refusal = f"{self.path} could not be written: {error}"

    def sync(self) -> None:
        """Make every line durable before a checkpoint relies on it. Raises UserError if a line cannot be written."""
        self._offer()
        if self.unwritten:
            raise UserError(self.refusal)
        os.fsync(self.file.fileno())

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_) -> None:
        self._offer()
        self.file.close()


def _line(record: dict) -> str:
    finite = {name: finite_or_none(v) if isinstance(v, float) else v for name, v in record.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def missing_steps(steps: Iterable[int], first: int, last: int) -> str:
    """The steps from ``first`` to ``last`` that are not among ``steps``, such as "1-4, 9"; "" if none is missing."""
    gaps, expected = [], first
    for step in [*sorted({step for step in steps if step >= first}), last + 1]:
        if step > expected:
            gaps.append(f"{expected}-{step - 1}" if step - 1 > expected else f"{expected}")
        expected = step + 1
    return ", ".join(gaps)


class Pending:
    """Device metrics on their way to the host: at most ``lag`` steps late, and equally late on every rank."""

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

    def ready(self, everything: bool = False) -> Iterator[tuple[int, list[float]]]:
        """The steps that are due and their values, oldest first: all but the last ``lag``, or everything.

        Waits until the GPU has finished each step.
        """
        while len(self.queue) > (0 if everything else self.lag):
            step, values, event = self.queue.popleft()
            if event is not None:
                event.synchronize()
            yield step, values.tolist()


class Throughput:
    """Positions per second over the last steps. Evaluation, saving and the first steps (compilation) do not count."""

    def __init__(self):
        self.times: deque[float] = deque(maxlen=WINDOW)
        self.steps = 0
        self.clock = time.perf_counter()

    def step(self, positions: int) -> float | None:
        """Count a step of ``positions`` that has just ended; returns positions per second, None in the first steps."""
        now = time.perf_counter()
        self.steps += 1
        if self.steps > SETTLING_STEPS:
            self.times.append(now - self.clock)
        self.clock = now
        return positions * len(self.times) / sum(self.times) if self.times else None

    def seconds_per_step(self) -> float | None:
        return sum(self.times) / len(self.times) if self.times else None

    @contextmanager
    def paused(self):
        """Time spent in this context does not count."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.clock += time.perf_counter() - start


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
