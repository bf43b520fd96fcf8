"""AdamW with moments in 8 bits (Dettmers et al., 2022), as torchao has it."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from dlr_pretrain import shards
from dlr_pretrain.optim.adam import COUNTER_BYTES
from dlr_pretrain.optim.parameters import decay_groups
from dlr_pretrain.optim.quantized import torchao_optim, whole_blocks

SMALLEST = 4096  # values; the moments of smaller parameters, and of those that are no whole blocks, are not quantised


def build(parameters: dict[str, Tensor], knobs: dict, undecayed: Collection[str]) -> list[torch.optim.Optimizer]:
    """torchao's optimizer, computing in fp32. Its step is compiled, once for each shape of a parameter.

    torchao decides by the rows that are here whether to quantise; here all ranks decide alike (``_quantised``).
    """
    groups = decay_groups(parameters, knobs["weight_decay"], undecayed)
    betas, eps, block_size = (knobs["beta1"], knobs["beta2"]), knobs["eps"], knobs["block_size"]
    optimizer = torchao_optim().AdamW8bit(groups, betas=betas, eps=eps, block_size=block_size)
    for p in filter(shards.is_sharded, parameters.values()):
        if not _quantised(p, block_size):
            own = shards.here(p)
            plain = {moment: torch.zeros_like(own) for moment in ("exp_avg", "exp_avg_sq")}
            optimizer.state[own] = {"step": torch.zeros(()), **plain}
    return [optimizer]


def _quantised(p: Tensor, block_size: int) -> bool:
    """Whether the moments of ``p`` are: where it is sharded, whether every rank can quantise its rows."""
    fewest = p.numel()
    if shards.is_sharded(p):
        ranks, (rows, *row) = p.device_mesh.size(), p.shape
        fewest = (rows - -(-rows // ranks) * (ranks - 1)) * math.prod(row)
    return fewest >= SMALLEST and whole_blocks(p, block_size)


def state_bytes(parameters: dict[str, Tensor], knobs: dict) -> int:
    return sum(_state_bytes(p, knobs["block_size"]) for p in parameters.values())


def _state_bytes(p: Tensor, block_size: int) -> int:
    """Of two moments and a counter; a quantised moment is its codes, fp32 scales, and an fp32 map of 256 values."""
    moment = p.numel() * p.element_size()
    if _quantised(p, block_size):
        moment = p.numel() + p.numel() // block_size * 4 + 256 * 4
    return 2 * moment + COUNTER_BYTES
