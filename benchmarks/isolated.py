"""Measures a few steps in a process of their own: how long the first one compiles, and how much memory they take.

``python -m benchmarks.isolated scale=60m backbone=cola`` prints the JSON that ``isolated`` returns.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

from benchmarks.protocol import seconds, warm_up_products
from benchmarks.variants import Variant, fixed_batch
from dlr_pretrain.analysis.memory import peak_bytes
from dlr_pretrain.cli import load
from dlr_pretrain.config import Config
from dlr_pretrain.train.runtime import Runtime
from dlr_pretrain.util.command import command
from dlr_pretrain.util.errors import UserError

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def main(overrides: list[str]) -> None:
    """Make a few steps and print the seconds of the first and of a later one, and the peak bytes of tensors."""
    cfg = load(overrides)
    with Runtime(cfg) as runtime:
        runtime.use_device()
        warm_up_products(runtime.device)
        on_gpu = runtime.device.type == "cuda"
        before = torch.cuda.memory_allocated() if on_gpu else 0
        variant, batch = Variant("isolated", cfg, runtime), fixed_batch(cfg, runtime)
        first, _, *later = (seconds(lambda: variant.step(batch), runtime.device) for _ in range(4))
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            variant.step(batch)
            peak = torch.cuda.max_memory_allocated() - before
        else:
            peak = peak_on_cpu(lambda: variant.step(batch))
    print(json.dumps({"first_step_s": first, "step_s": min(later), "peak": peak}))


def peak_on_cpu(act) -> int:
    """Bytes of all tensors that exist now, and the most that torch allocates beyond them during ``act``."""
    gc.collect()
    storages = (t.untyped_storage() for t in gc.get_objects() if type(t) in (Tensor, Parameter))
    now = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        act()
    with tempfile.TemporaryDirectory() as scratch:
        seen.export_chrome_trace(str(trace := Path(scratch, "trace.json")))
        events = json.loads(trace.read_text())["traceEvents"]
    return now + max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")


def isolated(overrides: list[str], caches: Path | None = None) -> dict:
    """Run ``main`` in a new process and return what it prints; its only cache of compiled code is ``caches`` if given.

    Raises UserError if the process fails.
    """
    own = {name: str(caches / folder) for name, folder in CACHES.items()} if caches else {}
    line = [sys.executable, "-m", "benchmarks.isolated", *overrides]
    done = subprocess.run(line, env=os.environ | own, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{' '.join(overrides)}: no step was made. {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compile_times(overrides: list[str]) -> dict[str, float]:
    """Extra seconds of the first step over a later one: ``cold`` with an empty cache, ``warm`` with a filled one."""
    with tempfile.TemporaryDirectory() as scratch:
        cold, warm = (isolated(overrides, Path(scratch)) for _ in range(2))
    return {name: run["first_step_s"] - run["step_s"] for name, run in (("cold", cold), ("warm", warm))}


def memory(overrides: list[str], cfg: Config) -> dict:
    """What ``isolated`` returns, and as ``estimate`` the peak bytes that scripts/plan.py predicts."""
    return isolated(overrides) | {"estimate": peak_bytes(cfg, cfg.planned_vocab_size, ranks=1)}


if __name__ == "__main__":
    sys.exit(command(lambda: main(sys.argv[1:])))
