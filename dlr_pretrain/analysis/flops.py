"""Arithmetic of a model, counted from its modules: low-rank layers count as low-rank."""

from __future__ import annotations

import torch
from torch import nn

# Dense bf16 peaks of the data sheets, FLOP/s, by the driver's exact name: variants differ, and so do slices of a GPU.
# A GPU that is not listed has no MFU.
PEAK_FLOPS = {
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A800-SXM4-80GB": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA B200": 2250e12,
}


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
    return PEAK_FLOPS.get(torch.cuda.get_device_name(device))
