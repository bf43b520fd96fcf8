"""The LLaMA model for training: pre-norm, rotary embeddings, grouped-query attention, SwiGLU, no biases.

The backbone provides the linear layers, whose parameters are fused; ``adapter`` has their exported names.
Shapes: B micro-batch, T positions, D hidden size, H heads of width E (D / H by default).
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dlr_pretrain.config import Config
from dlr_pretrain.models import adapter
from dlr_pretrain.models.layer import ALIGNMENT, INIT_STD, Joined, Layer, SeededInit, Spec, named_layers, projections
from dlr_pretrain.models.loss import score, summed_cross_entropy
from dlr_pretrain.models.residual import add_
from dlr_pretrain.models.rotary_attention import covers, rotary_attention
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.tensors import at_least_fp32

Carry = tuple[Any, ...]  # tensors or None, from each layer of a block to the same layer of the next block
NO_CARRY: Carry = (None, None, None, None)


def padded(width: int, alignment: int = ALIGNMENT) -> int:
    """The width of activations: ``width`` if ``alignment`` divides it, else the next multiple of 64."""
    return width if width % alignment == 0 else -(-width // 64) * 64


class RMSNorm(nn.Module):
    """x / rms(x) * weight, with statistics in fp32 (fp64 for fp64)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(at_least_fp32(x.dtype))
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotary(length: int, width: int, dtype: torch.dtype, device: torch.device, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin [T, E] of the half-split rotary embedding, computed in fp32 (fp64 for fp64)."""
    wide = at_least_fp32(dtype)
    frequency = base ** (-torch.arange(0, width, 2, dtype=wide, device=device) / width)
    angle = torch.outer(torch.arange(length, dtype=wide, device=device), frequency).repeat(1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def attention_bias(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias [B, 1, T, T] of the attention scores that hides other documents and later positions.

    ``documents`` [B, T] holds the number of each position's document. Positions need not restart at each document,
    because rotary embeddings act only through differences of positions. The bias is not a boolean mask, because every
    block would convert the mask into this tensor and keep it for the backward pass.
    """
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return torch.zeros_like(same, dtype=dtype).masked_fill_(~same.tril_(), -torch.inf)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, T, E], each vector rotated by its position."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def _keep_nothing(*_, **__) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def _keep_latents(_, operation, *__, **___) -> CheckpointPolicy:
    """Keep the products A x, the only products in a block that are not batched."""
    saved = operation is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.MUST_RECOMPUTE


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(head size) + bias) v, all [B, heads, T, head size]; causal without a bias [B, 1, T, T].

    Fewer heads of k and v are repeated: torch's kernels that share heads take no bias. On the meta device, where models
    are only counted, it is a GPU's fused operator: torch's own choice there forms the weights [T, T], and no public
    name makes another one.

    A model compiled for a CPU in bf16 uses plain products with fused code between them. The backward pass of torch's
    operator takes 2.4 times as long there (T = 256, two cores with avx512_bf16). In fp32 both take the same time.
    """
    k, v = (t[:, :, None].expand(-1, -1, q.shape[1] // t.shape[1], -1, -1).flatten(1, 2) for t in (k, v))
    if q.device.type == "meta":
        if bias is None:
            return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        shared = bias.expand(-1, q.shape[1], -1, -1)
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, shared, True)[0]
    if torch.compiler.is_compiling() and q.device.type == "cpu" and q.dtype == torch.bfloat16:
        if bias is None:
            positions = torch.arange(q.shape[2], device=q.device)
            bias = torch.where(positions <= positions[:, None], 0.0, -torch.inf)
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1]) + bias
        return scores.softmax(-1).to(q.dtype) @ v
    return F.scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None)


class Attention(nn.Module):
    """Causal multi-head attention. q is a layer apart if k and v have fewer heads."""

    def __init__(self, cfg: Config, layer: type[Layer], block: int, alignment: int):
        super().__init__()
        d, self.num_heads, self.head_width = cfg.scale.hidden_size, cfg.scale.num_heads, cfg.scale.head_width
        wide, narrow = (heads * self.head_width for heads in (self.num_heads, cfg.scale.kv_heads))
        self.triton = cfg.attention_kernel == "triton"
        of = partial(Spec, block=block, alignment=alignment)
        if narrow == wide:
            self.qkv: Any = layer(of(("q_proj", "k_proj", "v_proj"), d, wide, d, wide), cfg.backbone)
        else:
            self.q = layer(of(("q_proj",), d, wide, d, wide), cfg.backbone)
            self.kv = layer(of(("k_proj", "v_proj"), d, narrow, d, narrow), cfg.backbone)
            self.qkv = Joined(self.q, self.kv)
        self.o = layer(of(("o_proj",), wide, d, wide, d), cfg.backbone)

    def attend(self, z: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """The latent of q, k and v -> the input [B, T, H E] of the output projection; causal even without a mask."""
        if self.triton and covers(z, self.head_width):
            return rotary_attention(self.qkv.expand(z), cos, sin, mask, self.num_heads)
        q, k, v = (t.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for t in self.qkv.outputs(z))
        y = attention(rotate(q, cos, sin), rotate(k, cos, sin), v, mask)
        return y.transpose(1, 2).flatten(2)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), without the SiLU if the backbone's option ``swiglu_silu`` is false."""

    def __init__(self, cfg: Config, layer: type[Layer], block: int, alignment: int):
        super().__init__()
        d, f = cfg.scale.hidden_size, cfg.scale.intermediate_size
        wide = padded(f, alignment)
        self.silu = cfg.backbone.swiglu_silu
        self.gate_up = layer(Spec(("gate_proj", "up_proj"), d, f, d, wide, block, alignment), cfg.backbone)
        self.down = layer(Spec(("down_proj",), f, d, wide, d, block, alignment), cfg.backbone)

    def combine(self, z: Tensor) -> Tensor:
        """The latent of gate and up -> the input of the down projection."""
        gate, up = self.gate_up.outputs(z)
        return (F.silu(gate) if self.silu else gate) * up


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    ``forward`` takes the tensors carried from the previous block, and returns those for the next block.
    """

    def __init__(self, cfg: Config, layer: type[Layer], block: int, alignment: int):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.scale.hidden_size, cfg.scale.norm_eps)
        self.self_attn = Attention(cfg, layer, block, alignment)
        self.post_attention_layernorm = RMSNorm(cfg.scale.hidden_size, cfg.scale.norm_eps)
        self.mlp = MLP(cfg, layer, block, alignment)
        self.checkpointing = cfg.train.activation_checkpointing
        self.policy = _keep_latents if self.checkpointing == "latent" else _keep_nothing

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, carried: Carry) -> tuple[Tensor, Carry]:
        arguments = (x, cos, sin, mask, carried)
        if self.checkpointing == "none":
            return self.compute(*arguments)
        selective: dict[str, Any] = {}
        # A policy slows down an eager block. A compiled block needs one that keeps nothing, because torch 2.11 would
        # otherwise keep the products of autograd functions.
        if self.checkpointing == "latent" or torch.compiler.is_compiling():
            selective["context_fn"] = partial(create_selective_checkpoint_contexts, self.policy)
        return checkpoint(self.compute, *arguments, use_reentrant=False, preserve_rng_state=False, **selective)

    def compute(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, carried: Carry) -> tuple[Tensor, Carry]:
        attention, mlp = self.self_attn, self.mlp
        z, qkv = attention.qkv.latent(self.input_layernorm(x), carried[0])
        z, o = attention.o.latent(attention.attend(z, cos, sin, mask), carried[1])
        x = x + attention.o.outputs(z)[0]
        z, gate_up = mlp.gate_up.latent(self.post_attention_layernorm(x), carried[2])
        z, down = mlp.down.latent(mlp.combine(z), carried[3])
        return x + mlp.down.outputs(z)[0], (qkv, o, gate_up, down)


class Body(nn.Module):
    """Embedding, blocks and final norm: the tensors under ``model.``."""

    def __init__(self, cfg: Config, vocab_size: int, alignment: int):
        super().__init__()
        self.head_width, self.rope_theta = cfg.scale.head_width, cfg.scale.rope_theta
        self.triton = cfg.attention_kernel == "triton"
        self.embed_tokens = nn.Embedding(vocab_size, cfg.scale.hidden_size)
        self.layers = nn.ModuleList(Block(cfg, cfg.backbone.layer, i, alignment) for i in range(cfg.scale.num_layers))
        self.norm = RMSNorm(cfg.scale.hidden_size, cfg.scale.norm_eps)

    def forward(self, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        """ids [B, T] -> the input [B, T, D] of the head."""
        x = self.embed_tokens(ids)
        cos, sin = rotary(ids.shape[1], self.head_width, x.dtype, x.device, self.rope_theta)
        mask = documents
        if documents is not None and not (self.triton and covers(x, self.head_width)):
            mask = attention_bias(documents, x.dtype)
        carried = NO_CARRY
        for block in self.layers:
            x, carried = block(x, cos, sin, mask, carried)
        return self.norm(x)


class Llama(nn.Module):
    """``forward(ids, targets)`` returns the training loss, ``logits(ids)`` the logits.

    A position attends to itself and to earlier positions in its row. With ``documents`` [B, T], the number of each
    position's document, it attends only to its own document.

    With ``train.activation_checkpointing`` "latent", each block keeps its input and the products A x of its projections
    for the backward pass, 7 r + d values per position, and recomputes the rest (CoLA-M; Liu et al., 2025, count 2 d
    instead of d, and recompute the products). With "block", each block keeps only its input. The input includes the
    tensors carried from block to block. With ``alignment`` 1 no width is padded.
    """

    def __init__(self, cfg: Config, vocab_size: int, alignment: int = ALIGNMENT):
        super().__init__()
        self.factorized = cfg.backbone.factorized
        self.model = Body(cfg, vocab_size, alignment)
        if cfg.scale.tie_embeddings:
            vars(self)["lm_head"] = self.model.embed_tokens  # past nn.Module: its weight has no second name
        else:
            self.lm_head = nn.Linear(cfg.scale.hidden_size, vocab_size, bias=False)
        self.score = score

    def logits(self, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        """ids [B, T] -> [B, T, vocabulary]."""
        return F.linear(self.model(ids, documents), self.lm_head.weight)

    def forward(self, ids: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """The summed (not averaged) cross-entropy over the targets [B, T] that are not ``IGNORE``, in fp32."""
        x = self.model(ids, documents).flatten(0, -2)
        return summed_cross_entropy(x, self.lm_head.weight, targets.flatten(), self.score)

    def compile_(self, mode: str | None = None) -> None:
        """Compile the blocks, the last norm and the loss in place. Blocks of a kind share their graphs.

        Parameter names do not change. The products of the head are not compiled, because the loss cuts them into a
        varying number of pieces. ``mode`` is passed to torch.compile.
        """
        compiled = partial(torch.compile, dynamic=False, fullgraph=True, mode=mode)
        self.score = compiled(score)
        module: nn.Module
        for module in (*self.model.layers, self.model.norm):
            module.forward = compiled(module.forward)  # not the module: FSDP's hooks stay outside the graph

    @torch.no_grad()
    def init_(self, seed: int) -> None:
        """Draw every initial value from (seed, exported name) in fp32, and round it to the model's dtype."""
        seeded = SeededInit(seed)
        adapter.zero_layers_(self)
        for name in ("lm_head", "model.embed_tokens"):  # a tied head has the embedding's values
            weight = self.get_parameter(f"{name}.weight")
            weight.copy_(seeded.normal(f"{name}.weight", weight.shape, INIT_STD))
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
        exported = adapter.split(self, self.state_dict())
        for path, layer in named_layers(self):
            for name in projections(path, layer):
                values = layer.initial(seeded, name)
                declared, given = dict(layer.parts.values()), {leaf: tuple(v.shape) for leaf, v in values.items()}
                if given != declared:  # copy_ would repeat a value of another shape
                    rule = f"its layer declares {declared} by fuse, but initial gives {given}"
                    raise UserError(f"backbone={layer.options.name}", rule, "Correct the layer's method initial")
                for leaf, value in values.items():
                    exported[f"{name}.{leaf}"].copy_(value)


def build_model(
    cfg: Config,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    initialize: bool = True,
    alignment: int = ALIGNMENT,
) -> Llama:
    """The model of ``cfg`` on ``device``, allocated once in its final dtype; with DLR its weights hold B.

    Without ``initialize`` the values are undefined until the caller loads a checkpoint.
    """
    with torch.device("meta"):
        model = Llama(cfg, vocab_size, alignment).to(dtype)
    if device.type != "meta":
        model.to_empty(device=device)
        if initialize:
            model.init_(cfg.seed)
            if cfg.dlr.enabled and cfg.dlr.mode == "offset":
                add_(model.state_dict(), model, cfg.dlr)
    if cfg.dlr.enabled and not cfg.dlr.train_b:
        for _, layer in named_layers(model):
            torch.nn.init.zeros_(layer.get_parameter("b").requires_grad_(False))
    return model
