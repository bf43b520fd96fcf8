"""Grouped-query attention, heads of any width, rotary bases and tied embeddings, against formulas and transformers."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import LlamaConfig, LlamaForCausalLM

from dlr_pretrain.deploy.export import model_config
from dlr_pretrain.train.state import new_optimizer
from dlr_pretrain.util.tensors import ALPHA
from tests.parity.reference import TODAYS, VOCAB, disturbed, small, weights, with_checkpointing
from tests.parity.test_models import MANY, assert_formula, assert_same_step, leaves, padded, step

CASES = [
    "full",
    f"sltrain backbone.alpha=12 {MANY}",
    "cola dlr=on",
    f"lost dlr=on {MANY}",
    "cola_lax dlr=learnable_alpha",
]
CASES += [pytest.param(case, marks=pytest.mark.full) for case in (
    "lora backbone.alpha=12", "relora backbone.alpha=12", "lowrank", "cola dlr=random", "lax dlr=on"
)]  # fmt: skip


def of(case: str, *shape: str):
    return small(*case.split(), *(shape or TODAYS), "precision=fp32", layers=3 if "lax" in case else 2)


@pytest.mark.parametrize("case", CASES)
def test_grouped_backbones_match_the_formulas(case):
    """q has 24 outputs, k and v have 12 each: at rank 8, DLR copies a latent three times there and twice here."""
    cfg = of(case)
    model = disturbed(cfg)
    state = leaves(weights(model))
    optimizer = new_optimizer(cfg, model)
    if cfg.dlr.learn_alpha:
        state[ALPHA] = optimizer.values[ALPHA].clone()
    assert "lm_head.weight" not in state
    assert_formula(cfg, state, *step(model))


@pytest.mark.parametrize("shape", [TODAYS, ("scale.head_dim=10",), (*TODAYS[:2], "scale.rope_theta=1e6")], ids=str)
def test_the_full_model_is_transformers_own_in_float64(shape):
    """To the rounding of its tables of angles, which are in fp32."""
    cfg = of("full", *shape)
    model, (ids, targets) = disturbed(cfg), padded()
    theirs = LlamaForCausalLM(LlamaConfig(**model_config(cfg, VOCAB, torch.float64), attn_implementation="eager"))
    theirs.double().load_state_dict(weights(model), strict=False)
    tied = theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert tied == cfg.scale.tie_embeddings == ("lm_head.weight" not in weights(model))
    logits = theirs(input_ids=ids).logits
    torch.testing.assert_close(model.logits(ids), logits, rtol=1e-6, atol=1e-6)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    _, gradients = step(model, (padded(),))
    assert gradients.keys() == dict(theirs.named_parameters()).keys()
    for name, p in theirs.named_parameters():
        assert (gradients[name] - p.grad).abs().max() < 1e-6 * p.grad.abs().max(), name


@pytest.mark.full
@pytest.mark.parametrize("case", ["cola", "lax"])
def test_checkpointing_grouped_layers_changes_no_bit(case):
    losses, gradients = step(disturbed(of(case)))
    for mode in ("latent", "block"):
        again, same = step(disturbed(with_checkpointing(of(case), mode)))
        assert again == losses and all(torch.equal(g, same[name]) for name, g in gradients.items()), mode


@pytest.mark.full
@pytest.mark.parametrize(("case", "kinds"), [("cola train.activation_checkpointing=latent", 1), ("lax", 2)])
def test_grouped_blocks_of_a_kind_share_their_graphs(case, kinds, monkeypatch):
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    eager = disturbed(small(*case.split(), *TODAYS, layers=4))
    compiled = copy.deepcopy(eager)
    compiled.compile_()
    assert_same_step(compiled, eager, 1e-12, 1e-10, 1e-11)
    assert counter.frame_count == 3 * kinds + 4  # as in test_models
