"""AdamW with 8-bit moments (Dettmers et al., 2022), quantised by torchao."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlr_pretrain.optim.parameters import decay_groups
from dlr_pretrain.optim.quantized import whole_blocks
from dlr_pretrain.optim.wide_adamw import WideAdamW, rounding_keys
from dlr_pretrain.util import sharded

SMALLEST = 4096  # values; moments of smaller parameters, or of parameters with a partial block, are not quantised


def build(
    parameters: dict[str, Tensor],
    knobs: dict,
    compiled: bool = False,
    rounding_seed: int | None = None,
) -> list[torch.optim.Optimizer]:
    """Build AdamW with 8-bit moments for parameters that are large enough; all ranks decide this alike."""
    quantised = {sharded.local_rows(p) for p in parameters.values() if _quantised(p, knobs["block_size"])}
    groups = decay_groups(parameters, knobs["weight_decay"])
    return [WideAdamW(groups, knobs, compiled, rounding_keys(parameters, rounding_seed), quantised)]


def _quantised(p: Tensor, block_size: int) -> bool:
    """Whether the moments of ``p`` are quantised. If ``p`` is sharded, every rank must be able to quantise its rows."""
    fewest = p.numel()
    if sharded.is_sharded(p):
        ranks, (rows, *row) = p.device_mesh.size(), p.shape
        fewest = (rows - -(-rows // ranks) * (ranks - 1)) * math.prod(row)
    return fewest >= SMALLEST and whole_blocks(p, block_size)
