"""Updates by recorded micro-batches equal eager updates bit for bit, and what a recording gets wrong is noticed."""

import itertools
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from benchmarks.variants import joined
from dlr_pretrain.config import Config
from dlr_pretrain.optim.schedule import merge_due, rate
from dlr_pretrain.train import recorded
from dlr_pretrain.train.parallel import without_backward
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.recorded import Recorded
from dlr_pretrain.util import sharded
from tests.conftest import on_ranks
from tests.golden.regenerate import VOCAB, batches
from tests.tape import Tape
from tests.trial import configured, trial

UPDATES = 5  # the first is eager, the second records
COLA = ("backbone=cola", "dlr=on")
CASES = {
    "one micro-batch": (*COLA, "train.micro_batch=8"),
    "two": (*COLA, "train.micro_batch=4"),
    "four": COLA,
    "documents": (*COLA, "data.mask_documents=true", "data.packing=packed"),
    "latents kept": (*COLA, "train.activation_checkpointing=latent"),
    "blocks' inputs kept": (*COLA, "train.activation_checkpointing=block"),
    "learned alpha": ("backbone=cola", "dlr=learnable_alpha"),
    "ablation": ("backbone=cola", "dlr=no_b"),
    "merges": ("backbone=relora", "backbone.merge_every=3", "backbone.restart_warmup=1"),
    **{precision: (*COLA, f"precision={precision}") for precision in ("bf16", "bf16_sr", "bf16_mixed")},
    **{name: (f"backbone={name}", "dlr=on") for name in ("lowrank", "lost", "lax", "cola_lax")},
    **{name: (f"backbone={name}",) for name in ("sltrain", "lora")},
    **{name: (*COLA, f"optimizer={name}") for name in ("adamw_foreach", "muon")},
    **{name: ("backbone=full", f"optimizer={name}") for name in ("galore", "fira")},
    "loro": ("backbone=lowrank", "optimizer=loro"),
}


def config(words: tuple[str, ...], ranks: int = 1) -> Config:
    return configured(*joined(["train.steps=20"], words), ranks=ranks)


def updated(cfg: Config, ranks: Ranks, by_graphs: bool, before=lambda update, index: None):
    """The outcomes and weights of some updates with a forward pass after each, the ``Update``, and its tapes."""
    update, outcomes, tapes = trial(cfg, ranks, VOCAB), [], []
    if by_graphs:
        micro_batches = cfg.train.global_batch // ranks.world_size // update.micro_batch
        parameters = list(update.model.parameters())
        update.compute = Recorded(update.compute, parameters, micro_batches, ranks)

        def capture(function, pool):
            tapes.append(Tape(lambda: [sharded.local_rows(p.grad) for p in parameters if p.grad is not None]))
            return tapes[-1], tapes[-1].record(function)

        update.compute.capture = capture
    share, separator = cfg.train.global_batch // ranks.world_size, 1 if cfg.data.mask_documents else None
    rows = slice(ranks.rank * share, (ranks.rank + 1) * share)
    for index, batch in enumerate(itertools.islice(batches(cfg.train.global_batch, cfg.train.seq_len), UPDATES)):
        batch = replace(batch, tokens=batch.tokens[rows], lengths=batch.lengths[rows], separator=separator)
        before(update, index)
        outcomes.append([value.item() for value in update(batch, index, rate(cfg, index))])
        if merge_due(cfg, index + 1):
            update.merge(index + 1)
        with torch.no_grad(), without_backward(update.model):
            update.model(*update.inputs(batch))
    weights = {name: sharded.local_rows(p).detach().clone() for name, p in update.model.named_parameters()}
    return outcomes, weights, update, tapes


def assert_equal(cfg: Config, before=lambda update, index: None) -> list[list[float]]:
    """Eager and recorded updates agree, and all but the first are replayed. Returns the outcomes."""
    with Ranks(cfg) as ranks:
        expected, eager, *_ = updated(cfg, ranks, by_graphs=False, before=before)
        outcomes, weights, update, tapes = updated(cfg, ranks, by_graphs=True, before=before)
    micro_batches = cfg.train.global_batch // ranks.world_size // update.micro_batch
    assert update.compute.failure is None
    assert len(tapes) == min(micro_batches, 3)  # first, next, last; or one that is first and last
    assert sum(tape.replays for tape in tapes) == (UPDATES - 1) * micro_batches + len(tapes)  # with those of the check
    assert str(outcomes) == str(expected)  # as text, NaN equals itself
    for name, weight in eager.items():
        assert torch.equal(weights[name], weight), name
    return outcomes


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "four" else pytest.mark.full) for n in CASES])
def test_replays_are_the_update(name):
    assert_equal(config(CASES[name]))


