"""The device of a rank: how it is found and prepared, and its memory."""

import ctypes
import gc
import os
import resource
import sys
import time
from collections.abc import Callable

import torch

from dlr_pretrain.config import Config, ConfigError, attention_problem, compiler_problem
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.tensors import WORKING_DTYPE
from dlr_pretrain.util.text import plural

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
GIB = 1 << 30
TIMED_WIDTH = 512  # of a square product: 2 ms in fp32, and 0.1 s in bf16 where the CPU has no instructions for it


def find_device(cfg: Config) -> torch.device:
    """The device of this rank. Raises UserError if the machine lacks it, ConfigError without a compiler or Triton."""
    if cfg.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: torch finds no GPU here. Use device=cpu, or a CUDA build of torch")
    gpus = os.environ.get("SLURM_GPUS_ON_NODE") or "0"
    if cfg.device == "auto" and gpus != "0" and not torch.cuda.is_available():
        raise UserError(
            "device=auto",
            f"SLURM gave this job {gpus} GPUs on this node, but torch finds none",
            "Use a CUDA build of torch that this driver supports, or device=cpu",
        )
    device = torch.device("cpu")
    if cfg.device != "cpu" and torch.cuda.is_available():
        local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= count:
            raise UserError(f"local rank {local} has no GPU of its own: {count} visible. Use --nproc-per-node {count}")
        device = torch.device("cuda", local)
    if problem := compiler_problem(cfg, device.type) or attention_problem(cfg, device.type):
        raise ConfigError([problem])
    return device


def prepare_device(device: torch.device) -> None:
    """Use ``device`` for the first time in a run, and free what earlier runs of a multirun have left on it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        gc.collect()  # a compiled model is a reference cycle
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    elif device.type == "cpu":
        keep_freed_memory()


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next allocations, except blocks of more than 1 GiB.

    Each step on a CPU allocates and frees the same tensors. Without this call, most of that memory is returned to the
    kernel and comes back page by page. Other C libraries stay as they are, and so does a glibc that refuses the bound.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and mallopt(M_MMAP_THRESHOLD, GIB):
        mallopt(M_TRIM_THRESHOLD, -1)


def slow_precision(cfg: Config, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> str:
    """What to use instead of a bf16 precision on a CPU without instructions for it, from one timed product; or ""."""
    if device.type != "cpu" or WORKING_DTYPE[cfg.precision.name] != torch.bfloat16:
        return ""
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(TIMED_WIDTH, TIMED_WIDTH, dtype=dtype)
        x[:1] @ x  # prepares the kernel
        began = clock()
        x @ x
        seconds.append(clock() - began)
    ratio = seconds[1] / seconds[0]
    return f"precision=fp32 is about {ratio:.0f} times as fast on this CPU, which lacks bf16" if ratio >= 2 else ""


def peak_memory(device: torch.device) -> int:
    """The peak memory of this rank in bytes: of the GPU's allocator, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {os.cpu_count()} cores, {plural(torch.get_num_threads(), 'thread')}"
