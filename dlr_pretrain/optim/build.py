"""Optimizers by name, their masked update, and their state as named tensors. One file an optimizer."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import torch
from torch import Tensor

from dlr_pretrain.config import Choice
from dlr_pretrain.errors import UserError


def build(choice: Choice, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """The optimizer that ``choice`` names, over ``parameters``; its learning rate is given to every update."""
    return importlib.import_module(f"dlr_pretrain.optim.{choice.name}").build(parameters, choice.knobs)


def update(optimizer: torch.optim.Optimizer, lr: float, skip: Tensor) -> None:
    """One update at rate ``lr``; where ``skip`` (a device scalar) is 1, parameters and state stay as they are.

    The fused kernels read ``skip`` on the device through the hook that gradient scalers use, so the host never waits.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.grad_scale, optimizer.found_inf = None, skip
    optimizer.step()


def state_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """The optimizer's state as ``<parameter>/<entry>`` tensors; ``names`` are in the order of its parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{name}/{entry}": value
        for name, p in zip(names, parameters, strict=True)
        for entry, value in optimizer.state[p].items()
    }


def load_state_tensors(optimizer: torch.optim.Optimizer, names: list[str], tensors: Mapping[str, Tensor]) -> None:
    """The inverse of ``state_tensors``: bit for bit, in each parameter's own memory layout."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    by_name: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for full, value in tensors.items():
        name, entry = full.rsplit("/", 1)
        if name not in by_name:
            raise UserError(f"optimizer state of {name}, which this model does not have")
        by_name[name][entry] = value
    for name, p in zip(names, parameters, strict=True):
        optimizer.state[p] = {entry: _like(p, value) for entry, value in by_name[name].items()}


def _like(p: Tensor, value: Tensor) -> Tensor:
    """A copy of ``value`` on the device of ``p``, and in its memory layout where it is element-wise."""
    if value.shape == p.shape:
        return torch.empty_like(p, dtype=value.dtype).copy_(value)
    return value.new_empty(value.shape, device=p.device).copy_(value)
