"""A rank of ``parallel=fsdp`` holds its share of weights and moments, and nothing of the others' between steps."""

from __future__ import annotations

import dlr_pretrain.train.fsdp  # noqa: F401 - imported once for all ranks that are forked
from dlr_pretrain.analysis.memory import memory
from dlr_pretrain.util import sharded
from tests.fsdp.steps import VOCAB, config, made, on_two_ranks, own_batches


def test_a_plan_counts_what_rank_0_holds():
    """Rows of every parameter, gradient and moment, to the byte, where rows are odd."""

    def act(ranks):
        words = ("backbone=cola", "dlr=learnable_alpha", "precision=bf16")
        cfg = config(*words, "scale.intermediate_size=91", "scale.rank=7", "train.clip=null", "parallel=fsdp")
        updates = made(cfg, ranks)
        held = {}
        clear = updates.gradients.clear

        def counted():
            own = [sharded.local_rows(p.grad) for p in updates.weights.optimized.values()]
            held["gradients"] = sum(tensor.nbytes for tensor in own)
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
            assert planned.gradients == held["gradients"]

    on_two_ranks(act)
