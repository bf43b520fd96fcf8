"""Overrides with which a configuration takes less memory, each with the plan's figure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dlr_pretrain.analysis.memory import memory
from dlr_pretrain.config import Config, Precision
from dlr_pretrain.config.optimizer_rules import OF_MATRICES
from dlr_pretrain.config.tree import Parallel, largest_divisor


@dataclass(frozen=True)
class Way:
    """Overrides for the command line (``words``), and the bytes that the plan then counts on one GPU.

    If ``same``, the run goes on with them from its last checkpoint; otherwise they make another run.
    """

    words: str
    bytes: int
    same: bool


def ways_to_save(cfg: Config, vocab_size: int, ranks: int) -> tuple[int, list[Way]]:
    """The plan's bytes for ``cfg`` on one of ``ranks`` GPUs, and the ways that take less.

    Ways that go on with the same run come first, and among equals the one with the fewest bytes.
    """
    now = memory(cfg, vocab_size, ranks).total
    found = [Way(words, memory(other, vocab_size, ranks).total, same) for words, other, same in _candidates(cfg, ranks)]
    return now, sorted((way for way in found if way.bytes < now), key=lambda way: (not way.same, way.bytes))


def _candidates(cfg: Config, ranks: int) -> list[tuple[str, Config, bool]]:
    train, rows = cfg.train, cfg.micro_batch(ranks)
    found = []
    half = largest_divisor(train.global_batch // ranks, max(1, rows // 2))
    fewer = replace(train, micro_batch=half)
    kept = [mode for mode in ("latent", "block") if mode != train.activation_checkpointing]
    if train.activation_checkpointing == "block" or not cfg.backbone.knobs.get("factorized"):
        kept = [mode for mode in kept if mode == "block"]
    fewer_go = half < rows
    if fewer_go:
        found.append((f"train.micro_batch={half}", replace(cfg, train=fewer), True))
    for mode in kept:
        word = f"train.activation_checkpointing={mode}"
        found.append((word, replace(cfg, train=replace(train, activation_checkpointing=mode)), True))
        if fewer_go:
            both = replace(fewer, activation_checkpointing=mode)
            found.append((f"train.micro_batch={half} {word}", replace(cfg, train=both), True))
    whole = cfg.parallel.name == "ddp"
    if ranks > 1 and whole and cfg.optimizer.name not in OF_MATRICES and not cfg.probe.enabled:
        found.append(("parallel=fsdp", replace(cfg, parallel=Parallel("fsdp")), True))
    if cfg.precision.name != "bf16" and cfg.dlr.mode != "decayed_offset":
        found.append(("precision=bf16", replace(cfg, precision=Precision("bf16")), False))
    return found
