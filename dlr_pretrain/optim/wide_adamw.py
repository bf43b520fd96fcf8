"""AdamW that updates each parameter in one pass: it computes in fp32, masks on the device, and can store 8-bit moments.

The k-th update of a parameter is W <- (1 - lr weight_decay) W - lr m / (1 - beta1^k) / (sqrt(v / (1 - beta2^k)) + eps)
(Loshchilov and Hutter, 2019). Moments are tensors of the parameter's dtype, or blocks of 8-bit codes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from dlr_pretrain.optim import quantized, rounding
from dlr_pretrain.optim.parameters import empty_state
from dlr_pretrain.util import sharded
from dlr_pretrain.util.tensors import at_least_fp32

LARGEST = 1 << 24  # values that are updated at once
Moment = Tensor | tuple[Tensor, Tensor, Tensor]  # a plain tensor, or codes, scales and map


class WideAdamW(torch.optim.Optimizer):
    """AdamW over ``groups``, which may hold the rows of sharded parameters.

    ``rounding_keys`` has keys by parameter (see ``rounding``); bf16 weights and second moments with keys are rounded
    stochastically, because most of their changes are smaller than half a unit in the last place: beta2 = 0.999 shrinks
    a second moment by a thousandth. First moments change by a tenth, and are rounded to the nearest.

    The moments of the parameters in ``quantised`` are stored in 8 bits, in blocks of ``knobs["block_size"]`` values.
    """

    _step_supports_amp_scaling = True  # ``found_inf`` masks an update on the device, ``grad_scale`` divides gradients

    def __init__(
        self,
        groups: list[dict],
        knobs: dict,
        compiled: bool,
        rounding_keys: Mapping[Tensor, Tensor] | None = None,
        quantised: Collection[Tensor] = (),
    ):
        betas = knobs["beta1"], knobs["beta2"]
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": knobs["eps"], "weight_decay": 0.0})
        self.rounding_keys, self.quantised = rounding_keys or {}, quantised
        self.compiled, self.block_size = compiled, knobs.get("block_size", 1)
        self.advance = torch.compile(_advance, fullgraph=True, dynamic=False) if compiled else _advance
        self.found_inf: Tensor | None = None
        self.grad_scale: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # as in Adam
        graphs: AbstractContextManager = nullcontext()
        if self.compiled:
            from torch._dynamo.utils import disable_cache_limit  # its import takes a second

            graphs = disable_cache_limit()  # one for each shape
        with graphs:
            for group in self.param_groups:
                lr = torch.tensor(group["lr"], dtype=torch.float64)  # a scalar: it does not widen the dtype of products
                for p in group["params"]:
                    if p.grad is not None:
                        self.update(p, p.grad, group, lr)

    def update(self, p: Tensor, gradient: Tensor, group: dict, lr: Tensor) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = self.new_moment(p, True), self.new_moment(p, False)
        skip = torch.zeros_like(state["step"]) if self.found_inf is None else self.found_inf
        moments = _parts(state["exp_avg"]), _parts(state["exp_avg_sq"])
        numbers = group["weight_decay"], *group["betas"], group["eps"]
        for w, g, m, v, keys in self.pieces(p.detach(), gradient, *moments, self.rounding_keys.get(p)):
            self.advance(w, g, m, v, state["step"], lr, skip, self.grad_scale, keys, *numbers)
        state["step"].add_(skip == 0)

    def new_moment(self, p: Tensor, signed: bool) -> Tensor:
        if p in self.quantised:
            return quantized.zeros(p, signed, self.block_size)
        return empty_state(p, p.shape, p.dtype).zero_()

    def pieces(self, w: Tensor, g: Tensor, m: Moment, v: Moment, keys: Tensor | None) -> Iterator[tuple]:
        """What each pass takes: all of ``w``, or a number of rows that keeps temporaries small and cuts no block."""
        if w.numel() <= LARGEST:
            yield w, g, m, v, keys
            return
        row = w.shape[1:].numel()
        rows = max(LARGEST // row // self.block_size, 1) * self.block_size
        for first in range(0, len(w), rows):
            end, start = min(first + rows, len(w)), first * row
            of_piece = None if keys is None else torch.cat((keys[:2], keys[2:] + start))
            parts = (_rows(moment, first, end, row, self.block_size) for moment in (m, v))
            yield w[first:end], g[first:end], *parts, of_piece


def rounding_keys(parameters: Mapping[str, Tensor], seed: int | None) -> dict[Tensor, Tensor]:
    """The rounding keys of each bf16 parameter, by the tensor of this rank's rows; none without a seed."""
    found = {}
    for name, p in parameters.items():
        if seed is not None and p.dtype == torch.bfloat16:
            row = sharded.span(p)[0] if sharded.is_sharded(p) else 0
            found[sharded.local_rows(p)] = rounding.keys(seed, name, row * p.shape[1:].numel(), p.device)
    return found


def _parts(moment: Tensor) -> Moment:
    return (moment.codes, moment.scale, moment.qmap) if quantized.is_quantized(moment) else moment


def _rows(moment: Moment, first: int, end: int, row: int, block_size: int) -> Moment:
    if isinstance(moment, Tensor):
        return moment[first:end]
    codes, scale, values = moment
    return codes[first:end], scale[first * row // block_size : end * row // block_size], values


def _advance(
    p: Tensor,
    gradient: Tensor,
    exp_avg: Moment,
    exp_avg_sq: Moment,
    step: Tensor,
    lr: Tensor,
    skip: Tensor,
    grad_scale: Tensor | None,
    keys: Tensor | None,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Update in place if ``skip`` is 0; ``step`` is the number of updates before this one."""
    kept, dtype = skip != 0, at_least_fp32(p.dtype)
    k = step + 1
    w, g = p.to(dtype), gradient.to(dtype)
    if grad_scale is not None:
        g = g / grad_scale
    m = torch.lerp(_read(exp_avg, dtype), g, 1 - beta1)
    v = torch.lerp(_read(exp_avg_sq, dtype), g.square(), 1 - beta2)
    size = (v / (1 - beta2**k)).sqrt() + eps
    w = w - lr * weight_decay * w - lr * (m / (1 - beta1**k)) / size
    if keys is None:
        _write(p, w, kept)
        _write(exp_avg_sq, v, kept)
    else:
        words = rounding.random_words(p.shape, keys, k)
        _write(p, rounding.rounded(w, words >> 16), kept)
        plain = isinstance(exp_avg_sq, Tensor)
        _write(exp_avg_sq, rounding.rounded(v, words & 0xFFFF) if plain else v, kept)
    _write(exp_avg, m, kept)


def _read(moment: Moment, dtype: torch.dtype) -> Tensor:
    return (moment if isinstance(moment, Tensor) else quantized.decoded(*moment)).to(dtype)


def _write(target: Moment, value: Tensor, kept: Tensor) -> None:
    """Write ``value`` to ``target`` unless ``kept`` is true."""
    if isinstance(target, Tensor):
        target.copy_(torch.where(kept, target, value.to(target.dtype)))
    else:
        codes, scale, values = target
        for old, new in zip((codes, scale), quantized.encoded(value, values, len(scale)), strict=True):
            old.copy_(torch.where(kept, old, new))
