"""``train.micro_batch=auto``: the largest micro-batch that fits, found once and kept by the run's record.

On a GPU real updates are tried, from the plan's estimate on; with ``parallel=fsdp``, where ranks could not try without
waiting for one that is out of memory, and on a CPU, the estimate decides. All ranks take the smallest of their answers.
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
from dlr_pretrain.errors import UserError
from dlr_pretrain.process import available_memory
from dlr_pretrain.train.out_of_memory import is_out_of_memory
from dlr_pretrain.train.record import update_record
from dlr_pretrain.train.runtime import Runtime
from dlr_pretrain.train.trial import noise, trial

RECORDED = "micro_batch"  # in manifest.json: {ranks: sequences}
CPU_SHARE = 0.5  # of the memory that is free: the estimate is of tensors, and the machine has other uses
GPU_SHARE = 0.94  # of a GPU's memory that the allocator may hold after a trial: NCCL and the evaluation come on top


def settled(cfg: Config, runtime: Runtime, vocab_size: int, run_dir: Path, resumed: bool) -> Config:
    """``cfg`` with a number for ``auto``: the recorded one where the run goes on among as many ranks; all ranks call.

    Losses depend on it by rounding alone, which is why a run that goes on must not choose anew.
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
    """The largest divisor of a rank's rows that fits on every rank; UserError where not one sequence does."""
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
    """The largest of ascending ``sizes`` that ``fit``, tried from ``start`` on; 0 where none does. What is larger than
    one that does not fit, fits neither.
    """
    at = sizes.index(start)
    if fit(start):
        return [start, *takewhile(fit, sizes[at + 1 :])][-1]
    return next(filter(fit, reversed(sizes[:at])), 0)


def free_memory(runtime: Runtime) -> float:
    """Bytes that this rank may count on."""
    if runtime.device.type == "cuda":
        return GPU_SHARE * torch.cuda.mem_get_info(runtime.device)[0]
    return CPU_SHARE * available_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", runtime.world_size))


def fits(cfg: Config, runtime: Runtime, vocab_size: int, rows: int) -> bool:
    """Whether two real updates of ``rows`` sequences at once, with gradients that are summed, fit on this GPU.

    This rank tries by itself; nothing that the run draws or measures is moved.
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
