"""CoLA: low-rank layers with a SiLU between the factors, y = B silu(A x) (Liu et al., 2025)."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from dlr_pretrain.config.key import key
from dlr_pretrain.models import lowrank
from dlr_pretrain.models.lowrank import LowRank

SWIGLU = "keep the SwiGLU's SiLU, as in the DLR paper; the authors of CoLA drop it from 350M on"


@dataclass
class Options(lowrank.Options):
    swiglu_silu: bool = key(SWIGLU)
    exported_keys = lowrank.Options.exported_keys


class Cola(LowRank):
    """y = s B silu(A x) on all seven projections. Option ``swiglu_silu`` keeps the SiLU of the SwiGLU."""

    def activate(self, h: Tensor) -> Tensor:
        return F.silu(h)


Options.layer = Cola
