"""LLaMA with low-rank linear layers, for transformers 4.57 and 5.x.

This file is part of the checkpoint (``trust_remote_code=True``) and needs only torch and transformers. Cache, attention
kernels, generation and everything else are those of the library's LLaMA; the seven projections of each block are

    lowrank    y = s B A x
    cola       y = s B silu(A x)
    lost       y = gamma B phi(A x) + (1 - gamma) S x_I, where x_I are some of the input channels
    lax        y = B z, where z joins A x with the latent of the same projection in the previous block
    cola_lax   the same, with a SiLU between the factors

In lax and cola_lax the model makes a ``Latents`` for each forward pass, which the library's loop passes to every block
as an argument. A position reads no latents of other positions, so cached positions need none.
"""

from functools import wraps
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, GenerationMixin, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

try:
    from transformers.initialization import copy_  # skips tensors that a checkpoint has set
except ImportError:  # transformers 4 initialises only modules that no checkpoint has set
    copy_ = Tensor.copy_


class LowRankLlamaConfig(LlamaConfig):
    """LLaMA's configuration, with the kind of low-rank layer (``backbone``), its ``rank``, and its formula's settings.

    lowrank, cola: ``latent_scale`` is s. lost: ``gamma``, ``sparsity`` (the share of the channels of x that are in x_I)
    and ``activation`` (phi, "silu" or "none"). lax, cola_lax: ``gate`` ("tensor" or "dense").
    """

    model_type = "lowrank_llama"

    def __init__(
        self,
        backbone: str = "lowrank",
        rank: int = 128,
        latent_scale: float = 1.0,
        gamma: float = 0.7,
        sparsity: float = 0.01,
        activation: str = "silu",
        gate: str = "tensor",
        **kwargs,
    ):
        self.backbone = backbone
        self.rank = rank
        self.latent_scale = latent_scale
        self.gamma = gamma
        self.sparsity = sparsity
        self.activation = activation
        self.gate = gate
        super().__init__(**kwargs)

    @property
    def crosses(self) -> bool:
        """Whether each block reads latents of the previous one."""
        return self.backbone in ("lax", "cola_lax")

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
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
    def base_model_pp_plan(self) -> dict[str, tuple] | None:
        """None if latents pass between blocks: a pipeline stage receives hidden states alone."""
        return None if self.crosses else LlamaConfig.base_model_pp_plan


class Latents:
    """The latents of one forward pass: (block, projection) -> [..., rank]. Not a dict, which hooks would copy.

    A block that gradient checkpointing recomputes keeps the latents of its first run, to whose graph they belong.
    """

    def __init__(self):
        self.of: dict[tuple[int, str], Tensor] = {}


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

    def forward(self, x: Tensor, latents: Latents | None = None) -> Tensor:
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

    def forward(self, x: Tensor, latents: Latents | None = None) -> Tensor:
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

    def forward(self, x: Tensor, latents: Latents) -> Tensor:
        h = self.a(x)
        if self.block:
            h = self.norm(h + self.gate(latents.of[self.block - 1, self.name].to(h.device)))
        z = self.activate(h)
        if not self.last:
            latents.of.setdefault((self.block, self.name), z)
        return self.b(z)


LAYERS = {
    "lowrank": LowRankLinear,
    "cola": LowRankLinear,
    "lost": LostLinear,
    "lax": LaxLinear,
    "cola_lax": LaxLinear,
}


class LowRankLlamaAttention(LlamaAttention):
    def __init__(self, config: LowRankLlamaConfig, layer_idx: int):
        nn.Module.__init__(self)  # the library's would build dense projections
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.num_key_value_groups = heads // key_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        layer, wide, narrow = LAYERS[config.backbone], heads * self.head_dim, key_heads * self.head_dim
        self.q_proj = layer(config.hidden_size, wide, config, layer_idx, "q_proj")
        self.k_proj = layer(config.hidden_size, narrow, config, layer_idx, "k_proj")
        self.v_proj = layer(config.hidden_size, narrow, config, layer_idx, "v_proj")
        self.o_proj = layer(wide, config.hidden_size, config, layer_idx, "o_proj")

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        latents: Latents | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(hidden_states, latents).view(shape).transpose(1, 2) for p in projections)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        cache, past = kwargs.pop("cache", None), kwargs.pop("past_key_values", None)
        if cache is not None:  # transformers 5.24
            k, v = cache.update(k, v, self.layer_idx, kwargs=kwargs)
        elif past is not None:
            k, v = past.update(k, v, self.layer_idx, {"cache_position": kwargs.get("cache_position")})
        attend = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        y, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(y.reshape(*shape[:-2], -1), latents), weights


class LowRankLlamaMLP(LlamaMLP):
    def __init__(self, config: LowRankLlamaConfig, layer_idx: int):
        nn.Module.__init__(self)
        layer, narrow, wide = LAYERS[config.backbone], config.hidden_size, config.intermediate_size
        self.config, self.hidden_size, self.intermediate_size = config, narrow, wide
        self.gate_proj = layer(narrow, wide, config, layer_idx, "gate_proj")
        self.up_proj = layer(narrow, wide, config, layer_idx, "up_proj")
        self.down_proj = layer(wide, narrow, config, layer_idx, "down_proj")
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor, latents: Latents | None = None) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x, latents)) * self.up_proj(x, latents), latents)


class LowRankLlamaDecoderLayer(LlamaDecoderLayer):
    def __init__(self, config: LowRankLlamaConfig, layer_idx: int):
        nn.Module.__init__(self)
        self.hidden_size = config.hidden_size
        self.self_attn = LowRankLlamaAttention(config, layer_idx)
        self.mlp = LowRankLlamaMLP(config, layer_idx)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, latents: Latents | None = None, **kwargs) -> Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), latents=latents, **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states), latents)


class LowRankLlamaPreTrainedModel(LlamaPreTrainedModel):
    config_class = LowRankLlamaConfig
    _no_split_modules: ClassVar = ["LowRankLlamaDecoderLayer"]
    _can_record_outputs: ClassVar = {"hidden_states": LowRankLlamaDecoderLayer, "attentions": LowRankLlamaAttention}

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LostLinear):
            copy_(module.channels, module.spread(len(module.channels)))
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
    """Classifies a text by its last token."""


class LowRankLlamaForTokenClassification(GenericForTokenClassification, LowRankLlamaPreTrainedModel):
    """Classifies each token."""


AutoModel.register(LowRankLlamaConfig, LowRankLlamaModel, exist_ok=True)  # the classifiers build their body through it
