"""Similarity of the activations of two models on the same tokens, block by block."""

import torch
from torch import Tensor

from dlr_pretrain.models import Llama
from dlr_pretrain.util.tensors import IGNORE

from .weights import Inputs


@torch.no_grad()
def outputs(model: Llama, inputs: Inputs) -> list[Tensor]:
    """The residual stream after each block, [tokens, d] on the host, at the scored positions. The hooks remain."""
    streams: list[Tensor] = []
    for block in model.model.layers:
        block.register_forward_hook(lambda _block, _inputs, output: streams.append(output[0]))
    parts = []
    for ids, targets, *documents in inputs:
        streams.clear()
        model.logits(ids, *documents)
        parts.append([stream[targets != IGNORE].cpu() for stream in streams])
    return [torch.cat(of_block) for of_block in zip(*parts, strict=True)]


def hsic(x: Tensor, y: Tensor) -> Tensor:
    """The unbiased estimate of the HSIC of x [n, p] and y [n, q] with linear kernels, in memory linear in n.

    With K = x x^T and L = y y^T without their diagonals: (tr(K L) + 1^T K 1 1^T L 1 / ((n - 1)(n - 2)) - 2 1^T K L 1 /
    (n - 2)) / (n (n - 3)). Source: Song et al. (2012), "Feature selection via dependence maximization".
    """
    n, diagonals = len(x), [side.square().sum(1) for side in (x, y)]
    k, l = (side @ side.sum(0) - diagonal for side, diagonal in zip((x, y), diagonals, strict=True))  # K 1 and L 1
    trace = (x.T @ y).square().sum() - diagonals[0] @ diagonals[1]
    return (trace + k.sum() * l.sum() / ((n - 1) * (n - 2)) - 2 * (k @ l) / (n - 2)) / (n * (n - 3))


def cka(x: Tensor, y: Tensor) -> float:
    """Linear CKA of x [n, p] and y [n, q] by these estimates, in float64; 1 for a rotation (Nguyen et al., 2021)."""
    x, y = (side.double() - side.double().mean(0) for side in (x, y))  # changes no estimate, but their rounding
    return (hsic(x, y) / (hsic(x, x) * hsic(y, y)).sqrt()).item()
