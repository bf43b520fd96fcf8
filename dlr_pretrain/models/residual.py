"""beta R^T of an up-projection: which output receives which latent, the layer that carries it, and how it is merged."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import record_function

from dlr_pretrain.util import sharded
from dlr_pretrain.util.tensors import at_least_fp32


class Residual:
    """beta R^T of one up-projection with weight [d_out, rank]: output i receives beta z[columns[i]].

    beta = alpha / sqrt(K), K = ceil(d_out / rank) (alpha itself without ``variance_correction``). ``columns`` is
    floor(i / K) unless given. If alpha is learned, it is the parameter ``dlr_alpha`` of the layer, and the caller gives
    its value to ``add``. If a weight is sharded by rows, each row on this rank receives the residual of its index in
    the whole weight.
    """

    def __init__(
        self,
        d_out: int,
        rank: int,
        alpha: float,
        variance_correction: bool,
        impl: str,
        columns: Tensor | None = None,
    ):
        self.copies = -(-d_out // rank)
        self.divisor = math.sqrt(self.copies) if variance_correction else 1.0
        self.alpha, self.impl = alpha, impl
        self.rows = torch.arange(d_out)
        self.contiguous = columns is None
        self.columns = self.rows // self.copies if columns is None else columns
        self.active = False  # whether a forward pass multiplies by B + beta R^T at present

    @property
    def beta(self) -> float:
        return self.alpha / self.divisor

    def add(self, weight: Tensor, alpha: Tensor | None = None, share: float = 1.0) -> None:
        """Add share beta to the entries of ``weight``, in place."""
        own, at = self.entries(weight)
        beta = self.beta if alpha is None else alpha.to(at_least_fp32(weight.dtype)) / self.divisor
        own[at] = plus(own[at], share * beta, weight.dtype)

    def entries(self, weight: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The rows of ``weight`` that this rank holds, and the indices of the entries (i, columns[i]) in them."""
        self._follow(weight.device)
        if not sharded.is_sharded(weight):
            return weight, (self.rows, self.columns)
        first, end = sharded.span(weight)
        return sharded.local_rows(weight), (self.rows[: end - first], self.columns[first:end])

    def places(self, weight: Tensor) -> Tensor:
        """The positions of the entries in the storage of ``weight``, counted in values from its start."""
        own, (rows, columns) = self.entries(weight)
        return int(own.storage_offset()) + rows * own.stride(0) + columns * own.stride(1)

    def duplicate(self, z: Tensor) -> Tensor:
        """R^T z, [..., rank] -> [..., d_out]. Contiguous copies are full groups of K and a tail.

        Repeating all latents and cutting at d_out gives the same, but inductor's C++ backend (torch 2.13) then does not
        write the last partial group if K > 8.
        """
        if not self.contiguous:
            self._follow(z.device)
            return z.index_select(-1, self.columns)
        full, tail = divmod(len(self.rows), self.copies)
        y = z[..., :full].repeat_interleave(self.copies, dim=-1)
        return torch.cat((y, z[..., full : full + 1].expand(*z.shape[:-1], tail)), dim=-1) if tail else y

    def require_active(self, name: str) -> None:
        """Raise RuntimeError if a forward pass would compute B z, which is neither DLR nor what folding gives."""
        if self.impl == "weight" and not self.active:
            rule = "its weight is without the residual, so this forward pass is that of another model"
            fix = "Run it inside `with active(model):` (under a Trainer, use TrainsWithDlr), or after fold_(model)"
            raise RuntimeError(f"{name}: {rule}. {fix}")

    def require_inactive(self, name: str, act: str) -> None:
        if self.active:
            raise RuntimeError(f"{name}: the residual is merged into its weight; {act} outside `active`")

    def _follow(self, device: torch.device) -> None:
        if self.rows.device != device:
            self.rows, self.columns = self.rows.to(device), self.columns.to(device)


def columns_of(grouping: str, name: str, d_out: int, rank: int, seed: int) -> Tensor | None:
    """The latent of each output [d_out] under ``grouping``; None for the default, contiguous groups of K.

    "random": drawn once from ``seed`` and the MD5 of the layer's ``name``, as in the paper's study.
    """
    if grouping == "random":
        digest = hashlib.md5(name.encode(), usedforsecurity=False).digest()
        mixed = (seed ^ int.from_bytes(digest[:8], "little")) % (2**63 - 1)
        return torch.randint(0, rank, (d_out,), generator=torch.Generator("cpu").manual_seed(mixed))
    return None


def plus(entries: Tensor, betas: Tensor | float, dtype: torch.dtype) -> Tensor:
    """entries + betas, formed in fp32 (fp64 for fp64) and rounded once to ``dtype``.

    Training, folding and exporting all add a residual to a weight by this function, so that they agree bit for bit.
    """
    return (entries.to(at_least_fp32(entries.dtype)) + betas).to(dtype)


