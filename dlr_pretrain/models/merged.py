"""Merges residuals into the weights of a module and takes them out again, with few kernels for each storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import record_function

from dlr_pretrain.models.residual import Residual, UpProjection, full_name, learned_alpha, plus, residuals
from dlr_pretrain.util import sharded
from dlr_pretrain.util.tensors import at_least_fp32


class Layer(NamedTuple):
    """An up-projection's residual, weight, state (the weight itself or its master), and learned alpha, if any."""

    name: str
    residual: Residual
    weight: Tensor
    state: Tensor
    alpha: Tensor | None


def require_restored(carrying: Sequence[tuple[str, UpProjection]]) -> None:
    for name, up in carrying:
        if up.residual.merged:
            raise RuntimeError(f"{name}: the residual is merged into the weight; leave `active` first")


class MergedResiduals:
    """Merges the residuals that ``module`` has now into its weights, any number of times.

    With ``masters`` (parameter name -> fp32 master) the masters are the state, and every merge sets all parameters from
    them. Without, the weights are the state themselves. Places in memory are looked up once: neither may move later.
    """

    def __init__(self, module: nn.Module, masters: Mapping[str, Tensor] | None = None):
        self.carrying, self.masters = residuals(module), masters
        parameters = dict(module.named_parameters())
        self.working: list[Tensor] = [parameters[name] for name in masters or ()]
        by_storage: dict[tuple[int, int], list[Layer]] = {}
        for name, up in self.carrying:
            if up.residual.impl == "weight":
                layer = _layer(name, up, masters)
                by_storage.setdefault((_storage(layer.weight), _storage(layer.state)), []).append(layer)
        self.storages = [_Storage(layers) for layers in by_storage.values()]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the context the weights are B + beta R^T; at its end they are B again. See ``dlr.active``.

        With masters they stay merged until the next merge.
        """
        if self.masters is None:
            require_restored(self.carrying)
        watch = register_optimizer_step_pre_hook(self._refuse_step)
        try:
            self.merge()
            yield
        finally:
            watch.remove()
            changed = self.restore()
        if changed:
            raise RuntimeError(f"{changed[0]}: the weight was changed inside `active` and is spoiled; load it again")

    @record_function("with_residual")
    @torch.no_grad()
    def merge(self) -> None:
        """Make the working weights from the state: B + beta R^T, rounded once."""
        if self.masters is not None:
            torch._foreach_copy_(self.working, list(self.masters.values()))
        for storage in self.storages:
            storage.merge()

    @record_function("with_residual")
    @torch.no_grad()
    def restore(self) -> list[str]:
        """Take residuals out again that were merged into the state, bit for bit; returns the layers that changed."""
        return [name or "the module" for storage in self.storages for name in storage.restore()]

    def _refuse_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, up in self.carrying:
            if up.residual.merged and id(up.weight) in stepped:
                where = f"{name or 'the module'}: the residual is merged into its weight"
                raise RuntimeError(f"{where}; call optimizer.step() outside `active`")


class _Storage:
    """Layers whose weights lie in one storage, and whose states lie in one, which may be the same."""

    def __init__(self, layers: list[Layer]):
        self.layers, first = layers, layers[0]
        self.own = [sharded.local_rows(layer.weight) for layer in layers]
        self.weights, self.states = _memory(first.weight), _memory(first.state)
        self.write_at = torch.cat([layer.residual.places(layer.weight) for layer in layers])
        self.read_at = self.write_at
        self.in_place = first.weight is first.state
        if not self.in_place:
            self.read_at = torch.cat([layer.residual.places(layer.state) for layer in layers])
        self.entries: Tensor | None = None  # B's, while residuals are merged in place
        self.betas = None if any(layer.alpha is not None for layer in layers) else self._betas()

    def merge(self) -> None:
        entries = self.states[self.read_at]
        merged = plus(entries, self._betas() if self.betas is None else self.betas, self.weights.dtype)
        self.entries = entries if self.in_place else None
        self._write(merged)
        self.versions = [own._version for own in self.own]  # autograd's
        for layer in self.layers:
            layer.residual.merged = True

    def restore(self) -> list[str]:
        """Write B's entries back; returns the names of the layers whose weight changed since ``merge``."""
        if self.entries is None:
            return []
        of_layers = zip(self.layers, self.own, self.versions, strict=True)
        changed = [layer.name for layer, own, version in of_layers if own._version != version]
        self._write(self.entries)
        self.entries = None
        for layer in self.layers:
            layer.residual.merged = False
        return changed

    def _write(self, values: Tensor) -> None:
        self.weights[self.write_at] = values
        torch.autograd.graph.increment_version(self.own)

    def _betas(self) -> Tensor:
        """beta for each entry, in the dtype of the addition."""
        wide = at_least_fp32(self.states.dtype)
        parts = []
        for (_, residual, _, _, alpha), own in zip(self.layers, self.own, strict=True):
            beta = residual.strength(wide, alpha)
            wide_beta = beta if isinstance(beta, Tensor) else own.new_full((), beta, dtype=wide)
            parts.append(wide_beta.expand(len(own)))
        return torch.cat(parts)


def _layer(name: str, up: UpProjection, masters: Mapping[str, Tensor] | None) -> Layer:
    alpha: Tensor | None = learned_alpha(up)
    if masters is None:
        return Layer(name, up.residual, up.weight, up.weight, alpha)
    alpha = None if alpha is None else masters[full_name(name, "dlr_alpha")]
    return Layer(name, up.residual, up.weight, masters[full_name(name, "weight")], alpha)


def _memory(tensor: Tensor) -> Tensor:
    """The whole storage of this rank's rows of ``tensor``, flat."""
    own = sharded.local_rows(tensor).detach()
    return own.as_strided((own.untyped_storage().nbytes() // own.element_size(),), (1,), 0)


def _storage(tensor: Tensor) -> int:
    return sharded.local_rows(tensor).untyped_storage()._cdata
