"""LLaMA with low-rank linear layers, for transformers 4.57 and 5.x.

This file is part of the checkpoint (``trust_remote_code=True``) and needs only torch and transformers. The model is the
library's LLaMA, but for the seven linear layers of each block:

    lowrank    y = s B A x
    cola       y = s B silu(A x)
    lost       y = gamma B phi(A x) + (1 - gamma) S x_I, where x_I are some of the input channels
    lax        y = B z, where z joins A x with the latent of the same projection in the previous block
    cola_lax   the same, with a SiLU between the factors

In lax and cola_lax the model makes a ``Latents`` for each forward pass, which the library's loop passes to every block
as an argument. A position reads no latents of other positions, so cached positions need none.
"""

import threading
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

CALL = threading.local()  # its ``latents`` are those of the block that this thread is in


class LowRankLlamaConfig(LlamaConfig):
    """LLaMA's configuration, with the kind of low-rank layer (``backbone``), its ``rank``, and its formula's settings.

    lowrank, cola: ``latent_scale`` is s. lost: ``gamma``, ``sparsity`` (the share of the channels of x that are in x_I)
    and ``activation`` (phi, "silu" or "none"). lax, cola_lax: ``gate`` ("tensor" or "dense").
    """

    model_type = "lowrank_llama"

    backbone: str = "lowrank"
    rank: int = 128
    latent_scale: float = 1.0
    gamma: float = 0.7
    sparsity: float = 0.01
    activation: str = "silu"
    gate: str = "tensor"

    @property
    def crosses(self) -> bool:
        """Whether each block reads latents of the previous one."""
        return self.backbone in ("lax", "cola_lax")

    @property
    def base_model_tp_plan(self) -> dict[str, str]:  # type: ignore[override]  # depends on the backbone
        """Tensor parallelism splits the factor next to the attention heads or to the MLP's wide side.

        In lost, x_I are channels of the whole x: its outputs are gathered, and o_proj and down_proj are not split.
        """
        inward = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        if self.backbone == "lost":
            gathered = LlamaForCausalLM._tp_plan["lm_head"]  # its name differs between versions
            return {f"layers.*.{name}.{factor}": gathered for name in inward for factor in "bs"}
        outward = ("self_attn.o_proj", "mlp.down_proj")
        return {f"layers.*.{n}.b": "colwise" for n in inward} | {f"layers.*.{n}.a": "rowwise" for n in outward}

    @property
    def base_model_pp_plan(self) -> Any:  # type: ignore[override]  # depends on the backbone
        """None if latents pass between blocks: a pipeline stage receives hidden states alone."""
        return None if self.crosses else LlamaConfig.base_model_pp_plan


class Latents:
    """The latents of one forward pass by (block, projection), [..., rank]. Not a dict, which hooks would copy.

    A block that gradient checkpointing recomputes keeps the latents of its first run, to whose graph they belong.
    """

    def __init__(self) -> None:
        self.by_layer: dict[tuple[int, str], Tensor] = {}


class LowRankLinear(nn.Module):
    """y = s B phi(A x) with A [rank, d_in] and B [d_out, rank]; x [..., d_in] -> y [..., d_out].

    phi is a SiLU in cola, cola_lax and, unless ``activation`` is "none", lost; it is the identity in lowrank and lax.
    """

    def __init__(self, d_in: int, d_out: int, config: LowRankLlamaConfig, block: int, name: str):
        super().__init__()
        self.block, self.name = block, name
        self.a = nn.Linear(d_in, config.rank, bias=False)
        self.b = nn.Linear(config.rank, d_out, bias=False)
        self.scale = config.latent_scale
        self.silu = config.backbone in ("cola", "cola_lax") or (config.backbone, config.activation) == ("lost", "silu")

    def activate(self, h: Tensor) -> Tensor:
        return F.silu(h) if self.silu else h

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.activate(self.a(x)) * self.scale)


class LostLinear(LowRankLinear):
    """y = gamma B phi(A x) + (1 - gamma) S x_I, where I are the ``channels``."""

    def __init__(self, d_in: int, d_out: int, config: LowRankLlamaConfig, block: int, name: str):
        super().__init__(d_in, d_out, config, block, name)
        count = max(1, int(config.sparsity * d_in))
        self.d_in = d_in
        self.s = nn.Linear(count, d_out, bias=False)
        self.channels = nn.Buffer(self.spread(count))
        self.gamma = config.gamma

    def spread(self, count: int) -> Tensor:
        """The channels until a checkpoint sets them: ``count`` equally spaced ones."""
        return torch.arange(count) * self.d_in // count

    def forward(self, x: Tensor) -> Tensor:
        z = self.activate(self.a(x))
        return self.b(z * self.gamma) + self.s(x.index_select(-1, self.channels) * (1 - self.gamma))


