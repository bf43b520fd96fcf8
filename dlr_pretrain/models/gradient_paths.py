"""The gradient-path probe: how a projection's gradient reaches its latent, through B and through the residual.

For y = (B + beta R^T) z, the gradient with respect to z is u + v, with u = B^T g and v = beta R g. Here g is the
gradient with respect to y, the output of B before anything is added to it or normalises it. If g has no preferred
direction, the ratio of the root mean squares of |v| and |u| is |beta R^T|_F / |B|_F (``isotropic``).
Source: Wang et al. (2026), their study of gradient paths.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from dlr_pretrain.config import Config
from dlr_pretrain.models.dlr import marks
from dlr_pretrain.models.llama import Llama, build
from dlr_pretrain.models.residual import Residual
from dlr_pretrain.util.tensors import at_least_fp32

META = torch.device("meta")
SUMS = 6  # entries in the result of ``sums``


class PlainPath:
    """The model of ``cfg`` in its readable form: eager, one projection at a time, on the weights of another model.

    Its parameters are constants that share the memory of the model that trains. A backward pass through it therefore
    leaves no gradient in that model, and calls neither its hooks nor its compiled code.
    """

    def __init__(self, cfg: Config, vocab_size: int):
        if cfg.dlr.impl == "branch":
            self.model = build(cfg, vocab_size, META)
        else:  # the merged weights already hold the residual
            with META:
                self.model = Llama(cfg, vocab_size, grouped=False)

    def output_gradients(
        self, weights: dict[str, Tensor], names: Iterable[str], inputs: tuple[Tensor, ...], count: Tensor
    ) -> dict[str, Tensor]:
        """The gradients [N, d_out] of the outputs of the up-projections ``names``, at the N positions of ``inputs``.

        ``weights`` are the parameters and buffers that the model multiplies by; they hold the residual unless it is a
        branch. ``inputs`` are the arguments of the model. The loss is its summed cross-entropy divided by ``count``.
        """
        own = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        bare = {name: weights[name].detach() for name in own}
        self.model.load_state_dict(bare | marks(self.model), assign=True)
        self.model.requires_grad_(False)
        zeros: dict[str, Tensor] = {}  # added to the outputs; recomputation in the backward pass reuses them

        def added(name: str, _module, _inputs, y: Tensor) -> Tensor:
            if name not in zeros:
                zeros[name] = torch.zeros_like(y, requires_grad=True)
            return y + zeros[name]

        modules = ((name, self.model.get_submodule(name)) for name in names)
        hooks = [module.register_forward_hook(partial(added, name)) for name, module in modules]
        try:
            with torch.enable_grad():
                loss = self.model(*inputs) / count
                gradients = torch.autograd.grad(loss, list(zeros.values()))
        finally:
            for hook in hooks:
                hook.remove()
        return {name: gradient.flatten(0, -2) for name, gradient in zip(zeros, gradients, strict=True)}


def counted(name: str, scored: Tensor, documents: Tensor | None = None) -> Tensor:
    """A mask [N] of the positions that count for the projection ``name``: the ``scored`` ones [B, T].

    For q_proj, the first position of a document (of a row if there are no ``documents`` [B, T]) does not count: it sees
    only one key, so that its gradient is zero up to rounding.
    """
    if ".q_proj." in name:
        first = torch.zeros_like(scored)
        first[:, 0] = True
        if documents is not None:
            first[:, 1:] = documents[:, 1:] != documents[:, :-1]
        scored = scored & ~first
    return scored.flatten()


def sums(g: Tensor, b: Tensor, residual: Tensor) -> Tensor:
    """Totals [6] over the positions of ``g`` [N, d_out].

    They are the number of positions, the sums of |u|, |v|, |v| / |u| and cos(u, v), and the number of positions at
    which neither u nor v is zero: only these have a ratio and a cosine. ``b`` is B and ``residual`` is beta R^T, both
    [d_out, r]. Products are in fp32 (fp64 for fp64), sums in fp64.
    """
    wide = at_least_fp32(g.dtype)
    u, v = ((g.to(wide) @ matrix.to(wide)).double() for matrix in (b, residual))
    through_b, through_residual = u.norm(dim=-1), v.norm(dim=-1)
    both = (through_b > 0) & (through_residual > 0)
    ratio = through_residual[both] / through_b[both]
    cosine = (u[both] * v[both]).sum(dim=-1) / (through_b[both] * through_residual[both])
    number = torch.ones_like(through_b)
    return torch.stack([term.sum() for term in (number, through_b, through_residual, ratio, cosine, number[both])])


def means(sums: list[float]) -> dict[str, float | None]:
    """The means that follow from the ``sums`` over all positions; None for a mean over no position.

    ``rho`` is the ratio of the means of |v| and |u|, ``rho_mean`` the mean of the ratios |v| / |u|.
    """
    count, u, v, ratio, cosine, both = sums
    shares = {
        "through_b": (u, count),
        "through_residual": (v, count),
        "rho": (v, u),
        "rho_mean": (ratio, both),
        "cosine": (cosine, both),
    }
    return {name: total / number if number else None for name, (total, number) in shares.items()}


def residual_matrix(residual: Residual, b: Tensor, alpha: Tensor | None) -> Tensor:
    """beta R^T [d_out, r] in fp32 (fp64 for fp64), as it is added to B."""
    matrix = torch.zeros_like(b, dtype=at_least_fp32(b.dtype))
    residual.add(matrix, alpha)
    return matrix


def isotropic(b: Tensor, residual: Tensor) -> Tensor:
    """The ratio of the root mean squares of |v| and |u| if gradients have no preferred direction, [] in fp64."""
    return residual.double().norm() / b.double().norm()
