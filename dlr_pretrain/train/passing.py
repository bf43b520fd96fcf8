"""``train.memory=low``: each gradient is applied, and released, as soon as the backward pass has completed it.

An update must not change a weight that the rest of the backward pass still multiplies by. It cannot: the gradient of a
weight is complete only when every product with that weight has been differentiated. If the weight carries a residual,
the residual is taken out before the update, so that the update acts on B; the step does not need the residual again.

Source: Lv et al. (LOMO, 2023), with any optimizer that updates one parameter at a time.
"""

from __future__ import annotations

from collections import deque
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor

from dlr_pretrain.config.memory_rules import AHEAD
from dlr_pretrain.models import dlr
from dlr_pretrain.optim.build import Optimizer
from dlr_pretrain.train.gradients import norms
from dlr_pretrain.train.parts import part
from dlr_pretrain.train.weights import Weights


class PassingGradients:
    """Runs backward passes during which ``optimizer``, built with ``apart=True``, updates every optimized tensor.

    Gradients are summed over ranks in the order in which they are completed. The graph determines this order, so that
    it is the same on all ranks.
    """

    def __init__(self, weights: Weights, optimizer: Optimizer, world_size: int):
        self.weights, self.optimizer, self.world_size = weights, optimizer, world_size
        self.optimized = weights.optimized
        self.carrying = {f"{name}.weight": linear for name, linear in dlr.residuals(weights.model)}
        self.running = False
        self.waiting: deque = deque()  # parameters whose gradients are being summed over ranks
        arrived = WeakMethod(self._arrived)  # hooks live as long as the weights, and must not keep the optimizer alive
        for name, p in weights.differentiated.items():
            p.register_post_accumulate_grad_hook(lambda p, name=name: arrived()(name, p))

    def backward(self, loss: Tensor, lr: float, masked: Tensor, factor: Tensor | None) -> Tensor:
        """Update by the gradients of ``loss`` times ``factor``; update nothing if ``masked`` (a device scalar) is 1.

        A gradient that is not finite updates nothing, and neither does any gradient after it. Returns the l2 norm over
        all gradients, before ``factor``.
        """
        self.lr, self.masked, self.factor, self.norms = lr, masked, factor, {}
        self.running = True
        try:
            loss.backward()
            while self.waiting:
                self._apply(*self.waiting.popleft())
        finally:
            self.running = False
            self.waiting.clear()
        return torch.linalg.vector_norm(torch.stack([self.norms[name] for name in self.optimized]))

    def _arrived(self, name: str, p: Tensor) -> None:
        if not self.running:
            return
        if self.world_size == 1:
            return self._apply(name, p, None)
        # all_reduce needs contiguous memory; the gradient has the layout of p, which is row-major or column-major.
        dense = p.grad if p.grad.is_contiguous() else p.grad.T
        self.waiting.append((name, p, dist.all_reduce(dense, async_op=True)))
        if len(self.waiting) > AHEAD:
            self._apply(*self.waiting.popleft())

    @part("optimizer")
    @torch.no_grad()
    def _apply(self, name: str, p: Tensor, sum_over_ranks: dist.Work | None) -> None:
        if sum_over_ranks is not None:
            sum_over_ranks.wait()
        value = self.optimized[name]
        gradient, p.grad = p.grad.to(value.dtype), None
        (self.norms[name],) = norms([gradient])
        self.masked = torch.maximum(self.masked, (~torch.isfinite(self.norms[name])).float())
        if name in self.carrying and not self.carrying[name].residual.withdraw():
            raise RuntimeError(f"{name}: the weight was changed while its residual was published")
        value.grad = gradient
        self.optimizer.update_one(name, self.lr, self.masked, self.factor)
        value.grad = None
