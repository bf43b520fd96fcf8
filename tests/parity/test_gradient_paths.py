"""The gradient-path probe against its definition and autograd, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from dlr_pretrain.models import active, build
from dlr_pretrain.models.dlr import marks
from dlr_pretrain.models.gradient_paths import SUMS, PlainPath, counted, isotropic, means, residual_matrix, sums
from tests.parity.reference import CPU, VOCAB, r_transposed, small

PROBED = ("model.layers.0.self_attn.q_proj.b", "model.layers.0.mlp.down_proj.b", "model.layers.1.mlp.up_proj.b")


def weights_of(model) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def batch(rows: int = 2, padding: int = 4):
    ids, targets = torch.randint(0, VOCAB, (2, rows, 12), generator=torch.Generator().manual_seed(0))
    targets[:, 12 - padding :] = -100
    return ids, targets


@pytest.mark.parametrize("variant", [
    "lowrank", "cola", "lost backbone.rank=8 backbone.sparsity=0.2", "lax",
    "cola_lax backbone.norm=output backbone.crossing=post_act",
])  # fmt: skip
def test_both_ways_are_their_definition(variant):
    """u and v are how the loss changes with z where only B, or only the residual, passes the change on."""
    cfg = small(*variant.split(), "dlr=on", "dlr.impl=branch")
    model = build(cfg, VOCAB, CPU).double()
    inputs, count = batch(), torch.tensor(16)
    gradients = PlainPath(cfg, VOCAB).output_gradients(weights_of(model), PROBED, inputs, count)
    for name in PROBED:
        linear, ways = model.get_submodule(name), []
        b, beta_rt = linear.weight.detach(), linear.residual.beta * r_transposed(*linear.weight.shape).double()

        def by_two_ways(_, given, y, b=b, beta_rt=beta_rt, ways=ways):
            z_1, z_2 = (given[0].detach().clone().requires_grad_() for _ in range(2))
            ways += (z_1, z_2)
            return z_1 @ b.T + z_2 @ beta_rt.T

        hook = linear.register_forward_hook(by_two_ways)
        u, v = (g.flatten(0, -2) for g in torch.autograd.grad(model(*inputs) / count, ways))
        hook.remove()
        added = residual_matrix(linear.residual, b, None)
        torch.testing.assert_close(gradients[name] @ b, u, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(gradients[name] @ added, v, rtol=1e-9, atol=1e-12)
        for at in (3, 19):
            one = means(sums(gradients[name][at][None], b, added).tolist())
            expected = {"through_b": u[at].norm().item(), "through_residual": v[at].norm().item()}
            expected["rho"] = expected["rho_mean"] = expected["through_residual"] / expected["through_b"]
            expected["cosine"] = (u[at] @ v[at] / u[at].norm() / v[at].norm()).item()
            assert one == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("mode", "width"), [("none", 91), ("latent", 96)])
def test_merged_weights_grouped_and_recomputed_give_the_same_gradients(mode, width):
    """The path of hooks on the weights of the model that trains, against autograd through the grouped products."""
    overrides = ("dlr=on", f"train.activation_checkpointing={mode}")
    cfg = small("cola", *overrides, width=width)
    model = build(cfg, VOCAB, CPU).double()
    inputs, count = batch(), torch.tensor(16)
    with active(model):
        before = {name: p.grad for name, p in model.named_parameters()}
        gradients = PlainPath(cfg, VOCAB).output_gradients(weights_of(model), PROBED, inputs, count)
        assert all(p.grad is before[name] is None for name, p in model.named_parameters())
        (model(*inputs) / count).backward()
        readable, z = PlainPath(cfg, VOCAB).model, {}
        readable.load_state_dict({n: p.detach() for n, p in weights_of(model).items()} | marks(readable), assign=True)
        for name in PROBED:
            readable.get_submodule(name).register_forward_hook(lambda _, read, y, name=name: z.update({name: read[0]}))
        readable(*inputs)
    for name in PROBED:
        of_b = model.get_parameter(f"{name}.weight").grad  # g^T z
        torch.testing.assert_close(gradients[name].T @ z[name].flatten(0, -2), of_b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", PROBED)
def test_positions_without_a_target_do_not_count(name):
    cfg = small("cola", "dlr=on")
    model = build(cfg, VOCAB, CPU).double()
    ids, targets = batch(padding=5)
    linear = model.get_submodule(name)
    added = residual_matrix(linear.residual, linear.weight, None)

    def found(*inputs):
        with active(model):
            gradients = PlainPath(cfg, VOCAB).output_gradients(weights_of(model), [name], inputs, torch.tensor(14))
        return sums(gradients[name][counted(name, inputs[1] != -100)], linear.weight.detach(), added)

    padded, cut = found(ids, targets), found(ids[:, :7], targets[:, :7])
    assert padded[0] == (12 if "q_proj" in name else 14)  # the first query sees one key
    torch.testing.assert_close(padded, cut, rtol=1e-10, atol=0)


def test_queries_that_see_one_key_do_not_count():
    """In exact arithmetic their gradient is zero; what rounding leaves has a direction, and would count."""
    cfg, name = small("cola", "dlr=on"), PROBED[0]
    model = build(cfg, VOCAB, CPU).double()
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    inputs = (*batch(padding=0), documents)
    with active(model):
        g = PlainPath(cfg, VOCAB).output_gradients(weights_of(model), [name], inputs, torch.tensor(24))[name]
    scored = inputs[1] != -100
    counts, size = counted(name, scored, documents), g.norm(dim=-1)
    assert (~counts).nonzero().flatten().tolist() == [0, 5, 12]
    assert size[~counts].max() < 1e-12 * size[counts].min()
    assert counted(PROBED[1], scored, documents).all()


def test_where_nothing_counts_there_are_no_numbers():
    none = sums(torch.zeros(3, 91, dtype=torch.float64), torch.ones(91, 8), torch.ones(91, 8))
    assert means(none.tolist()) == {
        "through_b": 0, "through_residual": 0, "rho": None, "rho_mean": None, "cosine": None,
    }  # fmt: skip
    assert set(means([0.0] * SUMS).values()) == {None}


def test_an_isotropic_gradient_has_the_expected_ratio():
    """The 350M shapes of q_proj and up_proj start at 0.84 and 0.59, as the formula of CoLA's start says."""
    for d_in, d_out, rank, expected in ((1024, 1024, 256, 0.841), (1024, 2736, 256, 0.592)):
        generator = torch.Generator().manual_seed(1)
        std = (rank * (d_in + d_out)) ** -0.25
        b = torch.randn(d_out, rank, generator=generator, dtype=torch.float64) * std
        copies = math.ceil(d_out / rank)
        added = copies**-0.5 * r_transposed(d_out, rank).double()
        ideal = isotropic(b, added).item()
        assert ideal == pytest.approx(expected, rel=0.01)
        g = torch.randn(400, d_out, generator=generator, dtype=torch.float64)
        one = means(sums(g, b, added).tolist())
        assert one["rho"] == pytest.approx(ideal, rel=0.02) and one["rho_mean"] == pytest.approx(ideal, rel=0.02)
        assert abs(one["cosine"]) < 0.02
