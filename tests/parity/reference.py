"""A plain LLaMA written from the formulas, one projection at a time: the reference for every backbone."""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlr_pretrain.cli import load
from dlr_pretrain.config import Config
from dlr_pretrain.config.tree import Scale
from dlr_pretrain.models import Llama, build_model
from dlr_pretrain.models.adapter import split
from dlr_pretrain.util.tensors import ALPHA

VOCAB = 50
CPU = torch.device("cpu")
TODAYS = ("scale.num_heads=4", "scale.num_kv_heads=2", "scale.head_dim=6", "scale.rope_theta=500",
          "scale.norm_eps=1e-3", "scale.tie_embeddings=true")  # fmt: skip
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # as alphas are numbered

State = dict[str, Tensor]
Project = Callable[[str, Tensor], Tensor]  # (full name of a projection, its input) -> its output


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def layer_norm(state: State, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-6)
    return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]


def r_transposed(d_out: int, rank: int, grouping: str = "contiguous", name: str = "", seed: int = 0) -> Tensor:
    """R^T [d_out, rank], entry by entry: output i receives latent g(i)."""
    copies = math.ceil(d_out / rank)
    g = [i // copies for i in range(d_out)]
    if grouping == "random":
        hashed = int.from_bytes(hashlib.md5(name.encode()).digest()[:8], "little")
        generator = torch.Generator("cpu").manual_seed((seed ^ hashed) % (2**63 - 1))
        g = torch.randint(0, rank, (d_out,), generator=generator).tolist()
    return torch.tensor([[1.0 if g[i] == j else 0.0 for j in range(rank)] for i in range(d_out)])


def reference_loss(
    state: State, ids: Tensor, targets: Tensor, scale: Scale, project: Project, swiglu_silu: bool = True
) -> Tensor:
    """Summed next-token cross-entropy. ``project`` is the backbone, called in the order of a block's computation."""

    def norm(name, x):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + scale.norm_eps) * state[f"{name}.weight"]

    x = state["model.embed_tokens.weight"][ids]
    B, T, D = x.shape
    heads, E = scale.num_heads, scale.head_dim or D // scale.num_heads
    served_by = [head * (scale.num_kv_heads or heads) // heads for head in range(heads)]  # heads of k and v
    position = torch.arange(T, dtype=x.dtype)[:, None]
    angle = position * scale.rope_theta ** (-torch.arange(0, E, 2, dtype=x.dtype) / E)

    def turn(t):  # rotates the pairs (j, j + E/2) by their angle
        l, r = t[..., : E // 2], t[..., E // 2 :]
        return torch.cat((l * angle.cos() - r * angle.sin(), r * angle.cos() + l * angle.sin()), -1)

    for i in range(scale.num_layers):
        at = f"model.layers.{i}"
        h = norm(f"{at}.input_layernorm", x)
        q, k, v = (
            project(f"{at}.self_attn.{p}_proj", h).reshape(B, T, -1, E).permute(0, 2, 1, 3) for p in ("q", "k", "v")
        )
        k, v = k[:, served_by], v[:, served_by]
        scores = turn(q) @ turn(k).transpose(2, 3) / math.sqrt(E)
        future = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
        y = torch.softmax(scores.masked_fill(future, -torch.inf), -1) @ v
        x = x + project(f"{at}.self_attn.o_proj", y.permute(0, 2, 1, 3).reshape(B, T, heads * E))
        h = norm(f"{at}.post_attention_layernorm", x)
        gate, up = project(f"{at}.mlp.gate_proj", h), project(f"{at}.mlp.up_proj", h)
        x = x + project(f"{at}.mlp.down_proj", (silu(gate) if swiglu_silu else gate) * up)
    logits = norm("model.norm", x) @ state.get("lm_head.weight", state["model.embed_tokens.weight"]).T
    log_p = logits - torch.logsumexp(logits, -1, keepdim=True)
    scored = targets != -100
    return -(log_p[scored].gather(1, targets[scored][:, None])).sum()


# ----------------------------------------------------------------------------------------------------
# The projection of each backbone


def full(cfg: Config, state: State) -> Project:
    """y = W x."""
    return lambda name, x: x @ state[f"{name}.weight"].T


def up(cfg: Config, state: State, name: str) -> Tensor:
    """B; with DLR, B + alpha / sqrt(K) R^T with K = ceil(d_out / r)."""
    b, dlr = state[f"{name}.b.weight"], cfg.dlr
    if not dlr.enabled or dlr.mode == "offset":  # B starts with the offset
        return b
    _, _, block, _, projection = name.split(".")
    number = len(PROJECTIONS) * int(block) + PROJECTIONS.index(projection)
    alpha = state[ALPHA][number] if dlr.learn_alpha else dlr.alpha
    root = math.sqrt(math.ceil(b.shape[0] / b.shape[1])) if dlr.variance_correction else 1
    return b + alpha / root * r_transposed(*b.shape, dlr.grouping, name, dlr.grouping_seed).to(b)


def lowrank(cfg: Config, state: State) -> Project:
    """y = B z, z = s phi(A x); phi is CoLA's SiLU or the identity."""

    def project(name, x):
        h = x @ state[f"{name}.a.weight"].T
        z = silu(h) if cfg.backbone.name == "cola" else h
        return cfg.backbone.latent_scale * z @ up(cfg, state, name).T

    return project


def lost(cfg: Config, state: State) -> Project:
    """y = gamma B phi(A x) + (1 - gamma) W_s x_I."""
    gamma, plain = cfg.backbone.gamma, cfg.backbone.activation == "none"

    def project(name, x):
        h = x @ state[f"{name}.a.weight"].T
        sparse = x[..., state[f"{name}.channels"]] @ state[f"{name}.s.weight"].T
        return gamma * (h if plain else silu(h)) @ up(cfg, state, name).T + (1 - gamma) * sparse

    return project


def lax(cfg: Config, state: State) -> Project:
    """y = B z, z = phi(norm(A x + G(c))); c is the z of the same projection in the previous block.

    G(c) is W c + b, or E2^T C E1 with c as a matrix C [n1, n2].
    """
    crossing = {}
    phi = silu if cfg.backbone.name == "cola_lax" else (lambda h: h)

    def gate(name, c):
        if cfg.backbone.gate == "dense":
            return c @ state[f"{name}.gate.weight"].T + state[f"{name}.gate.bias"]
        e1, e2 = state[f"{name}.gate.e1"], state[f"{name}.gate.e2"]
        return (e2.T @ c.reshape(*c.shape[:-1], len(e2), len(e1)) @ e1).reshape(c.shape)

    def project(name, x):
        block, rest = name.removeprefix("model.layers.").split(".", 1)
        h = x @ state[f"{name}.a.weight"].T
        if block != "0":
            h = layer_norm(state, f"{name}.norm", h + gate(name, crossing[rest]))
        crossing[rest] = phi(h)
        return phi(h) @ up(cfg, state, name).T

    return project


def lora(cfg: Config, state: State) -> Project:
    """y = W0 x + alpha / r B A x."""

    def project(name, x):
        w, a, b = (state[f"{name}.{leaf}"] for leaf in ("weight", "a.weight", "b.weight"))
        return x @ w.T + cfg.backbone.alpha / cfg.backbone.rank * (x @ a.T @ b.T)

    return project


def sltrain(cfg: Config, state: State) -> Project:
    """y = (alpha / r B A + S) x, S from its values and their flat positions."""

    def project(name, x):
        a, b, values, index = (state[f"{name}.{leaf}"] for leaf in ("a.weight", "b.weight", "values", "index"))
        product = b @ a
        s = torch.zeros(product.numel(), dtype=x.dtype).scatter(0, index, values).view(product.shape)
        return x @ (cfg.backbone.alpha / cfg.backbone.rank * product + s).T

    return project


FORMULAS = {"full": full, "lowrank": lowrank, "cola": lowrank, "lost": lost, "lax": lax, "cola_lax": lax}
FORMULAS |= {"lora": lora, "relora": lora, "sltrain": sltrain}


def formula_loss(cfg: Config, state: State, rows: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """The summed loss of ``rows`` (ids, targets), each computed alone."""
    scale, silu_of_swiglu = cfg.scale, cfg.backbone.swiglu_silu
    project = FORMULAS[cfg.backbone.name]
    return sum(reference_loss(state, *row, scale, project(cfg, state), silu_of_swiglu) for row in rows)


# ----------------------------------------------------------------------------------------------------
# Models


class Operations(TorchDispatchMode):
    """Calls ``look`` with each torch operation and the tensors that it returns."""

    def __init__(self, look: Callable[[Any, list[Tensor]], object]):
        super().__init__()
        self.look = look

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        result = operation(*arguments, **(keywords or {}))
        self.look(operation, [t for t in tree_leaves(result) if isinstance(t, Tensor)])
        return result


@cache
def small(backbone: str, *overrides: str, width: int = 91, layers: int = 2) -> Config:
    """The smallest shape that has every part: two heads, and by default a feed-forward width that is padded."""
    shape = f"scale=tiny scale.hidden_size=32 scale.intermediate_size={width} scale.num_heads=2"
    unused = backbone == "full" or any(word.startswith("backbone.rank=") for word in overrides)
    rank = [] if unused else ["scale.rank=8"]
    words = [*shape.split(), f"scale.num_layers={layers}", *rank, f"backbone={backbone}", "data=sample", "logger=jsonl"]
    return load([*words, *overrides])


def weights(model: Llama) -> State:
    """The tensors of the model by their exported names."""
    return split(model, model.state_dict())


def with_checkpointing(cfg: Config, mode: str) -> Config:
    return replace(cfg, train=replace(cfg.train, activation_checkpointing=mode))


@torch.no_grad()
def disturbed(cfg: Config, dtype: torch.dtype = torch.float64, vocabulary: int = VOCAB) -> Llama:
    """The model of ``cfg`` with noise on constant initial values (norms, biases, a zero B), which could hide a term.

    The embedding has unit scale: at 0.02 the first norm would multiply rounding errors by 50.
    """
    model, generator = build_model(cfg, vocabulary, CPU, dtype), torch.Generator().manual_seed(9)
    model.model.embed_tokens.weight.mul_(50)
    for p in split(model, {name: p for name, p in model.named_parameters() if p.requires_grad}).values():
        if (p == p.flatten()[0]).all():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.3)
    return model
