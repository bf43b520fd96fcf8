"""A rank of ``parallel=fsdp`` holds its share of weights and moments, and nothing of the others' between steps."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

import dlr_pretrain.train.fsdp  # noqa: F401 - imported once for all ranks that are forked
from dlr_pretrain.analysis.memory import memory
from dlr_pretrain.data import inputs_and_targets
from dlr_pretrain.util import sharded
from tests.fsdp.steps import VOCAB, config, made, on_two_ranks, own_batches

WIDE = ("scale.hidden_size=64", "scale.intermediate_size=201", "scale.num_layers=3", "backbone=full")


def alive() -> int:
    """Bytes of all storages that a tensor of this process refers to."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and type(thing) in (Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def test_each_of_two_ranks_holds_half():
    def act(ranks):
        held = {}
        for parallel in ("fsdp", "ddp"):
            before = alive()
            cfg = config(*WIDE, f"parallel={parallel}", "precision=bf16_mixed")
            updates, batches = made(cfg, ranks), own_batches(cfg, ranks)
            for step in range(3):
                updates(batches[step], step, 1e-3)
            with torch.no_grad(), updates.weights.with_residual():
                updates.weights.model(*inputs_and_targets(batches[0].tokens, batches[0].lengths))
            if parallel == "fsdp":
                updates.weights.folded(keep=False)
                entries = sum(p.numel() for p in updates.weights.model.parameters())
                own = sum(sharded.local_rows(p).numel() for p in updates.weights.model.parameters())
                assert own <= 0.51 * entries
            batches.clear()
            held[parallel] = alive() - before
            del updates
        assert held["fsdp"] <= 1.05 * 12 * entries / 2  # an fp32 master and two moments
        assert held["ddp"] >= 14 * entries  # and bf16 weights

    on_two_ranks(act)


@pytest.mark.parametrize(
    "words",
    [
        ("backbone=cola", "dlr=learnable_alpha", "precision=bf16", "train.accumulate=fp32"),
        ("backbone=lora", "precision=bf16_mixed"),
    ],
)
def test_a_plan_counts_what_rank_0_holds(words):
    """Rows of every parameter, gradient and moment, to the byte, where rows are odd."""

    def act(ranks):
        cfg = config(*words, "scale.intermediate_size=91", "scale.rank=7", "train.clip=null", "parallel=fsdp")
        updates = made(cfg, ranks)
        held = {}
        clear = updates.gradients.clear

        def counted():
            totals = [total.sum for total in updates.gradients.totals]
            own = [sharded.local_rows(p.grad) for p in updates.weights.optimized.values()]
            held["gradients"] = sum(tensor.nbytes for tensor in own)
            held["totals"] = sum(tensor.nbytes for tensor in totals)
            clear()

        updates.gradients.clear = counted
        updates(own_batches(cfg, ranks)[0], 0, 1e-3)
        if ranks.rank == 0:
            planned = memory(cfg, VOCAB, 2)
            indices = (r for m in updates.weights.model.modules() if (r := getattr(m, "residual", None)))
            others = sum(r.rows.nbytes + r.columns.nbytes for r in indices)
            assert planned.weights == sum(sharded.local_rows(t).nbytes for t in updates.weights.state.values()) + others
            assert planned.optimizer_state == sum(
                sharded.local_rows(t).nbytes for t in updates.optimizer.state_tensors().values()
            )
            assert planned.gradients == held["gradients"] + held["totals"]

    on_two_ranks(act)
