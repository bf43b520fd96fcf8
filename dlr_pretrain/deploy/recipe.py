"""How a folder is fine-tuned: the protocol of the DLR paper, by default. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from dlr_pretrain.config import ConfigError, Problem

DATASET = "yahma/alpaca-cleaned"  # 51,760 rows
PRECISIONS = ("bf16_autocast", "fp32")
MICRO_BATCH = 8  # at most, unless given


@dataclass(frozen=True)
class Recipe:
    """Epochs, rows per update, peak learning rate (cosine to 0), maximal tokens per row, share of updates that warm up,
    norm to which gradients are clipped, rows that a rank takes at once (None: the largest divisor of its share up to
    8), and precision.
    """

    epochs: int = 3
    batch: int = 64
    lr: float = 2e-5
    length: int = 512
    warmup: float = 0.03
    clip: float = 1.0
    micro_batch: int | None = None
    precision: str = "bf16_autocast"

    def __post_init__(self):
        least = {"epochs": 1, "batch": 1, "length": 2, "micro_batch": 1}
        given = {name: getattr(self, name) for name in least if getattr(self, name) is not None}
        problems = [
            Problem(f"--{name.replace('_', '-')}", value, f"must be at least {least[name]}")
            for name, value in given.items()
            if value < least[name]
        ]
        if not 0 < self.lr < 1:
            problems.append(Problem("--lr", self.lr, "must be above 0 and below 1", "The paper's is 2e-5"))
        if problems:
            raise ConfigError(problems)

    def updates(self, rows: int) -> int:
        return self.epochs * -(-rows // self.batch)

    def accumulation(self, ranks: int) -> tuple[int, int]:
        """(rows that a rank takes at once, how often per update); ConfigError if ``batch`` is not divisible."""
        share, rest = divmod(self.batch, ranks)
        micro = self.micro_batch or max(n for n in range(1, MICRO_BATCH + 1) if share % n == 0)
        if rest or share % micro:
            at_once = f" x {self.micro_batch} rows at once" if self.micro_batch else ""
            rule = f"must be a multiple of {ranks} ranks{at_once}"
            fix = "Change --batch, --micro-batch or the number of ranks"
            raise ConfigError([Problem("--batch", self.batch, rule, fix)])
        return micro, share // micro
