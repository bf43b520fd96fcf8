"""LLaMA with low-rank linear layers, for transformers 4.57 and 5.x.

This file travels with the checkpoint (``trust_remote_code=True``) and needs torch and transformers only. Cache,
attention kernels, generation and everything else are the library's own LLaMA; the seven projections of each block are

    lowrank    y = s B A x
    cola       y = s B silu(A x)
    lost       y = gamma B phi(A x) + (1 - gamma) S x_I, with x_I some of the input channels
    lax        y = B z, where z joins A x with the latent from the same projection of the previous block
    cola_lax   the same, with a SiLU between the factors

The latents of lax and cola_lax belong to one forward pass: the model makes a ``Latents`` for each call, the library's
loop passes it to every block as an argument, and the block shows it to its projections. A latent belongs to its
position, so that a cached position needs none.
"""

import threading
from functools import wraps
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, GenerationMixin, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.utils import logging

try:
    from transformers.initialization import copy_  # leaves alone what a checkpoint has set
except ImportError:  # transformers 4 does not ask for modules that are set
    copy_ = Tensor.copy_

logger = logging.get_logger(__name__)


class LowRankLlamaConfig(LlamaConfig):
    """LLaMA's configuration, with the kind of low-rank layer (``backbone``), its ``rank``, and its formula's settings.

    lowrank, cola: s is ``latent_scale``. lost: ``gamma``, ``sparsity`` (the share of the channels of x that are in x_I)
    and phi (``activation``, "silu" or "none"). lax, cola_lax: ``gate`` ("tensor" or "dense").
    """

    model_type = "lowrank_llama"
    backbone = "lowrank"
    rank = 128
    latent_scale = 1.0
    gamma = 0.7
    sparsity = 0.01
    activation = "silu"
    gate = "tensor"

    @property
    def crosses(self) -> bool:
        """Whether latents pass from block to block."""
        return self.backbone in ("lax", "cola_lax")

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """Ranks divide the factor of a projection that touches the heads, or the wide side of the MLP.

        x_I of lost are channels of the whole x, so that its products are gathered, and o and down are not divided.
        """
        inward = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        if self.backbone == "lost":
            gathered = LlamaForCausalLM._tp_plan["lm_head"]  # its name differs between versions
            return {f"layers.*.{name}.{factor}": gathered for name in inward for factor in "bs"}
        outward = ("self_attn.o_proj", "mlp.down_proj")
        return {f"layers.*.{n}.b": "colwise" for n in inward} | {f"layers.*.{n}.a": "rowwise" for n in outward}

    @property
    def base_model_pp_plan(self) -> dict[str, tuple] | None:
        """None where latents cross: a stage gets hidden states alone."""
        return None if self.crosses else LlamaConfig.base_model_pp_plan


class Latents:
    """What crosses in one forward pass: (block, projection) -> latent [..., rank]. No container that hooks would copy.

    A block that is computed again for gradient checkpointing keeps the latents of its first run, whose graph they are.
    """

    def __init__(self):
        self.of: dict[tuple[int, str], Tensor] = {}


class Call(threading.local):
    """What the block that computes in this thread was given: the library hands projections nothing but x."""

    latents: Latents | None = None


CALL = Call()


class LowRankLinear(nn.Module):
    """y = s B phi(A x) with A [rank, d_in] and B [d_out, rank]; x [..., d_in] -> y [..., d_out].

    phi is a SiLU in cola, cola_lax and, unless ``activation`` says none, in lost; the identity in lowrank and lax.
    ``initial`` gives, for each parameter of a module, the function of ``nn.init`` that starts it, and its arguments.
    """

    def __init__(self, d_in: int, d_out: int, config: LowRankLlamaConfig, block: int, name: str):
        super().__init__()
        self.block, self.name = block, name
        self.a = nn.Linear(d_in, config.rank, bias=False)
        self.b = nn.Linear(config.rank, d_out, bias=False)
        std = (config.rank * (d_in + d_out)) ** -0.25  # Var[(B A)_ij] = 1 / (d_in + d_out)
        self.a.initial = self.b.initial = {"weight": ("normal_", {"std": std})}
        self.scale = config.latent_scale
        self.silu = config.backbone in ("cola", "cola_lax") or (config.backbone, config.activation) == ("lost", "silu")

    def activate(self, h: Tensor) -> Tensor:
        return F.silu(h) if self.silu else h

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.activate(self.a(x)) * self.scale)


class LostLinear(LowRankLinear):
    """y = gamma B phi(A x) + (1 - gamma) S x_I; I are the ``channels``."""

    def __init__(self, d_in: int, d_out: int, config: LowRankLlamaConfig, block: int, name: str):
        super().__init__(d_in, d_out, config, block, name)
        count = max(1, int(config.sparsity * d_in))
        self.d_in = d_in
        self.s = nn.Linear(count, d_out, bias=False)
        self.channels = nn.Buffer(self.spread(count))
        self.gamma = config.gamma

    def spread(self, count: int) -> Tensor:
        """The channels before a checkpoint says which: ``count`` of all, equally far apart."""
        return torch.arange(count) * self.d_in // count

    def forward(self, x: Tensor) -> Tensor:
        z = self.activate(self.a(x))
        return self.b(z * self.gamma) + self.s(x.index_select(-1, self.channels) * (1 - self.gamma))


