"""Every optimizer on a GPU: as on a CPU, nothing moves, masked updates change nothing, state comes back bit for bit."""

from __future__ import annotations

import pytest
import torch

from dlr_pretrain.optim.optimizer import Optimizer
from tests.parity.test_optim import CHOICES, chosen, draw, updated, updates_masks_and_states


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CHOICES)
def test_updates_masks_and_states(name, dtype):
    updates_masks_and_states(chosen(name), dtype, "cuda")


@pytest.mark.parametrize("name", [name for name in CHOICES if name != "adamw_8bit"])  # which computes in fp32
def test_a_gpu_takes_the_steps_of_the_cpu(name):
    """Over two updates, in fp64, before GaLore's next projector and LORO's exact step: signs of vectors may differ."""
    optimizers = [Optimizer(chosen(name), draw(torch.float64, device=device)) for device in ("cuda", "cpu")]
    for optimizer in optimizers:
        updated(optimizer, range(2))
    gpu, cpu = (optimizer.optimized for optimizer in optimizers)
    accuracy = 1e-3 if name == "muon" else 1e-9  # its iteration is in bf16
    for full, p in cpu.items():
        torch.testing.assert_close(gpu[full].detach().cpu(), p.detach(), rtol=0, atol=accuracy)
