"""How long a save holds the training: what ``python scripts/benchmark.py checkpoint`` measures, on any ranks."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch

from dlr_pretrain.config import Config
from dlr_pretrain.data import Batch
from dlr_pretrain.data.benchmark import Measure
from dlr_pretrain.models import Llama, build
from dlr_pretrain.models.precision import STATE_DTYPE
from dlr_pretrain.train.checkpoint import Keep, directories
from dlr_pretrain.train.console import Console
from dlr_pretrain.train.runtime import Runtime
from dlr_pretrain.train.saver import Saver
from dlr_pretrain.train.trainer import Trainer
from dlr_pretrain.train.weights import place

WARM_UP, BEFORE, AFTER = 5, 4, 4  # steps: before all, and around each save
LR = 1e-3


class NoSaver:
    """In the place of ``Saver``, for a trainer without a run directory."""

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
    model: Llama | None = None,
    compiled_for: int | None = None,
) -> Trainer:
    """A trainer without data room and run directory, of ``model`` if given: it neither evaluates nor saves.

    Its graphs are those of ``compiled_for`` ranks (default: the runtime's).
    """
    if model is None:
        model = build(cfg, vocab_size, runtime.device, STATE_DTYPE[cfg.precision.name])
    weights = place(cfg, model)
    if cfg.compile:
        torch._dynamo.reset()
        weights.compile_(cfg.train, compiled_for or runtime.world_size)
    unmeasured = {"eval/loss": 0.0}
    return Trainer(cfg, runtime, weights, lambda _: unmeasured, Console(cfg, False), write, NoSaver(), None)


def saving(cfg: Config, rounds: int) -> Iterator[Measure]:
    """Steps before, during and after asynchronous saves; call on all ranks."""
    with Runtime(cfg) as runtime, tempfile.TemporaryDirectory() as scratch:
        runtime.use_device()
        trainer = bare_trainer(cfg, runtime, cfg.planned_vocab_size, lambda _: None)
        batch = noise(cfg, runtime, cfg.planned_vocab_size)
        root = Path(runtime.on_main(lambda: scratch))
        with Saver(root, runtime, Keep(1)) as saver:
            trainer.saver = saver
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
    """Seconds: of each step before a save, in it, of the step after it, of some steps after it; of one waited for."""
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
    return timed(trainer, lambda: trainer.update(batch, LR))


def timed(trainer: Trainer, act: Callable[[], object]) -> float:
    trainer.runtime.gather(None)  # the ranks begin together
    start = time.perf_counter()
    act()
    trainer.runtime.synchronize()
    return time.perf_counter() - start


def noise(cfg: Config, runtime: Runtime, vocab_size: int) -> Batch:
    """A rank's batch of random tokens."""
    rows = cfg.train.global_batch // runtime.world_size
    generator = torch.Generator().manual_seed(runtime.rank)
    tokens = torch.randint(2, vocab_size, (rows, cfg.train.seq_len + 1), generator=generator, dtype=torch.int32)
    return Batch(tokens, torch.full((rows,), cfg.train.seq_len + 1, dtype=torch.int32), rows * cfg.train.seq_len, {})
