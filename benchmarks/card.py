"""Measures what a GPU achieves: clocks and power under load, and an update's products and attention in isolation.

The products are those of one block, forward and backward: for each layer's A and B, the output, the gradient of the
input and that of the weight. ``Layer.shared`` and ``Layer.batched`` define how a layer multiplies.
"""

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
from dlr_pretrain.models.llama import attention_bias, rotary, rotate
from dlr_pretrain.models.rotary_attention import covers, rotary_attention
from dlr_pretrain.util.errors import first_line

PRODUCT_SIZE = 8192
POSITIONS = (4_096, 16_384, 131_072)
ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
ATTENTION |= {"bias": SDPBackend.EFFICIENT_ATTENTION}  # document masks need a bias
TILES = {"64 positions, 4 warps, 2 stages": [64, 4, 2], "64, 4, 3": [64, 4, 3]}
TILES |= {"64, 8, 2": [64, 8, 2], "128, 8, 2": [128, 8, 2]}
CHECKED = 8  # rows whose values are compared: the last ones, with the largest offsets
STATE = "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,driver_version"


def everything(configs: list[Config], device: torch.device, dtype: torch.dtype) -> Iterator[dict]:
    """Yields every row that this module measures, for the layers, heads and batch of each of ``configs``."""
    yield from under_load(device, dtype)
    for cfg in configs:
        yield from products(cfg, device, dtype, POSITIONS)
        yield from attentions(cfg, device, dtype)


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


def attentions(cfg: Config, device: torch.device, dtype: torch.dtype) -> Iterator[dict]:
    """Yields every row on attention, for the heads and the batch of ``cfg``."""
    width = cfg.scale.head_width
    shape = (cfg.train.global_batch, cfg.scale.num_heads, cfg.train.seq_len, width)
    yield from attention(shape, device, dtype)
    yield from rotary_attentions(shape, device, dtype)


def attention(shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> Iterator[dict]:
    """Yields causal attention of ``shape`` [rows, heads, positions, width], forward and backward, by each kernel."""
    rows, _, length, _ = shape
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


def rotary_attentions(shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> Iterator[dict]:
    """Yields attention with rotary embedding, from qkv [3, B, T, D] to its gradient, as a block computes it.

    First the errors of torch's attention and of our kernel beside float64, then the time of torch's, compiled with the
    rotation, and of our kernel with each of ``TILES``.
    """
    rows, heads, length, width = shape
    qkv = torch.randn(3, rows, length, heads * width, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(qkv[0])
    table, flops = rotary(length, width, dtype, device, 1e4), 7 * qkv[0].numel() * length
    numbers = (torch.rand(rows, length, device=device) < 1 / 64).cumsum(1).int()
    name = f"rotary and attention {list(shape)}"

    def ours(x: Tensor, documents: Tensor | None = None, tiles: list[int] | None = None) -> Tensor:
        return rotary_attention(x, *table, documents, heads, tiles)

    def usual(x: Tensor, documents: Tensor | None = None) -> Tensor:
        cos, sin = (t.to(x.dtype) for t in table)
        q, k, v = (t.unflatten(-1, (heads, width)).transpose(1, 2) for t in x.unbind(0))
        bias = None if documents is None else attention_bias(documents, x.dtype)
        y = scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, bias, is_causal=bias is None)
        return y.transpose(1, 2).flatten(2)

    def outcome(act: Callable[..., Tensor], x: Tensor, dy: Tensor, documents: Tensor | None) -> list[Tensor]:
        y = act(x, documents)
        return [t[-CHECKED:].double() for t in (y.detach(), *torch.autograd.grad(y, x, dy)[0])]

    if not covers(qkv[0], width):
        yield {"name": f"{name}, triton", "error": "the kernel does not support the shape, the dtype or the device"}
        return
    last = qkv.detach()[:, -CHECKED:].double().requires_grad_()
    for words, documents in {"causal": None, "masked": numbers}.items():
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            few = None if documents is None else documents[-CHECKED:]
            exact = outcome(usual, last, dy[-CHECKED:].double(), few)
            outcomes = {"torch": outcome(usual, qkv, dy, documents), "triton": outcome(ours, qkv, dy, documents)}
        for kernel, found in outcomes.items():
            pairs = zip(("y", "dq", "dk", "dv"), found, exact, strict=True)
            errors = {label: ((a - b).norm() / b.norm()).item() for label, a, b in pairs}
            yield {"name": f"{name}, {kernel}, {words}", "errors": errors}
    compiled = torch.compile(usual, fullgraph=True, dynamic=False)
    actions: dict[str, Callable[[], Tensor]] = {"compiled, flash": lambda: compiled(qkv)}
    for words, tiles in TILES.items():
        if length % tiles[0] == 0:
            actions[f"triton, {words}"] = lambda tiles=tiles: ours(qkv, None, tiles)
    actions["triton, masked"] = lambda: ours(qkv, numbers)
    for words, act in actions.items():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            try:
                with torch.no_grad():
                    yield row_of(f"{name}, {words}, forward", 2 * flops // 7, act, device)
                yield row_of(f"{name}, {words}", flops, lambda act=act: torch.autograd.grad(act(), qkv, dy), device)
            except Exception as error:  # tiles that the card has no room for
                yield {"name": f"{name}, {words}", "error": first_line(error)}


def row_of(name: str, flops: int, action: Callable[[], object], device: torch.device) -> dict:
    """The row of ``action``: its median time over ten batches of ten calls, after one for warm-up."""

    def ten() -> None:
        for _ in range(10):
            action()

    times = [seconds(ten, device) / 10 for _ in range(11)][1:]
    return {"name": name, "ms": 1e3 * median(times), "flops_per_second": flops / median(times)}
