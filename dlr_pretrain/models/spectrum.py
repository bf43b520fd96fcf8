"""Leading singular vectors of weights."""

from __future__ import annotations

import torch
from torch import Tensor


def leading(weight: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """U [m, k], S [k], Vh [k, n] of the ``rank`` largest singular values of ``weight`` [m, n], in float64.

    From the eigenvectors of the smaller Gram matrix: for the sizes here several times faster than an SVD, which finds
    all of both sides. In float64 the squared condition number costs nothing that the weights' own precision shows.
    """
    wide = weight.double()
    if weight.shape[0] > weight.shape[1]:
        u, s, vh = leading(wide.T, rank)
        return vh.T, s, u.T
    u = torch.linalg.eigh(wide @ wide.T).eigenvectors.flip(-1)[:, :rank]
    projected = u.T @ wide
    s = projected.norm(dim=1)
    return u, s, projected / s[:, None].clamp_min(torch.finfo(s.dtype).tiny)


def factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """B [m, rank] and A [rank, n] with B A the best approximation of ``weight`` [m, n], and B^T B = A A^T."""
    u, s, vh = leading(weight, rank)
    return u * s.sqrt(), s.sqrt()[:, None] * vh
