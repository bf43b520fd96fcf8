"""CoLA: low-rank layers with a SiLU between the factors, y = B silu(A x) (Liu et al., 2025)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dlr_pretrain.models.lowrank import LowRank


class Cola(LowRank):
    """y = s B silu(A x) on all seven projections.

    The SwiGLU keeps its SiLU, as in the DLR paper; CoLA's authors drop it from 350M on (knob ``swiglu_silu``).
    """

    def activate(self, h: Tensor) -> Tensor:
        return F.silu(h)


BACKBONE = Cola
