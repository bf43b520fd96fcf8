"""``parallel=fsdp`` and ``hsdp`` train like ``ddp``, each rank holds its share, and runs resume on other ranks."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore  # torch has no public store for the backend "fake"

from benchmarks.variants import joined
from dlr_pretrain.analysis.plan import disk_bytes
from dlr_pretrain.cli import load
from dlr_pretrain.config import Config
from dlr_pretrain.data import Batch
from dlr_pretrain.models import attach_dlr, build_model
from dlr_pretrain.models.memory import memory
from dlr_pretrain.optim.optimizer import state_bytes
from dlr_pretrain.optim.schedule import merge_due, rate
from dlr_pretrain.train import checkpoint
from dlr_pretrain.train.guard import checksums
from dlr_pretrain.train.parallel import shard_, summed_over_ranks
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.state import folded, saved_tensors
from dlr_pretrain.train.update import Update
from dlr_pretrain.util import sharded
from dlr_pretrain.util.errors import Stopped
from dlr_pretrain.util.tensors import ALPHA, sum_dtype
from tests.conftest import SMALL, forked, on_ranks, saved
from tests.golden.regenerate import VOCAB, batches
from tests.parity.reference import TODAYS, r_transposed
from tests.resume.test_resume import assert_same, final
from tests.trial import configured, trial


@dataclass
class Outcome:
    """The loss and gradient norm of every step, the whole weights and moments, and the folded weights."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]
    folded: dict[str, Tensor]


def config(*words: str) -> Config:
    """A configuration for two ranks."""
    return configured(*joined(["train.lr=1e-3", "train.steps=10"], words), ranks=2)


def own_batches(cfg: Config, ranks: Ranks) -> list[Batch]:
    """This rank's rows of the run's batches."""
    share = cfg.train.global_batch // ranks.world_size
    rows = slice(ranks.rank * share, (ranks.rank + 1) * share)
    some = itertools.islice(batches(cfg.train.global_batch, cfg.train.seq_len), cfg.train.steps)
    return [Batch(b.tokens[rows], b.lengths[rows], share * cfg.train.seq_len, b.positions) for b in some]


def whole_state(updates: Update) -> dict[str, Tensor]:
    """Copies of a checkpoint's tensors, gathered from all ranks."""
    with updates.optimizer.taken_out() as values:
        tensors = saved_tensors(updates.model, values) | updates.optimizer.state_tensors()
        return {name: sharded.gathered(value).clone() for name, value in tensors.items()}


def on_two_ranks(act: Callable[[Ranks], object]) -> None:
    def with_ranks():
        with Ranks(config()) as ranks:
            act(ranks)

    on_ranks(with_ranks, 2)


def run(ranks: Ranks, *words: str) -> Outcome:
    """Run the steps of ``config(*words)`` on this rank."""
    cfg = config(*words)
    updates, losses, norms = trial(cfg, ranks, VOCAB), [], []
    for index, batch in enumerate(own_batches(cfg, ranks)):
        loss, norm, *_ = (value.item() for value in updates(batch, index, rate(cfg, index)))
        losses.append(loss), norms.append(norm)
        if merge_due(cfg, index + 1):
            updates.merge(index + 1)
    exported = folded(cfg, updates.model, updates.optimizer, keep=True)
    return Outcome(losses, norms, whole_state(updates), exported)


def assert_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].shape == b[name].shape, name
        assert torch.equal(a[name], b[name]), f"{name}: {(a[name].double() - b[name].double()).abs().max():.1e}"


# ----------------------------------------------------------------------------------------------------
# Parity


# For comparisons of bits: without sums in another order, and without the fused optimizer, whose kernel rounds its tail
# differently from its body, between which rows move. Nothing else may differ.
EXACT = ("train.clip=null", "train.micro_batch=4", "train.steps=6", "optimizer=adamw_foreach")
BOTH = ("ddp", "fsdp")
full = pytest.mark.full


def named(words) -> str:
    return "+".join(word.split("=", 1)[1] for word in words) if isinstance(words, tuple) else words


