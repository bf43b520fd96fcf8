"""Block-quantised state of torchao's optimizers as the plain tensors that it is made of, and back.

An entry of 8-bit state is codes (uint8, of the parameter's shape), one fp32 scale a block of consecutive entries in
row-major order, and the fp32 map from codes to values: value = map[code] * scale.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

PLAIN = (torch.Tensor, torch.nn.Parameter)


def torchao_optim():
    """torchao's optimizers, without what the package says of its other parts while it is imported."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        import torchao.optim
    finally:
        logging.disable(before)
    warnings.filterwarnings("ignore", message="OptimState8bit does not implement _stable_hash_for_caching")
    return torchao.optim


def is_quantized(value: Tensor) -> bool:
    return type(value) not in PLAIN


def stored(value: Tensor) -> dict[str, Tensor]:
    """The tensors that hold ``value``, by the suffix of each one's name; of a plain tensor itself."""
    if not is_quantized(value):
        return {"": value}
    return {".codes": value.codes, ".scale": value.scale, ".map": value.qmap}


def layout(value: Tensor) -> dict:
    """What ``stored`` does not say, as JSON: the rule, whether values have signs, the block, and the nominal dtype."""
    dtype = str(value.dtype).removeprefix("torch.")
    return {"rule": "blockwise_8bit", "signed": value.signed, "block_size": value.block_size, "dtype": dtype}


def restored(tensors: Mapping[str, Tensor], described: Mapping, device: torch.device) -> Tensor:
    """The inverse of ``stored`` and ``layout``, on ``device``; nothing is shared with ``tensors``."""
    torchao_optim()
    from torchao.optim.subclass_8bit import OptimState8bit

    if described["rule"] != "blockwise_8bit":
        raise ValueError(f"optimizer state quantised by {described['rule']}, which is not known here")
    parts = [tensors[suffix].to(device, copy=True).contiguous() for suffix in (".codes", ".scale", ".map")]
    return OptimState8bit(*parts, described["signed"], dtype=getattr(torch, described["dtype"]))


def values(value: Tensor) -> Tensor:
    return value.dequantize() if is_quantized(value) else value


def zero_(value: Tensor, where: Tensor) -> None:
    """Zero the entries of ``value`` under the mask ``where``; the others keep their bits."""
    if is_quantized(value):
        value.codes.masked_fill_(where, int(value.qmap.abs().argmin()))
    else:
        value.masked_fill_(where, 0)
