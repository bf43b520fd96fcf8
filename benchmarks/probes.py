"""Answers to questions that decide a design: what a launch costs, whether fp8 pays, how fast ``train.py`` itself is."""

import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.card import row_of
from benchmarks.protocol import seconds
from dlr_pretrain.config import Config
from dlr_pretrain.util.errors import UserError, first_line
from dlr_pretrain.util.files import read_metrics

LAUNCHES = 2_000
MODES = {
    "confidential computing": ("conf-compute", "-f"),
    "state": ("--query-gpu=clocks.sm,pstate", "--format=csv,noheader"),
}
POSITIONS = (4_096, 16_384)
SUMMED = 10_000  # values of a simulated gradient


def launches(device: torch.device, count: int = LAUNCHES) -> Iterator[dict]:
    """Yields the time of ``count`` small kernels: launched from Python, from compiled code, and as one graph."""
    x = torch.zeros(1, device=device)
    one_kernel = torch.compile(lambda t: t.add_(1), dynamic=False)

    def eager() -> None:
        for _ in range(count):
            x.add_(1)

    def compiled() -> None:
        for _ in range(count):
            one_kernel(x)

    actions: dict[str, Callable[[], object]] = {"from Python": eager, "from compiled code": compiled}
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        eager()  # on this stream, before the recording
        with torch.cuda.graph(graph):
            eager()
        actions["as one graph"] = graph.replay
    for name, action in actions.items():
        action()
        took = statistics.median(seconds(action, device) for _ in range(5))
        yield {"name": f"{count:,} launches {name}", "ms": 1e3 * took, "us": 1e6 * took / count, "state": modes()}


def modes() -> dict[str, str]:
    """What ``nvidia-smi`` says of the card's mode and clocks."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    answers = {name: subprocess.run([tool, *words], capture_output=True, text=True) for name, words in MODES.items()}
    return {name: " ".join(answer.stdout.split()) or "no answer" for name, answer in answers.items()}


def sums(_: torch.device) -> Iterator[dict]:
    """Yields what a ring loses that rounds the sum of gradients at each rank, in bf16, for several numbers of ranks.

    Gradients of ranks have a common part and noise. ``common`` is the share of the common part in their norm. ``lost``
    is the share of the exact sum that is missing along it, ``error`` the norm of the difference, relative to the sum.
    fp32 sums are rounded to bf16 once.
    """
    generator = torch.Generator().manual_seed(0)
    for common in (1.0, 0.5, 0.1):
        shared = torch.randn(SUMMED, generator=generator, dtype=torch.float64)
        for ranks in (8, 64, 256, 1_024):
            exact, by_ring = torch.zeros_like(shared), torch.zeros(SUMMED, dtype=torch.bfloat16)
            for _ in range(ranks):
                noise = torch.randn(SUMMED, generator=generator, dtype=torch.float64)
                gradient = (common * shared + math.sqrt(1 - common**2) * noise).bfloat16()
                exact += gradient.double()
                by_ring += gradient
            row = {"name": f"{ranks:,} ranks, common part {common:g}"}
            for label, found in (("bf16", by_ring.double()), ("fp32", exact.float().bfloat16().double())):
                row[f"lost_{label}"] = 1 - ((found @ exact) / (exact @ exact)).item()
                row[f"error_{label}"] = ((found - exact).norm() / exact.norm()).item()
            yield row


def fp8(cfg: Config, device: torch.device) -> Iterator[dict]:
    """Yields products of ``cfg`` in bf16 and in fp8: the product alone, and with the casts of both factors.

    They are the head, the up-projection of gate and up, and the gradient of the input of gate and up's A. Scales are
    those of whole tensors, from their largest values.
    """
    d, rank, wide = cfg.scale.hidden_size, cfg.scale.rank, -(-cfg.scale.intermediate_size // 64) * 64
    shapes = {"head": (d, cfg.planned_vocab_size), "gate B": (rank, wide), "gate/up A, input": (2 * rank, d)}
    to_fp8 = torch.compile(quantised, dynamic=False)
    for m in POSITIONS:
        for name, (k, n) in shapes.items():
            x, w = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in ((m, k), (n, k)))
            title, flops = f"{cfg.scale.name} {name} [{m}, {k}] x [{k}, {n}]", 2 * m * k * n
            yield row_of(f"{title}, bf16", flops, lambda x=x, w=w: x @ w.T, device)
            try:
                (x8, sx), (w8, sw) = to_fp8(x), to_fp8(w)
                yield row_of(f"{title}, fp8", flops, lambda a=(x8, w8, sx, sw): product(*a), device)

                def cast_too(x=x, w=w) -> Tensor:
                    (x8, sx), (w8, sw) = to_fp8(x), to_fp8(w)
                    return product(x8, w8, sx, sw)

                exact = x.float() @ w.float().T
                error = ((cast_too().float() - exact).norm() / exact.norm()).item()
                yield row_of(f"{title}, fp8 with casts (relative error {error:.1e})", flops, cast_too, device)
            except (RuntimeError, NotImplementedError) as error:
                yield {"name": f"{title}, fp8", "error": first_line(error)}


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in fp8 (e4m3), and the scale that it was divided by."""
    scale = x.abs().amax().float().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def product(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    """x w^T in bf16, of fp8 tensors. (torch has a public name for this product only since 2.10.)"""
    return torch._scaled_mm(x, w.T, x_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def training(variants: dict[str, list[str]]) -> Iterator[dict]:
    """Yields for each variant (name -> overrides) how fast a run of ``train.py`` was, by its own record.

    ``tokens_per_second`` is the record's last one: of updates, with the host's work and the loader, without the first
    steps, evaluations and saves. ``wall_s`` is the whole process, ``first_s`` up to the record of step 1.
    """
    for name, overrides in variants.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch, "run")
            begun = time.time()
            line = [sys.executable, "train.py", *overrides, f"run.dir={folder}"]
            done = subprocess.run(line, capture_output=True, text=True)
            if done.returncode:
                raise UserError(f"{' '.join(overrides)}: the run failed. {(done.stdout + done.stderr)[-2000:]}")
            records = list(read_metrics(folder / "metrics.jsonl"))
        evaluated = [r for r in records if "eval/loss" in r]
        yield {
            "name": name,
            "overrides": overrides,
            "tokens_per_second": records[-1]["perf/tokens_per_second"],
            "mfu": records[-1]["perf/mfu"],
            "peak": 1e9 * records[-1]["perf/max_memory_gb"],
            "steps": records[-1]["step"],
            "first_s": records[0]["time"] - begun,
            "wall_s": time.time() - begun,
            "eval_loss": evaluated[-1]["eval/loss"] if evaluated else None,
            "said": [row.strip() for row in (done.stdout + done.stderr).splitlines() if "CUDA graphs" in row],
        }
