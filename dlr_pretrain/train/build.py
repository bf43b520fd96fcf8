"""Builds the weights of a run: one rank computes them, the others receive them."""

from __future__ import annotations

import torch

from dlr_pretrain.config import Config
from dlr_pretrain.models import Llama, build
from dlr_pretrain.models.precision import STATE_DTYPE
from dlr_pretrain.models.start import FolderStart
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.weights import Weights


def initial_weights(cfg: Config, ranks: Ranks, vocab_size: int, start: FolderStart | None = None) -> Weights:
    """The weights of a new run on this rank's device, from ``start`` or drawn from the seed.

    Rank 0 draws them (or decomposes them, for LOST) and sends them: other machines might round an SVD differently.
    """
    model = build(cfg, vocab_size, ranks.device, STATE_DTYPE[cfg.precision.name], initialize=ranks.is_main)
    if start is not None and ranks.is_main:
        start.put_into_(model)
    ranks.broadcast(model.state_dict().values())
    return place(cfg, ranks, model)


def empty_weights(cfg: Config, ranks: Ranks, vocab_size: int) -> Weights:
    """Weights without values, for a checkpoint to be loaded into."""
    model = build(cfg, vocab_size, ranks.device, STATE_DTYPE[cfg.precision.name], initialize=False)
    return place(cfg, ranks, model)


def place(cfg: Config, ranks: Ranks, model: Llama, compiled_for: int | None = None) -> Weights:
    """The ``Weights`` of ``model``, given whole in the dtype of the state; sharded under ``parallel=fsdp``.

    If ``cfg.compile``, they are compiled as for ``compiled_for`` ranks (default: those of the run).
    """
    if cfg.parallel.name == "fsdp":
        from dlr_pretrain.train.fsdp import ShardedWeights  # its imports take half a second

        weights: Weights = ShardedWeights(model, cfg.precision.name, cfg.train.accumulate)
    else:
        weights = Weights(model, cfg.precision.name, cfg.train.accumulate)
    if cfg.compile:
        torch._dynamo.reset()  # in a multirun, the previous run compiled other shapes
        weights.compile_(cfg.train, compiled_for or ranks.world_size)
    return weights
