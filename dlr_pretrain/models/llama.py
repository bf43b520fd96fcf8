"""The LLaMA that trains: pre-norm, rotary embeddings, SwiGLU, no biases, untied head.

Parameter names are those of the exported checkpoint. Where the linear layers come from is the backbone's business.
Shapes: B micro-batch, T positions, D hidden size, H heads, E = D / H.
"""

from __future__ import annotations

import importlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlr_pretrain.config import Config
from dlr_pretrain.models.dlr import attach_dlr
from dlr_pretrain.models.linear import Draw, Group, GroupHolder, GroupSpec

NORM_EPS = 1e-6
ROPE_BASE = 10_000.0
INIT_STD = 0.02
IGNORE = -100  # target of a position that is not scored

Carry = tuple[Tensor | None, ...]  # what each group of a block hands to the same group of the next
NO_CARRY: Carry = (None, None, None, None)


def padded(width: int) -> int:
    """The width that activations take: a multiple of 8 as it is, another up to the next multiple of 64."""
    return width if width % 8 == 0 else -(-width // 64) * 64


class RMSNorm(nn.Module):
    """x / rms(x) * weight, statistics in fp32."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)).to(x.dtype)


def rotary(positions: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [T, E] of the half-split rotary embedding, formed in fp32 (fp64 for fp64)."""
    wide = torch.promote_types(dtype, torch.float32)
    frequency = ROPE_BASE ** (-torch.arange(0, width, 2, dtype=wide, device=device) / width)
    angle = torch.outer(torch.arange(positions, dtype=wide, device=device), frequency).repeat(1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, T, E] turned by its position."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(GroupHolder):
    """Causal multi-head attention."""

    def __init__(self, cfg: Config, layer: type[Group], block: int, grouped: bool):
        super().__init__()
        d, knobs = cfg.scale.hidden_size, cfg.backbone.knobs
        self.num_heads = cfg.scale.num_heads
        qkv = GroupSpec(("q_proj", "k_proj", "v_proj"), d, d, d, d, block)
        self.qkv = self.add_group(layer, qkv, knobs, grouped)
        self.o = self.add_group(layer, GroupSpec(("o_proj",), d, d, d, d, block), knobs, grouped)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, carried: Carry) -> tuple[Tensor, Carry]:
        (q, k, v), carried_qkv = self.qkv(x, carried[0])
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        (y,), carried_o = self.o(y.transpose(1, 2).flatten(2), carried[1])
        return y, (carried_qkv, carried_o)


class MLP(GroupHolder):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, cfg: Config, layer: type[Group], block: int, grouped: bool):
        super().__init__()
        d, f, knobs = cfg.scale.hidden_size, cfg.scale.intermediate_size, cfg.backbone.knobs
        wide = padded(f) if grouped else f
        gate_up = GroupSpec(("gate_proj", "up_proj"), d, f, d, wide, block)
        self.gate_up = self.add_group(layer, gate_up, knobs, grouped)
        self.down = self.add_group(layer, GroupSpec(("down_proj",), f, d, wide, d, block), knobs, grouped)

    def forward(self, x: Tensor, carried: Carry) -> tuple[Tensor, Carry]:
        (gate, up), carried_gate_up = self.gate_up(x, carried[0])
        (y,), carried_down = self.down(F.silu(gate) * up, carried[1])
        return y, (carried_gate_up, carried_down)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). What groups carry to the next block goes in and comes out."""

    def __init__(self, cfg: Config, layer: type[Group], block: int, grouped: bool):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.scale.hidden_size)
        self.self_attn = Attention(cfg, layer, block, grouped)
        self.post_attention_layernorm = RMSNorm(cfg.scale.hidden_size)
        self.mlp = MLP(cfg, layer, block, grouped)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, carried: Carry) -> tuple[Tensor, Carry]:
        y, carried_attention = self.self_attn(self.input_layernorm(x), cos, sin, carried[:2])
        x = x + y
        y, carried_mlp = self.mlp(self.post_attention_layernorm(x), carried[2:])
        return x + y, carried_attention + carried_mlp


class Body(nn.Module):
    """Embedding, blocks and final norm: the keys under ``model.``."""

    def __init__(self, cfg: Config, vocab_size: int, grouped: bool):
        super().__init__()
        layer = importlib.import_module(f"dlr_pretrain.models.{cfg.backbone.name}").BACKBONE
        self.embed_tokens = nn.Embedding(vocab_size, cfg.scale.hidden_size)
        self.layers = nn.ModuleList(Block(cfg, layer, i, grouped) for i in range(cfg.scale.num_layers))
        self.norm = RMSNorm(cfg.scale.hidden_size)


class Llama(nn.Module):
    """``forward(ids, targets)`` is the training loss; ``logits(ids)`` the model.

    ``grouped=False`` calls each projection's own modules, without common storages or padding.
    """

    def __init__(self, cfg: Config, vocab_size: int, grouped: bool = True):
        super().__init__()
        self.head_width = cfg.scale.hidden_size // cfg.scale.num_heads
        self.model = Body(cfg, vocab_size, grouped)
        self.lm_head = nn.Linear(cfg.scale.hidden_size, vocab_size, bias=False)

    def hidden(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> the residual stream after the last block [B, T, D], before the final norm."""
        x = self.model.embed_tokens(ids)
        cos, sin = rotary(ids.shape[1], self.head_width, x.dtype, x.device)
        carried = NO_CARRY
        for block in self.model.layers:
            x, carried = block(x, cos, sin, carried)
        return x

    def logits(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> [B, T, vocabulary]."""
        return self.lm_head(self.model.norm(self.hidden(ids)))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The sum (not the mean) of the cross-entropy over the scored targets [B, T], in fp32."""
        return self.summed_loss(self.hidden(ids), targets)

    def summed_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(self.model.norm(x)).flatten(0, -2)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, targets.flatten(), ignore_index=IGNORE, reduction="sum")

    def compile_(self) -> None:
        """Compile the blocks and the loss in place; parameter names stay as they are."""
        torch._dynamo.config.optimize_ddp = False  # would cut each block along DDP's buckets: a block is the unit here
        for block in self.model.layers:
            block.compile(dynamic=False, fullgraph=True)
        self.summed_loss = torch.compile(self.summed_loss, dynamic=False, fullgraph=True)

    @torch.no_grad()
    def init_(self, seed: int) -> None:
        """Draw every initial value from (seed, parameter name), in fp32 before it is rounded to the model's dtype."""
        draw = Draw(seed)
        for name in ("model.embed_tokens", "lm_head"):
            weight = self.get_submodule(name).weight
            weight.copy_(draw.normal(f"{name}.weight", weight.shape, INIT_STD))
        for name, module in self.named_modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, GroupHolder):
                for group in module.groups():
                    group.init_(draw, f"{name}.")


def build(cfg: Config, vocab_size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Llama:
    """The initialised model of ``cfg`` on ``device``, DLR attached; allocated once, in its final dtype."""
    branch = cfg.dlr.enabled and cfg.dlr.impl == "branch"
    with torch.device("meta"):
        model = Llama(cfg, vocab_size, grouped=not branch).to(dtype)
    if device.type != "meta":
        model.to_empty(device=device)
        model.init_(cfg.seed)
    if cfg.dlr.enabled:
        attach_dlr(model, cfg.dlr.alpha, cfg.dlr.variance_correction, cfg.dlr.impl)
    return model
