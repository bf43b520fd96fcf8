"""Evaluation counts right: a model of constant loss, and the GaLore convention."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from dlr_pretrain.train.evaluate import Evaluator, galore_loss

ALONE = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"), sum=lambda tensor: tensor)


class Constant(nn.Module):
    """Every target costs ``loss`` nats."""

    def __init__(self, loss: float):
        super().__init__()
        self.loss, self.calls = loss, []

    def forward(self, ids, targets):
        self.calls.append(tuple(ids.shape))
        return self.loss * (targets != -100).sum()


def validation(rows: int, real_tokens: int):
    rng = np.random.default_rng(0)
    targets = rng.integers(-100, -98, (rows, 6)).astype("int32")  # some scored, some not
    return SimpleNamespace(inputs=np.zeros((rows, 6), "uint16"), targets=targets, real_tokens=real_tokens)


@pytest.mark.parametrize("micro_batch", [1, 3, 16])
def test_constant_loss_is_returned_exactly(micro_batch):
    model = Constant(2.5)
    result = Evaluator(validation(7, 195 * 512 * 3), micro_batch, ALONE)(model)
    assert result["eval/loss"] == 2.5
    assert result["eval/perplexity"] == math.exp(2.5)
    assert result["eval/perplexity_galore"] == math.exp(2.5 * 3 / 4)
    assert set(model.calls) == {(micro_batch, 6)}  # one shape, also for the last rows


def test_ranks_share_the_sequences():
    whole = validation(7, 1)

    def seen(rank):
        sums = []
        view = SimpleNamespace(
            rank=rank, world_size=2, device=torch.device("cpu"), sum=lambda t: (sums.append(t), t)[1]
        )
        Evaluator(whole, 2, view)(Constant(1.0))
        return sums[0][1].item()

    assert seen(0) + seen(1) == (whole.targets != -100).sum()


def test_the_convention_of_the_papers_runs():
    assert galore_loss(3.0, 10_000_000) == 3.0 * 101 / 102  # n = 101 for 10M tokens
    assert galore_loss(3.0, 1) == 1.5
