"""Muon (Jordan et al., 2024) with the scaling of Liu et al. (2025), combined with AdamW."""

from __future__ import annotations

import torch
from torch import Tensor

from dlr_pretrain.optim import adamw
from dlr_pretrain.optim.adam import block_matrices, decay_groups, without


def build(parameters: dict[str, Tensor], knobs: dict) -> list[torch.optim.Optimizer]:
    """torch's Muon, with Nesterov's momentum, on the matrices of the blocks, fused AdamW on all others.

    Muon's momentum has the dtype of the matrices; its Newton-Schulz iteration runs in bf16. Muon's updates have the
    root mean square of AdamW's, so that one rate serves both.
    """
    matrices = block_matrices(parameters)
    muon = torch.optim.Muon(
        decay_groups(matrices, knobs["weight_decay"]),
        momentum=knobs["momentum"],
        ns_steps=knobs["ns_steps"],
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, *adamw.build(without(parameters, matrices), knobs)]
