"""AdamW (Loshchilov and Hutter, 2019), all parameters in one group as in the DLR paper."""

from __future__ import annotations

import torch
from torch import Tensor


def build(parameters: list[Tensor], knobs: dict) -> torch.optim.Optimizer:
    """torch's fused AdamW; moments have the parameters' dtype. The fused kernel rounds once an update."""
    return torch.optim.AdamW(
        parameters,
        betas=(knobs["beta1"], knobs["beta2"]),
        eps=knobs["eps"],
        weight_decay=knobs["weight_decay"],
        fused=True,
    )
