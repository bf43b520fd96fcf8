"""Measures the peak memory of a step and the compile time of the first one, in a new process.

``python -m benchmarks.isolated scale=60m backbone=cola`` prints the JSON that ``isolated`` returns.
"""

import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

from benchmarks.protocol import seconds, warm_up_products
from benchmarks.variants import Variant, compose, fixed_batch
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.util.errors import UserError, command


def main(overrides: list[str]) -> None:
    """Run a few steps, and print the seconds of the first and of a later one, and the peak bytes of tensors."""
    cfg, by_branch = compose(overrides)
    with Ranks(cfg) as ranks:
        ranks.use_device()
        warm_up_products(ranks.device)
        on_gpu = ranks.device.type == "cuda"
        before = torch.cuda.memory_allocated() if on_gpu else 0
        variant, batch = Variant("isolated", cfg, ranks, by_branch=by_branch), fixed_batch(cfg, ranks)
        first, _, *later = (seconds(lambda: variant.step(batch), ranks.device) for _ in range(4))
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            variant.step(batch)
            peak = torch.cuda.max_memory_allocated() - before
        else:
            peak = peak_on_cpu(lambda: variant.step(batch))
    print(json.dumps({"first_step_s": first, "step_s": min(later), "peak": peak}))


def peak_on_cpu(action: Callable[[], object]) -> int:
    """The bytes of all tensors that exist now, plus the most that torch allocates beyond them during ``action``."""
    gc.collect()
    held: dict[int, int] = {}
    for tensor in gc.get_objects():
        if type(tensor) in (Tensor, Parameter):
            with suppress(RuntimeError):  # a tensor that the compiler has traced has no memory
                storage = tensor.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
    now = sum(held.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        action()
    with tempfile.TemporaryDirectory() as scratch:
        seen.export_chrome_trace(str(trace := Path(scratch, "trace.json")))
        events = json.loads(trace.read_text())["traceEvents"]
    return now + max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")


def isolated(overrides: list[str]) -> dict:
    """Run ``main`` in a new process and return what it prints; raises UserError if the process fails."""
    line = [sys.executable, "-m", "benchmarks.isolated", *overrides]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{' '.join(overrides)}: the measurement failed. {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(command(lambda: main(sys.argv[1:])))
