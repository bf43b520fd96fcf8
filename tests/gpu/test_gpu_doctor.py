"""On a GPU: the micro-batch that is tried, and the doctor. ``pytest -m gpu``."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from benchmarks.protocol import warm_up_products
from dlr_pretrain.analysis.memory import peak_bytes
from dlr_pretrain.cli import load
from dlr_pretrain.train import memory
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.trial import noise, trial
from tests.conftest import ROOT

WORDS = [
    *("scale=60m", "backbone=cola", "dlr=on", "data=sample", "logger=jsonl", "device=cuda", "compile=false"),
    *("train.global_batch=256", "train.micro_batch=auto"),
]


@pytest.mark.parametrize("left", [4e9, 12e9])
def test_the_largest_micro_batch_is_found_and_nothing_stays_behind(left):
    """With so many bytes left on the GPU: what is chosen trains, and twice as much does not fit under the bound."""
    cfg = load(WORDS)
    with Ranks(cfg) as ranks:
        ranks.use_device()
        warm_up_products(ranks.device)
        free, total = torch.cuda.mem_get_info()
        taken = int(free - left - (1 - memory.GPU_SHARE) * total)  # the bound is of all that the allocator holds
        ballast = torch.empty(taken, dtype=torch.uint8, device="cuda")
        try:
            state, held = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
            rows = memory.largest_that_fits(cfg, ranks, 32_000, peak_bytes)
            assert torch.cuda.memory_allocated() == held and torch.equal(torch.cuda.get_rng_state(), state)
            assert 1 <= rows < 256 and 256 % rows == 0
            assert not memory.fits(cfg, ranks, 32_000, 2 * rows)
            pinned = cfg.with_micro_batch(rows)
            updates = trial(pinned, ranks, 32_000)
            updates(noise(pinned, ranks, 32_000), 0, 1e-3)
            torch.cuda.synchronize()
        finally:
            updates = None
            del ballast
            torch.cuda.empty_cache()


def test_the_doctor_finds_this_machine_sound(tmp_path):
    command = [sys.executable, "scripts/doctor.py", *WORDS, f"run.root={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.cuda.get_device_name(0) in " ".join(done.stdout.split())
    assert list(tmp_path.iterdir()) == []
