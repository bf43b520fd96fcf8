"""Puts residuals into the weights of a module and takes them out again, with one kernel for each storage of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import record_function

from dlr_pretrain.models.residual import Residual, Shared, by_memory, joined, plus
from dlr_pretrain.util import sharded


class Layer(NamedTuple):
    """An up-projection's residual, weight, state (the weight itself or its master), and learned alpha, if any."""

    residual: Residual
    weight: Tensor
    state: Tensor
    alpha: Tensor | None


def residuals(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The up-projections that carry a residual, with their names."""
    return [(name, m) for name, m in module.named_modules() if isinstance(getattr(m, "residual", None), Residual)]


def require_restored(carrying: Sequence[tuple[str, nn.Linear]]) -> None:
    for name, linear in carrying:
        if linear.residual.saved is not None:
            raise RuntimeError(f"{name}: the residual is published; leave `active` first")


class Publisher:
    """Publishes the residuals that ``module`` has when the publisher is made, any number of times.

    It looks up names once. It looks up the entries' places in memory again if a weight or its state was replaced or
    moved.
    """

    def __init__(self, module: nn.Module):
        self.carrying = residuals(module)
        self._module = module
        self._sums: list[_Sum] = []
        self._made_for: list[tuple] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the context the weights are B + beta R^T; at its end they are B again. See ``dlr.active``."""
        by_weight = {id(linear.weight): (name, linear) for name, linear in self.carrying}
        require_restored(self.carrying)
        watch = register_optimizer_step_pre_hook(partial(_refuse_step, by_weight))
        try:
            self.publish()
            yield
        finally:
            watch.remove()
            changed = self._restore()
        if changed:
            raise RuntimeError(f"{changed[0]}: the weight was changed inside `active` and is spoiled; load it again")

    @record_function("with_residual")
    @torch.no_grad()
    def publish(self, masters: Mapping[str, Tensor] | None = None) -> None:
        """Make the working weights from the state: B + beta R^T, rounded once.

        With ``masters`` (parameter name -> fp32 master) every parameter is set from its master, and nothing needs to be
        restored. Without them, the parameters are the state themselves, and must not be published already.
        """
        weights = [up.weight for _, up in self.carrying]
        if masters is None:
            require_restored(self.carrying)
            states, alphas = weights, [getattr(up, "dlr_alpha", None) for _, up in self.carrying]
        else:
            torch._foreach_copy_([self._parameters[name] for name in masters], list(masters.values()))
            states = [masters[weight] for weight, _ in self._names]
            alphas = [masters.get(alpha) for _, alpha in self._names]
        made_for = [_identity(tensor) for tensor in (weights if masters is None else weights + states)]
        if made_for != self._made_for:
            own = [up.residual for _, up in self.carrying]
            layers = map(Layer, own, weights, states, alphas)
            self._sums = _sums([layer for layer in layers if layer.residual.impl == "weight"])
            self._made_for = made_for
        for one in self._sums:
            one.publish()

    @record_function("with_residual")
    @torch.no_grad()
    def _restore(self) -> list[str]:
        """Take the residuals out of the weights, bit for bit; returns the names of those that changed meanwhile."""
        changed = [name or "the module" for name, up in self.carrying if not up.residual.untouched]
        for one in self._sums:
            one.restore()
        return changed

    @cached_property
    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._module.named_parameters())

    @cached_property
    def _names(self) -> list[tuple[str, str]]:
        """The names of each layer's weight and alpha."""
        return [(f"{name}.weight".lstrip("."), f"{name}.dlr_alpha".lstrip(".")) for name, _ in self.carrying]


class _Sum:
    """Residuals that one addition publishes: their weights have one dtype, their states too, all on one device.

    The layers of a group share one storage of weights and one storage of states.
    """

    def __init__(self, groups: Sequence[Sequence[Layer]]):
        self.layers = [layer for group in groups for layer in group]
        own = [[layer.residual for layer in group] for group in groups]
        self.states = [Shared(of, [layer.state for layer in g]) for of, g in zip(own, groups, strict=True)]
        self.weights = [Shared(of, [layer.weight for layer in g]) for of, g in zip(own, groups, strict=True)]
        self.rows = [len(sharded.local_rows(layer.weight)) for layer in self.layers]
        self.kept: Sequence[Tensor] = ()  # B's entries in each group, if the weights are the state
        self.constant: Tensor | None = None  # the betas, if none is learned

    def publish(self) -> None:
        read = [shared.read() for shared in self.states]
        entries, lengths = joined(read), [len(some) for some in read]
        parts, first = entries.split(self.rows), self.layers[0]
        values = plus(entries, self._betas(parts), first.weight.dtype).split(lengths)
        for layer, part in zip(self.layers, parts, strict=True):
            layer.residual.saved = (layer.weight, part) if layer.weight is layer.state else None
        self.kept = entries.split(lengths) if first.weight is first.state else ()
        for shared, some in zip(self.weights, values, strict=True):
            shared.write(some)
        for layer in self.layers:
            layer.residual.version = sharded.local_rows(layer.weight)._version

    def restore(self) -> None:
        for shared, some in zip(self.weights, self.kept, strict=False):  # none, if the weights are not the state
            shared.write(some)
        for layer in self.layers:
            layer.residual.saved = None
        self.kept = ()

    def _betas(self, parts: Sequence[Tensor]) -> Tensor:
        """beta for each entry of the layers' ``parts``."""
        if self.constant is not None:
            return self.constant
        found = joined([r.betas(part, alpha) for (r, _, _, alpha), part in zip(self.layers, parts, strict=True)])
        if all(layer.alpha is None for layer in self.layers):
            self.constant = found
        return found


def _sums(layers: Sequence[Layer]) -> list[_Sum]:
    alike: dict[tuple, list[list[Layer]]] = {}
    for group in by_memory([(layer.weight, layer.state) for layer in layers]):
        _, weight, state, _ = layers[group[0]]
        alike.setdefault((weight.dtype, state.dtype, state.device), []).append([layers[i] for i in group])
    return [_Sum(groups) for groups in alike.values()]


def _identity(tensor: Tensor) -> tuple:
    """A value that changes if the tensor is replaced or moves in memory."""
    own = sharded.local_rows(tensor)
    return id(tensor), own.data_ptr(), own.storage_offset(), own.stride(), own.dtype


def _refuse_step(by_weight: dict[int, tuple[str, nn.Linear]], optimizer: torch.optim.Optimizer, *_) -> None:
    for p in (p for group in optimizer.param_groups for p in group["params"] if id(p) in by_weight):
        name, linear = by_weight[id(p)]
        if linear.residual.saved is not None:
            where = f"{name or 'the module'}: its weight holds the published residual"
            raise RuntimeError(f"{where}; call optimizer.step() outside `active`")
