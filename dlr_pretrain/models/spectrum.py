"""Leading singular vectors of weights."""

from __future__ import annotations

import torch
from torch import Tensor


def leading(weight: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """U [m, k], S [k], Vh [k, n] of the k = ``rank`` largest singular values of ``weight`` [m, n], in float64.

    They come from the eigenvectors of the smaller Gram matrix. For the sizes here this is several times faster than an
    SVD, which finds all vectors of both sides. In float64 the squared condition number loses no precision that the
    weights have.

    The sign of a pair of singular vectors is arbitrary, but a nonlinearity between the factors makes it matter.
    Libraries and devices choose it differently. Here the largest entry of the shorter side's vector is positive.
    """
    wide = weight.double()
    if weight.shape[0] > weight.shape[1]:
        u, s, vh = leading(wide.T, rank)
        return vh.T, s, u.T
    u = torch.linalg.eigh(wide @ wide.T).eigenvectors.flip(-1)[:, :rank]
    u = u * u.gather(0, u.abs().argmax(0, keepdim=True)).sign()
    projected = u.T @ wide
    s = projected.norm(dim=1)
    return u, s, projected / s[:, None].clamp_min(torch.finfo(s.dtype).tiny)


def balanced(u: Tensor, s: Tensor, vh: Tensor) -> tuple[Tensor, Tensor]:
    """B = U sqrt(S) and A = sqrt(S) Vh, so that B^T B = A A^T."""
    root = s.sqrt()
    return u * root, root[:, None] * vh


def factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """B [m, rank] and A [rank, n], where B A is the best approximation of ``weight`` [m, n] and B^T B = A A^T."""
    return balanced(*leading(weight, rank))
