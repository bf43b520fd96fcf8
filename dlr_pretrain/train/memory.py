"""``train.micro_batch=auto``: the largest micro-batch that a GPU has room for, by the plan's estimate of eager code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from dlr_pretrain.config import Config
from dlr_pretrain.config.written import read_record
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import update_record
from dlr_pretrain.util.errors import UserError

ROOM = 0.94  # of a GPU's free memory: NCCL and the evaluation need the rest
# (cfg, vocab_size, ranks) -> the peak bytes of a rank, as the plan estimates them. The command hands it in.
PlannedMemory = Callable[[Config, int, int], int]


def resolve_micro_batch(
    cfg: Config, ranks: Ranks, vocab_size: int, planned: PlannedMemory | None, run_dir: Path
) -> Config:
    """``cfg`` with a number in place of ``auto``: that of the rank with the least room. All ranks must call.

    The run's record keeps the number for later starts on as many ranks: another one would change the rounding of the
    losses. Without a GPU, or without ``planned``, ``auto`` is ``null``. Raises UserError if no sequence fits.
    """
    if cfg.train.micro_batch != "auto" or planned is None or ranks.device.type != "cuda":
        return cfg
    world = ranks.world_size
    share = cfg.train.global_batch // world
    sizes = [replace(cfg, train=replace(cfg.train, micro_batch=n)) for n in range(share, 0, -1) if share % n == 0]
    kept = ranks.on_main(lambda: read_record(run_dir).get("micro_batch", {}))
    rows = kept.get(str(world))
    if rows is None:
        room = ROOM * torch.cuda.mem_get_info(ranks.device)[0]
        rows = min(
            ranks.gather(next((c.micro_batch(world) for c in sizes if planned(c, vocab_size, world) <= room), 0))
        )
        if rows == 0:
            rule = f"not one sequence of train.seq_len={cfg.train.seq_len} fits in {room / 1e9:.1f} GB"
            fix = "Use train.activation_checkpointing=latent or block, parallel=fsdp, or a smaller scale"
            raise UserError(f"train.micro_batch=auto: {rule}. {fix}")
        ranks.on_main(lambda: update_record(run_dir, {"micro_batch": kept | {str(world): rows}}))
    return next(c for c in sizes if c.micro_batch(world) == rows)
