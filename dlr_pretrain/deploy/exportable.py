"""Compares the exported layers of a user's backbone with the trained ones, before a run spends time on training."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlr_pretrain.config import Config
from dlr_pretrain.config.values import target_of
from dlr_pretrain.deploy.export import (
    EXPORTED_LAYERS,
    NO_LAYER,
    deployed_dense,
    exported_keys,
    import_failure,
    layers_source,
    model_config,
)
from dlr_pretrain.deploy.exported_layers import LAYERS, LowRankLinear
from dlr_pretrain.models.adapter import split
from dlr_pretrain.models.layer import INIT_STD, Spec, named_layers, projections
from dlr_pretrain.models.llama import build_model
from dlr_pretrain.util.errors import UserError, first_line
from dlr_pretrain.util.process import without_warnings

LAYER_BOUND = 1e-5  # the largest difference in an output of a layer, in standard deviations; lost at 1b: 5e-7


def require_exportable(cfg: Config) -> str:
    """Raise UserError if the exported layer of a user's backbone cannot be built, or differs from the trained one.

    The layers of three blocks are compared with random values, in fp32 on the CPU. The exported ones are made from the
    text that an export holds. Returns a warning if the backbone has no exported layer, or if transformers cannot be
    imported, else "". A run calls this first. Tests compare the layers of this package.
    """
    if deployed_dense(cfg):
        return ""
    if exported_keys(cfg) is None:
        return NO_LAYER.format(cfg.backbone.name)
    if cfg.backbone.name in LAYERS and not cfg.backbone.exported_layer:
        return ""
    if failure := import_failure():
        return f"the exported layer of backbone={cfg.backbone.name} is not checked: {failure}"
    if difference := layer_difference(cfg):
        fix = f"Correct exported_keys or exported_layer of {target_of(cfg.backbone)}, or this layer"
        rule = f"its exported layer {difference}"
        raise UserError(f"backbone={cfg.backbone.name}", rule, f"{fix}: see docs/extending.md")
    return ""


@torch.no_grad()
def layer_difference(cfg: Config) -> str:
    """How the exported layers differ from those of training, or why they cannot be used; "" if they agree."""
    scale, dlr = replace(cfg.scale, num_layers=min(3, cfg.scale.num_layers)), replace(cfg.dlr, enabled=False)
    random = torch.Generator().manual_seed(cfg.seed)
    with torch.random.fork_rng(devices=[]):  # new layers draw initial values
        model = build_model(replace(cfg, scale=scale, dlr=dlr), 1, torch.device("cpu")).eval()
        tensors, carried, exported = split(model, model.state_dict()), dict[Any, Any](), None
        for value in filter(Tensor.is_floating_point, tensors.values()):  # an initial zero or one would hide a formula
            value.add_(INIT_STD * torch.randn(value.shape, generator=random).abs() * torch.where(value < 0, -1, 1))
        for path, layer in named_layers(model):
            spec = layer.spec
            x = torch.randn(2, 3, spec.d_in, generator=random)
            z, carried[spec.names] = layer.latent(F.pad(x, (0, spec.pad_in - spec.d_in)), carried.get(spec.names))
            for name, y in zip(projections(path, layer), layer.outputs(z), strict=True):
                own = {leaf: tensors[f"{name}.{leaf}"] for leaf, _ in layer.parts.values()}
                try:
                    exported = exported or exported_layers(cfg)
                    rule = _difference(exported(spec, name.rpartition(".")[2]), own, x, y[..., : spec.d_out])
                except Exception as error:  # of a user's own code
                    return f"cannot be used ({type(error).__name__}: {first_line(error)})"
                if rule:
                    return f"{rule}, in {name}"
    return ""


def _difference(exported: nn.Module, tensors: dict[str, Tensor], x: Tensor, y: Tensor) -> str:
    """How ``exported`` differs from a trained layer with these ``tensors``, which gives ``y`` for ``x``; else ""."""
    here, there = ({leaf: tuple(t.shape) for leaf, t in one.items()} for one in (tensors, exported.state_dict()))
    if differ := sorted(here.items() ^ there.items()):
        leaf = differ[0][0]
        return f"has other tensors: {leaf} is {here.get(leaf)} in training, and {there.get(leaf)} there"
    if lost := sorted(dict(exported.named_buffers()).keys() - there.keys()):
        return f"has a buffer with persistent=False, which transformers does not restore: {lost[0]}"
    exported.load_state_dict(tensors)
    given = exported(x)
    gaps = (given - y).abs().masked_fill((given == y) | (given.isnan() & y.isnan()), 0.0)
    difference = (gaps.nan_to_num(nan=torch.inf).max() / y[y.isfinite()].std()).item()
    if difference <= LAYER_BOUND:
        return ""
    rule = "computes another formula: with random values its outputs differ from those of training by"
    return f"{rule} {difference:.2g} of their standard deviation"


def exported_layers(cfg: Config) -> Callable[[Spec, str], nn.Module]:
    """What makes the exported layer of a ``Spec`` and a projection's name, from the text that an export holds."""
    with without_warnings():
        from dlr_pretrain.deploy.modeling_lowrank_llama import LowRankLlamaConfig

    source = dict[str, Any]()
    exec(layers_source(cfg), source)
    if (layer_of := source["LAYERS"].get(cfg.backbone.name)) is None:
        raise LookupError(f"LAYERS of {EXPORTED_LAYERS.name} lacks it, and its options name no exported_layer")
    if not issubclass(layer_of, source[LowRankLinear.__name__]):
        raise TypeError(f"{layer_of.__name__} is not a subclass of {LowRankLinear.__name__}")
    settings: Any = LowRankLlamaConfig.from_dict(model_config(cfg, 1, torch.float32))
    source["CALL"].latents = source["Latents"]() if layer_of.crosses else None
    return lambda spec, projection: layer_of(spec.d_in, spec.d_out, settings, spec.block, projection).eval()
