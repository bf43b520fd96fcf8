"""Duplicated Latent Residuals: y = B z + beta R^T z, as a re-parameterisation of the up-projection B.

Output i of an up-projection receives, beside (B z)_i, a copy of latent g(i) = floor(i / K), scaled by
beta = alpha / sqrt(K), with K = ceil(d_out / r) copies per latent (the last r - ceil(d_out / K) latents get none). So
y = (B + beta R^T) z exactly, and only the d_out entries (i, g(i)) of B are touched. The residual is *merged* into
the weights for forward and backward and taken out again before any other code reads them. Gradients reach B
unchanged, weight decay acts on B alone, and folding leaves the residual in.

    attach_dlr(model)                 # any module with up-projections, in any training loop
    with active(model):
        loss = model(x); loss.backward()
    optimizer.step()
    ...
    fold_(model)                      # the plain low-rank model, at no extra cost

Before ``fold_``, a ``state_dict`` holds B and, beside each B, a ``dlr_mark``: beta and a checksum of the columns. A
model without the residual refuses this unknown name; a model with a residual requires that its own mark is equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any, cast

import torch
from torch import Tensor, nn

from dlr_pretrain.models.residual import (
    MergedResiduals,
    Residual,
    UpProjection,
    columns_of,
    full_name,
    residuals,
    up_projection_class,
)

FACTOR_NAMES = (("a", "b"), ("down", "up"), ("lora_A", "lora_B"))  # (down, up) children of a low-rank module


# ----------------------------------------------------------------------------------------------------
# The public interface


def attach_dlr(
    module: nn.Module,
    alpha: float = 1.0,
    variance_correction: bool = True,
    impl: str = "weight",
    match: str | Callable[[str, nn.Linear], bool] | None = None,
    *,
    grouping: str = "contiguous",
    seed: int = 0,
    learn_alpha: bool = False,
    train_b: bool = True,
    keep_output: bool = False,
) -> list[str]:
    """Attach a duplicated latent residual to the up-projections of ``module``; returns their names.

    ``match`` chooses the up-projections, each an ``nn.Linear`` with weight [d_out, rank], with or without bias: a glob
    over their names or a predicate (name, linear). By default they are the second factors of low-rank modules,
    which are modules with ``nn.Linear`` children named as in ``FACTOR_NAMES``, or ``module`` itself if it is a linear
    layer. ``impl="branch"`` adds the residual to the layer's output instead: it is the paper's formula, and slower.

    Arguments for the paper's ablations: ``grouping`` says which output receives which latent ("random" depends on
    ``seed`` and the name of the module that holds the up-projection, see ``columns_of``). ``learn_alpha`` makes alpha a
    parameter ``dlr_alpha`` of each layer, which needs ``impl="branch"``. With ``train_b=False`` B is frozen at zero.

    ``keep_output`` subtracts beta R^T from B first, so that the module still computes what it computes now. It is meant
    for trained weights, such as the truncated SVD of dense ones. The weights must be fp32 or wider: next to -beta, bf16
    would round away B's own values and most of their updates.

    Raises ValueError if nothing matches, if a layer has a residual already, if another module uses the same weight, if
    a weight is not a floating-point parameter, or if arguments contradict each other.
    """
    if impl not in ("weight", "branch"):
        raise ValueError(f"impl={impl!r}: must be weight or branch")
    if grouping not in ("contiguous", "random"):
        raise ValueError(f"grouping={grouping!r}: must be contiguous or random")
    if learn_alpha and impl != "branch":
        raise ValueError(f"learn_alpha=True: alpha is learned in the branch, and this is impl={impl!r}. Use 'branch'")
    if not train_b and keep_output:
        raise ValueError("train_b=False: B stays zero, and keep_output cannot act through it")
    targets = dict(_up_projections(module, match))
    _require_fit(module, targets, keep_output)
    for name, linear in targets.items():
        d_out, rank = linear.weight.shape
        columns = columns_of(grouping, name.rpartition(".")[0] or name, d_out, rank, seed)
        kind: Any = type(linear)
        linear.__class__ = up_projection_class(kind)
        up = cast(UpProjection, linear)
        up.residual = Residual(d_out, rank, alpha, variance_correction, impl, columns)
        up.dlr_alpha = nn.Parameter(up.weight.new_full((), alpha)) if learn_alpha else None
        if not train_b:
            up.weight.requires_grad_(False).zero_()
        if keep_output:
            with torch.no_grad():
                up.residual.add(up.weight, share=-1.0)
    return list(targets)


@contextmanager
def active(module: nn.Module) -> Iterator[None]:
    """Inside the context the weights are B + beta R^T, so that forward and backward are those of DLR.

    At its end B is restored bit for bit, also if the body raises. Change B outside only: inside, ``optimizer.step`` and
    ``load_state_dict`` raise RuntimeError before they change any B, and other changes, casts and moves raise it at the
    end. A forward pass outside raises RuntimeError, too.

    Raises ValueError if ``module`` has no residual.
    """
    require_residuals(module)
    with MergedResiduals(module).active():
        yield


def require_residuals(module: nn.Module) -> list[tuple[str, UpProjection]]:
    """The up-projections that carry a residual, with their names. Raises ValueError if there are none."""
    found = residuals(module)
    if not found:
        raise ValueError("this module has no residual: attach_dlr was not called, or fold_ was called already")
    return found


def fold_(module: nn.Module) -> int:
    """Put the residual into the weights for good and remove it; returns the number of folded layers.

    With ``impl="weight"`` the folded tensors equal the weights inside ``active`` bit for bit. Folding twice raises
    ValueError.
    """
    carrying = require_residuals(module)
    for name, up in carrying:
        up.residual.require_inactive(name or "the module", "fold")
        if issubclass(type(up).__bases__[-1], UpProjection):
            raise ValueError(f"{name}: its class was changed since attach_dlr; fold before fully_shard is called on it")
    for _, up in carrying:
        with torch.no_grad():
            up.residual.add(up.weight, up.dlr_alpha)
        up.residual.active = True  # for good
        del up.residual, up.dlr_alpha
        up.__class__ = type(up).__bases__[-1]
    return len(carrying)


# ----------------------------------------------------------------------------------------------------
# Functions that the trainer calls


@torch.no_grad()
def folded_state(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of ``state`` (parameter name -> value of B or its master) with every residual folded in."""
    folded = {name: value.clone() for name, value in state.items()}
    for name, linear in residuals(module):
        value = folded[full_name(name, "weight")]
        alpha = folded.pop(full_name(name, "dlr_alpha"), None)
        linear.residual.add(value, alpha)
    return folded


