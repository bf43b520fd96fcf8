"""DLR in other models and training loops: linear layers become pairs of factors.

factorize_(model, rank=128, match="*_proj")          # W becomes B A, its truncated SVD
attach_dlr(model, keep_output=True)
transformers.Trainer(model, ...).train()
fold_(model)
multiply_(model)                                     # optional: B A as one matrix again, in the model's own layout
"""

from typing import Any

import torch
from torch import Tensor, nn

from dlr_pretrain.models.attach import Match, matching, residuals
from dlr_pretrain.models.lowrank import balanced, leading, product


class FactorizedLinear(nn.Module):
    """y = B A x + bias, x [..., d_in] -> y [..., d_out]; the bias is ``b.bias``."""

    def __init__(self, d_in: int, d_out: int, rank: int, bias: bool, **where: Any):
        super().__init__()
        self.a = nn.Linear(d_in, rank, bias=False, **where)
        self.b = nn.Linear(rank, d_out, bias, **where)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@torch.no_grad()
def factorize_(module: nn.Module, rank: int, match: Match) -> list[str]:
    """Replace linear layers of ``module`` with ``FactorizedLinear`` layers of ``rank``; returns their names.

    ``match`` chooses the layers: a glob over names, or a predicate (name, linear). B A is the best approximation of the
    weight at that rank. Each factor is scaled by the square roots of the singular values. Biases are kept.

    Raises ValueError if nothing matches, or if a layer is smaller than ``rank`` or used under two names.
    """
    targets = {name: dense for name, dense in matching(module, match) if name}
    if not targets:
        raise ValueError(f"match={match!r}: matches no linear layer")
    for name, dense in targets.items():
        if not 1 <= rank <= min(dense.weight.shape):
            raise ValueError(f"rank={rank}: {name} has a weight of shape {list(dense.weight.shape)}")
        if sum(p is dense.weight for _, p in module.named_parameters(remove_duplicate=False)) > 1:
            raise ValueError(f"{name}: its weight is used under two names, which factors would separate")
    for name, dense in targets.items():
        where = {"device": dense.weight.device, "dtype": dense.weight.dtype}
        made = FactorizedLinear(dense.in_features, dense.out_features, rank, bias=dense.bias is not None, **where)
        made.requires_grad_(dense.weight.requires_grad)
        b, a = balanced(*leading(dense.weight, rank))
        made.b.weight.copy_(b), made.a.weight.copy_(a)
        if dense.bias is not None:
            made.b.bias.copy_(dense.bias)
        module.set_submodule(name, made)
    return list(targets)


@torch.no_grad()
def multiply_(module: nn.Module) -> int:
    """Turn each layer that ``factorize_`` made into one ``nn.Linear`` again; returns their number.

    W = B A is formed in fp32 (fp64 for fp64) and rounded once. Raises ValueError if no layer is factorized, or if a
    residual is not folded yet.
    """
    layers = [(name, m) for name, m in module.named_modules() if name and isinstance(m, FactorizedLinear)]
    if not layers:
        raise ValueError("no layer of this module was made by factorize_")
    for name, layer in layers:
        if residuals(layer):
            raise ValueError(f"{name}: its residual is not in the weight yet. Call fold_ first")
    for name, layer in layers:
        a, b = layer.a.weight, layer.b.weight
        dense = nn.Linear(a.shape[1], b.shape[0], layer.b.bias is not None, device=b.device, dtype=b.dtype)
        dense.weight.copy_(product(b, a))
        if layer.b.bias is not None:
            dense.bias.copy_(layer.b.bias)
        module.set_submodule(name, dense)
    return len(layers)
