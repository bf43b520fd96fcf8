"""Runs a few updates on this rank, without a data pipeline or a run directory, and returns their results."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dlr_pretrain.cli import load
from dlr_pretrain.config import Config
from dlr_pretrain.data import Batch
from dlr_pretrain.optim.schedule import merge_due, rate
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.state import folded, saved_tensors
from dlr_pretrain.train.update import Update
from dlr_pretrain.util import sharded
from tests.conftest import SMALL, on_ranks
from tests.golden.regenerate import VOCAB, batches
from tests.trial import trial


@dataclass
class Outcome:
    """The loss and gradient norm of every step, the whole weights and moments, and the folded weights."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]
    folded: dict[str, Tensor]


def config(*words: str) -> Config:
    """A configuration for two ranks."""
    default = {word.split("=")[0]: word for word in (*SMALL, "data=sample", "train.lr=1e-3", "train.steps=10")}
    given = {word.split("=")[0] for word in words} | ({"scale.rank"} if "backbone=full" in words else set())
    return load([*(word for name, word in default.items() if name not in given), *words], 2)


def own_batches(cfg: Config, ranks: Ranks) -> list[Batch]:
    """This rank's rows of the run's batches."""
    share = cfg.train.global_batch // ranks.world_size
    rows = slice(ranks.rank * share, (ranks.rank + 1) * share)
    some = itertools.islice(batches(cfg.train.global_batch, cfg.train.seq_len), cfg.train.steps)
    return [Batch(b.tokens[rows], b.lengths[rows], share * cfg.train.seq_len, b.state) for b in some]


def whole_state(updates: Update) -> dict[str, Tensor]:
    """Copies of a checkpoint's tensors, gathered from all ranks."""
    with updates.optimizer.taken_out() as values:
        tensors = saved_tensors(updates.model, values) | updates.optimizer.state_tensors()
        return {name: sharded.gathered(value).clone() for name, value in tensors.items()}


def on_two_ranks(act: Callable[[Ranks], object]) -> None:
    def with_ranks():
        with Ranks(config()) as ranks:
            act(ranks)

    on_ranks(with_ranks, 2)


def run(ranks: Ranks, *words: str) -> Outcome:
    """Run the steps of ``config(*words)`` on this rank."""
    cfg = config(*words)
    updates, losses, norms = trial(cfg, ranks, VOCAB), [], []
    for index, batch in enumerate(own_batches(cfg, ranks)):
        loss, norm, *_ = (value.item() for value in updates(batch, index, rate(cfg, index)))
        losses.append(loss), norms.append(norm)
        if merge_due(cfg, index + 1):
            updates.merge(index + 1)
    exported = folded(cfg, updates.model, updates.optimizer, keep=True)
    return Outcome(losses, norms, whole_state(updates), exported)


def assert_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].shape == b[name].shape, name
        assert torch.equal(a[name], b[name]), f"{name}: {(a[name].double() - b[name].double()).abs().max():.1e}"
