"""A device's memory: the micro-batch that fits (``train.micro_batch=auto``), and what is said when the memory runs out.

``auto`` is resolved once and kept in the run's record. On a GPU each rank tries real updates, starting from the plan's
estimate. On a CPU the estimate decides, and also with ``parallel=fsdp``, where the ranks could only try together and
would wait for one that is out of memory. All ranks take the smallest of their answers.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import torch

from dlr_pretrain.config import Config
from dlr_pretrain.config.written import read_record
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import update_record
from dlr_pretrain.train.trial import noise, trial
from dlr_pretrain.util.errors import UserError, first_line, tell
from dlr_pretrain.util.process import available_memory

RECORDED = "micro_batch"  # in manifest.json: {ranks: sequences}
CPU_SHARE = 0.5  # of the free memory: the estimate counts only tensors, and other processes use memory
GPU_SHARE = 0.94  # of a GPU's memory that the allocator may hold in a trial: NCCL and the evaluation need the rest

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
    world, sizes, free = ranks.world_size, cfg.micro_batches(ranks.world_size), free_memory(ranks)
    estimates = (rows for rows in reversed(sizes) if planned(cfg.with_micro_batch(rows), vocab_size, world) <= free)
    own = next(estimates, 0)
    if ranks.device.type == "cuda" and cfg.parallel.name != "fsdp":
        own = largest(sizes, own or 1, lambda rows: fits(cfg, ranks, vocab_size, rows))
    chosen = min(ranks.gather(own))
    if not chosen:
        rule = f"not one sequence of train.seq_len={cfg.train.seq_len} fits in {free / 1e9:.1f} GB"
        fix = "Use train.activation_checkpointing=latent or block, parallel=fsdp, or a smaller scale"
        raise UserError(f"train.micro_batch=auto: {rule}. {fix}")
    return chosen


def largest(sizes: Sequence[int], start: int, fit: Callable[[int], bool]) -> int:
    """The largest of the ascending ``sizes`` for which ``fit`` is true, tried from ``start`` on; 0 if there is none.

    If a size does not fit, no larger one fits either.
    """
    at = sizes.index(start)
    if fit(start):
        return [start, *takewhile(fit, sizes[at + 1 :])][-1]
    return next(filter(fit, reversed(sizes[:at])), 0)


def free_memory(ranks: Ranks) -> float:
    """Bytes of memory that this rank may use."""
    if ranks.device.type == "cuda":
        return GPU_SHARE * torch.cuda.mem_get_info(ranks.device)[0]
    return CPU_SHARE * available_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))


def fits(cfg: Config, ranks: Ranks, vocab_size: int, rows: int) -> bool:
    """Whether two real updates with ``rows`` sequences at once fit on this GPU, summing gradients if the run does.

    Each rank tries alone. The random state and the peak memory of the run are as if there had been no trial.
    """
    isolated, device = copy.copy(ranks), ranks.device
    isolated.rank, isolated.world_size = 0, 1
    summed = 2 if cfg.train.global_batch // ranks.world_size > rows or ranks.world_size > 1 else 1
    tried = replace(cfg, train=replace(cfg.train, global_batch=summed * rows, micro_batch=rows))

    def update_twice() -> None:  # a function, so that nothing of the model outlives it
        updates = trial(tried, isolated, vocab_size, compiled_for=ranks.world_size)
        for index in range(2):
            updates(noise(tried, isolated, vocab_size), index, cfg.train.lr)
        torch.cuda.synchronize(device)

    torch.cuda.reset_peak_memory_stats(device)
    try:
        with torch.random.fork_rng(devices=[device]):
            update_twice()
        enough = torch.cuda.max_memory_reserved(device) <= GPU_SHARE * torch.cuda.mem_get_info(device)[1]
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        enough = False
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return enough


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch's allocator had too little memory, or left too little for cuBLAS or a new kernel to allocate."""
    lacks = ("out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in lacks)


@contextmanager
def explained(cfg: Config, ranks: Ranks) -> Iterator[None]:
    """Turns an out-of-memory error into a UserError that says what helps.

    A rank other than 0 prints the message itself: it fails alone, and the command line prints only rank 0's errors.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        setting = f"train.micro_batch={cfg.micro_batch(ranks.world_size)}"
        fix = (
            "The same command continues with a smaller train.micro_batch, and train.micro_batch=auto finds the largest "
            "that fits; scripts/plan.py counts what other settings take"
        )
        text = f"out of GPU memory on rank {ranks.rank} with {setting}: {first_line(error)}. {fix}"
        if not ranks.is_main:
            tell(f"error: {text}")
        raise UserError(text) from error
