"""LORO (Mo et al., 2025): Adam on low-rank factors, with periodic exact steps on the manifold of their products."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dlr_pretrain.config import Config, Problem
from dlr_pretrain.config.key import key
from dlr_pretrain.config.tree import How
from dlr_pretrain.optim.adam import Adam, AdamOptions, decay_groups, move, whole_tensors

RESTARTS = {"optimizer.schedule": "loro"}


@dataclass
class Options(AdamOptions):
    """LORO on pairs ``<x>.a.weight`` [r, d_in] and ``<x>.b.weight`` [d_out, r], plain Adam on all other parameters."""

    schedule: Literal["loro", "cosine"] = key("loro: a cosine that restarts after each exact step; cosine: as usual")
    exact_every: int = key("steps between exact steps", ge=1)
    restart_warmup: int = key("steps of warm-up after an exact step", read_if=RESTARTS, ge=0)
    shift: int | None = key(
        "delay of the cosine, a multiple of exact_every; null: the largest in the warm-up", read_if=RESTARTS, ge=0
    )

    def build(self, parameters: dict[str, Tensor], how: How) -> list[torch.optim.Optimizer]:
        downs = {name.replace(".b.weight", ".a.weight"): name for name in parameters if name.endswith(".b.weight")}
        names = [name for a, b in downs.items() if a in parameters for name in (b, a)]
        others = {name: p for name, p in parameters.items() if name not in names}
        pairs = {"params": [parameters[name] for name in names], "weight_decay": self.weight_decay}
        pairs["hidden_size"] = parameters["model.embed_tokens.weight"].shape[1]
        return [Loro([*decay_groups(others, self.weight_decay), pairs], self)]

    @property
    def restart_every(self) -> int | None:
        return self.exact_every if self.schedule == "loro" else None

    def rate(self, cfg: Config, index: int) -> float:
        t, every = cfg.train, self.exact_every
        shift = cfg.warmup_steps // every * every if self.shift is None else self.shift  # restarts follow exact steps
        return rate(index, t.steps, cfg.warmup_steps, t.lr, t.min_lr_ratio, every, self.restart_warmup, shift)

    def problems(self, cfg: Config) -> Iterator[Problem]:
        yield from whole_tensors(cfg)
        if cfg.backbone.name != "lowrank":
            rule = f"moves the product B A^T of linear factors, which backbone={cfg.backbone.name} does not multiply by"
            yield Problem("optimizer", self.name, rule, "Use backbone=lowrank, or optimizer=adamw")
        elif cfg.dlr.enabled:
            rule = f"moves the product B A^T, not the (B + beta R^T) A^T that dlr={cfg.dlr.name} multiplies by"
            yield Problem("optimizer", self.name, rule, "Use dlr=off, or optimizer=adamw")
        every, shift, span = self.exact_every, self.shift, cfg.train.steps - cfg.warmup_steps
        if self.schedule == "loro" and shift is not None and (shift > span or shift % every):
            rule = f"must be null or a multiple of optimizer.exact_every={every} up to the {span} steps after warm-up"
            yield Problem("optimizer.shift", shift, rule)


class Loro(Adam):
    """Adam on pairs of factors; every ``exact_every``-th update of the run is an exact step.

    An exact step moves each pair along Adam's directions on the manifold of matrices of rank r. The other updates move
    the factors themselves, by r / ``hidden_size`` times Adam's step.

    ``index`` determines both the exact steps and the restarts of the rate. A skipped update, or a run that starts from
    weights alone, therefore shifts neither. An exact step resets the state of all parameters, including Adam's k.
    """

    def __init__(self, groups: list[dict], options: Options):
        super().__init__(groups, options)
        self.exact_every = options.exact_every

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
        if "hidden_size" not in group:
            return super().update_group(group)
        for b, a in zip(group["params"][::2], group["params"][1::2], strict=True):
            if b.grad is not None and a.grad is not None:
                (db, step), (da, _) = self.direction(b, b.grad, group), self.direction(a, a.grad, group)
                self.update_pair(b, a, db, da, step, group)

    def update_pair(self, b: Tensor, a: Tensor, db: Tensor, da: Tensor, step: float, group: dict) -> None:
        """Move B and A along Adam's directions."""
        if self.is_exact:
            new_b, new_a = retract(b.to(db.dtype), a.to(da.dtype).T, db, da.T, step)
            b.copy_(new_b)
            a.copy_(new_a.T)
        else:
            share = a.shape[0] / group["hidden_size"]
            for p, direction in ((b, db), (a, da)):
                move(p, direction, share * step, step * group["weight_decay"])


def retract(b: Tensor, a: Tensor, db: Tensor, da: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """The balanced factors (B^T B = A^T A) of the rank-r matrix nearest to W - step Z.

    W = B A^T with B [d_out, r] and A [d_in, r]. The directions ``db`` and ``da`` represent Z, a tangent vector at W.
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


def rate(
    index: int, steps: int, warmup: int, peak: float, min_ratio: float, every: int, restart: int, shift: int
) -> float:
    """The learning rate of the update with this ``index``, counted from 0, with the constants of the authors' code.

    The warm-up starts at ``min_ratio * peak`` rather than 0. The cosine after it is ``shift`` updates late: it first
    rises a little further, and ends above the minimum. Every ``every`` updates an exact step zeroes the moments. The
    rate then rises over ``restart`` updates from almost 0 to the value of the curve at the restart. Between the end of
    the warm-up and update ``shift + every`` the rate does not restart.
    """
    warms_up, span = index < warmup, steps - warmup
    t = index if warms_up else index - shift
    cycle, since = divmod(t, every)
    restarting = cycle > 0 and since < restart
    position = cycle * every if restarting else t
    if warms_up:
        top = 0.5 * (1 + math.cos(math.pi * shift / span))
        level = position / warmup * (top - min_ratio) + min_ratio
    else:
        level = min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * (position - warmup) / span))
    if restarting:
        level = since / restart * (level - 1e-6) + 1e-6
    return peak * level
