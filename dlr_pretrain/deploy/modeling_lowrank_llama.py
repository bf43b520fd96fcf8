"""LLaMA with low-rank linear layers, for transformers 4.57 and 5.x.

This file travels with the checkpoint (``trust_remote_code=True``) and needs torch and transformers only. Attention,
cache, generation and everything else are the library's own LLaMA; the seven projections of each block are two factors,
y = B z with z = A x (``lowrank``) or z = silu(A x) (``cola``).
"""

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


class LowRankLlamaConfig(LlamaConfig):
    """LLaMA's configuration, with the kind of low-rank layer (``backbone``) and its ``rank``."""

    model_type = "lowrank_llama"
    base_model_tp_plan = None  # the library's plan splits dense projections

    def __init__(self, backbone: str = "lowrank", rank: int = 128, **kwargs):
        self.backbone = backbone
        self.rank = rank
        super().__init__(**kwargs)


class LowRankLinear(nn.Module):
    """y = B A x with A [rank, d_in] and B [d_out, rank]; x [..., d_in] -> y [..., d_out]."""

    def __init__(self, d_in: int, d_out: int, config: LowRankLlamaConfig):
        super().__init__()
        self.a = nn.Linear(d_in, config.rank, bias=False)
        self.b = nn.Linear(config.rank, d_out, bias=False)
        # Var[(B A)_ij] = 1 / (d_in + d_out), for a model that is trained from scratch
        self.a.init_std = self.b.init_std = (config.rank * (d_in + d_out)) ** -0.25

    def latent(self, x: Tensor) -> Tensor:
        return self.a(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.latent(x))


class ColaLinear(LowRankLinear):
    """y = B silu(A x)."""

    def latent(self, x: Tensor) -> Tensor:
        return F.silu(self.a(x))


LAYERS = {"lowrank": LowRankLinear, "cola": ColaLinear}


class LowRankLlamaModel(LlamaModel):
    """The library's LLaMA without its head, the projections of each block replaced by the backbone's layers."""

    config_class = LowRankLlamaConfig

    def __init__(self, config: LowRankLlamaConfig):
        super().__init__(config)
        layer = LAYERS[config.backbone]
        for block in self.layers:
            for part, names in PROJECTIONS.items():
                parent = getattr(block, part)
                for name in names:
                    dense = getattr(parent, name)
                    setattr(parent, name, layer(dense.in_features, dense.out_features, config))
        self.post_init()  # once more: the new layers have not been seen yet

    def _init_weights(self, module: nn.Module) -> None:
        std = getattr(module, "init_std", None)
        if std is None:
            super()._init_weights(module)
        else:
            nn.init.normal_(module.weight, std=std)


class LowRankLlamaForCausalLM(LlamaForCausalLM):
    """The same with its head: loss, cache and generation are the library's."""

    config_class = LowRankLlamaConfig

    def __init__(self, config: LowRankLlamaConfig):
        super(LlamaForCausalLM, self).__init__(config)  # not LlamaForCausalLM's own, which builds a dense model
        self.model = LowRankLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
