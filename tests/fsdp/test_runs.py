"""Whole runs with ``parallel=fsdp`` and ``hsdp``: evaluated, saved, resumed on other ranks, folded, compiled."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed.fsdp

from dlr_pretrain.train import checkpoint
from dlr_pretrain.util.errors import Stopped
from tests.conftest import forked, saved
from tests.fsdp.steps import assert_bits
from tests.resume.test_resume import assert_same, final

pytestmark = pytest.mark.usefixtures("no_export")
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