class TensorGate(nn.Module):
    """G(c) = E2^T C E1, where C [n1, n2] is c reshaped; n1 n2 = rank, and n1 <= n2 are as close as possible."""

    def __init__(self, rank: int):
        super().__init__()
        short = max(n for n in range(1, int(rank**0.5) + 1) if rank % n == 0)
        self.e1 = nn.Parameter(torch.empty(rank // short, rank // short))
        self.e2 = nn.Parameter(torch.empty(short, short))
        bounds = {name: (6 / len(e)) ** 0.5 for name, e in self.named_parameters()}
        self.initial = {name: ("uniform_", {"a": -bound, "b": bound}) for name, bound in bounds.items()}

    def forward(self, c: Tensor) -> Tensor:
        return (self.e2.T @ (c.unflatten(-1, (len(self.e2), len(self.e1))) @ self.e1)).flatten(-2)


class DenseGate(nn.Linear):
    """G(c) = W c + w."""

    def __init__(self, rank: int):
        super().__init__(rank, rank)
        start = ("uniform_", {"a": -(rank**-0.5), "b": rank**-0.5})
        self.initial = {"weight": start, "bias": start}


GATES = {"tensor": TensorGate, "dense": DenseGate}


class LaxLinear(LowRankLinear):
    """y = B z, z = phi(norm(A x + G(c))), where c is the z of the previous block. The first block has z = phi(A x)."""

    def __init__(self, d_in: int, d_out: int, config: LowRankLlamaConfig, block: int, name: str):
        super().__init__(d_in, d_out, config, block, name)
        self.last = block == config.num_hidden_layers - 1
        if block:
            self.gate = GATES[config.gate](config.rank)
            self.norm = nn.LayerNorm(config.rank, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        latents = CALL.latents.of
        h = self.a(x)
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


def factorise_(module: nn.Module, config: LowRankLlamaConfig, block: int) -> None:
    """Put the layers of ``config`` in the place of dense ones."""
    for name, dense in list(module.named_children()):
        if isinstance(dense, nn.Linear):
            layer = LAYERS[config.backbone](dense.in_features, dense.out_features, config, block, name)
            setattr(module, name, layer)


class LowRankLlamaAttention(LlamaAttention):
    def __init__(self, config: LowRankLlamaConfig, layer_idx: int):
        with torch.device("meta"):  # its dense layers take no memory
            super().__init__(config, layer_idx)
        factorise_(self, config, layer_idx)


class LowRankLlamaMLP(LlamaMLP):
    def __init__(self, config: LowRankLlamaConfig, layer_idx: int):
        with torch.device("meta"):
            super().__init__(config)
        factorise_(self, config, layer_idx)


class LowRankLlamaDecoderLayer(LlamaDecoderLayer):
    def __init__(self, config: LowRankLlamaConfig, layer_idx: int):
        nn.Module.__init__(self)
        self.hidden_size = config.hidden_size
        self.self_attn = LowRankLlamaAttention(config, layer_idx)
        self.mlp = LowRankLlamaMLP(config, layer_idx)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, latents: Latents | None = None, **kwargs) -> Tensor:
        outer, CALL.latents = CALL.latents, latents
        try:
            return super().forward(hidden_states, **kwargs)
        finally:
            CALL.latents = outer


class LowRankLlamaPreTrainedModel(LlamaPreTrainedModel):
    config_class = LowRankLlamaConfig
    _no_split_modules: ClassVar = ["LowRankLlamaDecoderLayer"]
    _can_record_outputs: ClassVar = {"hidden_states": LowRankLlamaDecoderLayer, "attentions": LowRankLlamaAttention}

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, LostLinear):
            copy_(module.channels, module.spread(len(module.channels)))
        if hasattr(module, "initial"):
            for name, (draw, arguments) in module.initial.items():
                getattr(nn.init, draw)(getattr(module, name), **arguments)
        else:
            super()._init_weights(module)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None, **kwargs) -> None:
        """As the library's. A reentrant one follows gradients through hidden states alone: the latents' are lost."""
        settings = {"use_reentrant": False} | (gradient_checkpointing_kwargs or {})
        # CODEPATH: backbones lax and cola_lax
        if settings["use_reentrant"] and self.config.crosses:
            logger.warning_once("Latents cross between blocks: use_reentrant=False is taken instead of True.")
            settings["use_reentrant"] = False
        super().gradient_checkpointing_enable(settings, **kwargs)


class LowRankLlamaModel(LowRankLlamaPreTrainedModel, LlamaModel):
    """The library's LLaMA without its head, with low-rank blocks."""

    def __init__(self, config: LowRankLlamaConfig):
        LlamaPreTrainedModel.__init__(self, config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(LowRankLlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    @wraps(LlamaModel.forward)
    def forward(self, *args, **kwargs):
        # CODEPATH: backbones lax and cola_lax
        if self.config.crosses:
            kwargs["latents"] = Latents()
        return super().forward(*args, **kwargs)


class LowRankLlamaForCausalLM(LowRankLlamaPreTrainedModel, LlamaForCausalLM, GenerationMixin):
    """``LowRankLlamaModel`` with its head: loss, cache and generation are the library's."""

    def __init__(self, config: LowRankLlamaConfig):
        LlamaPreTrainedModel.__init__(self, config)
        self.model = LowRankLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class LowRankLlamaForSequenceClassification(GenericForSequenceClassification, LowRankLlamaPreTrainedModel):
    """A class of the whole text, from its last token."""


class LowRankLlamaForTokenClassification(GenericForTokenClassification, LowRankLlamaPreTrainedModel):
    """A class of each token."""


AutoModel.register(LowRankLlamaConfig, LowRankLlamaModel, exist_ok=True)  # the generic heads ask it for their body
