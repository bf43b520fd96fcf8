"""Adam as the GaLore family of optimizers implements it, and what optimizers share: groups, layout of state, rules."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dlr_pretrain.config import Config, Problem
from dlr_pretrain.config.key import key
from dlr_pretrain.config.tree import OptimizerOptions
from dlr_pretrain.util import sharded
from dlr_pretrain.util.tensors import ALPHA, at_least_fp32


@dataclass
class AdamOptions(OptimizerOptions):
    beta1: float = key("decay of first moments", ge=0, lt=1)
    beta2: float = key("decay of second moments", ge=0, lt=1)
    eps: float = key("added to the root of second moments before the bias correction", ge=1e-30)
    weight_decay: float = key("share of a weight that an update at rate 1 removes", ge=0)

    @property
    def betas(self) -> tuple[float, float]:
        return self.beta1, self.beta2


def whole_tensors(cfg: Config, needs: str = "a matrix optimizer needs whole matrices") -> Iterator[Problem]:
    """The rule for optimizers that need more of a tensor than a rank's rows."""
    if cfg.parallel.name != "ddp":
        rule = f"{needs}, but parallel={cfg.parallel.name} shards them"
        yield Problem("optimizer", cfg.optimizer.name, rule, "Use parallel=ddp, or optimizer=adamw")


class Adam(torch.optim.Optimizer):
    """Adam that adds epsilon before the bias correction, unlike ``torch.optim.AdamW``.

    The k-th update of a parameter W is W -= lr sqrt(1 - beta2^k) / (1 - beta1^k) m / (sqrt(v) + eps), then
    W -= lr weight_decay W. Moments have the parameter's dtype. Updates are computed in fp32 (fp64 for fp64) and rounded
    once, as in the fused kernels. A parameter without a gradient does not change. Counters are tensors on the CPU.
    """

    index: int  # the update's index in the run, counted from 0; set before each step

    def __init__(self, groups: list[dict], options: AdamOptions):
        super().__init__(groups, {"lr": 0.0, "betas": options.betas, "eps": options.eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures are not supported
        for group in self.param_groups:
            self.update_group(group)

    def update_group(self, group: dict) -> None:
        for p in group["params"]:
            if p.grad is not None:
                self.update(p, p.grad, group)

    def update(self, p: Tensor, gradient: Tensor, group: dict) -> None:
        direction, step = self.direction(p, gradient, group)
        move(p, direction, step, group["lr"] * group["weight_decay"])

    def direction(self, p: Tensor, gradient: Tensor, group: dict) -> tuple[Tensor, float]:
        """Update the counter and moments of ``p`` with ``gradient``, which may have any shape.

        Returns m / (sqrt(v) + eps) in fp32 (fp64 for fp64), and the step size with its bias correction.
        """
        state, (beta1, beta2) = self.state[p], group["betas"]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = empty_state(p, gradient.shape, p.dtype).zero_()
        state["step"] += 1
        k, g = int(state["step"]), gradient.to(at_least_fp32(p.dtype))
        m = state["exp_avg"].to(g.dtype).mul_(beta1).add_(g, alpha=1 - beta1)  # in place, or on a wider copy
        v = state["exp_avg_sq"].to(g.dtype).mul_(beta2).addcmul_(g, g, value=1 - beta2)
        state["exp_avg"].copy_(m)
        state["exp_avg_sq"].copy_(v)
        return m / v.sqrt().add_(group["eps"]), group["lr"] * math.sqrt(1 - beta2**k) / (1 - beta1**k)


def move(p: Tensor, direction: Tensor, step: float, decay: float) -> None:
    """p <- (1 - decay) (p - step direction), rounded once."""
    w = p.to(direction.dtype).sub_(direction, alpha=step)  # in place, or on a wider copy
    if decay > 0:
        w.mul_(1 - decay)
    p.copy_(w)


def block_matrices(parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The two-dimensional parameters of the transformer blocks, and all other parameters, by name."""
    matrices = {name: p for name, p in parameters.items() if name.startswith("model.layers.") and p.dim() == 2}
    return matrices, {name: p for name, p in parameters.items() if name not in matrices}


def decay_groups(parameters: Mapping[str, Tensor], weight_decay: float) -> list[dict]:
    """Parameter groups for ``torch.optim``, one per weight decay, with this rank's rows of sharded parameters.

    Learned alphas are not decayed, because at alpha = 0 the residual vanishes.
    """
    groups: dict[float, list[Tensor]] = {}
    for name, p in parameters.items():
        groups.setdefault(0.0 if name == ALPHA else weight_decay, []).append(sharded.local_rows(p))
    return [{"params": params, "weight_decay": decay} for decay, params in groups.items()]


def empty_state(p: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """An uninitialised state tensor on the device of ``p``, with its memory layout if the shapes are equal.

    New and restored state both use it, so products see the same strides before and after a resume.
    """
    if shape == p.shape:
        return torch.empty_like(p, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=p.device)
