"""The plan's memory, of eager code, beside the allocator's: 7B as the paper has it (CoLA + DLR, rank 1024, 8 x 256)."""

from __future__ import annotations

import pytest
import torch

from benchmarks.protocol import warm_up_products
from dlr_pretrain.analysis.memory import memory
from dlr_pretrain.cli import load
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.trial import noise, trial

V = 32_000
SEVEN = ("scale=7b", "backbone=cola", "dlr=on", "train.activation_checkpointing=latent", "train.global_batch=8")
EIGHT_BIT = ("optimizer=adamw_8bit",)


@pytest.mark.parametrize(("words", "at_most"), [
    ((), 25.5e9),
    (EIGHT_BIT, 20e9),
    ((*EIGHT_BIT, "precision=bf16_sr"), 20e9),
], ids=["adamw", "8bit", "8bit_sr"])  # fmt: skip
def test_7b_takes_what_the_plan_says(words, at_most):
    if torch.cuda.get_device_properties(0).total_memory < at_most + 4e9:
        pytest.skip("a smaller GPU")
    cfg = load([*SEVEN, *words, "data=sample", "logger=jsonl", "compile=false"])
    with Ranks(cfg) as ranks:
        ranks.use_device()
        warm_up_products(ranks.device)
        before = torch.cuda.memory_allocated()
        updates = trial(cfg, ranks, V)
        batch = noise(cfg, ranks, V)
        for index in range(4):
            if index == 2:
                torch.cuda.reset_peak_memory_stats()
            updates(batch, index, 1e-4)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < at_most
    assert peak == pytest.approx(memory(cfg, V, 1).total, rel=0.05)
