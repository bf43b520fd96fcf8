"""AdamW (Loshchilov and Hutter, 2019), all parameters in one group as in the DLR paper."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from dlr_pretrain.optim import adam
from dlr_pretrain.optim.parameters import decay_groups


def build(parameters: dict[str, Tensor], knobs: dict, undecayed: Collection[str]) -> list[torch.optim.Optimizer]:
    """torch's AdamW; moments have the parameters' dtype.

    The fused kernel computes in fp32 and rounds once an update. Without it the foreach kernels round after every
    operation, as in the published runs of this family: in pure bf16 they leave a weight as it is where
    lr * weight_decay < 2^-9, and a second moment where it would fall by less than that share.
    """
    groups, fused = decay_groups(parameters, knobs["weight_decay"], undecayed), knobs.get("fused", True)
    betas, eps = (knobs["beta1"], knobs["beta2"]), knobs["eps"]
    return [torch.optim.AdamW(groups, betas=betas, eps=eps, fused=fused, foreach=not fused)]


def state_bytes(parameters: dict[str, Tensor], knobs: dict) -> int:
    return sum(map(adam.state_bytes, parameters.values()))
