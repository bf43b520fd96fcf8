"""Micro-batches as CUDA graphs: the host launches one recorded graph instead of a thousand kernels.

A replay repeats kernels on the memory that they had, and runs no Python. What differs between updates is therefore
copied into that memory (the batch), or changes in place (the weights). Everything else of an update stays outside: clip
factor, learning rate, optimizer, residuals, merges, evaluations. The first micro-batch of an update assigns gradients,
the next ones add to them, and the last also sums them over ranks: each kind has a graph of its own. The graphs share
memory, because they are replayed in the order in which they were recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.util.errors import first_line, write_to_stderr
from dlr_pretrain.util.sharded import local_rows

Compute = Callable[[bool, tuple[Tensor, ...]], Tensor]  # last, inputs -> loss; assigns gradients, or adds to them
DRIFT = 1e-2  # relative, of one gradient's norm: attention's backward pass adds in the order of arrival


class CudaGraph:
    """The kernels that a function launches. ``pool`` is memory that it shares with other graphs."""

    def __init__(self, pool: Any):
        self.graph, self.pool = torch.cuda.CUDAGraph(), pool

    def record(self, function: Callable[[], Tensor]) -> Tensor:
        """Record the kernels of ``function`` without running them. Returns its result, which each replay computes."""
        with torch.cuda.graph(self.graph, pool=self.pool, capture_error_mode="thread_local"):  # other threads go on
            result = function()
        self.pool = self.graph.pool()
        return result

    def replay(self) -> None:
        self.graph.replay()


class Recording(NamedTuple):
    """A graph, with the memory that it reads and writes."""

    graph: CudaGraph
    inputs: tuple[Tensor, ...]
    loss: Tensor
    gradients: list[tuple[Tensor, Tensor | None]]  # of each parameter, after the graph

    def __call__(self, inputs: tuple[Tensor, ...]) -> Tensor:
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.graph.replay()
        for p, gradient in self.gradients:
            p.grad = gradient
        return self.loss.clone()  # the next replay overwrites it


class Recorded:
    """``compute`` by graphs, which are recorded in the second update: the first one compiles and connects.

    A graph is recorded with one batch and checked with another. Its loss must be that of ``compute`` bit for bit, and
    the norm of each gradient must agree within ``DRIFT``. If a graph fails on any rank, ``compute`` itself serves on
    all ranks from then on, and rank 0 says so.
    """

    make_graph = CudaGraph

    def __init__(self, compute: Compute, parameters: Sequence[Tensor], ranks: Ranks):
        self.compute, self.ranks = compute, ranks
        self.parameters = [p for p in parameters if p.requires_grad]
        self.recordings: dict[tuple, Recording] = {}
        self.earlier: tuple[Tensor, ...] | None = None  # inputs of the first update
        self.places: list[int] = []  # of the weights, when they were recorded
        self.pool: Any = None
        self.failure: str | None = None

    def __call__(self, last: bool, inputs: tuple[Tensor, ...]) -> Tensor:
        first = all(p.grad is None for p in self.parameters)
        key = first, last, *(t.shape for t in inputs)
        if first and self.recordings and self.places != [p.data_ptr() for p in self.parameters]:
            raise RuntimeError("weights have moved since micro-batches were recorded")
        if key in self.recordings:
            return self.recordings[key](inputs)
        if self.earlier is not None and self.failure is None:
            return self.record(key, last, inputs)
        if last:
            self.earlier = tuple(t.clone() for t in inputs)
        return self.compute(last, inputs)

    def record(self, key: tuple, last: bool, inputs: tuple[Tensor, ...]) -> Tensor:
        """The loss for ``inputs``, from a new graph that has been recorded with inputs of the first update."""
        before = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in self.parameters]
        expected, norms = self.compute(last, inputs).clone(), self.norms()
        restore(before)
        recording, failure = None, None
        try:
            recording = self.captured(last)
        except RuntimeError as error:  # a kernel that cannot be recorded, or no memory
            failure = first_line(error)
        if self.agree(failure) and recording is not None:
            loss = recording(inputs)
            if self.agree(self.difference(loss, expected, norms)):
                self.recordings[key] = recording
                return loss
        restore(before)
        return self.compute(last, inputs)

    def captured(self, last: bool) -> Recording:
        graph, inputs = self.make_graph(self.pool), tuple(t.clone() for t in self.earlier or ())
        loss = graph.record(lambda: self.compute(last, inputs))
        self.pool, self.places = graph.pool, [p.data_ptr() for p in self.parameters]
        return Recording(graph, inputs, loss, [(p, p.grad) for p in self.parameters])

    def agree(self, failure: str | None) -> bool:
        """Whether no rank has a ``failure``. After one, no rank replays any graph again."""
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(self.ranks.gather(failure)) if text is not None]
        if not failures:
            return True
        self.failure = failures[0]
        self.recordings.clear()
        if self.ranks.is_main:
            write_to_stderr(f"warning: micro-batches are not recorded as CUDA graphs: {self.failure}")
        return False

    def difference(self, loss: Tensor, expected: Tensor, norms: Tensor) -> str | None:
        """How the loss and gradients of a graph differ from the ``expected`` loss and ``norms``; None if they agree."""
        if not torch.equal(loss.nan_to_num(), expected.nan_to_num()):
            return f"the loss of a graph is {loss.item():.9g} instead of {expected.item():.9g}"
        drift = (self.norms() / norms - 1).abs()
        drift = torch.where((norms == 0) | ~norms.isfinite(), 0.0, drift)
        if not bool((drift <= DRIFT).all()):  # also if it is NaN
            return f"the norm of a gradient in a graph differs by {drift.max().item():.2g} of itself"
        return None

    def norms(self) -> Tensor:
        gradients = [local_rows(p.grad) for p in self.parameters if p.grad is not None]
        return torch.stack(torch._foreach_norm(gradients, 2.0, dtype=torch.float32)) if gradients else torch.zeros(1)


def restore(before: Sequence[tuple[Tensor, Tensor | None, Tensor | None]]) -> None:
    """Put each gradient back, with its value, in the memory that it had."""
    for p, gradient, value in before:
        p.grad = gradient
        if gradient is not None and value is not None:
            gradient.copy_(value)
