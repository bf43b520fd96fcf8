"""LLaMA with low-rank linear layers, for transformers 4.57 and 5.x.

This file is part of the checkpoint (``trust_remote_code=True``) and needs only torch and transformers: an export holds
``exported_layers.py`` in place of its import. The model is the library's LLaMA, but for the seven linear layers of each
block.

In lax and cola_lax the model makes a ``Latents`` for each forward pass, which the library's loop passes to every block
as an argument. A position reads no latents of other positions, so cached positions need none.
"""

from functools import wraps
from typing import Any

from torch import Tensor, nn
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from dlr_pretrain.deploy.exported_layers import CALL, LAYERS, Latents, LostLinear, Settings, TensorGate


class LowRankLlamaConfig(Settings, LlamaConfig):
    """LLaMA's configuration, with the settings of the low-rank layers."""

    model_type = "lowrank_llama"

    @property
    def crosses(self) -> bool:
        """Whether each block reads latents of the previous one."""
        return LAYERS[self.backbone].crosses

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
