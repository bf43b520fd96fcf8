"""LOST against its formula in float64: the two branches, and their start from one dense weight."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from dlr_pretrain.models import attach_dlr, build
from dlr_pretrain.models.linear import SeededInit
from dlr_pretrain.models.lowrank import leading
from tests.parity.reference import VOCAB, assert_follows_formula, r_transposed, silu, small

CPU = torch.device("cpu")
MANY = ("backbone.sparsity=0.2",)  # 6 of 32 channels and 18 of 91: projections of a group share some


def formula(cfg, state, dlr: bool = False):
    gamma, plain = cfg.backbone.gamma, cfg.backbone.activation == "none"

    def project(name, x):
        h = x @ state[f"{name}.a.weight"].T
        b = state[f"{name}.b.weight"]
        if dlr:
            b = b + cfg.dlr.alpha / math.sqrt(math.ceil(b.shape[0] / b.shape[1])) * r_transposed(*b.shape).to(b)
        low_rank = (h if plain else silu(h)) @ b.T
        sparse = x[..., state[f"{name}.channels"]] @ state[f"{name}.s.weight"].T
        return gamma * low_rank + (1 - gamma) * sparse

    return project


def dense_weights(model) -> dict[str, torch.Tensor]:
    """The weight that each projection starts from with seed 0, by the projection's name."""
    shapes = {name.removesuffix(".channels"): model.get_submodule(name.removesuffix(".channels"))
              for name in model.state_dict() if name.endswith(".channels")}  # fmt: skip
    return {
        name: SeededInit(0).normal(f"{name}.weight", (p.b.out_features, p.a.in_features), 0.02).double()
        for name, p in shapes.items()
    }


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("knobs", [
    (),
    ("backbone.rank=8",),
    ("backbone.rank=8", *MANY),
    ("backbone.rank=13", "backbone.gamma=0.5", "backbone.activation=none", *MANY),
    ("backbone.rank=8", "backbone.init=cola", "backbone.channels=random", *MANY),
])  # fmt: skip
def test_loss_and_gradients_equal_the_formula(knobs, grouped):
    cfg = small("lost", *knobs)
    assert_follows_formula(cfg, partial(formula, cfg), grouped)


def test_the_residual_of_dlr_is_inside_the_low_rank_branch():
    cfg = small("lost", "backbone.rank=8", "dlr=on", "dlr.alpha=1.5")
    attach = partial(attach_dlr, alpha=1.5, impl="branch")
    assert_follows_formula(cfg, partial(formula, cfg, dlr=True), False, attach)


def test_at_full_rank_without_activation_the_low_rank_branch_is_the_dense_layer():
    knobs = ("backbone.rank=32", "backbone.gamma=1", "backbone.activation=none")
    lost = build(small("lost", *knobs), VOCAB, CPU, torch.float64)
    full = build(small("full"), VOCAB, CPU, torch.float64)
    ids = torch.randint(0, VOCAB, (2, 12))
    torch.testing.assert_close(lost.logits(ids), full.logits(ids), rtol=1e-10, atol=1e-11)


def test_factors_are_the_best_approximation_of_the_dense_start_and_balanced():
    model = build(small("lost", "backbone.rank=8", "seed=0", *MANY), VOCAB, CPU, torch.float64)
    for name, dense in dense_weights(model).items():
        p = model.get_submodule(name)
        u, s, vh = torch.linalg.svd(dense, full_matrices=False)
        a, b = p.a.weight, p.b.weight
        torch.testing.assert_close(b @ a, u[:, :8] * s[:8] @ vh[:8], rtol=0, atol=1e-12)
        torch.testing.assert_close(b.T @ b, torch.diag(s[:8]), rtol=0, atol=1e-12)
        torch.testing.assert_close(a @ a.T, torch.diag(s[:8]), rtol=0, atol=1e-12)
        assert torch.equal(p.s.weight, dense[:, p.channels])


@pytest.mark.parametrize("looks_at", [256, 5])
@pytest.mark.parametrize("init", ["svd", "cola"])
def test_channels_are_the_largest_columns_of_what_is_left(looks_at, init):
    words = (f"backbone.residual_rank={looks_at}", f"backbone.init={init}")
    model = build(small("lost", "backbone.rank=8", "seed=0", *MANY, *words), VOCAB, CPU, torch.float64)
    for name, dense in dense_weights(model).items():
        u, s, vh = torch.linalg.svd(dense, full_matrices=False)
        of = slice(8, min(8 + looks_at, 32))
        left = (u[:, of] * s[of]) @ vh[of]
        count = max(1, int(0.2 * dense.shape[1]))
        expected = sorted(sorted(range(dense.shape[1]), key=lambda i: -left[:, i].norm().item())[:count])
        p = model.get_submodule(name)
        assert p.channels.tolist() == expected and p.channels.dtype == torch.int64
        assert torch.equal(p.s.weight, dense[:, expected])
        if init == "cola":
            assert p.b.weight.std().item() == pytest.approx((8 * sum(dense.shape)) ** -0.25, rel=0.25)


def test_random_channels_follow_from_the_seed_and_the_name():
    words = ("backbone.rank=8", "backbone.channels=random", *MANY)
    a, b = (build(small("lost", *words, f"seed={seed}"), VOCAB, CPU).state_dict() for seed in (0, 1))
    channels = {name: c.tolist() for name, c in a.items() if name.endswith(".channels")}
    for name, chosen in channels.items():
        width = 91 if "down_proj" in name else 32
        assert chosen == sorted(set(chosen)) and len(chosen) == int(0.2 * width) and chosen[-1] < width
    assert len({tuple(c) for c in channels.values()}) == len(channels)
    assert all(b[name].tolist() != c for name, c in channels.items())


def test_at_least_one_channel_is_chosen_and_none_is_trained():
    model = build(small("lost", "backbone.rank=8"), VOCAB, CPU)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(*torch.randint(0, VOCAB, (2, 2, 8))).backward()
    optimizer.step()
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name]) == name.endswith(".channels"), name
        assert not name.endswith(".channels") or t.shape == (1,)


def test_a_start_from_dense_weights_is_the_start_from_their_own():
    """As after run.start_from: whatever was drawn before is gone, but for random channels."""
    words = ("backbone.rank=8", *MANY)
    drawn = build(small("lost", *words, "seed=0"), VOCAB, CPU)
    other = build(small("lost", *words, "seed=1"), VOCAB, CPU)
    dense = dense_weights(drawn)
    for name, holder in other.named_modules():
        for group in holder.groups() if hasattr(holder, "groups") else ():
            group.start_from_([dense[f"{name}.{p}"] for p in group.spec.names])
    for name, t in drawn.state_dict().items():
        assert torch.equal(t, other.state_dict()[name]) == ("_proj." in name or "norm" in name), name


def test_the_signs_of_singular_vectors_do_not_depend_on_the_library():
    w = torch.randn(9, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for matrix in (w, w.T):
        u, s, vh = leading(matrix, 9)
        torch.testing.assert_close(u * s @ vh, matrix, rtol=0, atol=1e-12)
        shorter = u if len(u) == 9 else vh.T
        assert (shorter.gather(0, shorter.abs().argmax(0, keepdim=True)) > 0).all()
