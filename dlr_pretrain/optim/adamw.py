"""AdamW (Loshchilov and Hutter, 2019), all parameters in one group as in the DLR paper."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from dlr_pretrain.optim import adam
from dlr_pretrain.optim.parameters import decay_groups


def build(
    parameters: dict[str, Tensor], knobs: dict, undecayed: Collection[str], fused: bool = True
) -> list[torch.optim.Optimizer]:
    """torch's AdamW; moments have the parameters' dtype. The fused kernel computes in fp32 and rounds once."""
    groups = decay_groups(parameters, knobs["weight_decay"], undecayed)
    betas, eps = (knobs["beta1"], knobs["beta2"]), knobs["eps"]
    return [torch.optim.AdamW(groups, betas=betas, eps=eps, fused=fused, foreach=not fused)]


def state_bytes(parameters: dict[str, Tensor], knobs: dict) -> int:
    return sum(map(adam.state_bytes, parameters.values()))
