"""``parallel=fsdp`` on a GPU: one rank is sharded as several are, on NCCL and its streams."""

from __future__ import annotations

import itertools

import pytest
import torch

from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.trial import trial
from tests.golden.regenerate import VOCAB, batches
from tests.gpu.test_gpu import BATCH, SEQ_LEN, config


def losses(*words: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Of eight steps, and the folded weights."""
    cfg = config("train.steps=8", *words)
    with Ranks(cfg) as ranks:
        updates = trial(cfg, ranks, VOCAB)
        some = itertools.islice(batches(BATCH, SEQ_LEN), 8)
        found = [updates(batch, index, 1e-3)[0] for index, batch in enumerate(some)]
        return [loss.item() for loss in found], updates.weights.folded(keep=True)


@pytest.mark.parametrize("compiled", ["compile=false", "compile=true"])
@pytest.mark.parametrize("words", [
    ("precision=fp32",),
    ("precision=bf16_mixed", "train.activation_checkpointing=latent"),
    ("precision=bf16", "train.accumulate=fp32"),
], ids=lambda words: words[0])  # fmt: skip
def test_a_sharded_rank_trains_as_a_whole_one_does(words, compiled):
    whole, a = losses(*words, compiled)
    sharded, b = losses(*words, compiled, "parallel=fsdp")
    assert sharded == pytest.approx(whole, rel=1e-4 if words[0] == "precision=fp32" else 5e-3)
    assert sharded[-1] < sharded[0] - 0.1 and a.keys() == b.keys()
    assert all(a[name].dtype == b[name].dtype and a[name].shape == b[name].shape for name in a)
