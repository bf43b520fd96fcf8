"""Duplicated Latent Residuals: y = B z + beta R^T z, as a re-parameterisation of the up-projection B.

Output i of an up-projection receives, beside (B z)_i, a copy of latent g(i) = floor(i / K), scaled by
beta = alpha / sqrt(K), with K = ceil(d_out / r) copies a latent (the last ceil-remainder latents get none). So
y = (B + beta R^T) z exactly, and only the d_out entries (i, g(i)) of B are touched. The residual is *published* into
the weights while they are multiplied and taken out again before anything else looks at them: gradients reach B
unchanged, weight decay acts on B alone, and folding is to leave the residual in.

    attach_dlr(model)                 # any module with up-projections, in anybody's training loop
    with active(model):
        loss = model(x); loss.backward()
    optimizer.step()
    ...
    fold_(model)                      # the plain low-rank model, at no cost
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache

import torch
from torch import Tensor, nn

FACTOR_NAMES = (("a", "b"), ("down", "up"), ("lora_A", "lora_B"))  # (down, up) children of a low-rank module


class Residual:
    """beta R^T of one up-projection with weight [d_out, rank]."""

    def __init__(self, d_out: int, rank: int, alpha: float, variance_correction: bool, impl: str):
        self.copies = -(-d_out // rank)
        self.beta = alpha / math.sqrt(self.copies) if variance_correction else alpha
        self.impl = impl
        self.rows = torch.arange(d_out)
        self.columns = self.rows // self.copies
        self.saved: Tensor | None = None  # the entries of B while the residual is published into it

    def entries(self, weight: Tensor) -> Tensor:
        """The d_out entries (i, g(i)) of ``weight``."""
        self._follow(weight.device)
        return weight[self.rows, self.columns]

    def write(self, weight: Tensor, entries: Tensor) -> None:
        self._follow(weight.device)
        weight[self.rows, self.columns] = entries

    def add(self, weight: Tensor, entries: Tensor) -> None:
        """Make the entries of ``weight`` entries + beta, formed in fp32 (fp64 for fp64) and rounded once.

        The one place where a residual enters a weight: in training, folding and exporting alike.
        """
        wide = entries.to(torch.promote_types(entries.dtype, torch.float32))
        self.write(weight, (wide + self.beta).to(weight.dtype))

    def duplicate(self, z: Tensor) -> Tensor:
        """R^T z, [..., rank] -> [..., d_out], as full groups plus a tail.

        Repeating all latents and cutting at d_out is the same, but inductor's C++ backend (torch 2.13) leaves the last
        partial group unwritten for K > 8.
        """
        full, tail = divmod(len(self.rows), self.copies)
        y = z[..., :full].repeat_interleave(self.copies, dim=-1)
        return torch.cat((y, z[..., full : full + 1].expand(*z.shape[:-1], tail)), dim=-1) if tail else y

    def _follow(self, device: torch.device) -> None:
        if self.rows.device != device:
            self.rows, self.columns = self.rows.to(device), self.columns.to(device)


class Branch:
    """The paper's residual path, mixed into the class of a linear layer: y + beta * (each latent repeated K times).

    A class of its own, and not a forward hook: ``torch.compile`` guards on classes but, by default, not on hooks.
    """

    def forward(self, z: Tensor) -> Tensor:
        return super().forward(z) + self.residual.beta * self.residual.duplicate(z)


@cache
def _with_branch(linear: type[nn.Linear]) -> type[nn.Linear]:
    """One class for all layers of a class, so that equal blocks share one compiled graph."""
    return type(f"Branch{linear.__name__}", (Branch, linear), {})


# ----------------------------------------------------------------------------------------------------
# The public interface


def attach_dlr(
    module: nn.Module,
    alpha: float = 1.0,
    variance_correction: bool = True,
    impl: str = "weight",
    match: str | Callable[[str, nn.Linear], bool] | None = None,
) -> list[str]:
    """Give the up-projections of ``module`` a duplicated latent residual; returns their names.

    ``match`` chooses the up-projections, each an ``nn.Linear`` with weight [d_out, rank], with or without bias: a glob
    over their names or a predicate (name, linear). By default they are the second factors of low-rank modules, that is
    of modules with ``nn.Linear`` children named as in ``FACTOR_NAMES``, or ``module`` itself if it is a linear layer.
    ``impl="branch"`` adds the residual to the layer's output instead: slower, the paper's formula literally.

    Raises ValueError where nothing matches, where a residual is there already, or after folding.
    """
    if impl not in ("weight", "branch"):
        raise ValueError(f"impl={impl!r}: must be 'weight' or 'branch'")
    targets = dict(_up_projections(module, match))
    if not targets:
        raise ValueError("no up-projection matches; name them by match=, for instance match='*.up'")
    for name, linear in targets.items():
        if hasattr(linear, "residual"):
            raise ValueError(f"{name or 'the module'} has a residual already")
        if getattr(linear, "dlr_folded", False):
            raise ValueError(f"{name or 'the module'} was folded: its weight holds a residual already")
    for linear in targets.values():
        d_out, rank = linear.weight.shape
        linear.residual = Residual(d_out, rank, alpha, variance_correction, impl)
        linear.register_state_dict_pre_hook(_refuse_while_active)
        if impl == "branch":
            linear.__class__ = _with_branch(type(linear))
    return list(targets)


@contextmanager
def active(module: nn.Module) -> Iterator[None]:
    """Within, the weights are B + beta R^T, and forward and backward are those of DLR; outside they are B again.

    B is restored bit for bit, also when the body raises.
    """
    _require_restored(residuals(module))
    try:
        publish(module)
        yield
    finally:
        restore(module)


def fold_(module: nn.Module) -> int:
    """Put the residual into the weights for good and remove it; returns the number of folded layers.

    The folded tensors equal those that ``active`` multiplies by, bit for bit. Folding twice raises ValueError.
    """
    folded = residuals(module)
    if not folded and any(getattr(m, "dlr_folded", False) for m in module.modules()):
        raise ValueError("this module is folded already")
    if not folded:
        raise ValueError("this module has no residual to fold")
    _require_restored(folded)
    for _, linear in folded:
        residual = linear.residual
        with torch.no_grad():
            residual.add(linear.weight, residual.entries(linear.weight))
        if residual.impl == "branch":
            linear.__class__ = type(linear).__bases__[1]
        del linear.residual
        linear.dlr_folded = True
    return len(folded)


# ----------------------------------------------------------------------------------------------------
# What the trainer calls


def residuals(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The up-projections that carry a residual, by name."""
    return [(name, m) for name, m in module.named_modules() if isinstance(getattr(m, "residual", None), Residual)]


