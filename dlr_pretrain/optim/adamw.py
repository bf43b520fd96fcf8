"""AdamW (Loshchilov and Hutter, 2019), all parameters in one group as in the DLR paper."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from dlr_pretrain.optim import adam
from dlr_pretrain.optim.parameters import decay_groups


def build(parameters: dict[str, Tensor], knobs: dict, undecayed: Collection[str]) -> list[torch.optim.Optimizer]:
    """torch's fused AdamW; moments have the parameters' dtype. The fused kernel rounds once an update."""
    groups = decay_groups(parameters, knobs["weight_decay"], undecayed)
    return [torch.optim.AdamW(groups, betas=(knobs["beta1"], knobs["beta2"]), eps=knobs["eps"], fused=True)]


def state_bytes(parameters: dict[str, Tensor], knobs: dict) -> int:
    return sum(map(adam.state_bytes, parameters.values()))
