"""The summed cross-entropy of a linear head. The forward pass forms its gradients, for some rows of logits at a time.

The backward pass only scales these gradients, which have the shapes of the head and of its input. No logits or
probabilities are kept for it, and at most ``ROWS`` rows of either exist at once (on a CPU ``FEW_ROWS``). The method is
that of Liger Kernel's fused linear cross-entropy (Hsu et al., 2024). torch has its own operator for this since 2.13;
2.11 and 2.12 have none.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dlr_pretrain.util.tensors import IGNORE, at_least_fp32

# Larger pieces need less memory traffic. For each piece but a lone one, a product [V, D] is added to an fp32 sum: on a
# GPU the product itself does so, which moves 8 D V bytes, on a CPU in bf16 12 D V. Writing and reading the logits moves
# 12 V bytes per row. With 16,384 rows the sum adds D / 24,576 of the logits' traffic (1/48 at 60m, 1/12 at 1b). The
# 8 x 256 tokens of 7b are one piece, which needs no sum. Pieces that fit a GPU's cache would be so small that the sums
# would cost more than the cache saves.
ROWS = 16_384
VALUES = 1 << 29  # of logits in a piece: 1.07 GB in bf16, and indices of 32 bits; with V <= 32,768 ROWS is the bound
FEW_ROWS = 4096  # of a piece on a CPU, and of those that eager code widens at a time
LOG2_E = 1 / math.log(2)

Score = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]


def score(logits: Tensor, targets: Tensor, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """logits [n, V], targets [n] -> the summed loss, and its gradient [n] to the logit of each row's target.

    Both are in fp32 (fp64 for fp64). The softmax is formed in that dtype too, in at most one buffer. The logits may be
    overwritten. With ``gradient`` they become the gradient to them, except at the targets: theirs is the second result,
    which the caller puts there. It is None if the logits are complete.
    """
    compiled = torch.compiler.is_compiling()  # the compiled code computes exponentials twice and stores none
    if compiled and logits.is_cuda:
        return score_in_one_kernel(logits, targets, gradient), None
    if not compiled and len(logits) > FEW_ROWS:
        parts = (logits.split(FEW_ROWS), targets.split(FEW_ROWS))
        losses, at_targets = zip(*(score(*part, gradient) for part in zip(*parts, strict=True)), strict=True)
        return torch.stack(losses).sum(), torch.cat(at_targets)
    wide = logits.to(at_least_fp32(logits.dtype))
    scored = (targets != IGNORE).to(wide.dtype)[:, None]
    chosen = wide.gather(1, targets.clamp(min=0)[:, None])
    top = wide.amax(-1, keepdim=True)
    total = ((wide - top).exp() if compiled else wide.sub_(top).exp_()).sum(-1, keepdim=True)
    normalizer = top + total.log()
    loss = ((normalizer - chosen) * scored).sum()
    if gradient:
        logits.copy_((wide - normalizer).exp() * scored if compiled else wide.mul_(scored / total))
    return loss, (((chosen - normalizer).exp() - 1) * scored)[:, 0]


def score_in_one_kernel(logits: Tensor, targets: Tensor, gradient: bool) -> Tensor:
    """``score``, with the gradients at the targets in their places. On a GPU torch compiles it to one kernel for the
    rows and a small one for their sum.

    A row is read once from memory, and twice from the cache. The kernel looks for the target among the values that it
    reads, because to gather it would take a kernel of its own before the logits are overwritten. Instructions limit
    it, not memory: with powers of two it has two fifths fewer than with those of e.
    """
    wide = logits.to(at_least_fp32(logits.dtype)) * LOG2_E
    scored = (targets != IGNORE).to(wide.dtype)[:, None]
    hit = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    chosen = torch.where(hit, wide, 0.0).sum(-1, keepdim=True)
    top = wide.amax(-1, keepdim=True)
    normalizer = top + (wide - top).exp2().sum(-1, keepdim=True).log2()
    if gradient:
        p = (wide - normalizer).exp2()
        logits.copy_(torch.where(hit, p - 1, p) * scored)
    return ((normalizer - chosen) * scored).sum() / LOG2_E


def summed_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, score: Score = score) -> Tensor:
    """The sum of -log softmax(W x)[target] over the targets that are not ``IGNORE``, in fp32 (fp64 for fp64).

    x [N, D], weight [V, D], targets [N]. ``score`` may be compiled. The backward pass can run only once.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _SummedCrossEntropy.apply(x, weight, targets, score)
    losses = [score(logits, some, False)[0] for _, logits, some in _pieces(x, weight, targets)]
    return torch.stack(losses).sum()


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, score: Score) -> Tensor:
        losses, dx, dw = [], torch.empty_like(x), None
        for rows, logits, some in _pieces(x, weight, targets):
            loss, at_target = score(logits, some, True)
            if at_target is not None:  # not by scatter_, which for bf16 on a CPU goes through all of the logits
                logits[torch.arange(len(some), device=some.device), some.clamp(min=0)] = at_target.to(logits.dtype)
            losses.append(loss)
            torch.mm(logits, weight, out=dx[rows])
            dw = _added(dw, logits.T, x[rows], alone=len(some) == len(x))
        ctx.gradients, ctx.dtype = (dx, dw), weight.dtype  # not save_for_backward: a saved tensor cannot become a .grad
        return torch.stack(losses).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, scale: Tensor):
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss were formed once, and are gone; call the model again")
        (dx, dw), ctx.gradients = ctx.gradients, None
        scale = scale.view(1, 1) if scale.is_cuda else scale  # a GPU would round a 0-d scale to bf16 first
        return dx.mul_(scale), dw.mul_(scale).to(ctx.dtype), None, None


def _added(total: Tensor | None, a: Tensor, b: Tensor, alone: bool) -> Tensor:
    """total + a b. Pieces are summed in fp32 (fp64 for fp64), because a bf16 sum would round after every piece.

    A product that is ``alone`` needs no sum and keeps its dtype. On a GPU a product of bf16 can be formed and added in
    fp32. (The meta device mixes dtypes without being told.)
    """
    if alone:
        return a @ b
    wide = at_least_fp32(a.dtype)
    if a.is_cpu and a.dtype != wide:
        return (a @ b).to(wide) if total is None else total.add_(a @ b)
    if total is None:
        return torch.mm(a, b, out_dtype=wide) if a.dtype != wide else a @ b
    if a.is_cuda and a.dtype != wide:
        return torch.addmm(total, a, b, out_dtype=wide, out=total)
    return torch.addmm(total, a, b, out=total)


def _pieces(x: Tensor, weight: Tensor, targets: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield some rows at a time: their slice, their logits [n, V] and their targets.

    The next piece overwrites the logits. Pieces have equal sizes if a small enough number of them divides the rows, so
    that one compiled graph serves all.
    """
    fewest = max(1, math.ceil(len(x) / _most(x, weight)))
    size = math.ceil(len(x) / next((n for n in range(fewest, 2 * fewest) if len(x) % n == 0), fewest))
    buffer = x.new_empty(min(size, len(x)), len(weight))
    for start in range(0, len(x), size):
        rows = slice(start, min(start + size, len(x)))
        logits = torch.mm(x[rows], weight.T, out=buffer[: rows.stop - start])
        yield rows, logits, targets[rows]


def _most(x: Tensor, weight: Tensor) -> int:
    """The most rows of a piece."""
    return FEW_ROWS if x.is_cpu else max(1, min(ROWS, VALUES // len(weight)))
