"""Grouped-query attention, heads of any width, rotary bases and tied embeddings, against formulas and transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dlr_pretrain.deploy.export import model_config
from dlr_pretrain.train.state import new_optimizer
from dlr_pretrain.util.tensors import ALPHA
from tests.parity.reference import VOCAB, disturbed, small, weights
from tests.parity.test_models import MANY, assert_formula, leaves, padded, step

GROUPED = ["scale.num_heads=4", "scale.num_kv_heads=2"]
TODAYS = [*GROUPED, "scale.head_dim=6", "scale.rope_theta=500", "scale.tie_embeddings=true", "scale.norm_eps=1e-3"]
CASES = ["full", "lora backbone.alpha=12", "relora backbone.alpha=12", f"sltrain backbone.alpha=12 {MANY}", "lowrank",
         "cola dlr=on", "cola dlr=random", f"lost dlr=on {MANY}", "lax dlr=on",
         "cola_lax dlr=learnable_alpha"]  # fmt: skip


def of(case: str, *shape: str):
    return small(*case.split(), *(shape or TODAYS), "precision=fp32", layers=3 if "lax" in case else 2)


@pytest.mark.parametrize("case", CASES)
def test_grouped_backbones_match_the_formulas(case):
    """q has 24 outputs, k and v have 12 each: K of DLR differs between them (3 and 2 at rank 8)."""
    cfg = of(case)
    model = disturbed(cfg)
    state = leaves(weights(model))
    optimizer = new_optimizer(cfg, model)
    if cfg.dlr.learn_alpha:
        state[ALPHA] = optimizer.values[ALPHA].clone()
    losses, gradients = step(model)
    assert "lm_head.weight" not in state and state["model.layers.1.self_attn.k_proj.b.weight" if case != "full" else
                                                   "model.layers.1.self_attn.k_proj.weight"].shape[0] == 12  # fmt: skip
    assert_formula(cfg, state, losses, gradients)


@pytest.mark.parametrize("shape", [TODAYS, ["scale.head_dim=10"], [*GROUPED, "scale.rope_theta=1e6"]], ids=str)
def test_the_full_model_is_transformers_own_in_float64(shape):
    cfg = of("full", *shape)
    model, (ids, targets) = disturbed(cfg), padded()
    theirs = LlamaForCausalLM(LlamaConfig(**model_config(cfg, VOCAB, torch.float64), attn_implementation="eager"))
    theirs = theirs.double().requires_grad_()
    lacking = theirs.load_state_dict(weights(model), strict=False)
    assert lacking == ((["lm_head.weight"] if cfg.scale.tie_embeddings else []), [])
    logits = theirs(input_ids=ids).logits
    torch.testing.assert_close(model.logits(ids), logits, rtol=1e-6, atol=1e-6)  # its tables of angles are in fp32
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    _, gradients = step(model, (padded(),))
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-5, atol=1e-4, msg=name)
