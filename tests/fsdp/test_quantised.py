"""``optimizer=adamw_8bit`` under ``parallel=fsdp``: which moments are quantised, and the same blocks as unsharded."""

from __future__ import annotations

import pytest
import torch

import dlr_pretrain.train.fsdp  # noqa: F401 - imported once for all ranks that are forked
from dlr_pretrain.optim import quantized
from dlr_pretrain.optim.build import state_bytes
from dlr_pretrain.util import sharded
from tests.fsdp.steps import assert_bits, config, made, moments, on_two_ranks, own_batches, run

pytest.importorskip("torchao")
WORDS = ("backbone=full", "optimizer=adamw_8bit", "scale.num_layers=1", "scale.hidden_size=128")
ALIGNED, CUT = "scale.intermediate_size=192", "scale.intermediate_size=190"  # 95 rows of 128 values are 47.5 blocks
PLAIN = ("embed_tokens", "lm_head", "norm")  # 40 rows of 128 values: less than 4,096 on a rank


@pytest.fixture(autouse=True)
def eager():
    torch.compiler.set_stance("force_eager")  # torchao compiles its step
    yield
    torch.compiler.set_stance("default")


def test_blocks_that_no_rank_cuts_are_those_of_replicas():
    def act(ranks):
        words = (*WORDS, ALIGNED, "train.clip=null", "train.micro_batch=4")
        for count in (1, 4):
            replicas = run(ranks, *words, f"train.steps={count}", plain=True)
            sharded = run(ranks, *words, f"train.steps={count}", "parallel=fsdp")
            if count == 1:
                own, others = ({n: v for n, v in of.moments.items() if "proj" in n} for of in (sharded, replicas))
                assert len(own) == 7 * 3
                assert_bits(own, others)
        assert sharded.losses[:2] == replicas.losses[:2]  # later ones know that a replica quantises the embedding's
        assert sharded.losses == pytest.approx(replicas.losses, rel=1e-5)

    on_two_ranks(act)


@pytest.mark.parametrize("width", [ALIGNED, CUT])
def test_all_ranks_quantise_the_same_moments(width):
    def act(ranks):
        cfg = config(*WORDS, width, "parallel=fsdp")
        updates = made(cfg, ranks)
        updates.optimizer.load_state_tensors({}, {})  # as a fork from another optimizer does
        updates(own_batches(cfg, ranks)[0], 0, 1e-3)
        plain = PLAIN + (("mlp",) if width == CUT else ())  # 64 rows of 190 values are as many
        for name, p in updates.optimizer.parameters.items():
            state = updates.optimizer.part_of[name].state[sharded.local_rows(p)]
            quantised = not any(part in name for part in plain)
            assert quantized.is_quantized(state["exp_avg"]) == quantised, name
            assert state["exp_avg"].shape == sharded.local_rows(p).shape
        layout = updates.optimizer.state_layout()
        assert ranks.gather(layout) == [layout, layout] and len(layout) == 2 * (4 if width == CUT else 7)

    on_two_ranks(act)


@pytest.mark.parametrize("width", [ALIGNED, CUT])
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
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


def test_bytes_of_the_state_are_counted_as_they_are():
    def act(ranks):
        cfg = config(*WORDS, CUT, "parallel=fsdp")
        updates = made(cfg, ranks)
        updates(own_batches(cfg, ranks)[0], 0, 1e-3)
        held = sum(sharded.local_rows(t).nbytes for t in updates.optimizer.state_tensors().values())
        parameters = {name: sharded.local_rows(p) for name, p in updates.optimizer.parameters.items()}
        rows = {name: torch.empty_like(p, device="meta") for name, p in parameters.items()}
        assert state_bytes(cfg.optimizer, rows) == held

    on_two_ranks(act)
