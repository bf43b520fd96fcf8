"""The parity check: a step's time counts only if its losses agree with those of the plain model.

The step and the plain form of its configuration make ``STEPS`` updates on one batch from the same initial weights. The
plain form is eager, recomputes nothing, and has the residual as the paper's branch (in the weights if its strength is
learned). fp32 losses must agree to 1e-5. For bf16 the bound is ``SPREAD`` times the largest difference between plain
runs whose initial weights differ only in rounding: to nearest, or at random.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from benchmarks.variants import Variant, can_branch
from dlr_pretrain.config import Config
from dlr_pretrain.data import Batch
from dlr_pretrain.models import Llama, build_model
from dlr_pretrain.optim.adamw import rounded
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.util.tensors import STATE_DTYPE, WORKING_DTYPE

STEPS = 20
FP32_BOUND = 1e-5
SPREAD = 3.0
ROUNDING_SEEDS = (0, 1, 2)  # of the initial weights that are rounded at random


@dataclass(frozen=True)
class Verdict:
    """The largest relative difference of a loss from that of ``reference`` over ``STEPS`` updates, and its bound."""

    reference: str
    difference: float
    bound: float

    @property
    def passes(self) -> bool:
        return self.difference <= self.bound


def losses(step: Callable[[Batch], Tensor], batch: Batch) -> list[float]:
    """The losses of ``STEPS`` updates."""
    return torch.stack([step(batch).detach().float() for _ in range(STEPS)]).tolist()


def difference(found: list[float], expected: list[float]) -> float:
    """The largest relative difference. NaN counts as the largest, and exceeds every bound."""
    pairs = zip(found, expected, strict=True)
    return max((abs(f - e) / (abs(e) or 1.0) for f, e in pairs), key=lambda d: (d != d, d))


class References:
    """The losses of plain runs on ``batch``. Each run is made only once."""

    def __init__(self, ranks: Ranks, batch: Batch):
        self.ranks, self.batch = ranks, batch
        self.known: dict[tuple[str, int | None], list[float]] = {}

    def judge(self, cfg: Config, found: list[float]) -> Verdict:
        """The verdict on ``found``, the losses of ``cfg``, against those of its plain form."""
        return Verdict("the plain model", difference(found, self.losses(cfg)), self.bound(cfg))

    def bound(self, cfg: Config) -> float:
        """The largest relative difference that two forms of ``cfg`` may have."""
        if WORKING_DTYPE[cfg.precision.name] == torch.float32:
            return FP32_BOUND
        runs = [self.losses(cfg, seed) for seed in (None, *ROUNDING_SEEDS)]
        return SPREAD * max(difference(a, b) for a, b in combinations(runs, 2))

    def losses(self, cfg: Config, rounding: int | None = None) -> list[float]:
        cfg = plain(cfg)
        key = repr(replace(cfg, run=None)), rounding  # the run's name does not change a loss
        if key not in self.known:
            model = plain_model(cfg, self.ranks, rounding)
            plainly = Variant("plain", cfg, self.ranks, model, by_branch=can_branch(cfg))
            self.known[key] = losses(plainly.step, self.batch)
        return self.known[key]


def plain(cfg: Config) -> Config:
    return replace(cfg, compile=False, train=replace(cfg.train, activation_checkpointing="none"))


def plain_model(cfg: Config, ranks: Ranks, rounding: int | None) -> Llama:
    """The model of ``cfg``, rounded to nearest in the state's dtype, or at random to bf16 with seed ``rounding``."""
    dtype = STATE_DTYPE[cfg.precision.name]
    model = build_model(cfg, cfg.planned_vocab_size, ranks.device, dtype if rounding is None else torch.float32)
    if rounding is not None:
        generator = torch.Generator(ranks.device).manual_seed(rounding)
        for p in model.parameters():
            bits = torch.randint(1 << 16, p.shape, generator=generator, dtype=torch.int32, device=p.device)
            p.data.copy_(rounded(p.data, bits))
    return model.to(dtype)
