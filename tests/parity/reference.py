"""A plain LLaMA from its formulas, one projection at a time: what every backbone's test compares with."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dlr_pretrain.cli import load
from dlr_pretrain.config import Config
from dlr_pretrain.models.linear import GroupHolder
from dlr_pretrain.models.llama import Llama

VOCAB = 50

Project = Callable[[str, Tensor], Tensor]  # (full name of a projection, its input) -> its output


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def r_transposed(d_out: int, rank: int) -> Tensor:
    """R^T [d_out, rank] entry by entry."""
    copies = math.ceil(d_out / rank)
    return torch.tensor([[1.0 if i // copies == j else 0.0 for j in range(rank)] for i in range(d_out)])


def reference_loss(
    state: dict[str, Tensor],
    ids: Tensor,
    targets: Tensor,
    heads: int,
    layers: int,
    project: Project,
    swiglu_silu: bool = True,
) -> Tensor:
    """Summed next-token cross-entropy; ``project`` is the backbone, called in the order in which a block computes."""

    def norm(name, x):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * state[f"{name}.weight"]

    x = state["model.embed_tokens.weight"][ids]
    B, T, D = x.shape
    E = D // heads
    position = torch.arange(T, dtype=x.dtype)[:, None]
    angle = position * 10000.0 ** (-torch.arange(0, E, 2, dtype=x.dtype) / E)

    def turn(t):  # pairs (j, j + E/2) turned by their angle
        l, r = t[..., : E // 2], t[..., E // 2 :]
        return torch.cat((l * angle.cos() - r * angle.sin(), r * angle.cos() + l * angle.sin()), -1)

    for i in range(layers):
        at = f"model.layers.{i}"
        h = norm(f"{at}.input_layernorm", x)
        q, k, v = (
            project(f"{at}.self_attn.{p}_proj", h).reshape(B, T, heads, E).permute(0, 2, 1, 3) for p in ("q", "k", "v")
        )
        scores = turn(q) @ turn(k).transpose(2, 3) / math.sqrt(E)
        future = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
        y = torch.softmax(scores.masked_fill(future, -torch.inf), -1) @ v
        x = x + project(f"{at}.self_attn.o_proj", y.permute(0, 2, 1, 3).reshape(B, T, D))
        h = norm(f"{at}.post_attention_layernorm", x)
        gate, up = project(f"{at}.mlp.gate_proj", h), project(f"{at}.mlp.up_proj", h)
        x = x + project(f"{at}.mlp.down_proj", (silu(gate) if swiglu_silu else gate) * up)
    logits = norm("model.norm", x) @ state["lm_head.weight"].T
    log_p = logits - torch.logsumexp(logits, -1, keepdim=True)
    scored = targets != -100
    return -(log_p[scored].gather(1, targets[scored][:, None])).sum()


def small(backbone: str, *overrides: str, width: int = 91, layers: int = 2) -> Config:
    """The smallest shape that has every part: two heads, and by default a feed-forward width that is padded."""
    shape = f"scale=tiny scale.hidden_size=32 scale.intermediate_size={width} scale.num_heads=2"
    unused = backbone == "full" or any(word.startswith("backbone.rank=") for word in overrides)
    rank = [] if unused else ["scale.rank=8"]
    words = [*shape.split(), f"scale.num_layers={layers}", *rank, f"backbone={backbone}", "data=sample", "logger=jsonl"]
    return load([*words, *overrides])


def tied(model: Llama) -> bool:
    holders = [m for m in model.modules() if isinstance(m, GroupHolder)]
    return all(stack.is_tied() for m in holders for group in m.groups() for stack in group.stacks())


def assert_follows_formula(
    cfg: Config,
    formula: Callable[[dict[str, Tensor]], Project],
    grouped: bool,
    prepare: Callable[[Llama], object] = lambda model: None,
) -> None:
    """The loss and every gradient of the model are those of ``reference_loss``, in float64.

    ``formula(state)`` is the backbone's projection for the parameters and buffers of ``state``. ``prepare`` may change
    the initial weights, for instance where the start hides a term.
    """
    model = Llama(cfg, VOCAB, grouped=grouped)
    model.init_(3)
    model.double()
    with torch.no_grad():
        prepare(model)
    ids, targets = torch.randint(0, VOCAB, (2, 3, 12), generator=torch.Generator().manual_seed(0))
    targets[0, :4] = -100
    loss = model(ids, targets)
    loss.backward()

    state = {name: t.detach().clone().requires_grad_(t.is_floating_point()) for name, t in model.state_dict().items()}
    silu_of_swiglu = cfg.backbone.knobs.get("swiglu_silu", True)
    scale, project = cfg.scale, formula(state)
    expected = reference_loss(state, ids, targets, scale.num_heads, scale.num_layers, project, silu_of_swiglu)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        assert state[name].grad is not None and state[name].grad.any(), f"{name}: no gradient to compare"
        torch.testing.assert_close(p.grad, state[name].grad, rtol=1e-9, atol=1e-11, msg=name)


def nonzero_b(model: Llama) -> None:
    """Initially B = 0, which hides A."""
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if name.endswith(".b.weight"):
            p.copy_(torch.randn(p.shape, generator=generator) / 6)
