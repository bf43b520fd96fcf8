"""The variants of a comparison: training steps of several configurations in one process, on one batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from dlr_pretrain.cli import load, world_size
from dlr_pretrain.config import Config, ConfigError, Problem
from dlr_pretrain.data import Batch
from dlr_pretrain.models import Llama
from dlr_pretrain.models.adapter import split
from dlr_pretrain.models.layer import SeededInit
from dlr_pretrain.models.residual import branch_
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.state import new_model, new_optimizer
from dlr_pretrain.train.update import Update

LR = 1e-3
BY_BRANCH = "by-branch"  # a word among a variant's overrides: the residual is a branch, as in the paper


@contextmanager
def drawn_once() -> Iterator[None]:
    """Within this context, equal initial values are drawn only once: at 1b this takes seconds for each model. The host
    keeps them (2.4 GB at 1b)."""

    def once(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        drawn: dict[tuple, Tensor] = {}

        def method(init: SeededInit, name: str, shape: tuple[int, ...], scale: float) -> Tensor:
            key = init.seed, name, tuple(shape), scale
            if key not in drawn:
                drawn[key] = draw(init, name, shape, scale)
            return drawn[key].clone()

        return method

    with (
        patch.object(SeededInit, "normal", once(SeededInit.normal)),
        patch.object(SeededInit, "uniform", once(SeededInit.uniform)),
    ):
        yield


class Variant:
    """One configuration with its own weights and optimizer. With ``by_branch`` the residual is the paper's branch."""

    def __init__(self, name: str, cfg: Config, ranks: Ranks, model: Llama | None = None, by_branch: bool = False):
        self.name, self.cfg, self.device, self.steps = name, cfg, ranks.device, 0
        model, optimized = model or new_model(cfg, ranks, cfg.planned_vocab_size), cfg
        if by_branch:
            branch_(model, cfg.dlr)
            optimized = replace(cfg, dlr=replace(cfg.dlr, enabled=False))
        self.trainer = Update(cfg, ranks, model, new_optimizer(optimized, model))

    def step(self, batch: Batch) -> Tensor:
        """Makes one optimizer update; returns the loss, on the device."""
        loss = self.trainer(batch, self.steps, LR).loss
        self.steps += 1
        return loss

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Load ``tensors``, by their exported names. Raises ValueError if the names differ."""
        with torch.no_grad(), self.trainer.optimizer.taken_out() as values:
            own = split(self.trainer.model, values)
            if own.keys() != tensors.keys():
                names = sorted(own.keys() ^ tensors.keys())
                raise ValueError(f"{self.name}: {len(names)} names differ, {names[0]} among them")
            for name, value in own.items():
                value.copy_(tensors[name])

    def clip_as_torch_does(self) -> None:
        """Clip by the norm of ``clip_grad_norm_``, as peers do. On a CPU that norm is inexact (see
        ``tensors.NORM_PIECE``), which changes the losses of twenty fp32 updates of 60m by up to 1e-3."""
        model, factor = self.trainer.model, self.trainer.clip_factor

        def by_torch(_: Tensor) -> Tensor | None:
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            return factor(get_total_norm(split(model, gradients).values()).float())  # fused kernels read fp32

        self.trainer.clip_factor = by_torch


def joined(overrides: Sequence[str], more: Sequence[str]) -> list[str]:
    """``overrides`` without the keys that ``more`` sets, followed by ``more``."""
    replaced = {word.lstrip("+~").partition("=")[0] for word in more}
    return [*(word for word in overrides if word.lstrip("+~").partition("=")[0] not in replaced), *more]


def compose(overrides: list[str]) -> tuple[Config, bool]:
    """The configuration, and whether its residual is a branch. Raises ConfigError if it cannot be one."""
    cfg, by_branch = load([word for word in overrides if word != BY_BRANCH]), BY_BRANCH in overrides
    if by_branch and not can_branch(cfg):
        raise ConfigError([Problem("dlr", cfg.dlr.name, f"{BY_BRANCH} needs a residual of fixed strength")])
    return cfg, by_branch


def can_branch(cfg: Config) -> bool:
    return cfg.dlr.has_residual and not cfg.dlr.learn_alpha


def load_comparable(variants: dict[str, list[str]]) -> dict[str, Config]:
    """The configurations by name. Raises ConfigError if they cannot take turns on one batch in one process."""
    configs = {name: compose(overrides)[0] for name, overrides in variants.items()}
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
    """A batch of random tokens on the device, the same on every call."""
    batch = random_batch(cfg, ranks, cfg.planned_vocab_size)
    return replace(batch, tokens=ranks.to_device(batch.tokens), lengths=ranks.to_device(batch.lengths))


def random_batch(cfg: Config, ranks: Ranks, vocab_size: int) -> Batch:
    """A batch of random tokens for this rank."""
    rows = cfg.train.global_batch // ranks.world_size
    generator = torch.Generator().manual_seed(ranks.rank)
    tokens = torch.randint(2, vocab_size, (rows, cfg.train.seq_len + 1), generator=generator, dtype=torch.int32)
    lengths = torch.full((rows,), cfg.train.seq_len + 1, dtype=torch.int32)
    return Batch(tokens, lengths, rows * cfg.train.seq_len, {}, 1 if cfg.data.mask_documents else None)  # any id