def assert_equal(found: Outcome, expected: Outcome) -> None:
    """All bits are equal, but for the sum in the gradient norm."""
    assert found.losses == expected.losses
    assert found.norms == pytest.approx(expected.norms, rel=1e-6)
    assert_bits(found.state, expected.state)
    assert_bits(found.folded, expected.folded)


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize(("choice", "precision"), [
    (("backbone=cola", "dlr=on", "train.activation_checkpointing=latent"), "bf16_mixed"),
    # The embedding gets two gradients: under bf16_mixed, replicas add them in fp32, and shards in bf16.
    (("backbone=lowrank", "dlr=on", *TODAYS), "fp32"),
    pytest.param(("backbone=cola", "dlr=on"), "bf16_sr", marks=full),
    pytest.param(("backbone=cola", "dlr=on", *TODAYS[:-1]), "bf16_mixed", marks=full),
    pytest.param(("backbone=relora", "backbone.merge_every=4", "backbone.restart_warmup=2"), "bf16", marks=full),
    pytest.param(("backbone=lost", "dlr=on", "dlr.grouping=random"), "bf16_mixed", marks=full),
    pytest.param(("backbone=cola_lax", "dlr=on", "train.activation_checkpointing=block"), "bf16_mixed", marks=full),
    pytest.param(("backbone=lowrank", "dlr=no_b"), "bf16_mixed", marks=full),
], ids=named)  # fmt: skip
def test_shards_train_to_the_bits_of_replicas(choice, precision):
    def act(ranks):
        exact = EXACT[:3] if precision == "bf16_sr" else EXACT  # adamw_foreach has no stochastic rounding
        replicas, shards = (run(ranks, *exact, *choice, f"precision={precision}", f"parallel={p}") for p in BOTH)
        assert_equal(shards, replicas)

    on_two_ranks(act)


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("choice", [
    ("backbone=lowrank", "dlr=learnable_alpha"),
    pytest.param(("backbone=lax", "dlr=on"), marks=full),
], ids=named)  # fmt: skip
def test_shards_train_as_replicas_do_by_default(choice):
    """With the default optimizer, clipping and micro-batches, 12 steps agree to the rounding of fp32."""

    def act(ranks):
        replicas, sharded = (run(ranks, *choice, "train.steps=12", f"parallel={p}") for p in BOTH)
        assert sharded.losses == pytest.approx(replicas.losses, rel=3e-6)
        assert sharded.norms == pytest.approx(replicas.norms, rel=1e-4)
        assert sharded.losses[-1] < sharded.losses[0] - 0.02
        for name in (name for name in replicas.state if "/" not in name):  # weights, not moments
            torch.testing.assert_close(sharded.state[name], replicas.state[name], rtol=0, atol=2e-6, msg=name)

    on_two_ranks(act)


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize(("shards", "precision"), [(1, "bf16_mixed"), pytest.param(2, "bf16", marks=full)])
def test_copies_or_shards_alone_train_to_the_bits_of_replicas(shards, precision):
    """hsdp with two copies equals ddp; with one copy it equals fsdp, which sums micro-batches in the state's dtype."""

    def act(ranks):
        words = (*EXACT[:1], *EXACT[2:], "train.micro_batch=2", "backbone=cola", "dlr=on", f"precision={precision}")
        other = run(ranks, *words, f"parallel={BOTH[shards - 1]}")
        both = run(ranks, *words, "parallel=hsdp", f"parallel.shards={shards}")
        assert_equal(both, other)

    on_two_ranks(act)


@pytest.mark.filterwarnings("error::FutureWarning")
@full
@pytest.mark.parametrize("choice", [("dlr=learnable_alpha",), ("dlr=on", "precision=bf16_mixed")], ids=named)
def test_two_copies_of_two_shards_train_as_one_process(choice, tmp_path):
    """They agree to the rounding of sums. The copies stay equal bit for bit with clipping, because their norms do."""
    words = ("backbone=cola", *choice, "train.micro_batch=1", "scale.intermediate_size=91")

    def alone():
        with Ranks(config()) as ranks:
            torch.save(run(ranks, *words).losses, tmp_path / "losses")

    def act():
        with Ranks(config()) as ranks:
            shards = run(ranks, *words, "parallel=fsdp")
            both = run(ranks, *words, "parallel=hsdp", "parallel.shards=2")
            rel = 2e-3 if "precision=bf16_mixed" in words else 3e-6
            assert both.losses == pytest.approx(torch.load(tmp_path / "losses"), rel=rel)
            assert both.losses == pytest.approx(shards.losses, rel=rel)
            assert both.norms == pytest.approx(shards.norms, rel=30 * rel)
            first, *others = ranks.gather((both.losses, both.norms, checksums(both.state)))
            assert all(other == first for other in others)

    on_ranks(alone, 1)
    on_ranks(act, 4)


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("rank", [500, *(pytest.param(rank, marks=full) for rank in (0, 1023))])
@pytest.mark.parametrize(("parallel", "shape"), [(("parallel=fsdp",), (1024,)),
                         (("parallel=hsdp", "parallel.shards=8"), (128, 8))])  # fmt: skip
