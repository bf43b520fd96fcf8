"""Metrics of updates: their lines in ``metrics.jsonl``, and the throughput."""

import json
import math
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from dlr_pretrain.config import Config
from dlr_pretrain.models import Llama
from dlr_pretrain.models.flops import flops_per_token, peak_flops
from dlr_pretrain.optim.schedule import rate
from dlr_pretrain.train.device import peak_memory
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.state import TrainState
from dlr_pretrain.train.update import Outcome
from dlr_pretrain.util.errors import naming
from dlr_pretrain.util.files import sound_records, write_durably

WARMUP_STEPS = 10  # first steps of a start, which throughput leaves out
SPEED_WINDOW = 20  # steps over which throughput is averaged


class MetricsFile(AbstractContextManager["MetricsFile"]):
    """``metrics.jsonl``: a line for each completed update. A resume cuts it back to the checkpoint. Rank 0 only."""

    def __init__(self, path: Path, resumed_step: int = 0, first_step: int = 0):
        """The run began after ``first_step``; ``missing`` counts the lost records from there to ``resumed_step``."""
        self.path, self.unwritten = path, b""
        self._mutex = threading.Lock()  # the saver's thread calls ``sync`` while training writes
        records, damaged = sound_records(path)
        usable = [record for record in records if record["step"] <= resumed_step]
        self.last: dict = usable[-1] if usable else {}
        self.missing = resumed_step - first_step - len({record["step"] for record in usable})
        if damaged:
            shutil.copyfile(path, path.with_name("metrics.damaged.jsonl"))
        write_durably(path, "".join(_json_line(record) for record in usable))
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115 - open for the life of the run

    def write(self, record: dict) -> None:
        """Append a line. A line that the disk refuses stays in ``unwritten``, and the next call tries again."""
        with suppress(OSError):
            self._append(_json_line(record).encode())

    def sync(self) -> None:
        """Make every line durable, before a checkpoint relies on it. Raises OSError if a line cannot be written."""
        self._append()
        with naming(self.path):
            os.fsync(self.file.fileno())

    def _append(self, more: bytes = b"") -> None:
        with self._mutex, naming(self.path):
            self.unwritten += more
            while self.unwritten:
                self.unwritten = self.unwritten[self.file.write(self.unwritten) :]

    def __exit__(self, *_) -> None:
        with suppress(OSError):
            self._append()
        self.file.close()


def _json_line(record: dict) -> str:
    finite = {name: finite_or_none(v) if isinstance(v, float) else v for name, v in record.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


class Meter:
    """Measures updates: loss, gradient norm, learning rate, memory, and the speed of the last steps.

    The speed leaves out evaluation, saving and the first steps, which compile.
    """

    def __init__(self, cfg: Config, ranks: Ranks, model: Llama, micro_batch: int):
        self.cfg, self.ranks = cfg, ranks
        self.peak: float | None = None  # tokens/s of all GPUs at their peak FLOP/s, if known
        if flops := peak_flops(ranks.device, cfg.precision.name):
            per_token = flops_per_token(cfg, len(model.lm_head.weight), micro_batch)
            self.peak = flops * ranks.world_size / per_token
        self.steps = 0
        self.times: deque[float] = deque(maxlen=SPEED_WINDOW)  # seconds of the last steps
        self.clock = time.perf_counter()
        self.epoch = time.time() - self.clock  # once: a clock that is set later must not change how long training took

    def record(self, step: int, outcome: Outcome[float], state: TrainState) -> dict:
        """The record of update ``step``, which has just ended; ``state`` already counts it."""
        now = time.perf_counter()
        self.steps += 1
        if self.steps > WARMUP_STEPS:
            self.times.append(now - self.clock)
        self.clock = now
        tokens = len(self.times) * self.cfg.train.global_batch * self.cfg.train.seq_len
        speed = tokens / sum(self.times) if self.times else None
        return {
            "step": step,
            "train/skipped": state.skipped.total,
            "train/tokens": state.tokens,
            "train/real_tokens": state.real_tokens,
            "train/loss": finite_or_none(outcome.loss),
            "train/lr": rate(self.cfg, step - 1),
            "train/grad_norm": finite_or_none(outcome.norm),
            "perf/tokens_per_second": speed,
            "perf/mfu": speed / self.peak if speed and self.peak else None,
            "perf/max_memory_gb": peak_memory(self.ranks.device) / 1e9,
            "time": self.epoch + now,
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time in this context out of the speed."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.clock += time.perf_counter() - start


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
