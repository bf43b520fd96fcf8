"""A device's memory: the micro-batch that fits (``train.micro_batch=auto``), and what is said when the memory runs out.

``auto`` is resolved once, by the plan's estimate, and kept in the run's record. All ranks take the smallest of their
answers. The estimate counts eager code: compiled code takes less.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dlr_pretrain.config import Config
from dlr_pretrain.config.written import read_record
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import update_record
from dlr_pretrain.util.errors import UserError, first_line, write_to_stderr
from dlr_pretrain.util.process import available_memory

RECORDED = "micro_batch"  # in manifest.json: {ranks: sequences}
CPU_SHARE = 0.5  # of the free memory: the estimate counts only tensors, and other processes use memory
GPU_SHARE = 0.94  # of the free memory of a GPU: NCCL and the evaluation need the rest

# (cfg, vocab_size, ranks) -> the peak bytes of a rank, as the plan estimates them. The command hands it in.
PlannedMemory = Callable[[Config, int, int], int]


def resolve_micro_batch(
    cfg: Config, ranks: Ranks, vocab_size: int, planned: PlannedMemory | None, run_dir: Path, resumed: bool
) -> Config:
    """``cfg`` with a number in place of ``auto``; all ranks must call.

    A resumed run takes the number that was recorded for as many ranks, if there is one: another number would change the
    rounding of its losses.
    """
    if cfg.train.micro_batch != "auto":
        return cfg
    if planned is None:
        raise ValueError("train.micro_batch=auto needs the plan's memory: call run(cfg, planned_memory)")
    count = str(ranks.world_size)
    recorded = ranks.on_main(lambda: read_record(run_dir).get(RECORDED, {}) if resumed else {})
    if count not in recorded:
        recorded = recorded | {count: largest_that_fits(cfg, ranks, vocab_size, planned)}
        ranks.on_main(lambda: update_record(run_dir, {RECORDED: recorded}))
    return cfg.with_micro_batch(recorded[count])


def largest_that_fits(cfg: Config, ranks: Ranks, vocab_size: int, planned: PlannedMemory) -> int:
    """The largest divisor of a rank's rows that fits on every rank; raises UserError if not even one sequence fits."""
    world, free = ranks.world_size, free_memory(ranks)
    fitting = (
        n for n in reversed(cfg.micro_batches(world)) if planned(cfg.with_micro_batch(n), vocab_size, world) <= free
    )
    chosen = min(ranks.gather(next(fitting, 0)))
    if not chosen:
        rule = f"not one sequence of train.seq_len={cfg.train.seq_len} fits in {free / 1e9:.1f} GB"
        fix = "Use train.activation_checkpointing=latent or block, parallel=fsdp, or a smaller scale"
        raise UserError(f"train.micro_batch=auto: {rule}. {fix}")
    return chosen


def free_memory(ranks: Ranks) -> float:
    """Bytes of memory that this rank may use."""
    if ranks.device.type == "cuda":
        return GPU_SHARE * torch.cuda.mem_get_info(ranks.device)[0]
    return CPU_SHARE * available_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation has failed, of torch, numpy, cuBLAS or a new kernel."""
    lacks = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in lacks)


@contextmanager
def explained(cfg: Config, ranks: Ranks) -> Iterator[None]:
    """Turns an out-of-memory error into a UserError that says what helps.

    A rank other than 0 prints the message itself: it fails alone, and the command line prints only rank 0's errors.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        t = cfg.train
        sizes = (
            f"train.micro_batch={cfg.micro_batch(ranks.world_size)} of {t.global_batch:,} x {t.seq_len:,} tokens a step"
        )
        fix = (
            "The same command continues with a smaller train.micro_batch, and train.micro_batch=auto finds the largest "
            "that fits; scripts/plan.py counts what other settings take"
        )
        text = f"out of memory on rank {ranks.rank} with {sizes}: {first_line(error)}. {fix}"
        if not ranks.is_main:
            write_to_stderr(f"error: {text}")
        raise UserError(text) from error
