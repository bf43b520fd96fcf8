"""Evaluation counts right: a model of constant loss, the same number on any ranks, and the GaLore convention."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from dlr_pretrain.cli import load
from dlr_pretrain.data import inputs_and_targets, open_source, open_tokenizer, validation_set
from dlr_pretrain.models import build
from dlr_pretrain.train.evaluate import Evaluator, galore_loss


def runtime(rank: int = 0, world_size: int = 1, add=lambda tensor: tensor):
    return SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"), sum=add, to_device=lambda t: t)


class Constant(nn.Module):
    """Every target costs ``loss`` nats."""

    def __init__(self, loss: float):
        super().__init__()
        self.loss, self.calls = loss, []

    def forward(self, ids, targets):
        self.calls.append(tuple(ids.shape))
        return self.loss * (targets != -100).sum()


def validation(rows: int, real_tokens: int):
    lengths = np.random.default_rng(0).integers(2, 8, rows).astype("int32")  # of 7 tokens: some scored, some not
    return SimpleNamespace(tokens=np.ones((rows, 7), "uint16"), lengths=lengths, real_tokens=real_tokens)


@pytest.mark.parametrize("loss", [2.5, 3.0])
@pytest.mark.parametrize("micro_batch", [1, 3, 16])
def test_constant_loss_is_returned_exactly(micro_batch, loss):
    model, n = Constant(loss), 3
    result = Evaluator(validation(7, 195 * 512 * n), micro_batch, runtime())(model)
    assert result["eval/loss"] == loss
    assert result["eval/perplexity"] == math.exp(loss)
    assert result["eval/perplexity_galore"] == math.exp(loss * n / (n + 1))
    assert set(model.calls) == {(micro_batch, 6)}  # one shape, also for the last rows


def on_ranks(model, whole, micro_batch: int, world_size: int) -> dict[str, float]:
    """What every rank reports: each evaluates its share, and the sums are added up."""
    parts: list[torch.Tensor] = []

    def first(tensor):
        parts.append(tensor.clone())
        return tensor

    for rank in range(world_size):
        Evaluator(whole, micro_batch, runtime(rank, world_size, first))(model)
    assert len(parts) == world_size
    return Evaluator(whole, micro_batch, runtime(0, world_size, lambda _: torch.stack(parts).sum(0)))(model)


@pytest.mark.parametrize("packing", ["pad", "packed"])
def test_any_ranks_and_micro_batch_give_the_loss_of_the_sequences_one_by_one(words, packing):
    cfg = load(words(f"eval.packing={packing}", "eval.tokens=1000"))
    source = open_source(cfg)
    tokenizer = open_tokenizer(cfg, source)
    whole = validation_set(cfg, source, tokenizer)
    model = build(cfg, tokenizer.vocab_size, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # far from uniform, so that which target is predicted matters
        summed = count = 0
        for tokens, length in zip(whole.tokens.astype("int64"), whole.lengths, strict=True):
            ids = torch.from_numpy(tokens[: min(length, len(tokens) - 1)])
            logits = model.logits(ids[None])[0].double()
            following = torch.from_numpy(tokens[1:length])
            summed += -logits.log_softmax(-1)[range(len(following)), following].sum().item()
            count += len(following)
    assert len(whole.tokens) % 7 and count > 500
    for world_size, micro_batch in itertools.product((1, 2, 4), (1, 7, 16)):
        found = on_ranks(model, whole, micro_batch, world_size)
        assert found["eval/loss"] == pytest.approx(summed / count, abs=1e-6)


def test_ranks_share_the_sequences():
    whole = validation(7, 1)
    _, targets = inputs_and_targets(torch.from_numpy(whole.tokens), torch.from_numpy(whole.lengths))

    def seen(rank):
        sums = []
        view = runtime(rank, 2, lambda t: (sums.append(t), t)[1])
        Evaluator(whole, 2, view)(Constant(1.0))
        return sums[0][1].item()

    assert seen(0) + seen(1) == (targets != -100).sum()


def test_the_convention_of_the_papers_runs():
    assert galore_loss(3.0, 10_000_000) == 3.0 * 101 / 102  # n = 101 for 10M tokens
    assert galore_loss(3.0, 1) == 1.5