@pytest.mark.full
def test_a_skipped_update_changes_nothing():
    def spoil(update, index):
        if index == 3:
            with torch.no_grad():
                update.model.model.norm.weight[0] = torch.inf

    outcomes = assert_equal(config((*COLA, "train.on_nonfinite=skip")), before=spoil)
    assert [outcome[2] for outcome in outcomes] == [0, 0, 0, 1, 1]


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "words"), [
    (2, (*COLA, "parallel=ddp", "train.micro_batch=1")),
    (4, (*COLA, "parallel=ddp", "train.micro_batch=1")),
    (2, (*COLA, "parallel=fsdp", "train.micro_batch=1")),
    (2, ("backbone=full", "parallel=fsdp", "train.micro_batch=1")),
    (4, (*COLA, "parallel=hsdp", "parallel.shards=2", "train.micro_batch=2")),
], ids=str)  # fmt: skip
def test_ranks_replay_their_sums(ranks, words):
    on_ranks(lambda: assert_equal(config(words, ranks)), ranks)


def test_a_configuration_knows_why_it_has_no_graphs():
    hsdp = ("parallel=hsdp", "parallel.shards=2", "train.global_batch=16", "train.micro_batch=2")
    for words, reason in (
        (("compile=true",), None),
        (("compile=false",), "compile=false"),
        (("compile=true", "cuda_graphs=false"), "cuda_graphs=false"),
        (("compile=true", *hsdp), "hsdp sums several micro-batches outside their gradients"),
    ):
        assert config((*COLA, *words), 4).why_no_graphs(4) == reason


# ----------------------------------------------------------------------------------------------------
# Planted faults


def number_of_python(last, inputs, compute):
    """The loss is divided by a number of Python, which a recording keeps."""
    *batch, _ = inputs
    return compute(last, (*batch, torch.tensor(float(batch[0].sum()))))


def input_from_elsewhere(last, inputs, compute):
    """The ids come from a tensor that a replay does not overwrite."""
    ids, *others = inputs
    return compute(last, (torch.tensor(ids.tolist()), *others))


def moved_gradients(last, inputs, compute):
    """Gradients are put into new memory after they were computed, with another value where a recording runs."""
    loss = compute(last, inputs)
    for p in moved_gradients.parameters:
        p.grad = p.grad * (1.1 if len(_get_current_dispatch_mode_stack()) else 1.0)
    return loss


@pytest.mark.parametrize(("fault", "said"), [
    (number_of_python, "the loss of a graph is"),
    (input_from_elsewhere, "the loss of a graph is"),
    (moved_gradients, "the norm of a gradient in a graph differs by 0.1 of itself"),
])  # fmt: skip
def test_a_graph_that_differs_is_not_used(fault, said, capfd):
    cfg = config(COLA)
    eager = {}

    def plant(update, index):
        if index == 0:
            fault.parameters = list(update.model.parameters())
            wrong, own = partial(fault, compute=eager.setdefault(id(update), update.compute)), update.compute
            if isinstance(own, Recorded):
                own.compute = partial(fault, compute=own.compute)
            else:
                update.compute = wrong

    with Ranks(cfg) as ranks:
        expected, *_ = updated(cfg, ranks, by_graphs=False, before=plant)
        outcomes, _, update, _ = updated(cfg, ranks, by_graphs=True, before=plant)
    assert update.compute.failure.startswith(f"rank 0: {said}")
    assert outcomes == expected
    assert f"warning: micro-batches are not recorded as CUDA graphs: rank 0: {said}" in capfd.readouterr().err


def test_a_call_that_cannot_be_recorded_ends_the_recording(capfd):
    def refusing(function, pool):
        function()
        raise RuntimeError("operation not permitted when stream is capturing")

    cfg = config(COLA)
    with Ranks(cfg) as ranks:
        expected, *_ = updated(cfg, ranks, by_graphs=False)

        def refuse(update, index):
            update.compute.capture = refusing

        outcomes, _, update, _ = updated(cfg, ranks, by_graphs=True, before=refuse)
    assert outcomes == expected
    assert "not permitted when stream is capturing" in update.compute.failure


def test_a_difference_on_one_rank_ends_all_recordings(monkeypatch):
    def act():
        if os.environ["RANK"] == "1":
            monkeypatch.setattr(recorded, "difference", lambda *_: "another loss")
        cfg = config((*COLA, "train.micro_batch=1"), 2)
        with Ranks(cfg) as ranks:
            expected, *_ = updated(cfg, ranks, by_graphs=False)
            outcomes, _, update, _ = updated(cfg, ranks, by_graphs=True)
        assert update.compute.failure == "rank 1: another loss"
        assert outcomes == expected

    on_ranks(act, 2)


def test_a_weight_that_is_replaced_ends_the_run():
    def replace_weight(update, index):
        if index == 3:
            update.model.lm_head.weight.data = update.model.lm_head.weight.data.clone()

    cfg = config(COLA)
    with Ranks(cfg) as ranks, pytest.raises(RuntimeError, match="weights have moved"):
        updated(cfg, ranks, by_graphs=True, before=replace_weight)
