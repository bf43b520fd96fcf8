"""AdamW (Loshchilov and Hutter, 2019), with one learning rate for all parameters as in the DLR paper."""

from __future__ import annotations

import torch
from torch import Tensor

from dlr_pretrain.optim.parameters import decay_groups
from dlr_pretrain.optim.wide_adamw import WideAdamW, rounding_keys


def build(
    parameters: dict[str, Tensor],
    knobs: dict,
    fused: bool = True,
    compiled: bool = False,
    rounding_seed: int | None = None,
) -> list[torch.optim.Optimizer]:
    """Build torch's AdamW, or with ``rounding_seed`` a ``WideAdamW`` that rounds stochastically.

    Moments have the parameters' dtype. torch's fused kernel computes in fp32 and rounds once, to the nearest.
    """
    groups = decay_groups(parameters, knobs["weight_decay"])
    if rounding_seed is not None:
        return [WideAdamW(groups, knobs, compiled, rounding_keys(parameters, rounding_seed))]
    fused = fused and not any(p.is_meta for p in parameters.values())  # ``state_bytes``: no fused kernel there
    betas, eps = (knobs["beta1"], knobs["beta2"]), knobs["eps"]
    return [torch.optim.AdamW(groups, betas=betas, eps=eps, fused=fused, foreach=not fused)]
