"""Every backbone against a LLaMA written from the formulas, in float64; parameter counts of the paper."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch

from dlr_pretrain.cli import load
from dlr_pretrain.models import build
from dlr_pretrain.models.linear import require_tied
from dlr_pretrain.models.llama import Llama, padded
from dlr_pretrain.models.merged import MergedResiduals
from tests.parity.reference import VOCAB, assert_follows_formula, silu, small, tied

BACKBONES = ("full", "lowrank", "cola")


def formula(backbone: str, state: dict):
    """The projection of a backbone without state between blocks, from its formula."""

    def project(name, x):
        if backbone == "full":
            return x @ state[f"{name}.weight"].T
        z = x @ state[f"{name}.a.weight"].T
        return (silu(z) if backbone == "cola" else z) @ state[f"{name}.b.weight"].T

    return project


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_loss_and_gradients_equal_the_formula(backbone, grouped):
    assert_follows_formula(small(backbone), partial(formula, backbone), grouped)


@pytest.mark.parametrize("backbone", (*BACKBONES, "lost", "lax", "cola_lax"))
def test_initial_weights_do_not_depend_on_grouping_padding_or_rank_count(backbone):
    a, b = (Llama(small(backbone), VOCAB, grouped=grouped) for grouped in (True, False))
    a.init_(5), b.init_(5)
    for (name, x), (same, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        assert name == same and torch.equal(x, y), name


@pytest.mark.parametrize("backbone", ["lowrank", "cola", "lax", "cola_lax"])
def test_factors_start_with_the_variance_of_cola(backbone):
    cfg = load(["scale=60m", f"backbone={backbone}", "data=sample", "scale.num_layers=1"])
    model = build(cfg, 1000, torch.device("cpu"))
    for name, d_out in (("self_attn.q_proj", 512), ("mlp.gate_proj", 1376)):
        projection = model.model.layers[0].get_submodule(name)
        sigma = 128**-0.25 * (512 + d_out) ** -0.25
        for weight in (projection.a.weight, projection.b.weight):
            assert weight.std().item() == pytest.approx(sigma, rel=0.02)
            assert abs(weight.mean().item()) < 0.02 * sigma
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("init", ["xavier", "kaiming"])
def test_factors_start_as_other_methods_have_them(init):
    """LORO: normal, variance 2 / (fan_in + fan_out); Glentis et al.: uniform, bound 1 / sqrt(fan_in)."""
    cfg = load(["scale=60m", "backbone=lowrank", f"backbone.init={init}", "data=sample", "scale.num_layers=1"])
    model = build(cfg, 1000, torch.device("cpu"))
    for factor in ("a", "b"):
        weight = model.get_parameter(f"model.layers.0.mlp.gate_proj.{factor}.weight")
        if init == "xavier":
            assert weight.std().item() == pytest.approx(math.sqrt(2 / sum(weight.shape)), rel=0.02)
            assert weight.abs().max() > 4 * weight.std()
        else:
            bound = 1 / math.sqrt(weight.shape[1])
            assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
            assert 0.999 * bound < weight.abs().max().item() <= bound


def test_common_storage_survives_casts_copies_and_loading():
    model = Llama(small("cola"), VOCAB)
    model.init_(1)
    assert tied(model)
    moved = copy.deepcopy(model).to(torch.bfloat16).float()
    assert tied(moved)
    moved.load_state_dict(model.state_dict())
    assert tied(moved)
    moved.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)
    assert tied(moved)
    ids, targets = torch.randint(0, VOCAB, (2, 2, 8))
    assert torch.equal(model(ids, targets), moved(ids, targets))
    optimizer = torch.optim.AdamW(moved.parameters(), lr=0.01, fused=True)
    for _ in range(2):
        moved(ids, targets).backward()
        optimizer.step()
    assert tied(moved)
    require_tied(moved)
    moved.model.layers[1].mlp.up_proj.b.weight.data = torch.zeros(91, 8)
    with pytest.raises(RuntimeError, match=r"layers\.1\.mlp: gate_proj, up_proj have lost"):
        require_tied(moved)
    moved.float()
    fresh = Llama(small("cola"), VOCAB, grouped=False)
    fresh.load_state_dict(moved.state_dict())
    torch.testing.assert_close(moved(ids, targets), fresh(ids, targets))


def test_odd_widths_are_padded_outside_of_every_parameter():
    assert [padded(w) for w in (1376, 5461, 11008)] == [1376, 5504, 11008]
    model = Llama(small("cola"), VOCAB)
    mlp = model.model.layers[0].mlp
    assert mlp.down_proj.a.weight.shape == (8, 91) and mlp.gate_proj.b.weight.shape == (91, 8)
    model.init_(0)
    ids, targets = torch.randint(0, VOCAB, (2, 2, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, fused=True)
    for _ in range(3):
        model(ids, targets).backward()
        optimizer.step()
    assert mlp.gate_up.b.storage.shape == (2, 128, 8) and mlp.gate_up.b.storage[:, 91:].count_nonzero() == 0
    assert mlp.down.a.storage.shape == (1, 8, 128) and mlp.down.a.storage[..., 91:].count_nonzero() == 0


# Closed forms: 2 V d + 2 L d + d, and per block 4 d^2 + 3 d f (full) or r (8 d + 3 (d + f)) (low-rank) with entries of
# S (sltrain), k (4 d + 2 f) + int(0.01 f) d (lost, at the rank that keeps the budget), or from the second block on
# 7 (gate + 2 r) (lax; a dense gate has r^2 + r, at 60m and for cola_lax up to 350m, and a tensor gate n1^2 + n2^2).
# In millions they print as the paper's Table 1: 58 / 134 / 368 / 1339, 43 / 94 / 185 / 609, 44 / 94 / 185 / 610.
SCALES = ("60m", "130m", "350m", "1b", "7b")
COUNTS = {
    "full": (58_073_600, 134_105_856, 367_969_280, 1_339_082_752, 6_738_415_616),
    "lowrank": (42_770_944, 93_997_824, 185_222_144, 609_310_720, 2_820_935_680),
    "cola": (42_770_944, 93_997_824, 185_222_144, 609_310_720, 2_820_935_680),
    "lost": (42_703_872, 93_908_736, 184_910_720, 608_999_416, 2_819_543_040),
    "sltrain": (43_529_832, 96_545_796, 194_293_544, 645_547_960, 3_144_735_808),
    "lax": (43_592_576, 94_076_672, 185_387_008, 609_681_664, 2_821_824_512),
    "cola_lax": (43_592_576, 99_103_232, 195_897_088, 609_681_664, 2_821_824_512),
}
OTHERS = {"sltrain backbone.sparsity=0.1": 730_101_664, "lost backbone.rank=512": 621_139_648}  # at 1b


def parameters(scale: str, backbone: str) -> int:
    cfg = load([f"scale={scale}", *f"backbone={backbone}".split(), "data=sample"])
    return sum(p.numel() for p in build(cfg, cfg.scale.vocab_size, torch.device("meta")).parameters())


@pytest.mark.parametrize("backbone", COUNTS)
def test_parameter_counts_to_the_unit(backbone):
    assert tuple(parameters(scale, backbone) for scale in SCALES) == COUNTS[backbone]
    assert all(parameters("1b", name) == count for name, count in OTHERS.items() if name.split()[0] == backbone)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [
    "cola",
    *(pytest.param(v, marks=pytest.mark.full)
      for v in ("lost backbone.rank=8 backbone.sparsity=0.2", "cola_lax", "lora", "sltrain")),
])  # fmt: skip
def test_compiled_equals_eager(variant):
    factors = variant not in ("lora", "sltrain")
    cfg = small(*variant.split(), *(["dlr=on"] if factors else []))
    eager = build(cfg, VOCAB, torch.device("cpu"))
    compiled = copy.deepcopy(eager)
    compiled.compile_()
    ids, targets = torch.randint(0, VOCAB, (2, 2, 16))
    with MergedResiduals(eager).active(), MergedResiduals(compiled).active():
        with torch.no_grad():
            torch.testing.assert_close(eager(ids, targets), compiled(ids, targets), rtol=1e-5, atol=0)
        losses = [model(ids, targets) for model in (eager, compiled)]
        for loss in losses:
            loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    for (name, p), q in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5, msg=name)
    assert [n for n, _ in compiled.named_parameters()] == [n for n, _ in eager.named_parameters()]
