"""Latent crossing on CoLA: ``lax`` with a SiLU between the factors."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dlr_pretrain.models.lax import Lax


class ColaLax(Lax):
    """y = B z, z = silu(norm(A x + G(c)))."""

    def activate(self, h: Tensor) -> Tensor:
        return F.silu(h)


BACKBONE = ColaLax
