"""Muon (Jordan et al., 2024) in the scaling of Liu et al. (2025), beside AdamW."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from dlr_pretrain.optim import adamw
from dlr_pretrain.optim.parameters import block_matrices, decay_groups, without


def build(parameters: dict[str, Tensor], knobs: dict, undecayed: Collection[str]) -> list[torch.optim.Optimizer]:
    """torch's Muon on the matrices of the blocks (its momentum has their dtype, Newton and Schulz's iteration is in
    bf16), fused AdamW on all others. Muon's update has the root mean square of AdamW's: one rate serves both.
    """
    matrices = block_matrices(parameters)
    muon = torch.optim.Muon(
        decay_groups(matrices, knobs["weight_decay"], undecayed),
        momentum=knobs["momentum"],
        nesterov=knobs["nesterov"],
        ns_steps=knobs["ns_steps"],
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, *adamw.build(without(parameters, matrices), knobs, undecayed)]


def state_bytes(parameters: dict[str, Tensor], knobs: dict) -> int:
    matrices = block_matrices(parameters)
    momentum = sum(p.numel() * p.element_size() for p in matrices.values())
    return momentum + adamw.state_bytes(without(parameters, matrices), knobs)