def test_a_rank_of_1024_holds_its_rows(rank, parallel, shape):
    """Collectives do nothing here: the mesh, the rows of each rank and a micro-batch's gradients are real."""

    def act():
        dist.init_process_group("fake", rank=rank, world_size=1024, store=FakeStore())
        words = (*parallel, "backbone=cola", "dlr=on", "precision=bf16", "train.global_batch=1024", "data.streams=1024")
        cfg = load([*(word for word in SMALL if not word.startswith(("train.global", "train.micro", "precision"))),
                    "data=sample", *words], 1024)  # fmt: skip
        model = build_model(cfg, 1500, torch.device("cpu"), torch.bfloat16)
        whole = {name: p.detach().clone() for name, p in model.named_parameters()}
        shard_(cfg, model)
        ids = torch.zeros(1, 32, dtype=torch.int64)
        with summed_over_ranks(model, [], last=True):
            model(ids, ids).backward()
        place = rank % shape[-1]
        for name, p in model.named_parameters():
            assert tuple(p.device_mesh.shape) == shape
            chunks = whole[name].chunk(shape[-1])
            rows = chunks[place] if place < len(chunks) else whole[name][:0]
            assert torch.equal(sharded.local_rows(p), rows)
            assert sharded.local_rows(p.grad).shape == rows.shape

    on_ranks(act, 1)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_shards_and_replicas_of_many_ranks_sum_in_fp32(monkeypatch):
    """Above the bound, a sum of bf16 gradients is rounded once: replicas and shards have the same bits."""
    monkeypatch.setattr("dlr_pretrain.util.tensors.BF16_RANKS", 1)

    def act(ranks):
        assert sum_dtype("bf16", 2) == torch.float32
        words = (*EXACT, "backbone=cola", "dlr=on", "precision=bf16")
        replicas, shards = (run(ranks, *words, f"parallel={p}") for p in BOTH)
        assert_equal(shards, replicas)

    on_two_ranks(act)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_one_rank_without_torchrun_is_sharded_too():
    def act():
        words = ("backbone=cola", "dlr=on", "precision=bf16_mixed")
        with Ranks(config(*words, "parallel=fsdp")) as ranks:
            updates = trial(config(*words, "parallel=fsdp"), ranks, VOCAB)
            assert all(sharded.is_sharded(p) for p, *_ in updates.optimizer.targets.values())
            shards, whole = (run(ranks, *words, f"parallel={p}").losses for p in ("fsdp", "ddp"))
            assert shards == pytest.approx(whole, rel=2e-3)
        assert not dist.is_initialized()

    on_ranks(act, 1)


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize(("parallel", "precision"), [
    ("ddp", "bf16"), ("fsdp", "bf16_mixed"),
    *(pytest.param(*case, marks=full) for case in (
        ("ddp", "bf16_mixed"), ("fsdp", "bf16"), ("hsdp", "bf16"), ("hsdp", "bf16_mixed")
    )),
])  # fmt: skip
def test_a_plan_counts_what_rank_0_holds(parallel, precision):
    """Parameters, gradients and moments are planned to the byte, also for an odd number of rows."""

    def act(ranks):
        words = ("backbone=cola", "dlr=learnable_alpha", f"precision={precision}", f"parallel={parallel}")
        words += ("parallel.shards=1",) if parallel == "hsdp" else ()
        cfg = config(*words, "scale.intermediate_size=91", "scale.rank=7", "train.clip=null")
        updates = trial(cfg, ranks, VOCAB)
        optimizer, held = updates.optimizer, {}
        assert not sharded.is_sharded(optimizer.values[ALPHA])

        def bytes_of(tensors) -> int:
            storages = (sharded.local_rows(tensor).untyped_storage() for tensor in tensors if tensor is not None)
            return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

        def counted():
            tensors = [p for p, *_ in optimizer.targets.values()]
            held["gradients"] = bytes_of(p.grad for p in (*updates.model.parameters(), *tensors))

        optimizer.clear = counted
        updates(own_batches(cfg, ranks)[0], 0, 1e-3)
        checkpoint = sum(tensor.nbytes for tensor in whole_state(updates).values())
        if ranks.rank == 0:
            assert disk_bytes(cfg, VOCAB)["checkpoint"] == checkpoint
            planned, residuals = memory(cfg, VOCAB, 2, state_bytes), optimizer.residuals
            weights = bytes_of([*optimizer.working.values(), *optimizer.values.values()])  # alphas are values, too
            assert planned.weights + planned.masters == weights + residuals.nbytes() - residuals.alpha.nbytes
            assert planned.optimizer_state == bytes_of(optimizer.state_tensors().values())
            assert planned.gradients == held["gradients"]

    on_two_ranks(act)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_an_update_not_finite_on_one_rank_changes_nothing():
    def act(ranks):
        cfg = config("backbone=cola", "dlr=on", "parallel=fsdp", "train.on_nonfinite=skip")
        updates = trial(cfg, ranks, VOCAB)
        first, second, third, *_ = own_batches(cfg, ranks)
        updates(first, 0, 1e-3)

        before, collect = whole_state(updates), updates.optimizer.collect

        def poisoned():
            gradients = collect()
            if ranks.rank == 1:
                sharded.local_rows(gradients[3]).view(-1)[0] = torch.inf
            return gradients

        updates.optimizer.collect = poisoned
        found = updates(second, 1, 1e-3)
        assert found.skipped == 1 and not found.norm.isfinite() and found.loss.item() == pytest.approx(3.7, abs=0.3)
        assert_bits(whole_state(updates), before)
        updates.optimizer.collect = collect
        assert updates(third, 2, 1e-3).skipped == 0
        assert not torch.equal(whole_state(updates)["lm_head.weight"], before["lm_head.weight"])

    on_two_ranks(act)


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize(("d_out", "rank"), [(7, 3), (2, 2)])
def test_dlr_is_a_library_for_anybodys_sharded_module(d_out, rank):
    """B + beta R^T is as defined where ranks have unequal rows or none; in float64."""

    def act():
        dist.init_process_group("gloo")
        module = nn.Linear(rank, d_out, bias=False).double()
        b = torch.arange(d_out * rank, dtype=torch.float64).view(d_out, rank)
        module.weight.data.copy_(b)
        attach_dlr(module, alpha=0.7, learn_alpha=False)
        fully_shard(module)
        beta = 0.7 / (-(-d_out // rank)) ** 0.5
        z = torch.eye(rank, dtype=torch.float64)
        torch.testing.assert_close(module(z).T.detach(), b + beta * r_transposed(d_out, rank).double())
        module.reshard()
        stored = module.parametrizations.weight.original
        torch.testing.assert_close(sharded.gathered(stored), b, rtol=0, atol=0)

    on_ranks(act, 3)


# ----------------------------------------------------------------------------------------------------
# Whole runs: evaluated, saved, resumed on other ranks, folded, compiled


CHOICE = ("backbone=cola", "dlr=on", "train.lr=1e-3", "train.steps=12", "eval.every=6", "checkpoint.every=6")


def stopped(words: list[str], ranks: int) -> None:
    with pytest.raises(AssertionError, match="stopped after step"):
        forked(words, ranks)


def assert_losses_agree(found: list[dict], expected: list[dict]) -> None:
    """The records of two whole runs have the same losses, to rounding."""
    assert [record["step"] for record in found] == list(range(1, 13))
    for a, b in zip(found, expected, strict=True):
        for name in b.keys() & {"train/loss", "eval/loss"}:
            assert a[name] == pytest.approx(b[name], rel=2e-5)


@pytest.mark.usefixtures("no_export")
@pytest.mark.full
@pytest.mark.parametrize(("parallel", "ranks"), [("parallel=fsdp", 2), ("parallel=hsdp parallel.shards=2", 4)])
def test_interrupted_twice_equals_undisturbed(words, tmp_path, parallel, ranks):
    given = (*CHOICE, "precision=bf16_mixed", "eval.tokens=900", *parallel.split())
    forked(words(f"run.dir={tmp_path}/whole", *given), ranks)
    for stop in (4, 9):
        stopped(words(f"run.dir={tmp_path}/parts", *given, f"train.stop_after={stop}"), ranks)
    forked(words(f"run.dir={tmp_path}/parts", *given), ranks)
    assert_same(final(tmp_path / "parts"), final(tmp_path / "whole"))
    newest = (path / "checkpoints" / "step_00000012" for path in (tmp_path / "whole", tmp_path / "parts"))
    assert_bits(*map(saved, newest))


@pytest.mark.usefixtures("no_export")
def test_replicas_then_shards_then_replicas_on_other_ranks(train, words, tmp_path):
    """1 rank, 2 sharded, 3 sharded, 1 replicated: the losses are those of an uninterrupted run on one rank."""
    given = (*CHOICE, "optimizer=adamw", "scale.hidden_size=128", "scale.rank=64", "train.micro_batch=1",
             "train.global_batch=6", "data.streams=6")  # fmt: skip
    whole = final(train(tmp_path / "whole", *given))
    here = f"run.dir={tmp_path}/parts"
    with pytest.raises(Stopped):
        train(tmp_path / "parts", *given, "train.stop_after=3")
    stopped(words(here, *given, "parallel=fsdp", "train.stop_after=6"), 2)
    stopped(words(here, *given, "parallel=fsdp", "train.stop_after=9"), 3)
    train(tmp_path / "parts", *given)
    assert_losses_agree(final(tmp_path / "parts")[1], whole[1])


@pytest.mark.usefixtures("no_export")
@pytest.mark.full
def test_replicas_then_copies_of_shards_then_shards(train, words, tmp_path):
    """1 rank, 2 copies of 2 shards twice, 2 shards, 1 rank: the losses are those of one rank; rows are saved once."""
    given = (*CHOICE, "optimizer=adamw", "scale.intermediate_size=91", "train.micro_batch=1", "train.global_batch=8")
    whole = final(train(tmp_path / "whole", *given))
    here, hsdp = f"run.dir={tmp_path}/parts", ("parallel=hsdp", "parallel.shards=2")
    with pytest.raises(Stopped):
        train(tmp_path / "parts", *given, "train.stop_after=3")
    stopped(words(here, *given, *hsdp, "train.stop_after=5"), 4)
    found = checkpoint.load(tmp_path / "parts" / "checkpoints" / "step_00000005")
    for tensor in filter(lambda tensor: tensor.shape, (found.model | found.optimizer).values()):
        assert sum(piece.get_shape()[0] for _, piece in tensor.pieces) == tensor.shape[0]
    sizes = [part.stat().st_size for part in found.path.glob("part_*")]
    assert len(sizes) == 4 and max(sizes) < 1.2 * min(sizes)
    stopped(words(here, *given, *hsdp, "train.stop_after=7"), 4)
    stopped(words(here, *given, "parallel=fsdp", "train.stop_after=9"), 2)
    train(tmp_path / "parts", *given)
    assert_losses_agree(final(tmp_path / "parts")[1], whole[1])


@pytest.mark.usefixtures("no_export")
@pytest.mark.full
def test_compiled_shards_train_as_eager_ones_do(words, tmp_path, monkeypatch):
    """Each block is captured in one graph, without hooks, and run eagerly: inductor's code generation takes minutes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    given = (*CHOICE[:3], "train.steps=4", "eval.every=2", "parallel=fsdp", "train.warmup_steps=0",
             "train.activation_checkpointing=latent")  # fmt: skip
    forked(words(f"run.dir={tmp_path}/eager", *given), 2)
    forked(words(f"run.dir={tmp_path}/compiled", *given, "compile=true"), 2)
    for a, b in zip(final(tmp_path / "compiled")[1], final(tmp_path / "eager")[1], strict=True):
        for name in ("train/loss", "train/grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=2e-5)
        assert a.get("eval/loss", 0) == pytest.approx(b.get("eval/loss", 0), rel=2e-5)