def marks(module: nn.Module) -> dict[str, Tensor]:
    """The ``dlr_mark`` entries that ``load_state_dict`` requires, for a state that is known to belong to ``module``."""
    return {full_name(name, "dlr_mark"): up.mark() for name, up in residuals(module)}


def _up_projections(module: nn.Module, match: str | Callable | None) -> Iterator[tuple[str, nn.Linear]]:
    if match is None:
        if isinstance(module, nn.Linear):
            yield "", module
        for name, parent in module.named_modules():
            for down, up in FACTOR_NAMES:
                a, b = getattr(parent, down, None), getattr(parent, up, None)
                if isinstance(a, nn.Linear) and isinstance(b, nn.Linear) and a.out_features == b.in_features:
                    yield full_name(name, up), b
    else:
        yield from matching(module, match)


def matching(module: nn.Module, match: str | Callable[[str, nn.Linear], bool]) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of ``module`` that ``match`` chooses: a glob over names, or a predicate (name, linear)."""
    chosen = (lambda name, _: fnmatch(name, match)) if isinstance(match, str) else match
    for name, linear in module.named_modules():
        if isinstance(linear, nn.Linear) and chosen(name, linear):
            yield name, linear


def _require_fit(module: nn.Module, targets: dict[str, nn.Linear], keep_output: bool) -> None:
    """Raise ValueError if a residual on ``targets`` would not do what ``attach_dlr`` promises."""
    if not targets:
        raise ValueError("no up-projection matches; name nn.Linear layers by match=, for instance match='*.up'")
    named = [
        (full_name(n, leaf), p) for n, m in module.named_modules() for leaf, p in m.named_parameters(recurse=False)
    ]
    for name, linear in targets.items():
        here = name or "the module"
        if isinstance(linear, UpProjection):
            raise ValueError(f"{here} has a residual already")
        if linear.out_features < linear.in_features:
            rule = f"it maps {linear.in_features} to {linear.out_features} features"
            raise ValueError(f"{here} is no up-projection: {rule}. Choose second factors alone by match=")
        if "weight" not in dict(linear.named_parameters(recurse=False)) or not linear.weight.is_floating_point():
            raise ValueError(f"{here}: its weight is computed from others, or quantised: there is no B to add to")
        if len(shared := [full for full, p in named if p is linear.weight]) > 1:
            raise ValueError(f"{here}: {' and '.join(shared)} are one parameter: the residual would reach all of them")
        if keep_output and linear.weight.dtype.itemsize < 4:
            raise ValueError(f"{here}: keep_output=True is for fp32 weights, and this is {linear.weight.dtype}")
