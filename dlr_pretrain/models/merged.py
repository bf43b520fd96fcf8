"""Merges residuals into the weights of a module and takes them out again, with few kernels for each storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import record_function

from dlr_pretrain.models.residual import Residual, full_name, plus, residuals
from dlr_pretrain.util import sharded
from dlr_pretrain.util.tensors import at_least_fp32


class Layer(NamedTuple):
    """An up-projection's residual, its weight, and its state: the weight itself or its master."""

    name: str
    residual: Residual
    weight: Tensor
    state: Tensor


class MergedResiduals:
    """Merges the residuals that ``module`` has now into its weights, any number of times.

    With ``masters`` (parameter name -> fp32 master) the masters are the state, and every merge sets all parameters from
    them. Without, the weights are the state themselves. Places in memory are looked up once: neither may move later.
    ``compiled`` fuses the kernels of a merge: two a storage, or one with masters, where eager code takes up to five.
    """

    def __init__(self, module: nn.Module, masters: Mapping[str, Tensor] | None = None, compiled: bool = False):
        self.carrying, self.masters = residuals(module), masters
        parameters = dict(module.named_parameters())
        state = parameters if masters is None else masters
        self.working: list[Tensor] = [parameters[name] for name in masters or ()]
        by_storage: dict[tuple[int, int], list[Layer]] = {}
        for name, up in self.carrying:
            if up.residual.impl == "weight":
                b = state[full_name(name, "weight")]
                layers = by_storage.setdefault((_storage(up.weight), _storage(b)), [])
                layers.append(Layer(name, up.residual, up.weight, b))
        add = torch.compile(_add, fullgraph=True, dynamic=True) if compiled else _add
        self.storages = [_Storage(layers, add) for layers in by_storage.values()]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the context the weights are B + beta R^T; at its end they are B again. See ``dlr.active``.

        With masters they stay merged until the next merge.
        """
        if self.masters is None:
            for name, up in self.carrying:
                up.residual.require_inactive(name or "the module", "enter it")
        watch = register_optimizer_step_pre_hook(self._refuse_step)
        try:
            self.merge()
            yield
        finally:
            watch.remove()
            spoiled = self.restore() if self.masters is None else []
        if spoiled:
            rule = "its weight was changed, cast or moved inside `active`, and holds a part of the residual for good"
            raise RuntimeError(f"{spoiled[0] or 'the module'}: {rule}. Load it again, and do that outside")

    @record_function("with_residual")
    @torch.no_grad()
    def merge(self) -> None:
        """Make the working weights from the state: B + beta R^T, rounded once."""
        if self.masters is not None:
            torch._foreach_copy_(self.working, list(self.masters.values()))
        for storage in self.storages:
            storage.merge()
        for _, up in self.carrying:
            up.residual.active = True

    @record_function("with_residual")
    @torch.no_grad()
    def restore(self) -> list[str]:
        """Take residuals out again that were merged into the state, bit for bit; returns layers that are spoiled."""
        for _, up in self.carrying:
            up.residual.active = False
        return [name for storage in self.storages for name in storage.restore()]

    def _refuse_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, up in self.carrying:
            if id(up.weight) in stepped:
                up.residual.require_inactive(name or "the module", "call optimizer.step()")


class _Storage:
    """Layers whose weights lie in one storage, and whose states lie in one, which may be the same."""

    def __init__(self, layers: list[Layer], add: Callable[..., Tensor]):
        self.layers, self.add, first = layers, add, layers[0]
        self.own = [sharded.local_rows(layer.weight) for layer in layers]
        self.in_place = first.weight is first.state
        self.weights = self.states = _memory(first.weight)
        self.write_at = self.read_at = torch.cat([layer.residual.places(layer.weight) for layer in layers])
        if not self.in_place:
            self.states = _memory(first.state)
            self.read_at = torch.cat([layer.residual.places(layer.state) for layer in layers])
        self.entries: Tensor | None = None  # B's, while residuals are merged in place
        wide, rows = at_least_fp32(self.states.dtype), list(zip(layers, self.own, strict=True))
        self.betas = torch.cat([own.new_full((len(own),), layer.residual.beta, dtype=wide) for layer, own in rows])

    def merge(self) -> None:
        entries = self.add(self.weights, self.states, self.write_at, self.read_at, self.betas)
        torch.autograd.graph.increment_version(self.own)
        self.entries = entries if self.in_place else None
        self.merged = self._seen()

    def restore(self) -> list[str]:
        """Write B's entries back; returns the layers whose weight is not the one that ``merge`` has left."""
        if self.entries is None:
            return []
        seen = zip(self.layers, self.merged, self._seen(), strict=True)
        spoiled = [layer.name for layer, before, now in seen if before != now]
        self.weights[self.write_at] = self.entries
        torch.autograd.graph.increment_version(self.own)
        self.entries = None
        return spoiled

    def _seen(self) -> list[tuple[int, int]]:
        """For each layer where its weight lies, and how often that was written to, as autograd counts."""
        return [(own.data_ptr(), own._version) for own in self.own]


def _add(weights: Tensor, states: Tensor, write_at: Tensor, read_at: Tensor, betas: Tensor) -> Tensor:
    """Set ``weights[write_at]`` to ``states[read_at]`` plus ``betas``; returns what was read. All are flat."""
    entries = states[read_at]
    weights[write_at] = plus(entries, betas, weights.dtype)
    return entries


def _memory(tensor: Tensor) -> Tensor:
    """The whole storage of this rank's rows of ``tensor``, flat; not a view, which compiled code could not change."""
    own = sharded.local_rows(tensor).detach()
    size = own.untyped_storage().nbytes() // own.element_size()
    return own.new_empty(0).set_(own.untyped_storage(), 0, (size,))  # type: ignore[call-overload]


def _storage(tensor: Tensor) -> int:
    return sharded.local_rows(tensor).untyped_storage()._cdata
