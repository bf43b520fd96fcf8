"""``train.micro_batch=auto``: the largest micro-batch that fits, found once and kept in the run's record.

On a GPU each rank tries real updates, starting from the plan's estimate. On a CPU the estimate decides, and also with
``parallel=fsdp``, where the ranks could only try together and would wait for one that is out of memory. All ranks take
the smallest of their answers.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import torch

from dlr_pretrain.analysis.scaling import fitting, with_micro_batch
from dlr_pretrain.config import Config
from dlr_pretrain.config.written import read_record
from dlr_pretrain.train.out_of_memory import is_out_of_memory
from dlr_pretrain.train.record import update_record
from dlr_pretrain.train.runtime import Runtime
from dlr_pretrain.train.trial import noise, trial
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.process import available_memory

RECORDED = "micro_batch"  # in manifest.json: {ranks: sequences}
CPU_SHARE = 0.5  # of the free memory: the estimate counts only tensors, and other processes use memory
GPU_SHARE = 0.94  # of a GPU's memory that the allocator may hold in a trial: NCCL and the evaluation need the rest


def settled(cfg: Config, runtime: Runtime, vocab_size: int, run_dir: Path, resumed: bool) -> Config:
    """``cfg`` with a number in place of ``auto``; all ranks must call.

    A resumed run takes the number that was recorded for as many ranks, if there is one: another number would change the
    rounding of its losses.
    """
    if cfg.train.micro_batch != "auto":
        return cfg
    ranks = str(runtime.world_size)
    recorded = runtime.on_main(lambda: read_record(run_dir).get(RECORDED, {}) if resumed else {})
    if ranks not in recorded:
        recorded = recorded | {ranks: choose(cfg, runtime, vocab_size)}
        runtime.on_main(lambda: update_record(run_dir, {RECORDED: recorded}))
    return with_micro_batch(cfg, recorded[ranks])


def choose(cfg: Config, runtime: Runtime, vocab_size: int) -> int:
    """The largest divisor of a rank's rows that fits on every rank; raises UserError if not even one sequence fits."""
    share = cfg.train.global_batch // runtime.world_size
    divisors = [n for n in range(1, share + 1) if share % n == 0]
    room = free_memory(runtime)
    own = fitting(cfg, vocab_size, runtime.world_size, room) or 0
    if runtime.device.type == "cuda" and cfg.parallel.name != "fsdp":
        own = largest(divisors, own or 1, lambda rows: fits(cfg, runtime, vocab_size, rows))
    chosen = min(runtime.gather(own))
    if not chosen:
        rule = f"not one sequence of train.seq_len={cfg.train.seq_len} fits in {room / 1e9:.1f} GB"
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


def free_memory(runtime: Runtime) -> float:
    """Bytes of memory that this rank may use."""
    if runtime.device.type == "cuda":
        return GPU_SHARE * torch.cuda.mem_get_info(runtime.device)[0]
    return CPU_SHARE * available_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", runtime.world_size))


def fits(cfg: Config, runtime: Runtime, vocab_size: int, rows: int) -> bool:
    """Whether two real updates with ``rows`` sequences at once fit on this GPU, summing gradients if the run does.

    Each rank tries alone. The random state and the peak memory of the run are as if there had been no trial.
    """
    alone = copy.copy(runtime)
    alone.rank, alone.world_size = 0, 1
    summed = 2 if cfg.train.global_batch // runtime.world_size > rows or runtime.world_size > 1 else 1
    train = replace(cfg.train, global_batch=summed * rows, micro_batch=rows)
    tried = replace(cfg, train=train)
    device = runtime.device
    torch.cuda.reset_peak_memory_stats(device)
    with torch.random.fork_rng(devices=[device]):
        try:
            updates = trial(tried, alone, vocab_size, compiled_for=runtime.world_size)
            batch = noise(tried, alone, vocab_size)
            for index in range(2):
                updates.update(batch, index, cfg.train.lr)
            torch.cuda.synchronize(device)
            enough = torch.cuda.max_memory_reserved(device) <= GPU_SHARE * torch.cuda.mem_get_info(device)[1]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            enough = False
        updates = batch = None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return enough
