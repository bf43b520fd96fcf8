"""DLR in our models: which output receives which latent, folding, merging, ablations in runs."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from safetensors.torch import load_file

from dlr_pretrain.models import active, attach_dlr, build, fold_
from dlr_pretrain.models.dlr import folded_state, residuals
from dlr_pretrain.models.linear import require_shared_storage
from dlr_pretrain.models.residual import MergedResiduals, Residual, columns_of
from dlr_pretrain.train.weights import Weights
from dlr_pretrain.util.errors import Stopped
from dlr_pretrain.util.tensors import STATE_DTYPE
from tests.conftest import saved
from tests.parity.reference import CPU, VOCAB, Operations, r_transposed, small


def batch(seed: int = 0):
    return torch.randint(0, VOCAB, (2, 3, 12), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("d_out", "rank", "columns"), [
    (10, 4, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]),
    (14, 6, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4]),  # latent 5 gets no copy
    (8, 8, list(range(8))),
    (3, 8, [0, 1, 2]),
])  # fmt: skip
def test_each_output_receives_the_latent_of_its_group(d_out, rank, columns):
    residual = Residual(d_out, rank, 1.5, True, "weight")
    assert residual.columns.tolist() == columns
    assert residual.beta == 1.5 / math.sqrt(math.ceil(d_out / rank))
    z = torch.randn(3, rank, dtype=torch.float64)
    assert torch.equal(residual.duplicate(z), z @ r_transposed(d_out, rank).double().T)


def test_random_duplication_is_the_papers():
    q = "model.layers.0.self_attn.q_proj"
    hashed = int.from_bytes(hashlib.md5(q.encode()).digest()[:8], "little")
    assert [(seed ^ hashed) % (2**63 - 1) for seed in (0, 42)] == [3723340643983772940, 3723340643983772966]
    assert columns_of("random", "fc1", 12, 4, 42).tolist() == [1, 2, 3, 1, 2, 0, 0, 1, 0, 0, 3, 2]
    drawn = {name: up.residual.columns for name, up in residuals(build(small("cola", "dlr=random"), VOCAB, CPU))}
    assert torch.equal(drawn[f"{q}.b"], columns_of("random", q, 32, 8, 0))


# ----------------------------------------------------------------------------------------------------
# Folding and merging


@pytest.mark.parametrize("variant", ["cola", "lost backbone.rank=8 backbone.sparsity=0.2", "cola_lax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fold_leaves_the_tensors_and_logits_of_training_bit_for_bit(dtype, variant):
    model = build(small(*variant.split(), "dlr=on"), VOCAB, CPU, dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with active(model):
        working = {name: p.detach().clone() for name, p in model.named_parameters()}
        logits = model.logits(batch()[0])
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    expected = folded_state(model, before)
    assert fold_(model) == 14
    for name, p in model.named_parameters():
        assert torch.equal(p, working[name]) and torch.equal(p, expected[name]), name
    plain = build(small(*variant.split()), VOCAB, CPU, dtype)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain.logits(batch()[0]), logits)


def test_merging_masters_rounds_the_sum_once():
    model = build(small("cola", "dlr=on"), VOCAB, CPU)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.to(torch.bfloat16)
    merger = MergedResiduals(model, masters)
    for _ in range(2):  # merging again starts from the masters
        merger.merge()
    folded = folded_state(model, masters)
    for name, p in model.named_parameters():
        assert folded[name].dtype == torch.float32
        assert torch.equal(folded[name].to(torch.bfloat16), p), name


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_mixed"])
def test_merging_takes_as_many_kernels_for_any_depth(precision):
    def kernels(layers: int) -> int:
        cfg = small("cola", "dlr=on", f"precision={precision}", layers=layers)
        weights = Weights(build(cfg, VOCAB, CPU, STATE_DTYPE[precision]), precision)
        require_shared_storage(weights.model)
        with weights.with_residual():  # makes the indices
            pass
        seen = []
        with Operations(lambda operation, _: seen.append(operation)), weights.with_residual():
            pass
        return sum(not operation.is_view and operation is not torch.ops.prim.device.default for operation in seen)

    assert kernels(2) == kernels(5) <= 12


# ----------------------------------------------------------------------------------------------------
# Ablations in runs


@pytest.mark.parametrize(("option", "precision"), [
    ("learnable_alpha", "bf16_mixed"),
    *(pytest.param(option, "fp32", marks=pytest.mark.full) for option in ("init_offset", "no_b", "random")),
])  # fmt: skip
@pytest.mark.usefixtures("no_export")
def test_ablations_train_resume_and_fold(train, tmp_path, option, precision):
    """Bit for bit, masters and all; the folded tensors are what the last forward multiplied by (checked by the run)."""
    given = ("backbone=cola", f"dlr={option}", f"precision={precision}", "train.steps=8", "train.lr=1e-3")
    whole = load_file(train(tmp_path / "whole", *given) / "folded" / "model.safetensors")
    with pytest.raises(Stopped):
        train(tmp_path / "parts", *given, "train.stop_after=5")
    parts = load_file(train(tmp_path / "parts", *given) / "folded" / "model.safetensors")
    assert whole.keys() == parts.keys() and not any("dlr_alpha" in name for name in whole)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.usefixtures("no_export")
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed", "bf16_sr"])
def test_learned_scalars_are_not_decayed(train, tmp_path, precision):
    """At a decay of a tenth an update, which would leave 0.43 of them. Nor do they wait for a draw: bf16 has 1 and
    neighbours of 0.996 and 1.008.
    """
    given = ("dlr=learnable_alpha", "backbone=cola", f"precision={precision}")
    folder = train(tmp_path / "run", *given, "train.steps=8", "train.lr=1e-3", "optimizer.weight_decay=100")
    state = saved(folder / "checkpoints" / "step_00000008")
    scalars = {name: value for name, value in state.items() if value.dim() == 0 and "/" not in name}
    assert len(scalars) == 14 and all(0 < abs(value.item() - 1) < 0.01 for value in scalars.values())
    assert {value.dtype for value in scalars.values()} == {torch.float32}
    folded = load_file(folder / "folded" / "model.safetensors")
    assert len({value.dtype for value in folded.values()}) == 1 and not any("alpha" in name for name in folded)
    assert state["model.norm.weight"].max() < 0.7


@pytest.mark.full  # inductor
@pytest.mark.parametrize("with_masters", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_compiled_merge_has_the_bits_of_the_eager_one(dtype, with_masters):
    """Of several storages, by one dynamic graph; the GPU's path, here by the CPU's compiler."""

    def layers() -> torch.nn.Module:
        torch.manual_seed(0)
        made = torch.nn.Sequential(*(torch.nn.Linear(16, 16 * n + 3, dtype=dtype) for n in (2, 3, 5)))
        attach_dlr(made, match="*")
        return made

    def merged(module: torch.nn.Module, compiled: bool) -> MergedResiduals:
        masters = {name: p.detach().float() * 1.001 for name, p in module.named_parameters()}
        return MergedResiduals(module, masters if with_masters else None, compiled)

    eager, fused = layers(), layers()
    before = [p.detach().clone() for p in fused.parameters()]
    with merged(eager, False).active(), merged(fused, True).active():
        pairs = list(zip(eager.parameters(), fused.parameters(), strict=True))
        assert all(torch.equal(a, b) for a, b in pairs) and not torch.equal(before[0], pairs[0][1])
    if not with_masters:
        assert all(torch.equal(a, b) for a, b in zip(before, fused.parameters(), strict=True))


def test_under_masters_a_learned_alpha_acts_as_it_is_and_not_as_bf16_has_it():
    cfg = small("cola", "dlr=learnable_alpha", "precision=bf16_mixed")
    weights = Weights(build(cfg, VOCAB, CPU), "bf16_mixed")
    outputs = []
    for change in (0.0, 0.001):  # bf16 has nothing between 1 and 1.008
        for name in weights.optimized:
            if name.endswith("alpha"):
                weights.optimized[name].data.fill_(1 + change)
        with weights.with_residual(), torch.no_grad():
            outputs.append(weights.model.logits(batch()[0]))
    assert not torch.equal(*outputs)
