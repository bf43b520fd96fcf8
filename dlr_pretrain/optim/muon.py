"""Muon (Jordan et al., 2024) with the scaling of Liu et al. (2025), combined with AdamW."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dlr_pretrain.config import Config, Problem
from dlr_pretrain.config.key import key
from dlr_pretrain.config.tree import How
from dlr_pretrain.optim import adamw
from dlr_pretrain.optim.adam import block_matrices, decay_groups, whole_tensors


@dataclass
class Options(adamw.Options):
    """torch's Muon with Nesterov momentum on the matrices of the blocks, fused AdamW on all other parameters.

    Muon's momentum has the dtype of the matrices. The Newton-Schulz iteration runs in bf16. Muon's updates have the
    root mean square of AdamW's, so both use the same learning rate.
    """

    weight_decay: float = key("under precision=bf16, rounding cancels it on the matrices", ge=0)
    momentum: float = key("decay of the momentum", ge=0, lt=1)
    ns_steps: int = key("Newton-Schulz iterations", ge=1, le=99)
    elementwise = False
    rounds_stochastically = False

    def build(self, parameters: dict[str, Tensor], how: How) -> list[torch.optim.Optimizer]:
        matrices, others = block_matrices(parameters)
        muon = torch.optim.Muon(
            decay_groups(matrices, self.weight_decay),
            momentum=self.momentum,
            ns_steps=self.ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )
        return [muon, *super().build(others, how)]

    def problems(self, cfg: Config) -> Iterator[Problem]:
        return whole_tensors(cfg)
