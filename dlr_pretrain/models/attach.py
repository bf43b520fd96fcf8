"""Duplicated latent residuals (DLR) in any model and loop: y = B z + beta R^T z, as a parametrization of B.

    attach_dlr(model)                 # B -> B + beta R^T, in any module with up-projections
    ...                               # any loop, optimizer or trainer; they see B
    fold_(model)                      # the plain low-rank model, at no extra cost

Forward and backward passes multiply by W = round(B + beta R^T). Gradients reach B unchanged, and weight decay acts on B
alone. A ``state_dict`` holds B under the names of ``torch.nn.utils.parametrize``, with the strength and grouping of its
residual beside it. A model without this residual therefore refuses the ``state_dict``. Our own trainer stores W in the
model instead, which adds no kernels to a forward pass (see ``residual``).
"""

import zlib
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dlr_pretrain.models.residual import columns_of, divisor_of, plus
from dlr_pretrain.util import sharded
from dlr_pretrain.util.tensors import at_least_fp32

FACTOR_NAMES = (("a", "b"), ("down", "up"), ("lora_A", "lora_B"))  # (down, up) children of a low-rank module
Match = str | Callable[[str, nn.Linear], bool]


class Residual(nn.Module):
    """B [d_out, rank] -> B + beta R^T, formed in fp32 (fp64 for fp64) and rounded once.

    ``alpha`` is a number, or a parameter [1] to learn. ``name`` is the name of the layer in error messages.
    """

    columns: Tensor

    def __init__(self, name: str, columns: Tensor, alpha: float | nn.Parameter, divisor: float):
        super().__init__()
        self.name, self.alpha, self.divisor = name, alpha, divisor
        self.register_buffer("columns", columns, persistent=False)

    def forward(self, b: Tensor) -> Tensor:
        receives = self.columns[:, None] == torch.arange(b.shape[1], device=b.device)
        alpha = self.alpha.to(at_least_fp32(b.dtype)) if isinstance(self.alpha, Tensor) else self.alpha
        return torch.where(receives, plus(b, alpha / self.divisor), b)

    def get_extra_state(self) -> Tensor:
        """[[beta, CRC-32 of the columns]], in float64. If alpha is learned, beta is for alpha = 1.

        It has two dimensions because PEFT warns about any one-dimensional tensor of an adapter.
        """
        alpha = 1.0 if isinstance(self.alpha, Tensor) else self.alpha
        checksum = zlib.crc32(self.columns.cpu().numpy().tobytes())
        return torch.tensor([[alpha / self.divisor, checksum]], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        (beta, columns), (beta_here, columns_here) = state.flatten().tolist(), self.get_extra_state()[0].tolist()
        if beta != beta_here:
            trained = f"was trained with another residual: beta={beta:g}, but here {beta_here:g}"
            raise RuntimeError(f"{self.name} {trained}. Attach with the same alpha and variance_correction")
        if columns != columns_here:
            trained = "was trained with a residual that takes other latents"
            raise RuntimeError(f"{self.name} {trained}. Attach with the same grouping, seed and module names")


def attach_dlr(
    module: nn.Module,
    alpha: float = 1.0,
    variance_correction: bool = True,
    match: Match | None = None,
    *,
    grouping: str = "contiguous",
    seed: int = 0,
    learn_alpha: bool = False,
    train_b: bool = True,
    keep_output: bool = False,
) -> list[str]:
    """Attach a duplicated latent residual to the up-projections of ``module``; returns their names.

    An up-projection is an ``nn.Linear`` with weight [d_out, rank], with or without bias. ``match`` chooses them: it is
    a glob over names, or a predicate (name, linear). The default is the second factor of each module with children
    named as in ``FACTOR_NAMES`` (PEFT's adapters included), or ``module`` itself if it is a linear layer.

    The paper's ablations: ``grouping`` says which output receives which latent ("random" depends on ``seed`` and on
    the name of the module that holds the up-projection, see ``columns_of``). ``learn_alpha`` makes alpha a parameter of
    each layer. ``train_b=False`` freezes B at zero.

    ``keep_output`` first subtracts beta R^T from B, so the module still computes what it computes now. Use it for
    trained weights, such as the truncated SVD of dense ones. The weights must be fp32 or wider: next to -beta, bf16
    would round away B's own values and most of their updates.

    Raises ValueError if nothing matches, if a layer has a residual already, if another module uses the same weight, if
    a weight is not a plain floating-point parameter with values, or if arguments contradict each other.
    """
    if grouping not in ("contiguous", "random"):
        raise ValueError(f"grouping={grouping!r}: must be contiguous or random")
    if not train_b and keep_output:
        raise ValueError("train_b=False: B stays zero, so keep_output cannot act through it")
    targets = dict(_up_projections(module, match))
    _require_fit(module, targets, keep_output)
    for name, linear in targets.items():
        b, holder = linear.weight, name.rpartition(".")[0] or name
        d_out, rank = b.shape
        columns = columns_of(grouping, holder, d_out, rank, seed).to(b.device)
        divisor = divisor_of(d_out, rank, variance_correction)
        with torch.no_grad():
            if not train_b:
                b.requires_grad_(False).zero_()
            if keep_output:
                b.copy_(Residual(name, columns, -alpha, divisor)(b))
        strength: float | nn.Parameter = alpha
        if learn_alpha:
            strength = nn.Parameter(b.new_full((1,), alpha, dtype=at_least_fp32(b.dtype)))
        residual = Residual(name or "the module", columns, strength, divisor)
        parametrize.register_parametrization(linear, "weight", residual)
    return list(targets)


def fold_(module: nn.Module) -> int:
    """Add the residuals to the weights permanently and remove them; returns the number of folded layers.

    The folded tensors equal those of a forward pass bit for bit. The parameters remain the same objects.
    Raises ValueError if ``module`` has no residual, or if its weights are sharded.
    """
    carrying = residuals(module)
    if not carrying:
        raise ValueError("this module has no residual: attach_dlr was not called, or fold_ was called already")
    if _is_sharded(module):
        raise ValueError(
            "fully_shard holds these weights and would restore B. Gather a full state dict, load it into a model that "
            "attach_dlr was called on, and fold that"
        )
    for _, linear in carrying:
        shared: Any = type(linear)  # copies by deepcopy share this class, and torch deletes ``weight`` from it
        linear.__class__ = type(shared.__name__, shared.__bases__, dict(vars(shared)))
        parametrize.remove_parametrizations(linear, "weight", leave_parametrized=True)
    return len(carrying)


def residuals(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of ``module`` that carry a residual, with their names."""
    return [(name, m) for name, m in module.named_modules() if _carries(m)]


def matching(module: nn.Module, match: Match) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of ``module`` that ``match`` chooses: a glob over names, or a predicate (name, linear)."""
    chosen = (lambda name, _: fnmatch(name, match)) if isinstance(match, str) else match
    for name, linear in module.named_modules():
        if isinstance(linear, nn.Linear) and chosen(name, linear):
            yield name, linear


def _carries(module: nn.Module) -> bool:
    if not parametrize.is_parametrized(module, "weight"):
        return False
    return any(isinstance(part, Residual) for part in module.parametrizations.weight)  # type: ignore[union-attr]


def _is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` holds weights of ``module``; after a forward pass it may leave them whole for a while."""
    return any(hasattr(m, "reshard") for m in module.modules()) or any(map(sharded.is_sharded, module.parameters()))


def _up_projections(module: nn.Module, match: Match | None) -> Iterator[tuple[str, nn.Linear]]:
    if match is not None:
        yield from matching(module, match)
        return
    if isinstance(module, nn.Linear):
        yield "", module
    for name, parent in module.named_modules():
        for down, up in FACTOR_NAMES:
            downs, ups = (_by_adapter(getattr(parent, child, None)) for child in (down, up))
            for adapter, a in downs.items():
                b = ups.get(adapter)
                if isinstance(a, nn.Linear) and isinstance(b, nn.Linear) and a.out_features == b.in_features:
                    yield ".".join(filter(None, (name, up, adapter))), b


def _by_adapter(child: nn.Module | None) -> dict[str, nn.Module | None]:
    """The factors by the name of their adapter, as PEFT keeps them; others under an empty name."""
    return dict(child.items()) if isinstance(child, nn.ModuleDict) else {"": child}


def _require_fit(module: nn.Module, targets: dict[str, nn.Linear], keep_output: bool) -> None:
    """Raise ValueError if a residual on ``targets`` would not do what ``attach_dlr`` promises."""
    if not targets:
        raise ValueError("no up-projection matches; name nn.Linear layers with match=, for instance match='*.up'")
    if _is_sharded(module):
        raise ValueError("fully_shard holds the weights of this module: call attach_dlr before it")
    named = [
        (f"{name}.{leaf}".removeprefix("."), p)
        for name, holder in module.named_modules()
        for leaf, p in holder.named_parameters(recurse=False)
    ]
    for name, linear in targets.items():
        here = name or "the module"
        if _carries(linear):
            raise ValueError(f"{here} has a residual already")
        if linear.out_features < linear.in_features:
            widths = f"it maps {linear.in_features} to {linear.out_features} features"
            raise ValueError(f"{here} is not an up-projection: {widths}. Choose only second factors with match=")
        if linear.weight.is_meta:
            raise ValueError(f"{here} is on the meta device: call attach_dlr once it has values")
        if type(linear.weight) is not nn.Parameter or not linear.weight.is_floating_point():
            raise ValueError(f"{here}: its weight is computed from others, or quantised, so there is no B to add to")
        if len(shared := [full for full, p in named if p is linear.weight]) > 1:
            raise ValueError(f"{here}: {' and '.join(shared)} are one parameter; the residual would reach all of them")
        if keep_output and linear.weight.dtype.itemsize < 4:
            raise ValueError(f"{here}: keep_output=True is for fp32 weights, but this one is {linear.weight.dtype}")
