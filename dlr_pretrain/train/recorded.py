"""Micro-batches as CUDA graphs: the host launches one recorded graph instead of a thousand kernels.

A replay repeats kernels on the memory that they had, and runs no Python. What differs between updates is therefore
copied into that memory (the batch), or changes in place (the weights). Everything else of an update stays outside: clip
factor, learning rate, optimizer, residuals, merges, evaluations. The first micro-batch of an update assigns gradients,
the next ones add to them, and the last also sums them over ranks: each kind has a graph of its own. The graphs share
memory, because they are replayed in the order in which they were recorded.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.util.errors import first_line, write_to_stderr
from dlr_pretrain.util.sharded import local_rows

Compute = Callable[[bool, tuple[Tensor, ...]], Tensor]  # last, inputs -> loss; assigns gradients, or adds to them
DRIFT = 1e-2  # relative, of one gradient's norm: attention's backward pass adds in the order of arrival


def capture(function: Callable[[], Tensor], pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of the kernels of ``function``, which do not run, and its result, which each replay computes.

    ``pool`` is memory that the graph shares with others; None for new memory.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads go on
        return graph, function()


class Recording(NamedTuple):
    """A graph, with the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    loss: Tensor
    gradients: list[tuple[Tensor, Tensor | None]]  # of each parameter, after the graph

    def __call__(self, inputs: tuple[Tensor, ...]) -> Tensor:
        for static, given in zip(self.inputs, inputs, strict=True):
            static.copy_(given.view_as(static))
        self.graph.replay()
        for p, gradient in self.gradients:
            p.grad = gradient
        return self.loss.clone()  # the next replay overwrites it


class Recorded:
    """``compute`` by graphs, which are recorded before the second update: the first one compiles and connects.

    The graphs are recorded with one batch and checked with another. Their losses must be those of ``compute`` bit for
    bit, and the norm of each gradient must agree within ``DRIFT``. If a graph fails on any rank, ``compute`` itself
    serves on all ranks, and rank 0 says so.
    """

    capture = staticmethod(capture)

    def __init__(self, compute: Compute, parameters: Sequence[Tensor], micro_batches: int, ranks: Ranks):
        self.compute, self.ranks = compute, ranks
        self.parameters = [p for p in parameters if p.requires_grad]
        self.kinds = [*[False] * min(micro_batches - 1, 2), True]  # which is the last: of first, next and last
        self.recordings: list[Recording] = []  # of these kinds
        self.example: tuple[Tensor, ...] | None = None  # inputs of the first update's last micro-batch
        self.addresses: list[int] = []  # of the weights, when they were recorded
        self.failure: str | None = None

    def __call__(self, last: bool, inputs: tuple[Tensor, ...]) -> Tensor:
        first = all(p.grad is None for p in self.parameters)
        if first and self.example is not None:
            self.record(inputs)
        if first and self.recordings and self.addresses != [p.data_ptr() for p in self.parameters]:
            raise RuntimeError("weights have moved since micro-batches were recorded")
        if self.recordings:
            return self.recordings[-1 if last else 0 if first else 1](inputs)
        if last and self.failure is None:
            self.example = tuple(t.clone() for t in inputs)
        return self.compute(last, inputs)

    def record(self, inputs: tuple[Tensor, ...]) -> None:
        """Record the graphs of an update with inputs of the first update, and check them with ``inputs``."""
        expected = [self.outcome(self.compute(last, inputs)) for last in self.kinds]
        self.clear()
        recordings, failure = [], None
        try:
            recordings = self.captured()
        except RuntimeError as error:  # a kernel that cannot be recorded, or no memory
            failure = first_line(error)
        self.clear()
        if self.agree(failure):
            outcomes = [self.outcome(recording(inputs)) for recording in recordings]
            self.clear()
            if self.agree(difference(outcomes, expected)):
                self.recordings = recordings
        self.example = None

    def captured(self) -> list[Recording]:
        """New graphs of an update's kinds of micro-batches; each adds to the gradients of the one before it."""
        recordings: list[Recording] = []
        for last in self.kinds:
            inputs = tuple(t.clone() for t in self.example or ())
            pool = recordings[0].graph.pool() if recordings else None
            graph, loss = self.capture(partial(self.compute, last, inputs), pool)
            recordings.append(Recording(graph, inputs, loss, [(p, p.grad) for p in self.parameters]))
        self.addresses = [p.data_ptr() for p in self.parameters]
        return recordings

    def outcome(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """A copy of the loss, and the norm of each gradient."""
        gradients = [local_rows(p.grad) for p in self.parameters if p.grad is not None]
        # torch has no public name for few launches over many tensors
        return loss.clone(), torch.stack(torch._foreach_norm(gradients, 2.0, dtype=torch.float32))

    def clear(self) -> None:
        for p in self.parameters:
            p.grad = None

    def agree(self, failure: str | None) -> bool:
        """Whether no rank has a ``failure``; else rank 0 says which."""
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(self.ranks.gather(failure)) if text is not None]
        if failures:
            self.failure = failures[0]
            if self.ranks.is_main:
                write_to_stderr(f"warning: micro-batches are not recorded as CUDA graphs: {self.failure}")
        return not failures


def difference(outcomes: Sequence[tuple[Tensor, Tensor]], expected: Sequence[tuple[Tensor, Tensor]]) -> str | None:
    """How the losses and norms of graphs differ from the ``expected`` ones; None if they agree."""
    for (loss, norms), (right, right_norms) in zip(outcomes, expected, strict=True):
        if not torch.equal(loss.nan_to_num(), right.nan_to_num()):
            return f"the loss of a graph is {loss.item():.9g} instead of {right.item():.9g}"
        drift = (norms / right_norms - 1).abs()
        drift = torch.where((right_norms == 0) | ~right_norms.isfinite(), 0.0, drift)
        if not bool((drift <= DRIFT).all()):  # also if it is NaN
            return f"the norm of a gradient in a graph differs by {drift.max().item():.2g} of itself"
    return None
