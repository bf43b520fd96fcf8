"""GaLore (Zhao et al., 2024): Adam on gradients projected to a low rank, for dense weights.

Fira (Chen et al., 2024) adds the rest of the gradient, scaled as Adam scales the projected part.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dlr_pretrain.config import Config, Problem
from dlr_pretrain.config.key import key
from dlr_pretrain.config.tree import How
from dlr_pretrain.optim.adam import Adam, AdamOptions, block_matrices, decay_groups, empty_state, move, whole_tensors
from dlr_pretrain.util.tensors import at_least_fp32


@dataclass
class Options(AdamOptions):
    """GaLore on the matrices of the blocks, plain Adam on all other parameters."""

    rank: int = key("rank of the projection", binds="moments", ge=1)
    update_scale: float = key("factor of a projected update", gt=0)
    refresh_every: int = key("steps between refreshes of the projectors", ge=1)

    def build(self, parameters: dict[str, Tensor], how: How) -> list[torch.optim.Optimizer]:
        matrices, others = block_matrices(parameters)
        projected = [group | {"projected": True} for group in decay_groups(matrices, self.weight_decay)]
        groups = projected + decay_groups(others, self.weight_decay)
        return [Fira(groups, self) if isinstance(self, FiraOptions) else GaLore(groups, self)]

    def problems(self, cfg: Config) -> Iterator[Problem]:
        yield from whole_tensors(cfg)
        if cfg.backbone.name != "full":
            rule = f"projects the gradients of dense layers, but backbone={cfg.backbone.name} has none"
            yield Problem("optimizer", self.name, rule, "Use backbone=full, or optimizer=adamw")


@dataclass
class FiraOptions(Options):
    limiter: float = key("largest growth factor, per update, of the norm of the part that is not projected", ge=1)


class GaLore(Adam):
    """Runs Adam on a projection of each matrix's gradient G [m, n]: R = G P^T if m >= n, else R = P^T G.

    Adam's direction N for R moves the weight by N P or P N, times ``update_scale``. P is orthonormal: it consists of
    the leading singular vectors of G. The first of every ``refresh_every`` updates renews P. As in the authors' code,
    the moments stay, although they belong to the old P.
    """

    def __init__(self, groups: list[dict], options: Options):
        super().__init__(groups, options)
        self.rank, self.scale, self.refresh_every = options.rank, options.update_scale, options.refresh_every

    def update(self, p: Tensor, gradient: Tensor, group: dict) -> None:
        if not group.get("projected"):
            return super().update(p, gradient, group)
        state = self.state[p]
        if int(state.get("step", 0)) % self.refresh_every == 0:
            state["projector"] = projector(gradient, self.rank)
        reduced = project(gradient, state["projector"])
        direction, step = self.direction(p, reduced, group)
        move(p, self.full(p, gradient, reduced, direction), step, group["lr"] * group["weight_decay"])

    def full(self, p: Tensor, gradient: Tensor, reduced: Tensor, direction: Tensor) -> Tensor:
        """The direction for the whole matrix, in fp32 (fp64 for fp64), from Adam's ``direction`` for ``reduced``."""
        return self.scale * back(direction, self.state[p]["projector"], p)


class Fira(GaLore):
    """Fira moves a matrix by a back(N) + S, where S = (G - a back(R)) phi and a is ``update_scale``.

    phi = |N| / |R|, with norms along the reduced dimension. S contains a, as in the authors' code. The Frobenius norm
    of S grows by at most the factor ``limiter`` per update.
    """

    def __init__(self, groups: list[dict], options: FiraOptions):
        super().__init__(groups, options)
        self.limiter = options.limiter

    def full(self, p: Tensor, gradient: Tensor, reduced: Tensor, direction: Tensor) -> Tensor:
        state, along = self.state[p], 1 if p.shape[0] >= p.shape[1] else 0
        size = reduced.to(direction.dtype).norm(dim=along, keepdim=True)
        phi = direction.norm(dim=along, keepdim=True) / (size + 1e-8)
        rest = (gradient - self.scale * back(reduced, state["projector"], p)) * phi
        norm = rest.norm()
        if "residual_norm" in state:
            excess = (norm / (state["residual_norm"] + 1e-8)).clamp(min=self.limiter) / self.limiter
            rest, norm = rest / excess, norm / excess
        state["residual_norm"] = norm
        return super().full(p, gradient, reduced, direction) + rest


def projector(gradient: Tensor, rank: int) -> Tensor:
    """Orthonormal P [rank, n] if m >= n, else [m, rank], in the dtype of ``gradient`` [m, n].

    The decomposition is computed in fp32 (fp64 for fp64).
    """
    u, _, vh = torch.linalg.svd(gradient.to(at_least_fp32(gradient.dtype)), full_matrices=False)
    leading = vh[:rank] if gradient.shape[0] >= gradient.shape[1] else u[:, :rank]
    return empty_state(gradient, leading.shape, gradient.dtype).copy_(leading)


def project(gradient: Tensor, p: Tensor) -> Tensor:
    """G [m, n] -> G P^T [m, r] or P^T G [r, n]."""
    return gradient @ p.T if gradient.shape[0] >= gradient.shape[1] else p.T @ gradient


def back(reduced: Tensor, p: Tensor, like: Tensor) -> Tensor:
    """R [m, r] or [r, n] -> R P or P R, shaped as ``like``; multiplied in P's dtype, returned in fp32 or wider."""
    reduced = reduced.to(p.dtype)
    full = reduced @ p if like.shape[0] >= like.shape[1] else p @ reduced
    return full.to(at_least_fp32(p.dtype))
