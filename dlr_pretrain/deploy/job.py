"""Helpers of the commands after a run, alone or under torchrun: rank 0 decides and prints, other ranks follow."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

from dlr_pretrain.util import command as commands
from dlr_pretrain.util.errors import EXIT_FAILED, UserError, first_line

LONGEST_WAIT = timedelta(days=1)  # of ranks for each other: they exchange zero-shot scores when all are computed

T = TypeVar("T")


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def command(act: Callable[[], None]) -> int:
    """``util.command.command`` without the progress bars of libraries."""
    os.environ["TQDM_DISABLE"] = "1"  # read when torch is imported; the harness draws a bar for each subject of MMLU
    return commands.command(act)


def device_of(given: str | None):
    """The device named ``given`` ("cuda": this rank's GPU; None: a GPU if there is one). UserError if it is absent."""
    import torch

    if given is None:
        given = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(given)
        if given == "cuda":
            device = torch.device(given, int(os.environ.get("LOCAL_RANK", 0)))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {given}: {first_line(error)}. Give cpu, cuda or cuda:<number>") from error
    return device


@contextmanager
def joined(device: str) -> Iterator[None]:
    """A context in which the ranks of torchrun are one process group: gloo, and also NCCL for ``device`` "cuda"."""
    if world_size() == 1:
        yield
        return
    import torch.distributed as dist

    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=LONGEST_WAIT)
    yield
    dist.destroy_process_group()  # not after an error: it would wait for ranks that wait for this one


def decided(decide: Callable[[], T]) -> T:
    """Call ``decide`` on rank 0; returns its result on all ranks.

    If ``decide`` raises UserError or OSError, rank 0 raises it, and the other ranks exit silently with its exit code.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return decide()
    answer, error = [None, None], None
    if dist.get_rank() == 0:
        try:
            answer[0] = decide()
        except (UserError, OSError) as found:
            error, answer[1] = found, getattr(found, "exit_code", EXIT_FAILED)
    dist.broadcast_object_list(answer, device="cpu")
    if error is not None:
        raise error
    if answer[1] is not None:
        sys.exit(answer[1])
    return answer[0]
