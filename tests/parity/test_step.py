"""The step: micro-batches, compilation, precisions, failing ranks, padding, and norms."""

import gzip
import shutil
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from dlr_pretrain.cli import load
from dlr_pretrain.data import prepare
from dlr_pretrain.data.streams import Share, dealt
from dlr_pretrain.models.adapter import split
from dlr_pretrain.optim import adamw
from dlr_pretrain.train.parallel import gradient_groups, summed_over_ranks
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.update import Update
from dlr_pretrain.util.files import read_metrics
from dlr_pretrain.util.tensors import global_norm, norms
from tests.conftest import forked, on_ranks
from tests.parity.reference import VOCAB, disturbed, small
from tests.trial import random_batch, trial

pytestmark = pytest.mark.usefixtures("no_export")


def losses(folder):
    return [
        (r["train/loss"], r["train/grad_norm"], r.get("eval/loss", 0)) for r in read_metrics(folder / "metrics.jsonl")
    ]


def test_micro_batches_and_ranks_do_not_change_the_step(train, words, tmp_path):
    common = ("backbone=cola", "dlr=on", "train.lr=1e-3", "data.packing=pad")
    whole, cut = (train(tmp_path / f"{size}", *common, f"train.micro_batch={size}") for size in (8, 2))
    shared = tmp_path / "shared"
    forked(words(f"run.dir={shared}", *common, "train.micro_batch=2"), 2)
    for other in (cut, shared):
        for a, b in zip(losses(whole), losses(other), strict=True):
            assert a == pytest.approx(b, rel=2e-5)
    a, b = (load_file(f / "folded" / "model.safetensors") for f in (cut, shared))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-4, msg=name)


def test_gradients_are_summed_over_ranks_once_a_step(monkeypatch):
    """By blocks, bit for bit as one by one; also where a user's own layer has a parameter that nothing depends on."""

    def act():
        dist.init_process_group("gloo")
        model = disturbed(small("cola"), torch.float32)
        model.model.layers[0].unused = nn.Parameter(torch.ones(3))
        generator = torch.Generator().manual_seed(dist.get_rank())
        micro_batches = torch.randint(0, VOCAB, (2, 2, 3, 12), generator=generator)  # ids and targets of two

        def gradients(context) -> dict:
            model.zero_grad()
            for number, inputs in enumerate(micro_batches, 1):
                with context(number == len(micro_batches)):
                    model(*inputs).backward()
            return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

        wanted, reduce, reduced = gradients(lambda last: nullcontext()), dist.all_reduce, []
        for gradient in wanted.values():
            dist.all_reduce(gradient)
        monkeypatch.setattr(dist, "all_reduce", lambda *a, **k: reduced.append(1) or reduce(*a, **k))
        summed = partial(summed_over_ranks, model, gradient_groups(model, 2))
        found = gradients(summed)
        assert len(reduced) == len(model.model.layers) + 2  # the head; embedding and last norm
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
        gradients(lambda last: nullcontext())
        assert len(reduced) == len(model.model.layers) + 2  # no hook is left
        wide = gradients(partial(summed, dtype=torch.float64))  # rounded once, from copies
        assert all(torch.allclose(wide[name], wanted[name], rtol=1e-6, atol=1e-9) for name in wanted)

    on_ranks(act, 2)


@pytest.mark.parametrize(("given", "mode"), [("true", None), ("max-autotune", "max-autotune-no-cudagraphs")])
def test_the_compile_mode_reaches_torch(words, monkeypatch, given, mode):
    modes = []
    monkeypatch.setattr(torch, "compile", lambda act, **options: modes.append(options["mode"]) or act)
    cfg = load(words(f"compile={given}"))
    with Ranks(cfg) as ranks:
        trial(cfg, ranks, 120)
    assert modes == [mode] * (cfg.scale.num_layers + 2)  # blocks, the last norm and the loss


def test_precisions_train_alike_at_the_start(train, tmp_path):
    lower = ("bf16", "bf16_sr", "bf16_mixed")
    runs = {p: losses(train(tmp_path / p, f"precision={p}", "dlr=on", "train.steps=10")) for p in ("fp32", *lower)}
    for precision in lower:
        assert runs[precision][0][0] == pytest.approx(runs["fp32"][0][0], rel=2e-3)
        assert runs[precision][-1][0] == pytest.approx(runs["fp32"][-1][0], rel=3e-2)
    assert runs["bf16"] != runs["bf16_mixed"] and runs["bf16"] != runs["bf16_sr"]


def test_diverged_ranks_are_not_saved(words, tmp_path, monkeypatch):
    """For instance, unequal GPUs compute unequal singular vectors from equal gradients."""
    update = Update.__call__

    def drifting(self, batch, index, lr, *asked):
        values = update(self, batch, index, lr, *asked)
        if self.ranks.rank == 1 and index == 6:
            self.model.model.norm.weight.data[3] += 1e-6
        return values

    monkeypatch.setattr(Update, "__call__", drifting)
    differ = r"step 10: the ranks hold different weights, 1 in all, the first of them model\.norm"
    with pytest.raises(AssertionError, match=differ):
        forked(words(f"run.dir={tmp_path}/run", "train.lr=1e-12", "train.warmup_steps=0", "train.clip=null"), ranks=2)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000005"]


