"""Multiplies projections out, from a backbone's own tensors to those of a plain LLaMA."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dlr_pretrain.config import Config
from dlr_pretrain.models.full import DENSE
from dlr_pretrain.models.linear import named_groups
from dlr_pretrain.models.llama import Llama, backbone


def deployed(cfg: Config, tensors: dict[str, Tensor], merge: bool = False) -> tuple[Config, dict[str, Tensor]]:
    """The configuration and tensors to deploy for a run of ``cfg`` that ended with the folded ``tensors``.

    A backbone whose layers are dense weights made of parts (``Group.deployed_dense``) becomes a plain LLaMA; with
    ``merge`` every backbone does. Others do not change. Weights are formed in fp32 and rounded once to the dtype of
    ``tensors``. Raises UserError if a backbone cannot be merged.
    """
    layer = backbone(cfg)
    if not (merge or layer.deployed_dense) or cfg.backbone.name == DENSE.name:
        return cfg, _in_one_dtype(tensors)
    with torch.device("meta"):
        model = Llama(cfg, len(tensors["lm_head.weight"]), grouped=False)
    merged = dict(tensors)
    for prefix, group in named_groups(model):
        for name, projection in zip(group.spec.names, group.projections, strict=True):
            own = {leaf: merged.pop(f"{prefix}{name}.{leaf}") for leaf in projection.state_dict()}
            merged[f"{prefix}{name}.weight"] = group.dense(own)
    return replace(cfg, backbone=DENSE), merged


def _in_one_dtype(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Cast learned scalars to the dtype of the weights; under bf16_sr they are trained in fp32."""
    dtype = tensors["lm_head.weight"].dtype
    scalars = {name: t for name, t in tensors.items() if t.dim() == 0 and t.is_floating_point() and t.dtype != dtype}
    return tensors | {name: t.to(dtype) for name, t in scalars.items()} if scalars else tensors


def deployed_dense(cfg: Config) -> bool:
    """Whether a run of ``cfg`` ends with a plain LLaMA."""
    return cfg.backbone.name == DENSE.name or backbone(cfg).deployed_dense
