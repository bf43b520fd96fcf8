"""Every optimizer on a GPU updates as on a CPU, skips masked updates, and restores its state bit for bit."""

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
    """Two updates in fp64 agree. GaLore's next projector and LORO's exact step, whose signs may differ, come later."""
    optimizers = [Optimizer(chosen(name), draw(torch.float64, device=device)) for device in ("cuda", "cpu")]
    for optimizer in optimizers:
        updated(optimizer, range(2))
    gpu, cpu = (optimizer.optimized for optimizer in optimizers)
    accuracy = 1e-3 if name == "muon" else 1e-9  # Muon iterates in bf16
    for full, p in cpu.items():
        torch.testing.assert_close(gpu[full].detach().cpu(), p.detach(), rtol=0, atol=accuracy)