@torch.no_grad()
def publish(module: nn.Module, masters: Mapping[str, Tensor] | None = None) -> None:
    """Make the working weights from the state: B + beta R^T, rounded once.

    With ``masters`` (parameter name -> fp32 master) every parameter is the rounded master, and nothing needs to be
    restored. Without, the parameters are the state themselves, and ``restore`` puts the touched entries back.
    """
    carrying = residuals(module)
    if masters is None:
        _require_restored(carrying)
    else:
        parameters = dict(module.named_parameters())
        torch._foreach_copy_([parameters[name] for name in masters], list(masters.values()))
    for name, linear in carrying:
        residual, weight = linear.residual, linear.weight
        if residual.impl == "branch":
            continue
        entries = residual.entries(weight if masters is None else masters[f"{name}.weight".lstrip(".")])
        if masters is None:
            residual.saved = entries
        residual.add(weight, entries)


@torch.no_grad()
def restore(module: nn.Module) -> None:
    """Take the residual out of the weights again, bit for bit."""
    for _, linear in residuals(module):
        residual = linear.residual
        if residual.saved is not None:
            residual.write(linear.weight, residual.saved)
            residual.saved = None


@torch.no_grad()
def folded_state(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``state`` (parameter name -> value of B or its master) with every residual folded in, as copies."""
    folded = {name: value.clone() for name, value in state.items()}
    for name, linear in residuals(module):
        value = folded[f"{name}.weight".lstrip(".")]
        linear.residual.add(value, linear.residual.entries(value))
    return folded


def _up_projections(module: nn.Module, match: str | Callable | None) -> Iterator[tuple[str, nn.Linear]]:
    if match is None:
        if isinstance(module, nn.Linear):
            yield "", module
        for name, parent in module.named_modules():
            for down, up in FACTOR_NAMES:
                a, b = getattr(parent, down, None), getattr(parent, up, None)
                if isinstance(a, nn.Linear) and isinstance(b, nn.Linear) and a.out_features == b.in_features:
                    yield f"{name}.{up}".lstrip("."), b
    else:
        chosen = (lambda name, _: fnmatch(name, match)) if isinstance(match, str) else match
        for name, linear in module.named_modules():
            if isinstance(linear, nn.Linear) and chosen(name, linear):
                yield name, linear


def _require_restored(carrying: list[tuple[str, nn.Linear]]) -> None:
    for name, linear in carrying:
        if linear.residual.saved is not None:
            raise RuntimeError(f"{name}: the residual is published; leave `active` first")


def _refuse_while_active(linear: nn.Linear, prefix: str, keep_vars: bool) -> None:
    residual = getattr(linear, "residual", None)
    if residual is not None and residual.saved is not None:
        raise RuntimeError(f"{prefix}weight holds the published residual; save outside `active`")
