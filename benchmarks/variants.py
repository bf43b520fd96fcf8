"""The variants of a comparison: trainers of several configurations in one process, on one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from dlr_pretrain.cli import load, world_size
from dlr_pretrain.config import Config, ConfigError, Problem
from dlr_pretrain.data import Batch
from dlr_pretrain.models import Llama
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.update import trial

LR = 1e-3


class Variant:
    """One configuration, with weights and an optimizer of its own."""

    def __init__(self, name: str, cfg: Config, ranks: Ranks, model: Llama | None = None):
        self.name, self.cfg, self.device = name, cfg, ranks.device
        self.trainer, self.steps = trial(cfg, ranks, cfg.planned_vocab_size, model), 0

    def step(self, batch: Batch) -> Tensor:
        """Make one optimizer update; returns the loss, on the device."""
        loss = self.trainer(batch, self.steps, LR).loss
        self.steps += 1
        return loss

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Start from ``tensors``, by the names of our parameters; raises ValueError if the names differ."""
        state = self.trainer.weights.state
        if state.keys() != tensors.keys():
            names = sorted(state.keys() ^ tensors.keys())
            raise ValueError(f"{self.name}: {len(names)} names differ, {names[0]} among them")
        with torch.no_grad():
            for name, value in state.items():
                value.copy_(tensors[name])

    def clip_as_torch_does(self) -> None:
        """Clip by the norm of ``clip_grad_norm_``, as peers do. On a CPU it is inexact (see ``tensors.CACHED``), and
        moves the losses of twenty fp32 updates of 60m by up to 1e-3."""
        self.trainer.gradients.norm = lambda gradients: get_total_norm(gradients).float()  # fused kernels read fp32


def joined(overrides: Sequence[str], more: Sequence[str]) -> list[str]:
    """``overrides`` without the keys that ``more`` sets, followed by ``more``."""
    replaced = {word.lstrip("+~").partition("=")[0] for word in more}
    return [*(word for word in overrides if word.lstrip("+~").partition("=")[0] not in replaced), *more]


def load_comparable(variants: dict[str, list[str]]) -> dict[str, Config]:
    """The configurations. Raises ConfigError where they cannot take turns on one batch in one process."""
    configs = {name: load(overrides) for name, overrides in variants.items()}
    first, *_ = configs.values()
    for cfg in configs.values():
        for key, value, rule in (
            ("WORLD_SIZE", world_size(), 1),
            ("parallel", cfg.parallel.name, "ddp"),
            ("train.global_batch", cfg.train.global_batch, first.train.global_batch),
            ("train.seq_len", cfg.train.seq_len, first.train.seq_len),
            ("scale.vocab_size", cfg.planned_vocab_size, first.planned_vocab_size),
        ):
            if value != rule:
                why = "variants take turns in one process, on one batch"
                raise ConfigError([Problem(key, value, f"must be {rule}: {why}")])
    return configs


def fixed_batch(cfg: Config, ranks: Ranks) -> Batch:
    """Random tokens on the device, the same on every call."""
    rows, seq_len = cfg.train.global_batch, cfg.train.seq_len
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, cfg.planned_vocab_size, (rows, seq_len + 1), generator=generator, dtype=torch.int32)
    lengths = torch.full((rows,), seq_len + 1, dtype=torch.int32)
    return Batch(ranks.to_device(tokens), ranks.to_device(lengths), rows * seq_len, {})