class UpProjection(nn.Linear):
    """A linear layer with a residual. ``attach_dlr`` mixes this class into the layer's own; ``fold_`` takes it out.

    A ``state_dict`` holds B and, beside it, a ``mark``, which is required when the state is loaded again.
    """

    residual: Residual
    dlr_alpha: nn.Parameter | None  # if alpha is learned

    def forward(self, z: Tensor) -> Tensor:
        """W z + bias, with W = B + beta R^T; with ``impl="branch"``, B z + bias + beta R^T z, the paper's path."""
        residual = self.residual
        residual.require_active("an up-projection")
        y = super().forward(z)
        if residual.impl == "weight":
            return y
        copies = residual.duplicate(z)
        if self.dlr_alpha is None:
            return y + residual.beta * copies
        beta = self.dlr_alpha / residual.divisor  # perhaps wider than z: a product would round it to the dtype of z
        return y + (beta * copies.to(beta.dtype)).to(y.dtype)

    def __reduce_ex__(self, protocol):  # also of copy.deepcopy
        self.residual.require_inactive("an up-projection", "copy or pickle it")
        return super().__reduce_ex__(protocol)

    def mark(self) -> Tensor:
        """[beta, CRC-32 of the columns], in float64. A learned alpha is in the state itself; 1 replaces it here."""
        residual = self.residual
        beta = residual.beta if self.dlr_alpha is None else 1 / residual.divisor
        return torch.tensor([beta, zlib.crc32(residual.columns.cpu().numpy().tobytes())], dtype=torch.float64)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        self.residual.require_inactive(f"{prefix}weight", "save")
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}dlr_mark"] = self.mark()

    def _load_from_state_dict(self, state_dict, prefix, *others) -> None:
        name, own = f"{prefix}weight", self.mark().tolist()
        self.residual.require_inactive(name, "load")
        mark = state_dict.pop(f"{prefix}dlr_mark", torch.zeros(2)).tolist()
        if name in state_dict and mark != own:
            rule = f"was trained with another residual: by {prefix}dlr_mark, beta={mark[0]:g}, and here {own[0]:g}"
            fix = "Attach with the same alpha, grouping, seed and names; what was trained without, load before"
            raise RuntimeError(f"{name} {rule}. {fix}")
        super()._load_from_state_dict(state_dict, prefix, *others)


@cache
def up_projection_class(linear: Any) -> type[nn.Linear]:
    """``UpProjection`` mixed into ``linear``: one class for all layers of a class, so that blocks share a graph.

    It is a class and not a forward hook because ``torch.compile`` guards on classes but, by default, not on hooks.
    """
    return UpProjection if linear is nn.Linear else type(f"Residual{linear.__name__}", (UpProjection, linear), {})


def residuals(module: nn.Module) -> list[tuple[str, UpProjection]]:
    """The up-projections that carry a residual, with their names."""
    return [(name, m) for name, m in module.named_modules() if isinstance(m, UpProjection)]


def full_name(module: str, leaf: str) -> str:
    """The name of a parameter of the submodule ``module``, which is empty for the module itself."""
    return f"{module}.{leaf}" if module else leaf


# ----------------------------------------------------------------------------------------------------
# Merging, with few kernels for each storage


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
        by_storage: dict[tuple[int, int], list[tuple[str, UpProjection, Tensor]]] = {}
        for name, up in self.carrying:
            if up.residual.impl == "weight":
                b = state[full_name(name, "weight")]
                by_storage.setdefault((_storage(up.weight), _storage(b)), []).append((name, up, b))
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

    @record_function("merge residuals")
    @torch.no_grad()
    def merge(self) -> None:
        """Make the working weights from the state: B + beta R^T, rounded once."""
        if self.masters is not None:
            torch._foreach_copy_(self.working, list(self.masters.values()))
        for storage in self.storages:
            storage.merge()
        for _, up in self.carrying:
            up.residual.active = True

    @record_function("restore weights")
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
    """Layers (name, up-projection, state) whose weights lie in one storage, and whose states lie in one.

    The state of a layer is its weight itself or its master.
    """

    def __init__(self, layers: list[tuple[str, UpProjection, Tensor]], add: Callable[..., Tensor]):
        self.names, self.add, (_, first, state) = [name for name, _, _ in layers], add, layers[0]
        self.own = [sharded.local_rows(up.weight) for _, up, _ in layers]
        self.in_place = first.weight is state
        self.weights = _memory(first.weight)
        self.states = self.weights if self.in_place else _memory(state)  # two aliases would not compile in torch 2.11
        self.write_at = torch.cat([up.residual.places(up.weight) for _, up, _ in layers])
        self.read_at = self.write_at if self.in_place else torch.cat([up.residual.places(b) for _, up, b in layers])
        self.entries: Tensor | None = None  # B's, while residuals are merged in place
        wide, rows = at_least_fp32(self.states.dtype), list(zip(layers, self.own, strict=True))
        self.betas = torch.cat([own.new_full((len(own),), up.residual.beta, dtype=wide) for (_, up, _), own in rows])

    def merge(self) -> None:
        entries = self.add(self.weights, self.states, self.write_at, self.read_at, self.betas)
        torch.autograd.graph.increment_version(self.own)
        self.entries = entries if self.in_place else None
        self.merged = self._seen()

    def restore(self) -> list[str]:
        """Write B's entries back; returns the layers whose weight is not the one that ``merge`` has left."""
        if self.entries is None:
            return []
        seen = zip(self.names, self.merged, self._seen(), strict=True)
        spoiled = [name for name, before, now in seen if before != now]
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
