"""Evaluation is right: a model of constant loss, the same loss on any number of ranks, and the GaLore convention."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from dlr_pretrain.cli import load
from dlr_pretrain.data import ValidationSet, open_source, open_tokenizer, validation_set
from dlr_pretrain.data.tokenizer import EOS
from dlr_pretrain.models import build_model
from dlr_pretrain.train import evaluate
from dlr_pretrain.train.evaluate import STRIPES, Evaluator, galore_perplexity, halves


def ranks(rank: int = 0, world_size: int = 1, add=lambda tensor: tensor):
    return SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"), sum=add, to_device=lambda t: t)


class Constant(nn.Module):
    """Every target costs ``loss`` nats."""

    def __init__(self, loss: float):
        super().__init__()
        self.loss, self.calls = loss, []

    def forward(self, ids, targets):
        self.calls.append(tuple(ids.shape))
        return self.loss * (targets != -100).sum()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stop_abandons_an_evaluation(world_size, monkeypatch):
    """Between two batches; on all ranks if any was asked to, after the batches in which they do not ask each other."""
    monkeypatch.setattr(evaluate, "ASKED_EVERY", 3)
    model, shares = Constant(1.0), []
    given = ranks(0, world_size, lambda asked: asked + (len(model.calls) >= 7) if asked.dim() == 0 else asked)
    stop = (lambda: len(model.calls) >= 7) if world_size == 1 else (lambda: False)  # of two ranks, the other is asked
    assert Evaluator(validation(60, 1), 1, given, stop=stop, progress=shares.append)(model) is None
    assert len(model.calls) == (7 if world_size == 1 else 8)
    assert shares[0] == 0 and shares == sorted({*shares}) and shares[-1] < 1
    assert Evaluator(validation(3, 1), 1, given, progress=shares.append)(model) is not None


def validation(rows: int, real_tokens: int):
    lengths = np.random.default_rng(0).integers(2, 8, rows).astype("int32")  # of 7 tokens: some scored, some not
    return ValidationSet(np.ones((rows, 7), "uint16"), lengths, real_tokens)


@pytest.mark.parametrize("micro_batch", [1, 3, 16])
def test_constant_loss_is_returned_exactly(micro_batch):
    loss, n = 2.5, 3
    model = Constant(loss)
    result = Evaluator(validation(7, 195 * 512 * n), micro_batch, ranks(), one_shape=True)(model)
    assert result["eval/loss"] == loss
    assert result["eval/perplexity"] == math.exp(loss)
    assert result["eval/perplexity_galore"] is None  # three batches are too few
    assert set(model.calls) == {(micro_batch, 6)}  # one shape, also for the last rows
    some = Constant(loss)
    assert Evaluator(validation(7, 195 * 512 * n), micro_batch, ranks())(some) == result
    assert sum(rows for rows, _ in some.calls) == 7  # no empty rows
    # A sharded model gathers its weights in each call: all ranks must call it equally often.
    shares = Constant(loss), Constant(loss)
    for rank, share in enumerate(shares):
        Evaluator(validation(5, 1), 1, ranks(rank, 2))(share)
    assert shares[0].calls == shares[1].calls and len(shares[0].calls) == 3  # the last of the second has an empty row


@pytest.mark.parametrize(("one_shape", "widths"), [(False, [192, 128, 64, 64]), (True, [200] * 4)])
def test_a_batch_ends_with_its_longest_row(one_shape, widths):
    """Of 200 positions; the rows of both halves are 150, 100, 30 and 0 long, as a rank without a row has them."""
    lengths = np.repeat(np.array([30, 151, 0, 101], "int32"), 2)[:7]
    model = Constant(2.0)
    found = Evaluator(ValidationSet(np.ones((7, 201), "uint16"), lengths, 1), 1, ranks(), one_shape)(model)
    assert found["eval/loss"] == 2.0
    assert [shape[1] for shape in model.calls[:4]] == widths


def on_ranks(model, whole, micro_batch: int, world_size: int) -> dict[str, float]:
    """What every rank reports: each evaluates its share, and the sums are added."""
    parts: list[torch.Tensor] = []

    def first(tensor):
        parts.append(tensor.clone())
        return tensor

    for rank in range(world_size):
        Evaluator(whole, micro_batch, ranks(rank, world_size, first))(model)
    assert len(parts) == world_size
    return Evaluator(whole, micro_batch, ranks(0, world_size, lambda _: torch.stack(parts).sum(0)))(model)


def pieces(tokens: np.ndarray, mask_documents: bool) -> list[np.ndarray]:
    """The row itself, or each of its documents."""
    return np.split(tokens, np.flatnonzero(tokens[:-1] == EOS) + 1) if mask_documents else [tokens]


@pytest.mark.parametrize(("packing", "mask"), [("pad", False), ("packed", True)])
def test_any_ranks_and_micro_batch_give_the_same_loss(words, packing, mask):
    cfg = load(words(f"eval.packing={packing}", "eval.tokens=1000", f"data.mask_documents={mask}"))
    source = open_source(cfg)
    tokenizer = open_tokenizer(cfg, source)
    whole = validation_set(cfg, source, tokenizer)
    model = build_model(cfg, tokenizer.vocab_size, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # far from uniform, so that the target matters
        summed, count = np.zeros(2), np.zeros(2, int)
        half = np.isin(np.arange(len(whole.tokens)), halves(len(whole.tokens))[1]).astype(int)
        for tokens, length, which in zip(whole.tokens.astype("int64"), whole.lengths, half, strict=True):
            for piece in map(torch.from_numpy, pieces(tokens[:length], mask)):
                following = piece[1:]
                if len(following):
                    logits = model.logits(piece[None, :-1])[0].double()
                    summed[which] += -logits.log_softmax(-1)[range(len(following)), following].sum().item()
                    count[which] += len(following)
    assert len(whole.tokens) % 7 and min(count) > 200
    for world_size, micro_batch in itertools.product((1, 2, 4), (1, 7, 16)):
        found = on_ranks(model, whole, micro_batch, world_size)
        assert found["eval/loss"] == pytest.approx(summed.sum() / count.sum(), abs=1e-6)
        assert [found["eval/loss_a"], found["eval/loss_b"]] == pytest.approx(summed / count, abs=1e-6)


@pytest.mark.parametrize("sequences", [2, 15, 16, 17, 1_001])
def test_halves_share_no_sequence_and_meet_at_few_places(sequences):
    a, b = (half.tolist() for half in halves(sequences))
    assert sorted(a + b) == list(range(sequences)) and abs(len(a) - len(b)) <= min(sequences, STRIPES) / 2
    which = np.isin(np.arange(sequences), b)
    assert np.count_nonzero(which[1:] != which[:-1]) == min(sequences, STRIPES) - 1


def test_the_galore_convention_of_published_runs():
    assert galore_perplexity(3.0, 10_000_000) == math.exp(3.0 * 101 / 102)  # n = 101 for 10M tokens
    assert galore_perplexity(3.0, 1) is None