class TensorGate(nn.Module):
    """G(c) = E2^T C E1, where C [n1, n2] is c reshaped, n1 n2 = rank, and n1 <= n2 are as close as possible."""

    def __init__(self, rank: int):
        super().__init__()
        short = max(n for n in range(1, int(rank**0.5) + 1) if rank % n == 0)
        self.e1 = nn.Parameter(torch.empty(rank // short, rank // short))
        self.e2 = nn.Parameter(torch.empty(short, short))

    def forward(self, c: Tensor) -> Tensor:
        return (self.e2.T @ (c.unflatten(-1, (len(self.e2), len(self.e1))) @ self.e1)).flatten(-2)


class LaxLinear(LowRankLinear):
    """y = B z, z = phi(norm(A x + G(c))), where c is the previous block's z. In the first block, z = phi(A x)."""

    def __init__(self, d_in: int, d_out: int, config: LowRankLlamaConfig, block: int, name: str):
        super().__init__(d_in, d_out, config, block, name)
        self.last = block == config.num_hidden_layers - 1
        if block:
            self.gate = TensorGate(config.rank) if config.gate == "tensor" else nn.Linear(config.rank, config.rank)
            self.norm = nn.LayerNorm(config.rank, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        h, latents = self.a(x), CALL.latents.by_layer
        if self.block:
            h = self.norm(h + self.gate(latents[self.block - 1, self.name].to(h.device)))
        z = self.activate(h)
        if not self.last:
            latents.setdefault((self.block, self.name), z)
        return self.b(z)


LAYERS = {
    "lowrank": LowRankLinear,
    "cola": LowRankLinear,
    "lost": LostLinear,
    "lax": LaxLinear,
    "cola_lax": LaxLinear,
}


class LowRankLlamaDecoderLayer(LlamaDecoderLayer):
    """The library's block, whose linear layers become low-rank ones of the same shapes."""

    def __init__(self, config: LowRankLlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        for part in (self.self_attn, self.mlp):
            for name, dense in list(part.named_children()):
                if isinstance(dense, nn.Linear):
                    shape = dense.in_features, dense.out_features
                    setattr(part, name, LAYERS[config.backbone](*shape, config, layer_idx, name))

    def forward(self, *args, latents: Latents | None = None, **kwargs) -> Tensor:
        outer, CALL.latents = getattr(CALL, "latents", None), latents
        try:
            return super().forward(*args, **kwargs)
        finally:
            CALL.latents = outer


class LowRankLlamaPreTrainedModel(LlamaPreTrainedModel):
    config_class = LowRankLlamaConfig
    _no_split_modules = ["LowRankLlamaDecoderLayer"]  # noqa: RUF012 (not a ClassVar in the base class)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LostLinear):
            if not getattr(module.channels, "_is_hf_initialized", False):  # transformers 5 marks what it has loaded
                module.channels.copy_(module.spread(len(module.channels)))
        elif isinstance(module, TensorGate):
            for e in module.parameters():
                nn.init.normal_(e, std=self.config.initializer_range)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None, **kwargs) -> None:
        """Like the library's, but never reentrant: that variant would lose the gradients of latents."""
        given = gradient_checkpointing_kwargs or {}
        super().gradient_checkpointing_enable(given | {"use_reentrant": False}, **kwargs)


class LowRankLlamaModel(LowRankLlamaPreTrainedModel, LlamaModel):
    """The library's LLaMA without its head, with low-rank blocks."""

    def __init__(self, config: LowRankLlamaConfig):
        super().__init__(config)
        self.layers = nn.ModuleList(LowRankLlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.post_init()

    @wraps(LlamaModel.forward)
    def forward(self, *args, **kwargs):
        # CODEPATH: backbones lax and cola_lax
        if self.config.crosses:
            kwargs["latents"] = Latents()
        return super().forward(*args, **kwargs)


class LowRankLlamaForCausalLM(LowRankLlamaPreTrainedModel, LlamaForCausalLM):
    """``LowRankLlamaModel`` with its head: loss, cache and generation are the library's."""

    def __init__(self, config: LowRankLlamaConfig):
        LlamaPreTrainedModel.__init__(self, config)
        self.model = LowRankLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class LowRankLlamaForSequenceClassification(GenericForSequenceClassification, LowRankLlamaPreTrainedModel):
    """Classifies a text by its last token."""


class LowRankLlamaForTokenClassification(GenericForTokenClassification, LowRankLlamaPreTrainedModel):
    """Classifies each token."""


AutoModel.register(LowRankLlamaConfig, LowRankLlamaModel, exist_ok=True)  # the classifiers build their body through it
