"""Measures what a GPU achieves: clocks and power under load, and an update's products and attention in isolation.

The products are those of one block, forward and backward: for each layer's A and B, the output, the gradient of the
input and that of the weight. ``Layer.shared`` and ``Layer.batched`` define how a layer multiplies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.protocol import seconds
from dlr_pretrain.config import Config
from dlr_pretrain.models import build_model
from dlr_pretrain.models.layer import Layer, named_layers
from dlr_pretrain.util.errors import first_line

PRODUCT_SIZE = 8192
POSITIONS = (4_096, 16_384, 131_072)
ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
ATTENTION |= {"bias": SDPBackend.EFFICIENT_ATTENTION}  # document masks need a bias
STATE = "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,driver_version"


def everything(configs: list[Config], device: torch.device, dtype: torch.dtype) -> Iterator[dict]:
    """Yields every row that this module measures, for the layers, heads and batch of each of ``configs``."""
    yield from under_load(device, dtype)
    for cfg in configs:
        yield from products(cfg, device, dtype, POSITIONS)
        yield from attention(cfg, device, dtype)


def under_load(device: torch.device, dtype: torch.dtype, size: int = PRODUCT_SIZE) -> Iterator[dict]:
    """Yields a row for a ``size``^3 product, with the card's state in a second or two of load, and one for a copy."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    many = [row_of(f"{size}^3", 2 * size**3, lambda: a @ b, device) for _ in range(3)]
    state = {}
    if device.type == "cuda":
        for _ in range(1_000 if size == PRODUCT_SIZE else 1):
            a @ b
        if tool := shutil.which("nvidia-smi"):
            command = [tool, f"--query-gpu={STATE}", "--format=csv,noheader"]
            answer = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
            state = dict(zip(STATE.split(","), map(str.strip, answer[0].split(",")), strict=True)) if answer else {}
        torch.cuda.synchronize(device)
    yield many[-1] | {"state": state}
    rows = [row_of("", 0, lambda: a.copy_(b), device) for _ in range(3)]
    gigabytes = 2 * a.nbytes / 1e9
    yield rows[-1] | {"name": f"copy of {gigabytes / 2:.2g} GB", "GB/s": gigabytes / rows[-1]["ms"] * 1e3}


def products(cfg: Config, device: torch.device, dtype: torch.dtype, positions: tuple[int, ...]) -> Iterator[dict]:
    """Yields the products of one block of ``cfg``, for each number of positions in ``positions``."""
    layers = dict(named_layers(build_model(cfg, cfg.planned_vocab_size, torch.device("meta"), dtype).model.layers[0]))
    for m in positions:
        for layer in layers.values():
            for name, flops, act in multiplications(layer, m, device, dtype):
                full = f"{cfg.scale.name} {'/'.join(layer.spec.names)} {name}".replace("_proj", "")
                yield row_of(full, flops, act, device) | {"positions": m}


def multiplications(
    layer: Layer, m: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, int, Callable]]:
    """Yields each product of a factorised layer for ``m`` positions: name, FLOPs, and a function that computes it."""

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    (rows, width), (_, rank) = layer.a.shape, layer.b.shape
    x, dz, a = some(m, width), some(m, rows), some(rows, width)
    yield "A", 2 * m * a.numel(), lambda: x @ a.T
    yield "A, input", 2 * m * a.numel(), lambda: dz @ a
    yield "A, weight", 2 * m * a.numel(), lambda: dz.T @ x
    z, b = some(m, layer.count, rank).transpose(0, 1), some(layer.count, layer.b.shape[0] // layer.count, rank)
    dy = some(layer.count, m, b.shape[1])
    yield "B", 2 * m * b.numel(), lambda: torch.bmm(z, b.mT)
    yield "B, input", 2 * m * b.numel(), lambda: torch.bmm(dy, b)
    yield "B, weight", 2 * m * b.numel(), lambda: torch.bmm(dy.mT, z)


def attention(cfg: Config, device: torch.device, dtype: torch.dtype) -> Iterator[dict]:
    """Yields causal attention [rows, heads, positions, width] of ``cfg``, forward and backward, by each kernel."""
    rows, heads, length = cfg.train.global_batch, cfg.scale.num_heads, cfg.train.seq_len
    shape = (rows, heads, length, cfg.scale.hidden_size // heads)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn_like(q)
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril().expand(rows, 1, length, length)
    bias = torch.zeros(mask.shape, device=device, dtype=dtype).masked_fill(~mask, -torch.inf)
    for name, kernel in ATTENTION.items():
        how = {"attn_mask": bias} if name == "bias" else {"is_causal": True}

        def act(how=how):
            torch.autograd.grad(scaled_dot_product_attention(q, k, v, **how), (q, k, v), grad)

        flops = 7 * q.numel() * length  # half of 7 products over all pairs of positions: 2 forward, 5 backward
        row = {"name": f"attention {list(shape)}, {name}"}
        if kernel == SDPBackend.CUDNN_ATTENTION and os.environ.get("GPU_REHEARSAL"):
            yield row | {"error": "cuDNN aborts a process that has no GPU"}
            continue
        try:
            with sdpa_kernel(kernel):
                yield row_of(row["name"], flops, act, device)
        except RuntimeError as error:  # the kernel does not support the shape, the dtype or the device
            yield row | {"error": first_line(error)}


def row_of(name: str, flops: int, action: Callable[[], object], device: torch.device) -> dict:
    """The row of ``action``: its median time over ten batches of ten calls, after one for warm-up."""

    def ten() -> None:
        for _ in range(10):
            action()

    times = [seconds(ten, device) / 10 for _ in range(11)][1:]
    return {"name": name, "ms": 1e3 * median(times), "flops_per_second": flops / median(times)}
