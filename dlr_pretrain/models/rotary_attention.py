"""Causal attention with rotary embeddings and document masks in one Triton kernel each way, for short rows.

The kernels read q, k and v where the product of ``Layer.expand`` left them, and write their gradients the same way:
there are no rotated copies, transposes, biases [B, 1, T, T] or fp32 sums of dq. Products take the dtype of the model,
everything else is fp32. Shapes: B rows, T positions, H heads, E values per head, D = H E.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlr_pretrain.config.tree import TRITON_BLOCK, TRITON_HEADS, TRITON_POSITIONS

try:
    import triton.language as tl
    from triton import jit
except ImportError:  # CPU builds of torch come without it, but plans for GPUs call the operators on the meta device
    jit = lambda kernel: kernel  # noqa: E731

TILES = {32: [64, 4, 2], 64: [64, 4, 2], 128: [64, 8, 2]}  # by E: positions of a program, warps, stages of its pipeline


def covers(x: Tensor, head_width: int) -> bool:
    """Whether the kernels compute attention over the positions of x [B, T, ...]; ``config/rules.py`` says the same."""
    fits = x.shape[1] % TRITON_BLOCK == 0 and x.shape[1] <= TRITON_POSITIONS and head_width in TRITON_HEADS
    return fits and not x.is_cpu and x.dtype in (torch.bfloat16, torch.float16)


def rotary_attention(qkv: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None, heads: int,
                     tiles: list[int] | None = None) -> Tensor:  # fmt: skip
    """softmax(R q (R k)^T / sqrt(E)) v for qkv [3, B, T, D] -> [B, T, D]; R rotates by ``cos`` and ``sin`` [T, E].

    A position attends to itself and to earlier positions; with ``documents`` [B, T], only to those of its document.
    """
    qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
    documents = None if documents is None else documents.contiguous()
    return _attend(qkv, cos, sin, documents, heads, tiles or TILES[qkv.shape[-1] // heads])[0]


# Kernels. A program has one block of positions of one head of a row. x points to this head at position 0, and stride is
# the distance of positions.


@jit
def _tile(positions, stride, WIDTH: tl.constexpr):
    """The offsets [block, WIDTH] of the first WIDTH values at ``positions``."""
    return positions[:, None] * stride + tl.arange(0, WIDTH)[None, :]


@jit
def _rotated(x, cos, sin, positions, stride, WIDTH: tl.constexpr):
    """The left and the right half [block, WIDTH / 2] of x at ``positions``, rotated."""
    HALF: tl.constexpr = WIDTH // 2
    offsets, angle = _tile(positions, stride, HALF), _tile(positions, WIDTH, HALF)
    left, right = tl.load(x + offsets), tl.load(x + offsets + HALF)
    a, b = left.to(tl.float32), right.to(tl.float32)
    c, s = tl.load(cos + angle).to(tl.float32), tl.load(sin + angle).to(tl.float32)
    return (a * c - b * s).to(left.dtype), (b * c + a * s).to(left.dtype)


@jit
def _store_turned_back(x, cos, sin, positions, stride, left, right, WIDTH: tl.constexpr):
    """x at ``positions`` = the gradient of what was rotated, from its halves after the rotation."""
    HALF: tl.constexpr = WIDTH // 2
    offsets, angle = _tile(positions, stride, HALF), _tile(positions, WIDTH, HALF)
    c, s = tl.load(cos + angle).to(tl.float32), tl.load(sin + angle).to(tl.float32)
    tl.store(x + offsets, (left * c + right * s).to(x.dtype.element_ty))
    tl.store(x + offsets + HALF, (right * c - left * s).to(x.dtype.element_ty))


@jit
def _scores(q_left, q_right, k_left, k_right, rows, columns, documents, scale):
    """Scores [rows, columns] times log2(e), for powers of two; -inf where a row does not see a column."""
    products = tl.dot(q_left, tl.trans(k_left))
    products = tl.dot(q_right, tl.trans(k_right), products)
    seen = rows[:, None] >= columns[None, :]
    if documents is not None:
        seen = seen & (tl.load(documents + rows)[:, None] == tl.load(documents + columns)[None, :])
    return tl.where(seen, products * (scale * 1.4426950408889634), float("-inf"))


@jit
def attention_forward(qkv, cos, sin, documents, o, lse, of_kind, of_row, stride, scale,
                      H: tl.constexpr, T: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """o [B, T, D], and lse [B, H, T]: log2 of the sum of exponentials. of_kind: from q to k; of_row: between rows."""
    block, head = tl.program_id(0) % (T // BLOCK), tl.program_id(0) // (T // BLOCK)
    b, h = (head // H).to(tl.int64), head % H
    q = qkv + b * of_row + h * E
    k, v = q + tl.cast(of_kind, tl.int64), q + 2 * tl.cast(of_kind, tl.int64)
    documents = documents + b * T if documents is not None else None
    rows = block * BLOCK + tl.arange(0, BLOCK)
    q_left, q_right = _rotated(q, cos, sin, rows, stride, E)
    top, total = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    y = tl.zeros([BLOCK, E], tl.float32)
    for before in range(0, block + 1):  # from the diagonal on, where each row sees itself: the maximum is finite
        columns = (block - before) * BLOCK + tl.arange(0, BLOCK)
        k_left, k_right = _rotated(k, cos, sin, columns, stride, E)
        scores = _scores(q_left, q_right, k_left, k_right, rows, columns, documents, scale)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - higher[:, None]), tl.exp2(top - higher)
        value = tl.load(v + _tile(columns, stride, E))
        y = tl.dot(weights.to(value.dtype), value, y * shrink[:, None])
        total, top = total * shrink + tl.sum(weights, 1), higher
    tl.store(o + b * T * H * E + h * E + _tile(rows, H * E, E), (y / total[:, None]).to(o.dtype.element_ty))
    tl.store(lse + head.to(tl.int64) * T + rows, top + tl.log2(total))


@jit
def _score_gradients(scores, lse, dy, y, value, scale):
    """The weights, and the gradient of the products q k^T, in the dtype of ``dy``; scores [rows, columns]."""
    weights = tl.exp2(scores - lse[:, None])
    mean = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
    dweights = tl.dot(dy, tl.trans(value))
    return weights.to(dy.dtype), (weights * (dweights - mean[:, None]) * scale).to(dy.dtype)


@jit
def attention_backward(qkv, cos, sin, documents, o, do, lse, dqkv, of_kind, of_row, stride, scale,
                       H: tl.constexpr, T: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """dk and dv, then dq, for one block of positions. Both recompute the scores: nothing is added between programs."""
    block, head = tl.program_id(0) % (T // BLOCK), tl.program_id(0) // (T // BLOCK)
    b, h = (head // H).to(tl.int64), head % H
    q, dq = qkv + b * of_row + h * E, dqkv + b * of_row + h * E
    k, v = q + tl.cast(of_kind, tl.int64), q + 2 * tl.cast(of_kind, tl.int64)
    dk, dv = dq + tl.cast(of_kind, tl.int64), dq + 2 * tl.cast(of_kind, tl.int64)
    o, do, lse = o + b * T * H * E + h * E, do + b * T * H * E + h * E, lse + head.to(tl.int64) * T
    documents = documents + b * T if documents is not None else None
    mine = block * BLOCK + tl.arange(0, BLOCK)
    k_left, k_right = _rotated(k, cos, sin, mine, stride, E)
    value = tl.load(v + _tile(mine, stride, E))
    left, right = tl.zeros([BLOCK, E // 2], tl.float32), tl.zeros([BLOCK, E // 2], tl.float32)
    dvalue = tl.zeros([BLOCK, E], tl.float32)
    for other in range(block, T // BLOCK):
        rows = other * BLOCK + tl.arange(0, BLOCK)
        q_left, q_right = _rotated(q, cos, sin, rows, stride, E)
        dy, y = tl.load(do + _tile(rows, H * E, E)), tl.load(o + _tile(rows, H * E, E))
        scores = _scores(q_left, q_right, k_left, k_right, rows, mine, documents, scale)
        weights, dproducts = _score_gradients(scores, tl.load(lse + rows), dy, y, value, scale)
        dvalue = tl.dot(tl.trans(weights), dy, dvalue)
        left, right = tl.dot(tl.trans(dproducts), q_left, left), tl.dot(tl.trans(dproducts), q_right, right)
    tl.store(dv + _tile(mine, stride, E), dvalue.to(dv.dtype.element_ty))
    _store_turned_back(dk, cos, sin, mine, stride, left, right, E)

    q_left, q_right = _rotated(q, cos, sin, mine, stride, E)
    dy, y, my_lse = tl.load(do + _tile(mine, H * E, E)), tl.load(o + _tile(mine, H * E, E)), tl.load(lse + mine)
    left, right = tl.zeros([BLOCK, E // 2], tl.float32), tl.zeros([BLOCK, E // 2], tl.float32)
    for other in range(0, block + 1):
        columns = other * BLOCK + tl.arange(0, BLOCK)
        k_left, k_right = _rotated(k, cos, sin, columns, stride, E)
        value = tl.load(v + _tile(columns, stride, E))
        scores = _scores(q_left, q_right, k_left, k_right, mine, columns, documents, scale)
        _, dproducts = _score_gradients(scores, my_lse, dy, y, value, scale)
        left, right = tl.dot(dproducts, k_left, left), tl.dot(dproducts, k_right, right)
    _store_turned_back(dq, cos, sin, mine, stride, left, right, E)


# Operators, which torch does not look into: compiled graphs, checkpoints and CUDA graphs have one call each way.


@torch.library.custom_op("dlr_pretrain::rotary_attention", mutates_args=())
def _attend(qkv: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None, heads: int,
            tiles: list[int]) -> tuple[Tensor, Tensor]:  # fmt: skip
    o, lse = _like_outputs(qkv, cos, sin, documents, heads, tiles)
    _launch(attention_forward, qkv, cos, sin, documents, o, lse, heads=heads, tiles=tiles)
    return o, lse


@torch.library.custom_op("dlr_pretrain::rotary_attention_backward", mutates_args=())
def _attend_backward(do: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None, o: Tensor,
                     lse: Tensor, heads: int, tiles: list[int]) -> Tensor:  # fmt: skip
    dqkv = qkv.new_empty_strided(qkv.shape, qkv.stride())
    _launch(attention_backward, qkv, cos, sin, documents, o, do, lse, dqkv, heads=heads, tiles=tiles)
    return dqkv


def _launch(kernel, qkv: Tensor, *tensors: Tensor | None, heads: int, tiles: list[int]) -> None:
    (_, rows, length, width), (block, warps, stages) = qkv.shape, tiles
    numbers = (*qkv.stride()[:3], (width // heads) ** -0.5, heads, length, width // heads, block)
    kernel[(rows * heads * length // block,)](qkv, *tensors, *numbers, num_warps=warps, num_stages=stages)


@_attend.register_fake
def _like_outputs(qkv, cos, sin, documents, heads, tiles):
    _, rows, length, width = qkv.shape
    return qkv.new_empty(rows, length, width), qkv.new_empty(rows, heads, length, dtype=torch.float32)


def _keep(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.heads, ctx.tiles = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)  # lse has none


def _gradients(ctx, do: Tensor, _) -> tuple[Tensor | None, ...]:
    return _attend_backward(do.contiguous(), *ctx.saved_tensors, ctx.heads, ctx.tiles), *[None] * 5


_attend_backward.register_fake(lambda do, qkv, *_: qkv.new_empty_strided(qkv.shape, qkv.stride()))
_attend.register_autograd(_gradients, setup_context=_keep)
