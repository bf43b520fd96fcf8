"""LORO (Mo et al., 2025): Adam on low-rank factors, with periodic exact steps on the manifold of their products."""

from __future__ import annotations

import torch
from torch import Tensor

from dlr_pretrain.optim.adam import Adam, decay_groups, move, without


def build(parameters: dict[str, Tensor], knobs: dict) -> list[torch.optim.Optimizer]:
    """LORO on the pairs ``<x>.a.weight`` [r, d_in] and ``<x>.b.weight`` [d_out, r], plain Adam on all others."""
    downs = {name.replace(".b.weight", ".a.weight"): name for name in parameters if name.endswith(".b.weight")}
    names = [name for a, b in downs.items() if a in parameters for name in (b, a)]
    pairs = {"params": [parameters[name] for name in names], "weight_decay": knobs["weight_decay"], "paired": True}
    groups = [*decay_groups(without(parameters, names), knobs["weight_decay"]), pairs]
    return [Loro(groups, knobs, parameters["model.embed_tokens.weight"].shape[1])]


class Loro(Adam):
    """Adam on pairs of factors; every ``exact_every``-th update of the run is an exact step.

    An exact step moves each pair on the manifold of matrices of rank r, along Adam's directions. The other updates
    move the factors themselves, by r / ``hidden_size`` times Adam's step.

    ``index`` determines which updates are exact, as it determines the restarts of the rate, so that a skipped update,
    or a run that starts from weights alone, shifts neither. An exact step resets the state of all parameters, and k
    counts from there.
    """

    def __init__(self, groups: list[dict], knobs: dict, hidden_size: int):
        super().__init__(groups, knobs)
        self.exact_every, self.hidden_size = knobs["exact_every"], hidden_size

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # as in Adam
        super().step()
        if self.is_exact:
            for state in self.state.values():
                for value in state.values():
                    value.zero_()

    @property
    def is_exact(self) -> bool:
        return (self.index + 1) % self.exact_every == 0

    def update_group(self, group: dict) -> None:
        if not group.get("paired"):
            return super().update_group(group)
        for b, a in zip(group["params"][::2], group["params"][1::2], strict=True):
            if b.grad is not None and a.grad is not None:
                (db, step), (da, _) = self.direction(b, b.grad, group), self.direction(a, a.grad, group)
                self.update_pair(b, a, db, da, step, group["weight_decay"])

    def update_pair(self, b: Tensor, a: Tensor, db: Tensor, da: Tensor, step: float, weight_decay: float) -> None:
        """Move B and A along Adam's directions."""
        if self.is_exact:
            new_b, new_a = retract(b.to(db.dtype), a.to(da.dtype).T, db, da.T, step)
            b.copy_(new_b)
            a.copy_(new_a.T)
        else:
            share = a.shape[0] / self.hidden_size
            for p, direction in ((b, db), (a, da)):
                move(p, direction, share * step, step * weight_decay)


def retract(b: Tensor, a: Tensor, db: Tensor, da: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """The balanced factors (B^T B = A^T A) of the matrix of rank r that is nearest to W - step Z.

    W = B A^T with B [d_out, r] and A [d_in, r]. Z is the tangent vector at W that the directions ``db`` and ``da``
    represent.
    """
    r = b.shape[1]
    (u, rb), (v, ra) = torch.linalg.qr(b), torch.linalg.qr(a)
    z_v = torch.linalg.solve_triangular(ra, db, upper=True, left=False)  # Z V
    ut_z = torch.linalg.solve_triangular(rb.T, da.T, upper=False)  # U^T Z
    core = ut_z @ v
    q1, k1 = torch.linalg.qr(ut_z.T - v @ core.T)
    q2, k2 = torch.linalg.qr(z_v - u @ (u.T @ z_v))
    small = b.new_zeros(2 * r, 2 * r)  # W - step Z in the bases [U Q2] and [V Q1]
    small[:r, :r] = rb @ ra.T - step * core
    small[:r, r:], small[r:, :r] = -step * k1.T, -step * k2
    p, d, qh = torch.linalg.svd(small)
    root = d[:r].sqrt()
    return torch.cat([u, q2], 1) @ (p[:, :r] * root), torch.cat([v, q1], 1) @ (qh[:r].T * root)
