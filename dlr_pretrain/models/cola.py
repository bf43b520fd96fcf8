"""CoLA: low-rank layers with a SiLU between the factors, y = B silu(A x) (Liu et al., 2025)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dlr_pretrain.models.lowrank import LowRank


class Cola(LowRank):
    """y = B silu(A x) on all seven projections; the SiLU of the SwiGLU stays, as in the DLR paper."""

    def latent(self, x: Tensor, carried: Tensor | None) -> Tensor:
        return F.silu(self.down(x))


BACKBONE = Cola
