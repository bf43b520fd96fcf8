"""Latent crossing against its formula, in float64: gates, norms, where latents are added, and what crosses."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from dlr_pretrain.cli import load
from dlr_pretrain.models import attach_dlr, build
from dlr_pretrain.models.llama import Llama
from tests.parity.reference import VOCAB, assert_follows_formula, r_transposed, silu, small

CPU = torch.device("cpu")
GATES = ("tensor", "dense")
VARIANTS = [
    *((gate, "latent", "pre_act", True) for gate in GATES),
    *(("tensor", norm, crossing, recursive)
      for norm in ("latent", "output", "none") for crossing in ("pre_act", "post_act") for recursive in (True, False)),
]  # fmt: skip


def words(gate="tensor", norm="latent", crossing="pre_act", recursive=True) -> list[str]:
    knobs = {"gate": gate, "norm": norm, "crossing": crossing, "recursive": str(recursive).lower()}
    return [f"backbone.{knob}={value}" for knob, value in knobs.items()]


def layer_norm(state, name, x):
    centred = x - x.mean(-1, keepdim=True)
    return (
        centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-6) * state[f"{name}.weight"]
        + (state[f"{name}.bias"])
    )


def formula(cfg, state, dlr: bool = False):
    """The projection of LaX; it remembers what each one hands on, as a reader of the formula would."""
    knobs, crossing = cfg.backbone.knobs, {}
    phi = silu if cfg.backbone.name == "cola_lax" else (lambda h: h)

    def gate(name, c):
        if knobs["gate"] == "dense":
            return c @ state[f"{name}.gate.weight"].T + state[f"{name}.gate.bias"]
        e1, e2 = state[f"{name}.gate.e1"], state[f"{name}.gate.e2"]
        matrix = c.reshape(*c.shape[:-1], len(e2), len(e1))
        return (e2.T @ matrix @ e1).reshape(c.shape)

    def project(name, x):
        block, rest = name.removeprefix("model.layers.").split(".", 1)
        b = state[f"{name}.b.weight"]
        if dlr:
            b = b + cfg.dlr.alpha / (-(-b.shape[0] // b.shape[1])) ** 0.5 * r_transposed(*b.shape).to(b)
        h = x @ state[f"{name}.a.weight"].T
        if block == "0":
            crossing[rest] = phi(h)
            return phi(h) @ b.T

        def norm(h):
            return layer_norm(state, f"{name}.norm", h) if knobs["norm"] == "latent" else h

        crossed = gate(name, crossing[rest])
        z = phi(norm(h + crossed)) if knobs["crossing"] == "pre_act" else norm(phi(h) + crossed)
        crossing[rest] = z if knobs["recursive"] else phi(h)
        y = z @ b.T
        return layer_norm(state, f"{name}.norm", y) if knobs["norm"] == "output" else y

    return project


def disturb(model: Llama) -> None:
    """Norms start as the identity, which would hide a missing one."""
    generator = torch.Generator().manual_seed(9)
    for name, p in model.named_parameters():
        if ".norm." in name or (".gate." in name and p.dim() == 1):
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.3)


@pytest.mark.parametrize(("backbone", "variant", "grouped"), [
    ("lax", VARIANTS[0], True),
    *(("cola_lax", variant, True) for variant in VARIANTS),
    *(("cola_lax", variant, False) for variant in (*VARIANTS[:2], VARIANTS[-6])),
])  # fmt: skip
def test_loss_and_gradients_equal_the_formula(backbone, variant, grouped):
    cfg = small(backbone, *words(*variant), layers=3)
    assert_follows_formula(cfg, partial(formula, cfg), grouped, disturb)


def test_the_residual_takes_the_crossed_latent_and_comes_before_an_output_norm():
    cfg = small("cola_lax", "dlr=on", "dlr.alpha=1.5", *words(norm="output", crossing="post_act"), layers=3)

    def prepare(model):
        disturb(model)
        attach_dlr(model, cfg.dlr.alpha, impl="branch")

    assert_follows_formula(cfg, partial(formula, cfg, dlr=True), False, prepare)


def test_gates_start_as_the_authors_do():
    model = build(load(["scale=60m", "backbone=lax", "data=sample", "scale.num_layers=6", *words()]), 100, CPU)
    state = model.state_dict()
    assert state["model.layers.1.mlp.up_proj.gate.e1"].shape == (16, 16)
    assert state["model.layers.1.mlp.up_proj.gate.e2"].shape == (8, 8)
    for leaf, n in (("e1", 16), ("e2", 8)):  # twice the variance: n times 2 / n
        values = torch.cat([p.flatten() for name, p in state.items() if name.endswith(f"gate.{leaf}")])
        assert values.std().item() == pytest.approx((2 / n) ** 0.5, rel=0.03)
        assert 0.99 * (6 / n) ** 0.5 < values.abs().max().item() <= (6 / n) ** 0.5
    dense = build(load(["scale=60m", "backbone=lax", "data=sample", "scale.num_layers=2"]), 100, CPU).state_dict()
    for leaf in ("weight", "bias"):
        values = dense[f"model.layers.1.self_attn.q_proj.gate.{leaf}"]
        assert 0.9 * 128**-0.5 < values.abs().max().item() <= 128**-0.5
        assert values.std().item() == pytest.approx((1 / 3 / 128) ** 0.5, rel=0.1)
    assert (state["model.layers.1.mlp.up_proj.norm.weight"] == 1).all()
    assert (state["model.layers.1.mlp.up_proj.norm.bias"] == 0).all()


def test_the_padding_of_a_normalised_output_stays_zero():
    model = build(small("lax", *words(norm="output")), VOCAB, CPU)
    with torch.no_grad():
        disturb(model)
    gate_up = model.model.layers[1].mlp.gate_up
    y = gate_up.expand(torch.randn(2, 5, 2, 8))
    assert all(t.shape == (2, 5, 128) and not t[..., 91:].any() and t[..., :91].all() for t in y)
