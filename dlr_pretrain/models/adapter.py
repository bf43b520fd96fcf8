"""Exported tensor names: fused tensors are split into the tensors of each projection, without padding.

``model.layers.0.self_attn.qkv.b`` [3 d_out, r] becomes ``model.layers.0.self_attn.q_proj.b.weight`` [d_out, r] and the
same for ``k_proj`` and ``v_proj``. Tensors outside the layers keep their names.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dlr_pretrain.models.layer import named_layers, projections


def split(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of the ``tensors`` of ``model``, one per projection and without padding, by their exported names."""
    layers, exported = dict(named_layers(model)), {}
    for name, tensor in tensors.items():
        path, _, fused = name.rpartition(".")
        if path not in layers:
            exported[name] = tensor
            continue
        layer = layers[path]
        leaf, shape = layer.parts[fused]
        for projection, rows in zip(projections(path, layer), layer.each(tensor).unbind(0), strict=True):
            exported[f"{projection}.{leaf}"] = rows[tuple(map(slice, shape))]
    return exported


def unpadded_sizes(model: nn.Module) -> dict[str, int]:
    """The number of values in each parameter of ``model``, without padding, by its name in the model."""
    fused = {
        f"{path}.{name}": layer.count * math.prod(part.shape)
        for path, layer in named_layers(model)
        for name, part in layer.parts.items()
    }
    return {name: fused.get(name, p.numel()) for name, p in model.named_parameters()}


@torch.no_grad()
def load_(model: nn.Module, exported: Mapping[str, Tensor]) -> None:
    """Load ``exported``, which holds all tensors of ``model`` by their exported names. Padding becomes zero."""
    zero_layers_(model)
    targets = split(model, model.state_dict())
    if targets.keys() != exported.keys():
        raise KeyError(f"not the tensors of this model: {sorted(targets.keys() ^ exported.keys())[:5]}")
    for name, value in exported.items():
        targets[name].copy_(value)


@torch.no_grad()
def zero_layers_(model: nn.Module) -> None:
    """Zero all tensors of the layers, which may be uninitialised memory, and with them their padding."""
    for _, layer in named_layers(model):
        for tensor in layer.state_dict().values():
            tensor.zero_()
