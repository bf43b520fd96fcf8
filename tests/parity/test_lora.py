"""LoRA from scratch and ReLoRA against their formulas, in float64."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dlr_pretrain.cli import load
from dlr_pretrain.models import build
from dlr_pretrain.models.linear import SeededInit, named_groups
from dlr_pretrain.models.llama import Llama
from tests.parity.reference import VOCAB, assert_follows_formula, nonzero_b, small

CPU = torch.device("cpu")


@cache
def config(backbone: str = "lora"):
    return small(backbone, "backbone.alpha=12")


def formula(state: dict):
    def project(name, x):
        w, a, b = (state[f"{name}.{leaf}"] for leaf in ("weight", "a.weight", "b.weight"))
        return x @ w.T + 12 / 8 * (x @ a.T @ b.T)

    return project


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("backbone", ["lora", "relora"])
def test_loss_and_gradients_equal_the_formula(backbone, grouped):
    assert_follows_formula(config(backbone), formula, grouped, nonzero_b)


@pytest.mark.parametrize("grouped", [True, False])
def test_the_start_is_the_frozen_model(grouped):
    model = Llama(config(), VOCAB, grouped=grouped)
    model.init_(5)
    dense = Llama(small("full"), VOCAB, grouped=grouped)
    dense.init_(5)
    ids = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.logits(ids), dense.logits(ids), rtol=1e-5, atol=1e-6)
    a = model.model.layers[0].mlp.down_proj.a.weight
    assert a.abs().max() <= 91**-0.5 and a.std().item() == pytest.approx((3 * 91) ** -0.5, rel=0.1)


def test_frozen_weights_have_no_gradient_and_cost_no_product_for_one():
    model = build(config(), VOCAB, CPU)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert len(frozen) == 14 and all(name.endswith("_proj.weight") for name in frozen)
    group = model.model.layers[0].mlp.gate_up
    x = torch.randn(5, 32, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = sum(y.sum() for y in group.expand(x))
        forward = counter.get_total_flops()
        y.backward()
    dense, factors = 2 * 5 * 2 * 128 * 32, 2 * 5 * 2 * 8 * (32 + 128)  # 2 FLOPs x 5 rows x 2 projections
    assert forward == dense + factors
    assert counter.get_total_flops() - forward == dense + 2 * factors  # two products each, but one for W0
    assert all(p.weight.grad is None and p.a.weight.grad is not None for p in group.projections)


@pytest.mark.parametrize("scale", ["60m", "1b"])
def test_trained_parameters_are_those_of_the_low_rank_model_and_frozen_ones_those_of_the_dense(scale):
    models = {}
    for backbone in ("lora", "lowrank", "full"):
        cfg = load([f"scale={scale}", f"backbone={backbone}", "data=sample"])
        models[backbone] = build(cfg, cfg.scale.vocab_size, torch.device("meta"))
    shape = models["full"].model.layers.parameters()
    dense = sum(p.numel() for p in shape if p.dim() == 2)
    trained = sum(p.numel() for p in models["lora"].parameters() if p.requires_grad)
    assert trained == sum(p.numel() for p in models["lowrank"].parameters())
    assert sum(p.numel() for p in models["lora"].parameters()) == trained + dense


# ----------------------------------------------------------------------------------------------------
# ReLoRA's merge


def merge(model: Llama, state: dict, number: int) -> list[str]:
    return [
        name for prefix, group in named_groups(model) for name in group.merge_(state, SeededInit(7), prefix, number)
    ]


def test_a_merge_changes_no_output_and_starts_the_factors_anew():
    model = build(config("relora"), VOCAB, CPU).requires_grad_(False)
    nonzero_b(model)
    model.double()
    ids = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
    before, logits = {name: p.clone() for name, p in model.named_parameters()}, model.logits(ids)
    factors = merge(model, dict(model.named_parameters()), 1)
    assert set(factors) == {name for name in before if name.endswith((".a.weight", ".b.weight"))}
    torch.testing.assert_close(model.logits(ids), logits, rtol=1e-12, atol=1e-12)
    after = dict(model.named_parameters())
    at = "model.layers.1.mlp.down_proj"
    product = before[f"{at}.b.weight"] @ before[f"{at}.a.weight"]
    torch.testing.assert_close(after[f"{at}.weight"], before[f"{at}.weight"] + 12 / 8 * product, rtol=1e-12, atol=1e-15)
    a = after[f"{at}.a.weight"]
    assert after[f"{at}.b.weight"].count_nonzero() == 0
    assert a.abs().max() <= 91**-0.5 and a.std().item() == pytest.approx((3 * 91) ** -0.5, rel=0.1)


def test_new_factors_follow_from_seed_name_and_number_alone():
    def drawn(number: int) -> dict:
        model = build(config("relora"), VOCAB, CPU).requires_grad_(False)
        nonzero_b(model)
        merge(model, dict(model.named_parameters()), number)
        return {name: p for name, p in model.named_parameters() if name.endswith(".a.weight")}

    first, again, second = drawn(1), drawn(1), drawn(2)
    initial = {n: p for n, p in build(config("relora"), VOCAB, CPU).named_parameters() if n.endswith(".a.weight")}
    assert all(torch.equal(first[name], again[name]) for name in first)
    distinct = [p.flatten()[:8] for draws in (first, second, initial) for p in draws.values()]
    assert len({tuple(row.tolist()) for row in distinct}) == 3 * 14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_merge_is_rounded_once(dtype):
    model = build(config("relora"), VOCAB, CPU, dtype).requires_grad_(False)
    nonzero_b(model)
    at = "model.layers.0.self_attn.v_proj"
    w, a, b = (model.get_parameter(f"{at}.{leaf}").double() for leaf in ("weight", "a.weight", "b.weight"))
    merge(model, dict(model.named_parameters()), 1)
    exact = w + 12 / 8 * (b @ a)
    found = model.get_parameter(f"{at}.weight").double()
    # half a spacing, and for fp32 the order of a sum of eight products
    spacing = torch.finfo(dtype).eps * exact.abs()
    slack = 0 if dtype == torch.bfloat16 else 4 * torch.finfo(dtype).eps * exact.abs().max()
    assert ((found - exact).abs() <= 0.502 * spacing + slack).all()
