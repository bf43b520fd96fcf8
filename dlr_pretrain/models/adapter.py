"""The names of an exported model: fused tensors are split into those of each projection, without padding.

``model.layers.0.self_attn.qkv.b`` [3 d_out, r] is ``model.layers.0.self_attn.q_proj.b.weight`` [d_out, r], and the
same of ``k_proj`` and ``v_proj``. Everything outside the layers has one name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dlr_pretrain.models.layer import named_layers, projections


def split(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` of ``model`` by their exported names: views, each of one projection, without its padding."""
    layers, own = dict(named_layers(model)), {}
    for name, tensor in tensors.items():
        path, _, fused = name.rpartition(".")
        if path not in layers:
            own[name] = tensor
            continue
        layer = layers[path]
        leaf, shape = layer.parts[fused]
        for projection, rows in zip(projections(path, layer), layer.each(tensor).unbind(0), strict=True):
            own[f"{projection}.{leaf}"] = rows[tuple(map(slice, shape))]
    return own


def sizes(model: nn.Module) -> dict[str, int]:
    """The values of each parameter of ``model``, by its name, without padding."""
    fused = {
        f"{path}.{name}": layer.count * math.prod(part.shape)
        for path, layer in named_layers(model)
        for name, part in layer.parts.items()
    }
    return {name: fused.get(name, p.numel()) for name, p in model.named_parameters()}


@torch.no_grad()
def load_(model: nn.Module, exported: Mapping[str, Tensor]) -> None:
    """Load ``exported``, all tensors of ``model`` by their exported names; padding becomes zero."""
    zero_padding_(model)
    own = split(model, model.state_dict())
    if own.keys() != exported.keys():
        raise KeyError(f"not the tensors of this model: {sorted(own.keys() ^ exported.keys())[:5]}")
    for name, value in exported.items():
        own[name].copy_(value)


@torch.no_grad()
def zero_padding_(model: nn.Module) -> None:
    """Make the padding of uninitialised memory zero, and everything else in the layers."""
    for _, layer in named_layers(model):
        for tensor in layer.state_dict().values():
            tensor.zero_()
