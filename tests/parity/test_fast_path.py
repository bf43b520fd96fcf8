"""Twenty steps of what trains (grouped products, merged residual, fused loss and optimizer)
beside the plain model: one projection at a time, the residual as a branch, all logits, an optimizer of single tensors.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dlr_pretrain.config import Config
from dlr_pretrain.models import Llama, build
from dlr_pretrain.optim import build as optim
from dlr_pretrain.train.weights import Weights
from dlr_pretrain.util.tensors import STATE_DTYPE
from tests.parity.reference import VOCAB, small

CPU, STEPS, LR = torch.device("cpu"), 20, 3e-3
CARRYING = ("lowrank", "cola", "lost backbone.rank=8 backbone.sparsity=0.2", "lax", "cola_lax")
ALL, QUICK = (*CARRYING, "full", "sltrain", "lora"), ("cola", CARRYING[2], "lora")


def batches():
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, VOCAB, (STEPS, 4, 1), generator=generator)
    rows = (start + 7 * torch.arange(13)) % VOCAB  # something to be learned
    for row in rows:
        yield row[:, :-1], row[:, 1:]


def fast(cfg: Config, start: dict[str, Tensor]) -> list[float]:
    weights = Weights(loaded(build(cfg, VOCAB, CPU), start).to(STATE_DTYPE[cfg.precision.name]), cfg.precision.name)
    optimizer = optim.build(cfg.optimizer, weights.optimized, weights.undecayed)
    gradients = weights.gradients(1)
    losses = []
    for inputs in batches():
        with weights.with_residual():
            losses.append(gradients.add(inputs, torch.tensor(48), last=True).item())
        gradients.collect()
        optimizer.update(LR, skip=torch.zeros(()))
        gradients.clear()
    return losses


def plain(cfg: Config, start: dict[str, Tensor], dtype: torch.dtype, masters: bool = False) -> list[float]:
    """Weights and gradients in ``dtype``; with ``masters`` they are roundings of fp32 weights that AdamW updates."""
    state = loaded(build(cfg, VOCAB, CPU), start).to(torch.float32 if masters else dtype)
    working = copy.deepcopy(state).to(dtype) if masters else state
    knobs = cfg.optimizer.knobs
    betas = knobs["beta1"], knobs["beta2"]
    trained = [p for p in state.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=LR, betas=betas, eps=knobs["eps"], weight_decay=knobs["weight_decay"], foreach=False, fused=False
    )
    losses = []
    for ids, targets in batches():
        logits = working.logits(ids).flatten(0, 1)
        wide = logits.to(torch.promote_types(dtype, torch.float32))
        loss = F.cross_entropy(wide, targets.flatten(), reduction="sum") / 48
        gradients = torch.autograd.grad(loss, [p for p in working.parameters() if p.requires_grad])
        for p, gradient in zip(trained, gradients, strict=True):
            p.grad = gradient.to(p.dtype)
        optimizer.step()
        if masters:
            working.load_state_dict(state.state_dict())
        losses.append(loss.item())
    return losses


def loaded(model: Llama, start: dict[str, Tensor]) -> Llama:
    model.load_state_dict(start)
    return model


def both(variant: str, precision: str) -> tuple[Config, Config, dict[str, Tensor]]:
    """The configurations of what trains and of the plain model, and a start that is exact in ``precision``."""
    residual = variant in CARRYING
    words = [*variant.split(), f"precision={precision}", "dlr=on" if residual else "dlr=off"]
    cfg, reference = small(*words), small(*words, *(["dlr.impl=branch"] if residual else []))
    start = build(cfg, VOCAB, CPU).to(STATE_DTYPE[precision]).state_dict()
    return cfg, reference, start


def distance(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("variant", [v if v in QUICK else pytest.param(v, marks=pytest.mark.full) for v in ALL])
def test_fp32_trains_as_the_plain_model(variant):
    cfg, reference, start = both(variant, "fp32")
    assert fast(cfg, start) == pytest.approx(plain(reference, start, torch.float32), rel=1e-5)


def rms(values: list[float]) -> float:
    return (sum(v * v for v in values) / len(values)) ** 0.5


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "bf16_mixed"])
def test_bf16_strays_from_float64_as_far_as_the_plain_model_does(precision):
    """Over all backbones: how far one of them strays is a single draw, and two draws may differ threefold."""
    ours, theirs = {}, {}
    for variant in ALL:
        cfg, reference, start = both(variant, precision)
        exact = plain(reference, start, torch.float64)
        rounded = plain(reference, start, torch.bfloat16, masters=precision == "bf16_mixed")
        found = fast(cfg, start)
        assert found[-1] < found[0] - 0.3
        ours[variant], theirs[variant] = distance(found, exact), distance(rounded, exact)
    spread = rms(list(theirs.values()))
    assert rms(list(ours.values())) <= 1.5 * spread
    assert max(ours.values()) <= 3 * spread, ours
