"""The arms of a comparison: trainers of several configurations in one process, on one batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from dlr_pretrain.cli import world_size
from dlr_pretrain.config import Config, ConfigError, Problem
from dlr_pretrain.data import Batch
from dlr_pretrain.models import Llama
from dlr_pretrain.train.runtime import Runtime
from dlr_pretrain.train.trial import trial

LR = 1e-3


class Arm:
    """One configuration, with weights and an optimizer of its own."""

    def __init__(self, name: str, cfg: Config, runtime: Runtime, model: Llama | None = None):
        self.name, self.cfg, self.device = name, cfg, runtime.device
        before = allocated(self.device)
        self.updates, self.taken = trial(cfg, runtime, cfg.planned_vocab_size, model), 0
        self.resident = allocated(self.device) - before  # bytes that this arm holds on the GPU
        self.peak = 0  # the same at the highest point of a step

    def step(self, batch: Batch) -> Tensor:
        """Take one optimizer update; returns the loss, on the device."""
        before = allocated(self.device) if self.taken == 0 else 0
        loss = self.updates.update(batch, self.taken, LR)[0]
        if self.taken == 0:  # this update has created the optimizer's state
            self.resident += allocated(self.device) - before
        self.taken += 1
        return loss

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Start from ``tensors``, by the names of our parameters; raises ValueError if the names differ."""
        state = self.updates.weights.state
        if state.keys() != tensors.keys():
            names = sorted(state.keys() ^ tensors.keys())
            raise ValueError(f"{self.name}: {len(names)} names differ, {names[0]} among them")
        with torch.no_grad():
            for name, value in state.items():
                value.copy_(tensors[name])

    def clip_as_torch_does(self) -> None:
        """Clip by the norm of ``clip_grad_norm_``, as peers do. On a CPU it is inexact (see ``gradients.CACHED``), and
        moves the losses of twenty fp32 updates of 60m by up to 1e-3."""
        self.updates.gradients.norm = lambda gradients: get_total_norm(gradients).float()  # fused kernels read fp32

    def measure_memory(self, batch: Batch) -> None:
        """Set ``peak`` to this arm's resident bytes plus the bytes that a step allocates at its peak. GPUs only."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            before = allocated(self.device)
            self.step(batch)
            self.peak = self.resident + torch.cuda.max_memory_allocated(self.device) - before


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def require_comparable(configs: Iterable[Config]) -> None:
    """Raise ConfigError for arms that cannot take the same batch, or that one process cannot measure."""
    configs = list(configs)
    require_one_process(configs)
    first, *others = configs
    for cfg in others:
        for name in ("global_batch", "seq_len"):
            ours, theirs = getattr(first.train, name), getattr(cfg.train, name)
            if ours != theirs:
                rule = f"the first arm has {ours}, and arms are compared on one batch"
                raise ConfigError([Problem(f"train.{name}", theirs, rule)])
        if first.planned_vocab_size != cfg.planned_vocab_size:
            rule = f"the first arm has {first.planned_vocab_size}, and arms are compared on one batch"
            raise ConfigError([Problem("scale.vocab_size", cfg.planned_vocab_size, rule)])


def require_one_process(configs: Iterable[Config]) -> None:
    """Raise ConfigError for several ranks, sharding or an automatic micro-batch: arms take turns in one process."""
    if (ranks := world_size()) > 1:
        raise ConfigError([Problem("WORLD_SIZE", ranks, "a step is measured in one process", "Leave torchrun out")])
    for cfg in configs:
        if cfg.parallel.name != "ddp":
            rule = "shards over ranks, and a step is measured in one process"
            raise ConfigError([Problem("parallel", cfg.parallel.name, rule, "Leave it out")])
        if cfg.train.micro_batch == "auto":
            rule = "is found as a run starts, and a step is measured without one"
            raise ConfigError([Problem("train.micro_batch", "auto", rule, "Give a number")])


def fixed_batch(cfg: Config, runtime: Runtime, padding: float) -> Batch:
    """Random tokens on the device, the same on every call. A share ``padding`` of each row is padding."""
    rows, seq_len = cfg.train.global_batch, cfg.train.seq_len
    real = seq_len + 1 if padding == 0 else max(2, round(seq_len * (1 - padding)))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, cfg.planned_vocab_size, (rows, seq_len + 1), generator=generator, dtype=torch.int32)
    tokens[:, real:] = 0
    lengths = torch.full((rows,), real, dtype=torch.int32)
    return Batch(runtime.to_device(tokens), runtime.to_device(lengths), rows * min(real, seq_len), {})
