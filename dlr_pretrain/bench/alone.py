"""Measures a few steps in a separate process: how long the first one compiles, and how much memory they take.

``python -m dlr_pretrain.bench.alone scale=60m backbone=cola`` prints the JSON that ``alone`` returns.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

from dlr_pretrain.bench.arms import Arm, allocated, fixed_batch
from dlr_pretrain.bench.rounds import seconds, warm_up_products
from dlr_pretrain.cli import load
from dlr_pretrain.train.runtime import Runtime
from dlr_pretrain.util.command import command
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.process import peak_memory

SETTLING, STEPS = 2, 3  # steps before memory is measured, and steps that are measured
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def main(words: list[str]) -> None:
    """Train a few steps and print their seconds, the peak bytes of tensors, and the bytes that the process reserved.

    The reserved bytes are those of torch's allocator on a GPU, and the growth of the resident memory on a CPU."""
    cfg, start = load(words), time.perf_counter()
    with Runtime(cfg) as runtime:
        runtime.use_device()
        warm_up_products(runtime.device)
        before = allocated(runtime.device) if runtime.device.type == "cuda" else _begin()
        arm = Arm("alone", cfg, runtime)
        batch = fixed_batch(cfg, runtime, padding=0.0)
        built = time.perf_counter() - start
        first = seconds(lambda: arm.step(batch), runtime.device)
        for _ in range(SETTLING - 1):
            arm.step(batch)
        if runtime.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        later = min(seconds(lambda: arm.step(batch), runtime.device) for _ in range(STEPS))
        if runtime.device.type == "cuda":
            memory = {"peak": torch.cuda.max_memory_allocated() - before, "reserved": torch.cuda.max_memory_reserved()}
        else:
            grown = peak_memory() - before
            memory = {"peak": live() + allocated_by(lambda: arm.step(batch)), "reserved": grown}
    print(json.dumps({"build_s": built, "first_step_s": first, "step_s": later} | memory))


def live() -> int:
    """Bytes of all tensors that exist now."""
    gc.collect()
    storages = (t.untyped_storage() for t in gc.get_objects() if type(t) in (Tensor, Parameter))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def allocated_by(act: Callable[[], object]) -> int:
    """The largest number of bytes that torch has allocated on the CPU during ``act``, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        act()
    with tempfile.TemporaryDirectory() as scratch:
        seen.export_chrome_trace(str(trace := Path(scratch, "trace.json")))
        events = json.loads(trace.read_text())["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")


def _begin() -> int:
    """Reset the peak of the resident memory (on Linux alone), and return it, in bytes."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def alone(words: list[str], caches: Path | None = None) -> dict:
    """Run ``main`` in a new process and return what it prints; its only cache of compiled code is ``caches`` if given.

    Raises UserError if the process fails.
    """
    own = {name: str(caches / folder) for name, folder in CACHES.items()} if caches else {}
    line = [sys.executable, "-m", "dlr_pretrain.bench.alone", *words]
    done = subprocess.run(line, env=os.environ | own, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{' '.join(words)}: no step was taken. {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compile_times(words: list[str]) -> dict[str, float]:
    """Extra seconds of the first step over a later one: ``cold`` with an empty cache, ``warm`` with a filled one."""
    with tempfile.TemporaryDirectory() as scratch:
        cold, warm = (alone(words, Path(scratch)) for _ in range(2))
    return {name: run["first_step_s"] - run["step_s"] for name, run in (("cold", cold), ("warm", warm))}


def memory(words: list[str]) -> dict:
    """What ``alone`` returns, and as ``estimate`` the peak bytes that scripts/plan.py predicts."""
    from dlr_pretrain.analysis.memory import memory as estimate

    cfg = load(words)
    return alone(words) | {"estimate": estimate(cfg, cfg.planned_vocab_size, ranks=1).total}


if __name__ == "__main__":
    sys.exit(command(lambda: main(sys.argv[1:])))
