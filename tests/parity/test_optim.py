"""AdamW against its formula in float64, the masked update, and the schedule."""

from __future__ import annotations

import math

import pytest
import torch

from dlr_pretrain.config import Choice
from dlr_pretrain.optim import build as optim
from dlr_pretrain.optim.schedule import cosine

ADAMW = Choice("adamw", {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1})
GO, SKIP = torch.tensor(0.0), torch.tensor(1.0)


def test_adamw_follows_its_formula():
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    p = w.clone().requires_grad_()
    optimizer = optim.build(ADAMW, {"p": p})
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t in range(1, 51):
        g, lr = torch.randn(4, 3, dtype=torch.float64, generator=generator), 0.01 / t
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        w = (1 - lr * 0.1) * w - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-6)
        p.grad = g
        optimizer.update(lr, skip=GO)
    torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_masked_update_changes_nothing(dtype):
    p = torch.randn(5, 7).to(dtype).requires_grad_()
    optimizer = optim.build(ADAMW, {"p": p})
    p.grad = torch.randn(5, 7).to(dtype)
    optimizer.update(0.1, skip=GO)
    before = [p.detach().clone(), *(s.clone() for s in optimizer.state_tensors().values())]
    p.grad = torch.full((5, 7), math.nan, dtype=dtype)
    optimizer.update(0.1, skip=SKIP)
    for a, b in zip(before, [p.detach(), *optimizer.state_tensors().values()], strict=True):
        assert torch.equal(a, b)


def test_state_goes_through_tensors_bit_for_bit():
    def start():
        torch.manual_seed(1)
        return {"x": torch.randn(3, 4).requires_grad_(), "y": torch.randn(6, 5).T.requires_grad_()}  # y: column-major

    def update(parameters, optimizer, seed):
        torch.manual_seed(seed)
        for p in parameters.values():
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape))
        optimizer.update(0.01, skip=GO)

    a, b = start(), start()
    one, two = optim.build(ADAMW, a), optim.build(ADAMW, b)
    for seed in range(4):
        update(a, one, seed)
        update(b, two, seed)
        tensors = {k: v.clone().contiguous() for k, v in two.state_tensors().items()}
        two = optim.build(ADAMW, b)
        two.load_state_tensors(tensors, two.state_layout())
    assert set(tensors) == {f"{n}/{s}" for n in a for s in ("step", "exp_avg", "exp_avg_sq")}
    assert all(torch.equal(p, q) for p, q in zip(a.values(), b.values(), strict=True))


def test_the_schedule_is_that_of_the_papers_scripts():
    def rate(t):
        return cosine(t, steps=100, warmup=10, peak=2.0, min_ratio=0.1) / 2.0

    assert rate(0) == 0 and rate(5) == 0.5 and rate(10) == 1
    assert rate(55) == pytest.approx(0.55)
    assert rate(99) == pytest.approx(0.100274, abs=1e-6)
    assert cosine(0, steps=1, warmup=0, peak=0.3, min_ratio=0.1) == 0.3
