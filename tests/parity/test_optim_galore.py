"""GaLore and Fira against their formulas in float64, the projector, and Fira's limiter."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from dlr_pretrain.config import Choice
from dlr_pretrain.optim import build as optim
from dlr_pretrain.optim.galore import projector

KNOBS = {"rank": 3, "update_scale": 0.25, "refresh_every": 7, "limiter": 1.01}
KNOBS |= {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
GO = torch.tensor(0.0)
SHAPES = {"tall": (9, 5), "wide": (5, 9), "square": (6, 6)}
PLAIN = "model.embed_tokens.weight"


def run(name: str, gradients: list[dict[str, Tensor]], start: dict[str, Tensor], lr: float, **knobs) -> optim.Optimizer:
    """The optimizer ``name`` after an update from each of ``gradients``; wide matrices are column-major."""
    parameters = {}
    for full, w in start.items():
        w = w.T.contiguous().T if "wide" in full else w.clone()
        parameters[full] = w.requires_grad_()
    optimizer = optim.build(Choice(name, KNOBS | knobs), parameters)
    for t, given in enumerate(gradients):
        for full, p in parameters.items():
            p.grad = torch.empty_like(p, requires_grad=False).copy_(given[full])
        optimizer.update(lr / (t + 1), skip=GO)
    return optimizer


def draw(updates: int) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Starting values and the gradients of every update, of sizes that vary over orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    names = {f"model.layers.0.{kind}.weight": shape for kind, shape in SHAPES.items()} | {PLAIN: (7, 5)}

    def values(scale: float = 1.0) -> dict[str, Tensor]:
        return {
            name: scale * torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in names.items()
        }

    return values(), [values(10 ** math.sin(t)) for t in range(updates)]


def reference(fira: bool, w: Tensor, gradients: list[Tensor], lr: float, projected: bool = True) -> Tensor:
    """The formulas of both papers' code, for one matrix, all from the right or all from the left."""
    m = v = 0.0
    previous = None
    a, rank = KNOBS["update_scale"], KNOBS["rank"]
    right = w.shape[0] >= w.shape[1]
    for k, g in enumerate(gradients):
        if k % KNOBS["refresh_every"] == 0:
            u, _, vh = torch.linalg.svd(g, full_matrices=False)
            p = vh[:rank] if right else u[:, :rank]
        if not projected:
            r = g
        else:
            r = torch.einsum("mn,rn->mr", g, p) if right else torch.einsum("mr,mn->rn", p, g)
        m, v = 0.9 * m + 0.1 * r, 0.99 * v + 0.01 * r * r
        n = m / (v.sqrt() + 1e-6)
        eta = lr / (k + 1) * math.sqrt(1 - 0.99 ** (k + 1)) / (1 - 0.9 ** (k + 1))
        if not projected:
            change = n
        else:

            def back(x: Tensor, p: Tensor = p) -> Tensor:
                return a * (torch.einsum("mr,rn->mn", x, p) if right else torch.einsum("mr,rn->mn", p, x))

            change = back(n)
            if fira:
                along = 1 if right else 0
                phi = n.square().sum(along).sqrt() / (r.square().sum(along).sqrt() + 1e-8)
                s = (g - back(r)) * (phi[:, None] if right else phi[None, :])
                norm = s.square().sum().sqrt()
                if previous is not None:
                    limit = max(norm / (previous + 1e-8), 1.01) / 1.01
                    s, norm = s / limit, norm / limit
                previous = norm
                change = change + s
        w = w - eta * change
        w = w - lr / (k + 1) * 0.1 * w
    return w


@pytest.mark.parametrize("name", ["galore", "fira"])
def test_50_steps_follow_the_formula(name):
    start, gradients = draw(50)
    optimizer = run(name, gradients, start, lr=1.0)
    for full, p in optimizer.parameters.items():
        expected = reference(name == "fira", start[full], [g[full] for g in gradients], 1.0, projected=full != PLAIN)
        assert (expected - start[full]).norm() > 0.1 * start[full].norm()
        torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_projector_is_orthonormal_and_spans_the_leading_directions(shape, dtype):
    m, n = shape
    g = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    p = projector(g, rank=3)
    assert p.dtype == dtype and p.is_contiguous()
    assert p.shape == ((3, n) if m >= n else (m, 3))
    rows = (p if m >= n else p.T).double()
    accuracy = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(rows @ rows.T, torch.eye(3, dtype=torch.float64), rtol=0, atol=accuracy)
    tail = torch.linalg.svdvals(g.double())[3:].norm()
    rest = g.double() - (g.double() @ rows.T @ rows if m >= n else rows.T @ rows @ g.double())
    assert rest.norm() == pytest.approx(float(tail), rel=accuracy, abs=accuracy)


def test_the_projector_is_renewed_at_the_first_of_every_so_many_updates():
    start, gradients = draw(9)
    name = "model.layers.0.tall.weight"
    kept = [run("galore", gradients[:k], start, 0.1).state_tensors()[f"{name}/projector"] for k in range(1, 10)]
    renewed = [not torch.equal(a, b) for a, b in itertools.pairwise(kept)]
    assert renewed == [False] * 6 + [True, False]
    assert torch.equal(kept[7], projector(gradients[7][name], 3))


def test_firas_rest_grows_by_at_most_1_percent_a_step_and_falls_at_once():
    """The gradient grows tenfold a step where the projector does not see it, then almost vanishes there."""
    start, gradients = draw(1)
    seen = gradients[0]
    unseen = {}
    for name, g in seen.items():
        u, d, vh = torch.linalg.svd(g, full_matrices=False)
        unseen[name] = u[:, 3:] @ torch.diag(d[3:]) @ vh[3:]
    growing = [{name: g + (10.0**t - 1) * unseen[name] for name, g in seen.items()} for t in range(6)]
    for kind in SHAPES:
        norm = f"model.layers.0.{kind}.weight/residual_norm"
        given = [*growing, {name: g - 0.99 * unseen[name] for name, g in seen.items()}]
        runs = [run("fira", given[: k + 1], start, 0.0, update_scale=1.0) for k in range(7)]
        norms = [float(optimizer.state_tensors()[norm]) for optimizer in runs]
        growth = [after / before for before, after in itertools.pairwise(norms)]
        assert growth[:5] == pytest.approx([1.01] * 5, abs=1e-7)  # 1e-8 stands beside the norm that it is divided by
        assert growth[5] < 0.1


@pytest.mark.parametrize("name", ["galore", "fira"])
def test_the_trainer_hears_of_each_matrix(name):
    """A refresh of all projections may take longer than a run is left to stand still."""
    start, gradients = draw(1)
    optimizer, heard = run(name, [], start, lr=0.1), []

    def heartbeat(items):
        for item in items:
            heard.append(item)
            yield item

    for part in optimizer.parts:
        part.heartbeat = heartbeat
    for full, p in optimizer.parameters.items():
        p.grad = torch.empty_like(p, requires_grad=False).copy_(gradients[0][full])
    optimizer.update(0.1, skip=GO)
    assert len(heard) == len(start)
