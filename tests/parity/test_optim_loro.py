"""LORO against its formula in float64, and what an exact step leaves as it is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dlr_pretrain.config import Choice
from dlr_pretrain.optim import build as optim
from dlr_pretrain.optim.loro import retract

D_OUT, D_IN, R, HIDDEN = 11, 8, 3, 6
A, B = "model.layers.0.mlp.up_proj.a.weight", "model.layers.0.mlp.up_proj.b.weight"
EMBEDDING = "model.embed_tokens.weight"
KNOBS = {"exact_every": 8, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
KNOBS |= {"schedule": "loro", "restart_warmup": 2, "shift": None}
GO = torch.tensor(0.0)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def start() -> dict[str, Tensor]:
    return {A: normal(R, D_IN, seed=1), B: normal(D_OUT, R, seed=2), EMBEDDING: normal(5, HIDDEN, seed=3)}


def built(columns: bool = False, dtype: torch.dtype = torch.float64, **knobs) -> optim.Optimizer:
    parameters = {name: (w.T.contiguous().T if columns else w).to(dtype) for name, w in start().items()}
    return optim.build(Choice("loro", KNOBS | knobs), {name: w.requires_grad_() for name, w in parameters.items()})


def product(optimizer: optim.Optimizer) -> Tensor:
    return (optimizer.parameters[B] @ optimizer.parameters[A]).detach().double()


def tangent(a: Tensor, b: Tensor, da: Tensor, db: Tensor) -> Tensor:
    """The direction in the tangent space at B A^T that directions of A [d_in, r] and B [d_out, r] stand for."""
    a_inverse, b_inverse = torch.linalg.pinv(a), torch.linalg.pinv(b)
    return b_inverse.T @ da.T + (torch.eye(len(b), dtype=b.dtype) - b @ b_inverse) @ db @ a_inverse


def nearest(w: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Balanced factors (A, B) of the nearest matrix of that rank."""
    p, d, qh = torch.linalg.svd(w)
    return qh[:rank].T * d[:rank].sqrt(), p[:, :rank] * d[:rank].sqrt()


@pytest.mark.parametrize("columns", [False, True])
def test_50_steps_follow_the_formula(columns):
    """Products are compared: the signs of singular vectors are anybody's choice. Gradients are those of
    |B A^T - target|^2 / 2, taken by each side at its own factors.
    """
    target, optimizer = normal(D_OUT, D_IN, seed=4), built(columns)
    parameters = optimizer.parameters
    a, b, embedding = start()[A].T.clone(), start()[B], start()[EMBEDDING]
    k, moments = 0, {name: [0.0, 0.0] for name in "abe"}

    def direction(name: str, g: Tensor) -> Tensor:
        m, v = moments[name]
        moments[name] = m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return m / (v.sqrt() + 1e-6)

    for t in range(50):
        lr = 0.05 / (1 + t % 8)
        difference = (parameters[B] @ parameters[A]).detach() - target
        parameters[A].grad = torch.empty_like(parameters[A]).copy_(parameters[B].detach().T @ difference)
        parameters[B].grad = torch.empty_like(parameters[B]).copy_(difference @ parameters[A].detach().T)
        parameters[EMBEDDING].grad = parameters[EMBEDDING].detach().clone()
        optimizer.update(lr, skip=GO, index=t)

        k += 1
        eta = lr * math.sqrt(1 - 0.99**k) / (1 - 0.9**k)
        difference = b @ a.T - target
        da, db = direction("a", difference.T @ b), direction("b", difference @ a)
        embedding = (1 - 0.1 * lr) * (embedding - eta * direction("e", embedding))
        if (t + 1) % 8 == 0:
            a, b = nearest(b @ a.T - eta * tangent(a, b, da, db), R)
            k, moments = 0, {name: [0.0, 0.0] for name in "abe"}
        else:
            a, b = ((1 - 0.1 * eta) * (x - eta * R / HIDDEN * dx) for x, dx in ((a, da), (b, db)))
        torch.testing.assert_close(product(optimizer), b @ a.T, rtol=0, atol=1e-12)
    torch.testing.assert_close(parameters[EMBEDDING].detach(), embedding, rtol=1e-12, atol=1e-13)
    assert (b @ a.T - target).norm() < 0.8 * (start()[B] @ start()[A] - target).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_exact_step_at_rate_0_leaves_the_product_and_balances_the_factors(dtype):
    optimizer = built(dtype=dtype, exact_every=1)
    before = product(optimizer)
    for name, p in optimizer.parameters.items():
        p.grad = normal(*p.shape, seed=len(name)).to(dtype)
    optimizer.update(0.0, skip=GO, index=0)
    accuracy = {"rtol": 0, "atol": 200 * torch.finfo(dtype).eps}
    torch.testing.assert_close(product(optimizer), before, **accuracy)
    a, b = (optimizer.parameters[name].detach().double() for name in (A, B))
    assert (a - start()[A]).norm() > 0.1  # they are others than before
    torch.testing.assert_close(b.T @ b, a @ a.T, **accuracy)


def test_an_exact_step_has_rank_r_and_its_first_order_is_the_tangent_direction():
    (a, b), (da, db) = (start()[A].T, start()[B]), (normal(D_IN, R, seed=5), normal(D_OUT, R, seed=6))
    for step in (1e-1, 1e-3, 1e-5):
        new_b, new_a = retract(b, a, db, da, step)
        assert new_b.shape == (D_OUT, R) and new_a.shape == (D_IN, R)
        torch.testing.assert_close(new_b.T @ new_b, new_a.T @ new_a, rtol=0, atol=1e-12)
        moved = (b @ a.T - new_b @ new_a.T) / step
        z = tangent(a, b, da, db)
        assert (moved - z).norm() < 5 * step * z.norm() ** 2
    assert torch.linalg.matrix_rank(new_b @ new_a.T) == R


def test_after_an_exact_step_all_state_starts_anew():
    optimizer, counted = built(), []
    for t in range(10):
        for name, p in optimizer.parameters.items():
            p.grad = normal(*p.shape, seed=t + len(name))
        optimizer.update(0.01, skip=GO, index=t)
        tensors = optimizer.state_tensors()
        steps = {int(value) for name, value in tensors.items() if name.endswith("/step")}
        assert len(steps) == 1
        counted += steps
        assert all(bool(value.any()) == (t != 7) for value in tensors.values())
    assert counted == [1, 2, 3, 4, 5, 6, 7, 0, 1, 2]


@pytest.mark.parametrize(("first", "left_out"), [(0, 3), (5, None), (13, 14)])
def test_exact_steps_come_by_the_runs_count(first, left_out):
    """Also where an update was left out, or the state is new in the middle of a run: the rate restarts there."""
    optimizer, anew = built(), []
    for t in range(first, 25):
        for name, p in optimizer.parameters.items():
            p.grad = normal(*p.shape, seed=t + len(name))
        optimizer.update(0.01, skip=torch.tensor(float(t == left_out)), index=t)
        anew += [t] if not any(value.any() for value in optimizer.state_tensors().values()) else []
    assert anew == [t for t in (7, 15, 23) if t >= first]


def test_without_an_index_it_says_what_it_needs():
    with pytest.raises(ValueError, match=r"give Optimizer\.update its index"):
        built().update(0.01, skip=GO)
