"""SLTrain against its formula, y = (s B A + S) x, in float64."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from dlr_pretrain.models import build
from dlr_pretrain.models.linear import GroupSpec, SeededInit, named_groups
from dlr_pretrain.models.sltrain import Sltrain
from tests.parity.reference import VOCAB, assert_follows_formula, nonzero_b, small

CPU = torch.device("cpu")


@cache
def config(width: int = 91):
    return small("sltrain", "backbone.alpha=12", "backbone.sparsity=0.05", width=width)


def sparse(p: dict, shape: torch.Size) -> torch.Tensor:
    """S, from its values and their flat positions."""
    return torch.zeros(shape.numel(), dtype=p["values"].dtype).scatter(0, p["index"], p["values"]).view(shape)


def formula(state: dict):
    def project(name, x):
        p = {leaf: state[f"{name}.{leaf}"] for leaf in ("a.weight", "b.weight", "values", "index")}
        product = p["b.weight"] @ p["a.weight"]
        return x @ (12 / 8 * product + sparse(p, product.shape)).T

    return project


@pytest.mark.parametrize("grouped", [True, False])
def test_loss_and_gradients_equal_the_formula(grouped):
    assert_follows_formula(config(), formula, grouped, nonzero_b)


def test_the_support_is_random_sorted_and_without_repetition():
    model = build(config(width=96), VOCAB, CPU)
    found = {}
    for prefix, group in named_groups(model):
        for name, p in zip(group.spec.names, group.projections, strict=True):
            index, places = p.index, group.spec.d_in * group.spec.d_out
            assert index.dtype == torch.int64 and (index.diff() > 0).all() and index[0] >= 0 and index[-1] < places
            assert index.double().mean().item() == pytest.approx(places / 2, rel=0.2)
            bound = group.spec.d_in**-0.5
            assert p.values.abs().max() <= bound and p.values.std().item() == pytest.approx(bound / 3**0.5, rel=0.15)
            found[prefix + name] = tuple(index.tolist())
    assert len(set(found.values())) == len(found) == 14
    again = build(config(width=96), VOCAB, CPU)
    assert torch.equal(model.model.layers[1].mlp.down_proj.index, again.model.layers[1].mlp.down_proj.index)


@pytest.mark.parametrize("shape", [(64, 64, 64, 64), (64, 91, 64, 128), (91, 64, 128, 64)])
def test_no_dense_matrix_is_kept_after_forward(shape):
    knobs, (d_in, d_out, pad_in, pad_out) = {"rank": 8, "alpha": 8.0, "sparsity": 0.05}, shape
    spec = GroupSpec(("one", "other"), d_in, d_out, pad_in, pad_out, block=0)
    group = Sltrain(spec, [Sltrain.projection(spec, knobs) for _ in spec.names], knobs, grouped=True)
    group.init_(SeededInit(0), "")
    x, kept = torch.randn(3, pad_in, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        group.expand(x)
    stored = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // t.element_size() for t in kept}
    factors, entries = 2 * 8 * (pad_in + pad_out), int(0.05 * d_in * d_out)
    assert sum(stored.values()) == 3 * pad_in + factors + 2 * (entries + entries)
    assert max(stored.values()) < d_in * d_out
