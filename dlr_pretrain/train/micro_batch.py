"""The largest micro-batch that fits on the GPUs (``train.micro_batch=auto``), and what helps when memory runs out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from dlr_pretrain.config import Config
from dlr_pretrain.config.run_folder import read_record
from dlr_pretrain.models.memory import USABLE_SHARE, memory
from dlr_pretrain.optim.optimizer import state_bytes
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import update_record
from dlr_pretrain.util.errors import UserError, first_line, write_to_stderr


def planned_memory(cfg: Config, vocab_size: int, ranks: int) -> int:
    """The peak memory of a rank in bytes, as planned."""
    return memory(cfg, vocab_size, ranks, state_bytes).total


def resolve_micro_batch(cfg: Config, ranks: Ranks, vocab_size: int, run_dir: Path) -> Config:
    """``cfg`` with a number for ``train.micro_batch=auto``: the largest for which every rank has memory.

    The run's record keeps the number for later starts on the same number of ranks, because another micro-batch would
    change the rounding of the losses. Those starts use it if it fits without a reserve. Without a GPU, ``auto`` means
    ``null``. All ranks must call this. Raises UserError if not even one sequence fits.
    """
    if cfg.train.micro_batch != "auto" or ranks.device.type != "cuda":
        return cfg
    world = ranks.world_size
    share = cfg.train.global_batch // world
    recorded = ranks.on_main(lambda: read_record(run_dir).get("micro_batch", {}))
    most = recorded.get(str(world), share)
    room = torch.cuda.mem_get_info(ranks.device)[0] * (1.0 if str(world) in recorded else USABLE_SHARE)

    def fits(rows: int) -> bool:
        return planned_memory(replace(cfg, train=replace(cfg.train, micro_batch=rows)), vocab_size, world) <= room

    divisors = (rows for rows in range(most, 0, -1) if share % rows == 0)
    rows, least = min(ranks.gather((next(filter(fits, divisors), 0), room)))
    if rows == 0:
        rule = f"not even one sequence of train.seq_len={cfg.train.seq_len} fits in {least / 1e9:.1f} GB of a GPU"
        fix = "Use train.activation_checkpointing=latent or block, parallel=fsdp, or a smaller scale"
        raise UserError("train.micro_batch=auto", rule, f"{fix}; nvidia-smi shows what else is on the GPU")
    ranks.on_main(lambda: update_record(run_dir, {"micro_batch": recorded | {str(world): rows}}))
    return replace(cfg, train=replace(cfg.train, micro_batch=rows))


@contextmanager
def explain_out_of_memory(cfg: Config, ranks: Ranks, building: bool = False) -> Iterator[None]:
    """Turns an out-of-memory error of torch, numpy, cuBLAS or a new kernel into a UserError that says what helps.

    ``building`` says that the model and its optimizer are being built: micro-batches take no memory yet. A rank other
    than 0 prints the message itself: it fails alone, and the command line prints only rank 0's errors.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        said = any(text in str(error) for text in ("out of memory", "ALLOC_FAILED", "can't allocate memory"))
        if not said and not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            raise
        t, rows = cfg.train, cfg.micro_batch(ranks.world_size)
        sizes = f"train.micro_batch={rows} of {t.global_batch:,} x {t.seq_len:,} tokens per step"
        fix = "The same command continues with a smaller train.micro_batch"
        if building:
            sizes = f"a model of scale={cfg.scale.name}, before any batch"
            fix = "Use parallel=fsdp, a smaller scale, or a smaller scale.vocab_size"
        text = f"out of memory on rank {ranks.rank} with {sizes}: {first_line(error)}. {fix}; see scripts/plan.py"
        if not ranks.is_main:
            write_to_stderr(f"error: {text}")
        raise UserError(text) from error
