"""Updates without a run's data, for the doctor, measurements and tests."""

from __future__ import annotations

from pathlib import Path

import torch

from dlr_pretrain.config import Config
from dlr_pretrain.data import Batch
from dlr_pretrain.models import Llama
from dlr_pretrain.train.console import Console
from dlr_pretrain.train.guard import Guard, StopRequest
from dlr_pretrain.train.loop import Loop
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.saver import Saver
from dlr_pretrain.train.state import new_model, new_optimizer
from dlr_pretrain.train.update import Update


def trial(cfg: Config, ranks: Ranks, vocab_size: int, model: Llama | None = None) -> Update:
    """The updates of ``model``; by default of a new model."""
    model = model or new_model(cfg, ranks, vocab_size)
    return Update(cfg, ranks, model, new_optimizer(cfg, model))


def trial_loop(cfg: Config, ranks: Ranks, vocab_size: int, run_dir: Path) -> Loop:
    """The training loop of a new model, whose checkpoints go to ``run_dir``. Its evaluations return a loss of 0."""
    console = Console(cfg, enabled=False)
    saver = Saver(run_dir, ranks, cfg.checkpoint, None, console)
    guard, update = Guard(cfg, ranks, StopRequest(ranks), saver, console, None), trial(cfg, ranks, vocab_size)
    return Loop(cfg, ranks, update, lambda _: {"eval/loss": 0.0}, [], saver, guard, console)


def random_batch(cfg: Config, ranks: Ranks, vocab_size: int) -> Batch:
    """A batch of random tokens for this rank."""
    rows = cfg.train.global_batch // ranks.world_size
    generator = torch.Generator().manual_seed(ranks.rank)
    tokens = torch.randint(2, vocab_size, (rows, cfg.train.seq_len + 1), generator=generator, dtype=torch.int32)
    lengths = torch.full((rows,), cfg.train.seq_len + 1, dtype=torch.int32)
    return Batch(tokens, lengths, rows * cfg.train.seq_len, {}, 1 if cfg.data.mask_documents else None)  # any id
