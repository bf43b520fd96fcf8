"""Updates a new model on random tokens, without the data of a run: for trials, checks and measurements."""

from __future__ import annotations

from pathlib import Path

import torch

from dlr_pretrain.config import Config
from dlr_pretrain.data import Batch
from dlr_pretrain.models import Llama, build
from dlr_pretrain.train.console import Console
from dlr_pretrain.train.guard import Guard
from dlr_pretrain.train.loop import Loop
from dlr_pretrain.train.metrics import MetricsFile
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.saver import Saver
from dlr_pretrain.train.update import Update
from dlr_pretrain.train.weights import place
from dlr_pretrain.util.tensors import STATE_DTYPE


def trial(cfg: Config, ranks: Ranks, vocab_size: int, model: Llama | None = None) -> Update:
    """The updates of ``model`` (default: a new one)."""
    if model is None:
        model = build(cfg, vocab_size, ranks.device, STATE_DTYPE[cfg.precision.name])
    return Update(cfg, ranks, place(cfg, ranks, model))


def trial_loop(cfg: Config, ranks: Ranks, vocab_size: int, run_dir: Path, metrics: MetricsFile | None = None) -> Loop:
    """The training loop of a new model, whose checkpoints go to ``run_dir``. Its evaluations return a loss of 0."""
    console = Console(cfg, enabled=False)
    saver = Saver(run_dir, ranks, cfg.checkpoint, metrics, console)
    guard = Guard(cfg, ranks, saver, console, None)

    def evaluator(model: Llama, interruptible: bool) -> dict[str, float | None]:
        return {"eval/loss": 0.0}

    return Loop(cfg, ranks, trial(cfg, ranks, vocab_size), evaluator, metrics, saver, guard, console)


def noise(cfg: Config, ranks: Ranks, vocab_size: int) -> Batch:
    """This rank's batch of random tokens."""
    rows = cfg.train.global_batch // ranks.world_size
    generator = torch.Generator().manual_seed(ranks.rank)
    tokens = torch.randint(2, vocab_size, (rows, cfg.train.seq_len + 1), generator=generator, dtype=torch.int32)
    lengths = torch.full((rows,), cfg.train.seq_len + 1, dtype=torch.int32)
    separator = 1 if cfg.data.mask_documents else None  # any id
    return Batch(tokens, lengths, rows * cfg.train.seq_len, {}, separator)
