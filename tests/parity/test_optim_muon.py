"""Muon and 8-bit AdamW against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dlr_pretrain.config import Choice
from dlr_pretrain.optim import build as optim

ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
GO = torch.tensor(0.0)


def gradients(shape: tuple[int, ...], updates: int) -> list[Tensor]:
    """With a mean that stays, so that momentum matters."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(shape, dtype=torch.float64, generator=generator)
    return [mean + torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(updates)]


def orthogonalized(x: Tensor, steps: int) -> Tensor:
    """Newton and Schulz's iteration of fifth order on the singular values, with Jordan's coefficients."""
    u, s, vh = torch.linalg.svd(x / x.norm(), full_matrices=False)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


def adamw(w: Tensor, given: list[Tensor], lr: float) -> Tensor:
    m = v = 0.0
    for t, g in enumerate(given, 1):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        w = (1 - lr * 0.1) * w - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-6)
    return w


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(12, 5), (5, 12)])
def test_muon_follows_its_formula_on_the_matrices_of_blocks_and_adamw_on_the_rest(shape, nesterov):
    names = {"model.layers.3.mlp.up_proj.weight": shape, "lm_head.weight": (7, 4), "model.layers.3.norm.weight": (6,)}
    start = {name: gradients(s, 1)[0] for name, s in names.items()}
    parameters = {name: w.T.contiguous().T.requires_grad_() if w.dim() == 2 else w.clone().requires_grad_()
                  for name, w in start.items()}  # fmt: skip
    knobs = ADAM | {"momentum": 0.9, "nesterov": nesterov, "ns_steps": 5}
    optimizer = optim.build(Choice("muon", knobs), parameters)
    given = {name: gradients(s, 50) for name, s in names.items()}
    for t in range(50):
        for name, p in parameters.items():
            p.grad = torch.empty_like(p, requires_grad=False).copy_(given[name][t])
        optimizer.update(0.01, skip=GO)
    matrix, *others = names
    w, buffer = start[matrix], torch.zeros(shape, dtype=torch.float64)
    for g in given[matrix]:
        buffer = 0.9 * buffer + 0.1 * g
        direction = 0.1 * g + 0.9 * buffer if nesterov else buffer
        w = (1 - 0.01 * 0.1) * w - 0.01 * 0.2 * math.sqrt(12) * orthogonalized(direction, 5)
    # torch iterates in bf16 (eps 2^-8), whatever the parameter's dtype
    error = (parameters[matrix].detach() - w).norm() / (w - start[matrix]).norm()
    assert error < 0.01
    for name in others:
        torch.testing.assert_close(parameters[name].detach(), adamw(start[name], given[name], 0.01), rtol=1e-12, atol=0)


def dynamic_map(signed: bool) -> Tensor:
    """The 256 values of dynamic tree quantisation (Dettmers et al., 2022): seven decades, each with a bit more than the
    one below; the sign, where there is one, takes a bit from all.
    """
    values = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        middle = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        values += [middle, -middle] if signed else [middle]
    return torch.cat(values).sort().values


def quantized(x: Tensor, signed: bool, block: int) -> Tensor:
    """Each block, in row-major order, divided by its largest absolute value and rounded to the map."""
    codes, blocks = dynamic_map(signed), x.reshape(-1, block)
    scale = blocks.abs().amax(1, keepdim=True)
    upper = torch.searchsorted(codes, blocks / scale).clamp(1, 255)
    low, high = codes[upper - 1], codes[upper]
    return (torch.where(blocks / scale - low < high - blocks / scale, low, high) * scale).view(x.shape)


@pytest.mark.parametrize("columns", [False, True])
def test_8_bit_adamw_follows_its_formula(columns):
    pytest.importorskip("torchao")
    shape, block = (64, 96), 128
    start = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    p = (start.T.contiguous().T if columns else start.clone()).requires_grad_()
    optimizer = optim.build(Choice("adamw_8bit", ADAM | {"block_size": block}), {"w": p})
    w, m, v = start, torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    with torch.compiler.set_stance("force_eager"):
        for t, g in enumerate(gradients(shape, 50), 1):
            p.grad = torch.empty_like(p, requires_grad=False).copy_(g)
            optimizer.update(0.01, skip=GO)
            m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
            w = (1 - 0.01 * 0.1) * w - 0.01 * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-6)
            m, v = quantized(m, signed=True, block=block), quantized(v, signed=False, block=block)
    # torchao computes in fp32: where a value lies at the middle of two codes, the two sides may round it differently
    error = (p.detach() - w).abs()
    assert (error < 1e-5).double().mean() > 0.99
    assert error.max() < 0.01
    plain = adamw(start, gradients(shape, 50), 0.01)
    assert ((w - plain).abs() > 1e-4).double().mean() > 0.9  # the quantisation is seen


@pytest.mark.full
def test_the_compiled_step_is_the_eager_one():
    pytest.importorskip("torchao")
    results = []
    for stance in ("default", "force_eager"):
        with torch.compiler.set_stance(stance):
            p = torch.randn(96, 64, generator=torch.Generator().manual_seed(1)).T.to(torch.bfloat16).requires_grad_()
            optimizer, place = optim.build(Choice("adamw_8bit", ADAM | {"block_size": 256}), {"w": p}), p.data_ptr()
            for g in gradients((64, 96), 5):
                p.grad = torch.empty_like(p, requires_grad=False).copy_(g)
                optimizer.update(0.01, skip=GO)
            assert p.data_ptr() == place and p.stride() == (1, 64)
            results.append(p.detach().float())
    assert (results[0] != results[1]).float().mean() < 0.01
    torch.testing.assert_close(*results, rtol=0.01, atol=1e-4)
