"""The layout of the CoLA authors' repository: names, shapes and configuration of their ``ColaForCausalLM``.

In that layout a projection is ``cola_a`` [d_in, rank] and ``cola_b`` [rank, d_out], the transposes of ours, and the
SwiGLU has no SiLU if ``only_lr_act`` is true.
"""

from __future__ import annotations

from torch import Tensor

from dlr_pretrain.config import Config
from dlr_pretrain.models.lowrank import latent_scale
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.tensors import at_least_fp32


def cola_tensors(cfg: Config, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The folded ``tensors`` of a CoLA model under the authors' names; the scale of its latents is multiplied into B.

    Raises UserError for other backbones.
    """
    if cfg.backbone.name != "cola":
        raise UserError(f"--layout cola holds CoLA's layers alone, and this is backbone={cfg.backbone.name}")
    renamed = {}
    for name, tensor in tensors.items():
        if name.endswith(".a.weight"):
            renamed[name.removesuffix(".a.weight") + ".cola_a"] = tensor.T
        elif name.endswith(".b.weight"):
            stem = name.removesuffix(".b.weight")
            own = {"theta": tensors[f"{stem}.theta"]} if f"{stem}.theta" in tensors else {}
            wide = tensor.to(at_least_fp32(tensor.dtype))
            renamed[f"{stem}.cola_b"] = (wide * latent_scale(own, cfg.backbone.knobs)).to(tensor.dtype).T
        elif not name.endswith(".theta"):
            renamed[name] = tensor
    return renamed


def cola_config(cfg: Config, settings: dict[str, object]) -> dict[str, object]:
    """``config.json`` of the authors' layout, made from ``settings``, the one of our layout."""
    knobs = cfg.backbone.knobs
    shape = {name: value for name, value in settings.items() if name not in (*knobs, "auto_map", "backbone")}
    return shape | {
        "model_type": "cola",
        "architectures": ["ColaForCausalLM"],
        "rank": knobs["rank"],
        "hidden_act": "silu",  # in that layout also the activation between the factors
        "only_lr_act": not knobs.get("swiglu_silu", True),
        "max_sequence_length": settings["max_position_embeddings"],
        "torch_dtype": settings["dtype"],  # the name that transformers used then
    }
