"""Builds the weights of a run: one rank computes them, the others receive them."""

from __future__ import annotations

import torch

from dlr_pretrain.config import Config
from dlr_pretrain.models import Llama, build
from dlr_pretrain.models.precision import STATE_DTYPE
from dlr_pretrain.models.start import FolderStart
from dlr_pretrain.train.runtime import Runtime
from dlr_pretrain.train.weights import Weights


def initial_weights(cfg: Config, runtime: Runtime, vocab_size: int, start: FolderStart | None = None) -> Weights:
    """The weights of a new run on this rank's device, from ``start`` or drawn from the seed.

    Rank 0 draws them (or decomposes them, for LOST) and sends them: other machines might round an SVD differently.
    """
    model = build(cfg, vocab_size, runtime.device, STATE_DTYPE[cfg.precision.name], initialize=runtime.is_main)
    if start is not None and runtime.is_main:
        start.put_into_(model)
    runtime.broadcast(model.state_dict().values())
    return place(cfg, runtime, model)


def empty_weights(cfg: Config, runtime: Runtime, vocab_size: int) -> Weights:
    """Weights without values, for a checkpoint to be loaded into."""
    model = build(cfg, vocab_size, runtime.device, STATE_DTYPE[cfg.precision.name], initialize=False)
    return place(cfg, runtime, model)


def place(cfg: Config, runtime: Runtime, model: Llama, compiled_for: int | None = None) -> Weights:
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
        weights.compile_(cfg.train, compiled_for or runtime.world_size)
    return weights
