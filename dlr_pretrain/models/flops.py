"""FLOPs of a model, counted from the matrix products that its code runs: low-rank layers count as low-rank."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from dlr_pretrain.config import Config
from dlr_pretrain.models.adapter import unpadded_sizes
from dlr_pretrain.models.full import DENSE
from dlr_pretrain.models.llama import Llama, build_model
from dlr_pretrain.util.tensors import WORKING_DTYPE

# Peak FLOP/s of dense bf16 products from the data sheets, by the exact name that the driver reports: variants and
# slices of a GPU have different peaks. MFU is unknown for GPUs that are not listed, and for fp32 products, which run on
# slower units.
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


def flops_per_token(cfg: Config, vocab_size: int, micro_batch: int) -> float:
    """FLOPs per position of the forward and backward passes, in micro-batches of ``micro_batch`` sequences.

    Each weight that multiplies a position costs 2 in the forward pass and 4 in the backward pass (2 if it is frozen).
    Causal attention costs 6 T H E L (H heads of width E). Products that a micro-batch needs once, whatever its size
    (SLTrain forms its weights), are divided by its positions. The count excludes embedding rows, padding, elementwise
    operations, the optimizer and recomputation in the backward pass. It runs the model's own code on the meta device.
    """
    d, depth = cfg.scale.num_heads * cfg.scale.head_width, cfg.scale.num_layers
    cfg = replace(cfg, train=replace(cfg.train, activation_checkpointing="none"))
    products = by_depth(lambda shallow: _products(shallow, vocab_size, micro_batch), cfg)["products"]
    return products / (micro_batch * cfg.train.seq_len) + 6.0 * cfg.train.seq_len * d * depth


def by_depth(count: Callable[[Config], dict[str, int]], cfg: Config) -> dict[str, int]:
    """``count`` of ``cfg`` from models of two and of three blocks: blocks are equal from the second on.

    Each number grows by the same amount with each block. A ``peak`` of bytes does so, too, once it grows by as much as
    "activations" or "gradients", which a backward pass frees and allocates; before, the whole model is counted.
    """
    depth = cfg.scale.num_layers
    if depth > 3:
        two, three = (count(replace(cfg, scale=replace(cfg.scale, num_layers=blocks))) for blocks in (2, 3))
        more = {name: three[name] - two[name] for name in two}
        if "peak" not in more or more["peak"] == max(more["activations"], 0 if more["held"] else more["gradients"]):
            return {name: three[name] + (depth - 3) * more[name] for name in more}
    return count(cfg)


def _products(cfg: Config, vocab_size: int, micro_batch: int) -> dict[str, int]:
    """FLOPs of all products of a micro-batch except those of attention."""
    model = build_model(cfg, vocab_size, torch.device("meta"), alignment=1).eval()  # no padding, no recomputation
    ids = torch.zeros(micro_batch, cfg.train.seq_len, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(ids, ids).backward()
    counted = counter.get_flop_counts()["Global"]
    return {"products": sum(flops for op, flops in counted.items() if "attention" not in str(op))}


def parameter_counts(cfg: Config, model: Llama) -> dict[str, int]:
    """The numbers of parameters of ``model``, without padding: "total", "trainable", and "folded" (as deployed).

    A learned alpha (DLR) is one parameter per projection, and is folded into B. A backbone that is deployed dense
    becomes the dense model.
    """
    counted = unpadded_sizes(model)
    total = sum(counted.values())
    trained = sum(counted[name] for name, p in model.named_parameters() if p.requires_grad)
    learned, folded = 7 * cfg.scale.num_layers if cfg.dlr.enabled and cfg.dlr.learn_alpha else 0, total
    if cfg.backbone.layer.deployed_dense:
        dense = replace(cfg, backbone=DENSE, dlr=replace(cfg.dlr, enabled=False))
        shapes = build_model(dense, len(model.lm_head.weight), torch.device("meta"))
        folded = parameter_counts(dense, shapes)["total"]
    return {"total": total + learned, "trainable": trained + learned, "folded": folded}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s of one device for products in the working dtype of ``precision``; None if unknown."""
    if device.type != "cuda" or WORKING_DTYPE[precision] != torch.bfloat16:
        return None
    return PEAK_FLOPS.get(torch.cuda.get_device_name(device))
