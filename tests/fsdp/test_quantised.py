"""``optimizer=adamw_8bit`` under ``parallel=fsdp``: which moments are quantised, and the same blocks as unsharded."""

from __future__ import annotations

import pytest
import torch

import dlr_pretrain.train.fsdp  # noqa: F401 - imported once for all ranks that are forked
from dlr_pretrain.util import sharded
from tests.fsdp.steps import assert_bits, config, made, moments, on_two_ranks, own_batches

pytest.importorskip("torchao")
WORDS = ("backbone=full", "optimizer=adamw_8bit", "scale.num_layers=1", "scale.hidden_size=128")
ALIGNED, CUT = "scale.intermediate_size=192", "scale.intermediate_size=190"  # 95 rows of 128 values are 47.5 blocks
PLAIN = ("embed_tokens", "lm_head", "norm")  # 40 rows of 128 values: less than 4,096 on a rank


@pytest.fixture(autouse=True)
def eager():
    torch.compiler.set_stance("force_eager")  # torchao compiles its step
    yield
    torch.compiler.set_stance("default")


@pytest.mark.full
@pytest.mark.parametrize(("width", "parallel"), [(CUT, "fsdp"), (ALIGNED, "fsdp"), (CUT, "ddp")])
def test_state_goes_over_to_the_other_way_and_back_by_value(width, parallel):
    """Codes and scales as they are where blocks stay whole; where rows cut them, the values in full precision."""
    other = {"fsdp": "ddp", "ddp": "fsdp"}[parallel]

    def act(ranks):
        cfg = config(*WORDS, width, f"parallel={parallel}")
        first = made(cfg, ranks)
        for index, batch in enumerate(own_batches(cfg, ranks)[:2]):
            first(batch, index, 1e-3)
        values = moments(first)
        second, third = (made(config(*WORDS, width, f"parallel={p}"), ranks) for p in (other, parallel))
        for a, b in ((first, second), (second, third)):
            tensors = {name: sharded.gathered(value) for name, value in a.optimizer.state_tensors().items()}
            b.optimizer.load_state_tensors(tensors, a.optimizer.state_layout())
            assert_bits(moments(b), values)
        if width == ALIGNED and parallel == "fsdp":
            assert third.optimizer.state_layout() == first.optimizer.state_layout()
        second(own_batches(cfg, ranks)[2], 2, 1e-3)  # in whatever form the state now is

    on_two_ranks(act)
