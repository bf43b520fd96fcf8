"""Updates a model on random tokens, without a run directory: for trials, checks and measurements."""

from __future__ import annotations

import torch

from dlr_pretrain.config import Config
from dlr_pretrain.data import Batch
from dlr_pretrain.models import Llama, build
from dlr_pretrain.models.precision import STATE_DTYPE
from dlr_pretrain.train.descent import Descent
from dlr_pretrain.train.runtime import Runtime
from dlr_pretrain.train.weights import place


def trial(
    cfg: Config, runtime: Runtime, vocab_size: int, model: Llama | None = None, compiled_for: int | None = None
) -> Descent:
    """The ``Descent`` of ``model`` (default: a new one), compiled as for ``compiled_for`` ranks (default: all)."""
    if model is None:
        model = build(cfg, vocab_size, runtime.device, STATE_DTYPE[cfg.precision.name])
    weights = place(cfg, model)
    if cfg.compile:
        torch._dynamo.reset()
        weights.compile_(cfg.train, compiled_for or runtime.world_size)
    return Descent(cfg, runtime, weights)


def noise(cfg: Config, runtime: Runtime, vocab_size: int) -> Batch:
    """This rank's batch of random tokens."""
    rows = cfg.train.global_batch // runtime.world_size
    generator = torch.Generator().manual_seed(runtime.rank)
    tokens = torch.randint(2, vocab_size, (rows, cfg.train.seq_len + 1), generator=generator, dtype=torch.int32)
    lengths = torch.full((rows,), cfg.train.seq_len + 1, dtype=torch.int32)
    separator = 1 if cfg.data.mask_documents else None  # any id
    return Batch(tokens, lengths, rows * cfg.train.seq_len, {}, separator)
