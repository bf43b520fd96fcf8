"""The summed cross-entropy of a linear head, its gradients formed in the forward pass, some rows of logits at a time.

The backward pass finds gradients of the size of the head and of its input, and multiplies them by a number: neither
logits nor probabilities are kept for it, and no more than ``ROWS`` rows of either exist at once. After Liger Kernel's
fused linear cross-entropy (Hsu et al., 2024). torch has had an operator of its own since 2.13; 2.11 and 2.12 have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dlr_pretrain.tensors import IGNORE, at_least_fp32

# The more rows in a piece, the less traffic: each piece adds a product [V, D] to an fp32 sum, 12 D V bytes in bf16,
# while a row of logits is written and read for 12 V bytes. At 4,096 rows the sum adds D / 4,096 to that (an eighth at
# 60m, half at 1b); 7b's 8 x 256 tokens are one piece, which needs no sum. A piece of bf16 logits is at most 262 MB at
# V = 32,000; to lie in a GPU's cache it would have to be so small that the sums cost more than the cache saves.
ROWS = 4096

Score = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]


def score(logits: Tensor, targets: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    """logits [n, V], targets [n] -> the summed loss, and [n, 1] its gradient to the logit of each row's target.

    Both in fp32 (fp64 for fp64), where softmax is formed too, in one buffer at most. The logits are overwritten: with
    ``gradient`` by the gradient to them, but for those of the targets.
    """
    wide = logits.to(at_least_fp32(logits.dtype))
    scored = (targets != IGNORE).to(wide.dtype)[:, None]
    chosen = wide.gather(1, targets.clamp(min=0)[:, None])
    top = wide.amax(-1, keepdim=True)
    compiled = torch.compiler.is_compiling()  # then powers are computed twice, and never written out
    total = ((wide - top).exp() if compiled else wide.sub_(top).exp_()).sum(-1, keepdim=True)
    normalizer = top + total.log()
    loss = ((normalizer - chosen) * scored).sum()
    if gradient:
        logits.copy_((wide - normalizer).exp() * scored if compiled else wide.mul_(scored / total))
    return loss, ((chosen - normalizer).exp() - 1) * scored


def summed_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, score: Score = score) -> Tensor:
    """The sum of -log softmax(W x)[target] over the targets that are not ``IGNORE``, in fp32 (fp64 for fp64).

    x [N, D], weight [V, D], targets [N]. ``score`` may be a compiled ``score``. Gradients can be asked for once.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _SummedCrossEntropy.apply(x, weight, targets, score)
    losses = [score(logits, some, False)[0] for _, logits, some in _pieces(x, weight, targets)]
    return torch.stack(losses).sum()


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, score: Score) -> Tensor:
        for_x, for_weight = ctx.needs_input_grad[:2]
        losses, dx, dw = [], torch.empty_like(x) if for_x else None, None
        for rows, logits, some in _pieces(x, weight, targets):
            loss, at_target = score(logits, some, True)
            logits[torch.arange(len(some), device=x.device), some.clamp(min=0)] = at_target[:, 0].to(logits.dtype)
            losses.append(loss)
            if for_x:
                torch.mm(logits, weight, out=dx[rows])
            if for_weight:
                dw = _added(dw, logits.T, x[rows], alone=len(some) == len(x))
        ctx.gradients, ctx.dtype = (dx, dw), weight.dtype  # no saved tensors: what is saved cannot become a .grad
        return torch.stack(losses).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, scale: Tensor):
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss were formed once, and are gone; call the model again")
        (dx, dw), ctx.gradients = ctx.gradients, None
        scale = scale.view(1, 1) if scale.is_cuda else scale  # a GPU would round one without dimensions to bf16 first
        dx = None if dx is None else dx.mul_(scale)
        dw = None if dw is None else dw.mul_(scale).to(ctx.dtype)
        return dx, dw, None, None


def _added(total: Tensor | None, a: Tensor, b: Tensor, alone: bool) -> Tensor:
    """total + a b. Pieces are summed in fp32 (fp64 for fp64), so that they cost no more than the one rounding of a
    product that is ``alone``."""
    if alone:
        return a @ b
    wide = at_least_fp32(a.dtype)
    if total is None:
        return (a @ b).to(wide)
    return total.addmm_(a, b) if a.dtype == wide else total.add_(a @ b)


def _pieces(x: Tensor, weight: Tensor, targets: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """At most ``ROWS`` rows at a time: which, their logits [n, V] (in memory that the next piece takes), their targets.

    Pieces are of one size where it divides the rows, so that one graph serves all.
    """
    fewest = max(1, -(-len(x) // ROWS))
    size = -(-len(x) // next((n for n in range(fewest, 2 * fewest) if len(x) % n == 0), fewest))
    buffer = x.new_empty(min(size, len(x)), len(weight))
    for start in range(0, len(x), size):
        rows = slice(start, min(start + size, len(x)))
        logits = torch.mm(x[rows], weight.T, out=buffer[: rows.stop - start])
        yield rows, logits, targets[rows]
