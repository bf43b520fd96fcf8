"""Every optimizer on a GPU: nothing moves in memory, a masked update changes nothing, state comes back bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dlr_pretrain.config import Choice
from dlr_pretrain.optim import build as optim

DEVICE = torch.device("cuda", 0)
ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
GALORE = ADAM | {"rank": 16, "update_scale": 0.25, "refresh_every": 3}
CHOICES = {
    "adamw": ADAM,
    "adamw_foreach": ADAM,
    "adamw_8bit": ADAM | {"block_size": 256},
    "galore": GALORE,
    "fira": GALORE | {"limiter": 1.01},
    "loro": ADAM | {"exact_every": 4},
    "muon": ADAM | {"momentum": 0.95, "nesterov": True, "ns_steps": 5},
}


def draw(dtype: torch.dtype) -> dict[str, Tensor]:
    """Pairs of factors, dense matrices (one column-major) and a vector."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (302, 128),
        "model.layers.0.self_attn.o_proj.a.weight": (32, 128),
        "model.layers.0.self_attn.o_proj.b.weight": (128, 32),
        "model.layers.0.mlp.up_proj.weight": (344, 128),
        "model.layers.0.mlp.down_proj.weight": (128, 344),
        "model.norm.weight": (128,),
    }
    drawn = {name: torch.randn(s, device=DEVICE, generator=generator).to(dtype) for name, s in shapes.items()}
    drawn["model.layers.0.mlp.down_proj.weight"] = drawn["model.layers.0.mlp.down_proj.weight"].T.contiguous().T
    return {name: p.requires_grad_() for name, p in drawn.items()}


def update(optimizer: optim.Optimizer, seed: int, skip: float = 0.0) -> None:
    generator = torch.Generator(DEVICE).manual_seed(100 + seed)
    for p in optimizer.parameters.values():
        noise = torch.randn(p.shape, device=DEVICE, generator=generator)
        p.grad = torch.empty_like(p, requires_grad=False).copy_(noise * (math.nan if skip else 1.0))
    optimizer.update(0.01, skip=torch.tensor(skip, device=DEVICE), index=seed)


def everything(optimizer: optim.Optimizer) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in optimizer.parameters.items()} | optimizer.state_tensors()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CHOICES)
def test_updates_masks_and_states(name, dtype):
    if name == "adamw_8bit":
        pytest.importorskip("torchao")
    choice = Choice(name, CHOICES[name])
    one, two = optim.build(choice, draw(dtype)), optim.build(choice, draw(dtype))
    places = {full: (p.data_ptr(), p.stride()) for full, p in two.parameters.items()}
    for seed in range(6):
        update(one, seed)
        update(two, seed)
        before = {full: value.clone() for full, value in everything(two).items()}
        update(two, seed, skip=1.0)
        tensors = {full: value.cpu().contiguous() for full, value in two.state_tensors().items()}
        two = optim.build(choice, two.parameters)
        two.load_state_tensors(tensors)
        for expected in (before, everything(one)):
            found = everything(two)
            assert found.keys() == expected.keys()
            for full, value in found.items():
                other = expected[full]
                assert (value.device, value.dtype) == (other.device, other.dtype), full
                assert torch.equal(value, other) and value.isfinite().all(), full
                assert expected is before or value.stride() == other.stride(), full
    assert {full: (p.data_ptr(), p.stride()) for full, p in two.parameters.items()} == places
    measured = sum(value.numel() * value.element_size() for value in two.state_tensors().values())
    assert measured == optim.state_bytes(choice, two.parameters)


@pytest.mark.parametrize("name", CHOICES)
def test_a_gpu_takes_the_steps_of_the_cpu(name):
    """Over two updates, in fp64, before GaLore's next projector and LORO's exact step: signs of vectors may differ."""
    if name == "adamw_8bit":
        pytest.skip("computes in fp32")
    choice = Choice(name, CHOICES[name])
    gpu = optim.build(choice, draw(torch.float64))
    cpu = optim.build(choice, {full: p.detach().cpu().requires_grad_() for full, p in draw(torch.float64).items()})
    for seed in range(2):
        update(gpu, seed)
        for full, p in cpu.parameters.items():
            p.grad = torch.empty_like(p, requires_grad=False).copy_(gpu.parameters[full].grad)
        cpu.update(0.01, skip=torch.tensor(0.0), index=seed)
    accuracy = 1e-3 if name == "muon" else 1e-9  # its iteration is in bf16
    for full, p in cpu.parameters.items():
        torch.testing.assert_close(gpu.parameters[full].detach().cpu(), p.detach(), rtol=0, atol=accuracy)
