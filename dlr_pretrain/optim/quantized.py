"""Converts the block-quantised state of torchao's optimizers to plain tensors, and back.

An entry of 8-bit state consists of codes (uint8, of the parameter's shape), one fp32 scale for each block of
consecutive entries in row-major order, and the fp32 map from codes to values: value = map[code] * scale.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TypeGuard

import torch
from torch import Tensor

from dlr_pretrain.util import sharded
from dlr_pretrain.util.process import without_warnings
from dlr_pretrain.util.sharded import Stored

PLAIN = (torch.Tensor, torch.nn.Parameter)


class Quantized(Tensor):
    """The type of torchao's 8-bit state, which is imported only where it is used."""

    codes: Tensor
    scale: Tensor
    qmap: Tensor
    block_size: int


def _state_class():
    """torchao's class of 8-bit state, imported without the package's warnings about its other parts."""
    with without_warnings():
        from torchao.optim.subclass_8bit import OptimState8bit
    warnings.filterwarnings("ignore", message="OptimState8bit does not implement _stable_hash_for_caching")
    return OptimState8bit


def zeros(p: Tensor, signed: bool, block_size: int) -> Tensor:
    """A quantised entry of the state of ``p`` (this rank's rows)."""
    return _state_class().zeros(p.shape, signed, block_size, p.device, dtype=p.dtype)


def is_quantized(value: Tensor) -> TypeGuard[Quantized]:
    return type(value) not in PLAIN


def stored(value: Tensor, p: Tensor) -> dict[str, Tensor]:
    """The tensors that hold ``value``, an entry of the state of ``p``, by the suffix of each tensor's name.

    A plain tensor has the empty suffix.
    """
    if is_quantized(value):
        return {".codes": value.codes, ".scale": value.scale, ".map": value.qmap}
    return {"": sharded.shard_like(p, value) if value.dim() else value}


def restored(tensors: Mapping[str, Tensor | Stored], p: Tensor) -> Tensor:
    """The inverse of ``stored`` for ``p``, on its device; the result shares no memory with ``tensors``.

    The block size follows from the number of scales, and a map with negative values is that of signed ones.
    """
    whole = (sharded.whole(tensors[suffix]) for suffix in (".codes", ".scale", ".map"))
    codes, scale, qmap = (part.to(p.device, copy=True).contiguous() for part in whole)
    return _state_class()(codes, scale, qmap, bool(qmap.min() < 0), dtype=p.dtype)


def decoded(codes: Tensor, scale: Tensor, values: Tensor) -> Tensor:
    """The fp32 values of quantised state."""
    from torchao.optim.quant_utils import dequant_with_qmap

    return dequant_with_qmap(codes, values, scale)


def encoded(value: Tensor, values: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Codes of the shape of ``value``, and the scale of each of its ``blocks``: the block's largest magnitude."""
    from torchao.optim.quant_utils import quantize_8bit_with_qmap, scale_tensor

    unit, scale = scale_tensor(value.contiguous(), value.numel() // blocks)
    return quantize_8bit_with_qmap(unit, values), scale


def zero_(value: Tensor, where: Tensor) -> None:
    """Zero the entries of ``value`` under the mask ``where``; the others keep their bits."""
    if is_quantized(value):
        value.codes.masked_fill_(where, int(value.qmap.abs().argmin()))
    else:
        value.masked_fill_(where, 0)
