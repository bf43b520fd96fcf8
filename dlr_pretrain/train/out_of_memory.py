"""Explains out-of-memory errors of a GPU: what was requested, what was held and by what, and what would need less."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dlr_pretrain.analysis.memory_savings import Way, ways_to_save
from dlr_pretrain.config import Config
from dlr_pretrain.train.runtime import Runtime
from dlr_pretrain.util.errors import UserError, first_line, tell


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch's allocator had too little memory, or left too little for cuBLAS or a new kernel to allocate."""
    lacks = ("out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in lacks)


@contextmanager
def explained(cfg: Config, runtime: Runtime, vocab_size: int) -> Iterator[None]:
    """Turns an out-of-memory error into a UserError with overrides to try, and writes a snapshot of the memory.

    A rank other than 0 prints the message itself: it fails alone, and the command line prints only rank 0's errors.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        snapshot = dump(Path(cfg.run.dir) / "profile", runtime)
        text = explain(str(error), cfg, runtime, *ways_to_save(cfg, vocab_size, runtime.world_size), snapshot)
        if not runtime.is_main:
            tell(f"error: {text}")
        raise UserError(text) from error


def dump(folder: Path, runtime: Runtime) -> str:
    """Write a snapshot of the GPU's allocations; returns a sentence: where it is, or why there is none; "" on a CPU."""
    if runtime.device.type != "cuda":
        return ""
    path = folder / f"out_of_memory_rank{runtime.rank}.pickle"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    except OSError as error:
        return f"No snapshot of the memory: {error}"
    return f"What held it is in {path}, for https://pytorch.org/memory_viz; profile=on adds the places in the code"


def explain(error: str, cfg: Config, runtime: Runtime, planned: int, ways: list[Way], snapshot: str) -> str:
    """The whole message; ``error`` is torch's message."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", error)
    request = f"{asked[1]} were asked for" if asked else first_line(error)
    lines = [f"out of GPU memory on rank {runtime.rank} with train.micro_batch={cfg.micro_batch(runtime.world_size)}"]
    lines[0] += f": {request}{_held(runtime)}"
    if ways:
        lines.append(f"The plan counts {planned / 1e9:.2f} GB for this run, and less with")
        width = max(len(way.words) for way in ways)
        for way in ways:
            other = "" if way.same else "  another run: rates do not carry over"
            lines.append(f"  {way.words:<{width}}  {way.bytes / 1e9:8.2f} GB{other}")
        lines.append("The same command with one of these goes on from the last checkpoint, if there is one.")
    else:
        lines.append(
            f"The plan counts {planned / 1e9:.2f} GB for this run, and no setting takes less: use larger GPUs."
        )
    return "\n".join([*lines, f"{snapshot}."] if snapshot else lines)


def _held(runtime: Runtime) -> str:
    if runtime.device.type != "cuda":
        return ""
    peak, whole = torch.cuda.max_memory_allocated(runtime.device), torch.cuda.mem_get_info(runtime.device)[1]
    return f", {peak / 1e9:.2f} GB were allocated at the peak, and the GPU has {whole / 1e9:.2f} GB"
