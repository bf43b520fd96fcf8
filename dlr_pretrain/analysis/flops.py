"""Arithmetic of a model, counted from its modules: low-rank layers count as low-rank."""

from __future__ import annotations

import torch
from torch import nn

# Dense bf16 peaks of the data sheets, FLOP/s. A GPU that is not listed has no MFU.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "A800": 312e12}


def flops_per_token(model: nn.Module, seq_len: int, hidden_size: int, num_layers: int) -> float:
    """FLOPs of forward and backward for one position: 6 for each weight of a matrix product, and causal attention.

    Embedding rows, padding and recomputation do not count.
    """
    embedding = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in embedding)
    return 6.0 * weights + 6.0 * seq_len * hidden_size * num_layers


def peak_flops(device: torch.device) -> float | None:
    """The peak of one device, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)
