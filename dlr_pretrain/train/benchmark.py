"""Measures how long a save delays the training, for ``python scripts/benchmark.py checkpoint``, on any ranks."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from dlr_pretrain.config import Config
from dlr_pretrain.data import Batch
from dlr_pretrain.data.benchmark import Measure
from dlr_pretrain.train.checkpoint import Keep, directories
from dlr_pretrain.train.console import Console
from dlr_pretrain.train.runtime import Runtime
from dlr_pretrain.train.saver import Saver
from dlr_pretrain.train.trainer import Trainer
from dlr_pretrain.train.trial import noise, trial

WARM_UP, BEFORE, AFTER = 5, 4, 4  # steps: to warm up, before each save, and after the first step behind each save
LR = 1e-3


class NoSaver:
    """Stands in for ``Saver`` in a trainer without a run directory."""

    saved, error = 0, None

    def save(self, *_) -> None:
        pass

    def wait(self) -> None:
        pass


def bare_trainer(
    cfg: Config,
    runtime: Runtime,
    vocab_size: int,
    write: Callable[[dict], None],
    saver: Saver | None = None,
) -> Trainer:
    """A trainer of a new model, without data and run directory; its evaluations only return a loss of 0."""
    updates, unmeasured = trial(cfg, runtime, vocab_size), {"eval/loss": 0.0}
    return Trainer(cfg, runtime, updates, lambda *_: unmeasured, Console(cfg, False), write, saver or NoSaver(), None)


def saving(cfg: Config, rounds: int) -> Iterator[Measure]:
    """Time the steps around asynchronous saves, and the saves themselves. All ranks must call."""
    with Runtime(cfg) as runtime, tempfile.TemporaryDirectory() as scratch:
        runtime.use_device()
        batch = noise(cfg, runtime, cfg.planned_vocab_size)
        root = Path(runtime.on_main(lambda: scratch))
        with Saver(root, runtime, Keep(1)) as saver:
            trainer = bare_trainer(cfg, runtime, cfg.planned_vocab_size, lambda _: None, saver)
            for _ in range(WARM_UP):
                step(trainer, batch)
            found = [one_round(trainer, batch) for _ in range(rounds)]
        size = runtime.on_main(lambda: sum(p.stat().st_size for p in directories(root)[0].iterdir())) / 1e6
    plain, blocked, first, behind, whole = zip(*found, strict=True)
    yield Measure("checkpoint", "MB", [size])
    yield Measure("step", "ms", [1e3 * median(times) for times in plain])
    yield Measure("slowest step / median step, without a save", "ratio", [max(t) / median(t) for t in plain])
    yield Measure("asynchronous save holds the training for", "ms", [1e3 * seconds for seconds in blocked])
    usual = [median(times) for times in plain]
    ratios = {"step after it": first, f"{AFTER + 1} steps after it": behind}
    for name, times in ratios.items():
        yield Measure(f"{name} / steps before it", "ratio", [t / u for t, u in zip(times, usual, strict=True)])
    yield Measure("synchronous save holds the training for", "ms", [1e3 * seconds for seconds in whole])


def one_round(trainer: Trainer, batch: Batch) -> tuple[list[float], float, float, float, float]:
    """The seconds of one round, with an asynchronous and a synchronous save.

    Returns those of each step before the asynchronous save, of the call that starts it, of the first step after it, the
    median of the ``AFTER`` + 1 steps after it, and those of the synchronous save.
    """
    plain = [step(trainer, batch) for _ in range(BEFORE)]
    blocked = timed(trainer, lambda: trainer.checkpoint(None, wait=False))
    first = step(trainer, batch)
    behind = [first, *(step(trainer, batch) for _ in range(AFTER))]
    trainer.saver.wait()
    step(trainer, batch)
    whole = timed(trainer, lambda: trainer.checkpoint(None, wait=True))
    return plain, blocked, first, median(behind), whole


def step(trainer: Trainer, batch: Batch) -> float:
    """Seconds of one update, from end to end."""
    trainer.step += 1
    return timed(trainer, lambda: trainer.descent.update(batch, trainer.step - 1, LR))


def timed(trainer: Trainer, act: Callable[[], object]) -> float:
    trainer.runtime.gather(None)  # the ranks begin together
    start = time.perf_counter()
    act()
    trainer.runtime.synchronize()
    return time.perf_counter() - start