def test_a_data_error_on_one_rank_stops_all_and_saves(words, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "SMALL_BYTES", 0)  # the text is streamed
    shards = tmp_path / "shards"
    shutil.copytree(corpus, shards)
    first, _ = sorted(shards.glob("c4-train.*"))
    lines = gzip.decompress(first.read_bytes()).splitlines(keepends=True)
    lines = lines[:20]
    for i in range(4):  # of one size
        (shards / f"c4-train.{i:05d}-of-00002.json.gz").write_bytes(b"".join(lines))
    later = dealt([1] * 4, Share(42, 1, 0, 2, True))[1]  # what stream 1, of rank 1, reads second
    second = shards / f"c4-train.{later:05d}-of-00002.json.gz"
    lines[10] = lines[10].replace(b"{", b"x")
    second.write_bytes(b"".join(lines))
    given = words(f"run.dir={tmp_path}/run", "train.global_batch=2", "train.micro_batch=1", "train.steps=1000")
    with pytest.raises(AssertionError, match=rf"rank 1: {second}: document 10") as failed:
        forked([w if "data.root" not in w else f"data.root={shards}" for w in given], 2)
    steps = [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    assert newest.name == f"step_{steps[-1]:08d}" and f"step {steps[-1] + 1} was not taken" in str(failed.value)


def padded(*case: str):
    quick = case in (("adamw", "bf16", "lost dlr=on"), ("galore", "bf16", "full optimizer.rank=8"))
    return pytest.param(*case, marks=[] if quick else pytest.mark.full)


PRECISIONS = ("fp32", "bf16", "bf16_mixed")
PADDED = [padded(name, each, "lost dlr=on") for name in ("adamw", "adamw_8bit") for each in (*PRECISIONS, "bf16_sr")]
PADDED += [padded(name, each, "lost dlr=on") for name in ("adamw_foreach", "muon") for each in PRECISIONS]
PADDED += [padded(name, precision, "full optimizer.rank=8") for name in ("galore", "fira") for precision in PRECISIONS]
PADDED += [padded("loro", precision, "lowrank") for precision in PRECISIONS]
PADDED += [padded("adamw", "bf16", backbone) for backbone in ("lora", "cola_lax dlr=learnable_alpha")]


@pytest.mark.parametrize(("optimizer", "precision", "backbone"), PADDED)
def test_padding_stays_zero_bit_for_bit(optimizer, precision, backbone, monkeypatch):
    """The padding of weights, masters and moments: 91 channels are padded to 128, and LOST's rank of 7 to 8."""
    monkeypatch.setattr(adamw, "MIN_QUANTISED", 256)  # so that this small model has 8-bit moments
    given = ("compile=false", "device=cpu", "train.global_batch=2", "train.micro_batch=2", "train.seq_len=4")
    cfg = small(*backbone.split(), f"optimizer={optimizer}", f"precision={precision}", *given)
    with Ranks(cfg) as ranks:
        update, batch = trial(cfg, ranks, VOCAB), random_batch(cfg, ranks, VOCAB)
        for index in range(200):
            assert not update(batch, index, lr=0.01).skipped
    padding = {name: torch.ones_like(p, dtype=torch.bool) for name, p in update.model.named_parameters()}
    for own in split(update.model, padding).values():
        own.zero_()
    layers = {name.split(".", 3)[3] for name, places in padding.items() if places.any()}
    assert {name.rpartition(".")[0] for name in layers} >= {"mlp.gate_up", "mlp.down"}
    assert ("self_attn.qkv.a" in layers) == ("lost" in backbone)
    state, quantised = update.optimizer.state_tensors(), 0
    with update.optimizer.taken_out() as values:
        kept = {f"{name}/": value.clone() for name, value in values.items()}
    for full, value in (kept | state | {f"{name}/working": p for name, p in update.optimizer.working.items()}).items():
        places = padding.get(full.rpartition("/")[0])
        if places is not None and places.shape == value.shape:
            if full.endswith(".codes"):
                value, quantised = state[full.replace("codes", "map")][value.int()], quantised + 1
            assert not value[places].count_nonzero(), full
    assert (quantised > 0) == (optimizer == "adamw_8bit")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_large_tensors_are_exact(dtype):
    """torch's own norms are off by 2.5e-4 here."""
    generator = torch.Generator().manual_seed(0)
    large, small = (torch.randn(n, 1000, generator=generator).to(dtype) for n in (16000, 1))
    columns = large.T  # not contiguous
    for tensor, norm in zip((large, columns, small), norms([large, columns, small]), strict=True):
        assert norm.dtype == torch.float32 and norm.item() == pytest.approx(tensor.double().norm().item(), rel=1e-5)
        assert torch.equal(norm, norms([tensor])[0])


def test_clipping_bounds_the_global_norm():
    norm = global_norm([torch.full((3, 4), 2.0), torch.full((5,), -1.0)])
    assert norm.item() == pytest.approx((12 * 4 + 5) ** 0.5)

    def factor(bound: float | None) -> torch.Tensor | None:
        return Update.clip_factor(SimpleNamespace(cfg=SimpleNamespace(train=SimpleNamespace(clip=bound))), norm)

    assert factor(0.5).item() == pytest.approx(0.5 / norm.item(), rel=1e-6)
    assert factor(8.0).item() == 1.0
    assert factor(None) is None
