"""AdamW (Loshchilov and Hutter, 2019): torch's kernels, and an update that rounds stochastically or has 8-bit moments.

All parameters have the same learning rate, as in the DLR paper. Moments have the parameter's dtype, or 8 bits (Dettmers
et al., 2022): codes (uint8, of the parameter's shape), an fp32 scale for each block of consecutive entries in row-major
order, and the fp32 map from codes to values. A value is map[code] * scale; torchao quantises.

**Stochastic rounding** from fp32 to bf16 takes a value to one of its two bf16 neighbours, to the nearer one with the
higher probability. The mean over many draws is the value itself, so changes smaller than half a unit in the last place
still have an effect (Gupta et al., 2015). The random bits are a function of (seed, name, step, entry) alone, without a
generator: they are the same on every rank and device, and after every restart.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dlr_pretrain.config import Config, Problem
from dlr_pretrain.config.key import key
from dlr_pretrain.config.tree import How
from dlr_pretrain.optim.adam import AdamOptions, decay_groups, empty_state, whole_tensors
from dlr_pretrain.util import sharded
from dlr_pretrain.util.process import without_warnings
from dlr_pretrain.util.tensors import at_least_fp32

MAX_PIECE = 1 << 22  # values updated at once; the plan omits their temporaries, some 100 MB in eager code
MIN_QUANTISED = 4096  # values; moments of smaller parameters, or of parameters with a partial block, are not quantised
MASK_32_BITS = 0xFFFFFFFF
Moment = Tensor | tuple[Tensor, Tensor, Tensor]  # a plain tensor, or codes, scales and map


@dataclass
class Options(AdamOptions):
    """torch's fused AdamW, which computes in fp32 and rounds once to nearest, or one that rounds stochastically."""

    eps: float = key("added to the root of second moments", ge=1e-30)
    weight_decay: float = key("applied to every parameter, as in the paper", ge=0)
    elementwise = True
    rounds_stochastically = True
    fused = True  # torch's fused kernel, else its foreach kernels

    def build(self, parameters: dict[str, Tensor], how: How) -> list[torch.optim.Optimizer]:
        if how.rounding_seed is not None:
            return [WideAdamW(parameters, self, how)]
        on_meta = any(p.is_meta for p in parameters.values())  # for ``state_bytes``; meta has no fused kernel
        groups, fused = decay_groups(parameters, self.weight_decay), self.fused and not on_meta
        return [torch.optim.AdamW(groups, betas=self.betas, eps=self.eps, fused=fused, foreach=not fused)]


class ForeachOptions(Options):
    """torch's foreach kernels, which round after every operation, as in this family's published runs.

    In pure bf16, weight decay then has no effect if lr * weight_decay < 2^-9. Nor does the decay of a second moment by
    1 - beta2 = 0.001.
    """

    rounds_stochastically = False
    fused = False


@dataclass
class EightBitOptions(Options):
    """AdamW with 8-bit moments for parameters that are large enough and consist of whole blocks."""

    block_size: int = key("values that share a scale", binds="moments", ge=1)

    def build(self, parameters: dict[str, Tensor], how: How) -> list[torch.optim.Optimizer]:
        _map(signed=True)  # imports torchao before code is compiled
        return [WideAdamW(parameters, self, how, self.block_size)]

    def problems(self, cfg: Config) -> Iterator[Problem]:
        return whole_tensors(cfg, "8-bit moments come in whole blocks")


class WideAdamW(torch.optim.Optimizer):
    """AdamW over named ``parameters``, whose rows may be sharded, in one pass per parameter.

    It computes in fp32 and masks updates on the device. The k-th update of a parameter is
    W <- (1 - lr weight_decay) W - lr m / (1 - beta1^k) / (sqrt(v / (1 - beta2^k)) + eps).

    With a rounding seed, bf16 weights and their second moments are rounded stochastically, because most of their
    changes are smaller than half a unit in the last place: beta2 = 0.999 shrinks a second moment by a thousandth. First
    moments change by a tenth and are rounded to nearest.

    With ``block_size``, moments of parameters that are large enough are stored in 8 bits, in blocks of that size.
    """

    # As in torch's fused kernels, ``found_inf`` masks an update on the device, and ``grad_scale`` divides gradients
    _step_supports_amp_scaling = True
    found_inf: Tensor  # both are set before each step
    grad_scale: Tensor | None

    def __init__(self, parameters: dict[str, Tensor], options: AdamOptions, how: How, block_size: int | None = None):
        groups = decay_groups(parameters, options.weight_decay)
        super().__init__(groups, {"lr": 0.0, "betas": options.betas, "eps": options.eps, "weight_decay": 0.0})
        large = {p for p in parameters.values() if p.numel() >= MIN_QUANTISED}
        self.quantised = {p for p in large if p.numel() % block_size == 0} if block_size else set()
        self.block_size, self.compiled = block_size or 1, how.compiled
        self.rounding_keys = rounding_keys(parameters, how.rounding_seed)
        self.advance = torch.compile(_advance, fullgraph=True, dynamic=False) if how.compiled else _advance

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # as in Adam
        with _graph_per_shape() if self.compiled else nullcontext():
            for group in self.param_groups:
                lr = torch.tensor(group["lr"], dtype=torch.float64)  # 0-d: does not widen the dtype of products
                for p in group["params"]:
                    if p.grad is not None:
                        self.update(p, p.grad, group, lr)
        updated = [self.state[p]["step"] for group in self.param_groups for p in group["params"] if p.grad is not None]
        if updated:  # one launch, which has no public name; with a scalar as the second argument the host would wait
            torch._foreach_add_(updated, [(self.found_inf == 0).float()] * len(updated))

    def update(self, p: Tensor, gradient: Tensor, group: dict, lr: Tensor) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), device=p.device)
            state.update(self.new_moment(p, "exp_avg", True), **self.new_moment(p, "exp_avg_sq", False))
        if p.is_meta:  # for ``state_bytes``, which needs no numbers
            return
        moments = _moment(state, "exp_avg"), _moment(state, "exp_avg_sq")
        numbers = group["weight_decay"], *group["betas"], group["eps"]
        for w, g, m, v, keys in self.pieces(p.detach(), gradient, *moments, self.rounding_keys.get(p)):
            self.advance(w, g, m, v, state["step"], lr, self.found_inf, self.grad_scale, keys, *numbers)

    def new_moment(self, p: Tensor, entry: str, signed: bool) -> dict[str, Tensor]:
        """A zero moment, as tensors by their names in the state."""
        if p not in self.quantised:
            return {entry: empty_state(p, p.shape, p.dtype).zero_()}
        return {
            f"{entry}.codes": empty_state(p, p.shape, torch.uint8).zero_(),
            f"{entry}.scale": torch.zeros(p.numel() // self.block_size, device=p.device),
            f"{entry}.map": torch.tensor(_map(signed), device=p.device),
        }

    def pieces(self, w: Tensor, g: Tensor, m: Moment, v: Moment, keys: Tensor | None) -> Iterator[tuple]:
        """Yield what each pass updates: all of ``w``, or few enough rows for small temporaries, in whole blocks."""
        if w.numel() <= MAX_PIECE:
            yield w, g, m, v, keys
            return
        row = w.shape[1:].numel()
        rows = max(MAX_PIECE // row // self.block_size, 1) * self.block_size
        for first in range(0, len(w), rows):
            end, start = min(first + rows, len(w)), first * row
            own_keys = None if keys is None else torch.cat((keys[:2], keys[2:] + start))
            moments = (_rows(moment, first, end, row, self.block_size) for moment in (m, v))
            yield w[first:end], g[first:end], *moments, own_keys


def _graph_per_shape() -> AbstractContextManager:
    """Lift Dynamo's limit on the graphs of a function: ``_advance`` has one per shape."""
    from torch._dynamo.utils import disable_cache_limit  # takes a second to import; the public limit is global

    return disable_cache_limit()


def _moment(state: Mapping[str, Tensor], entry: str) -> Moment:
    if entry in state:
        return state[entry]
    return state[f"{entry}.codes"], state[f"{entry}.scale"], state[f"{entry}.map"]


@cache
def _map(signed: bool) -> list[float]:
    """The values of the 256 codes. The import hides torchao's warnings about its other parts."""
    with without_warnings():
        from torchao.optim.quant_utils import create_dynamic_map
    return list(create_dynamic_map(signed=signed))


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
    """Update in place if ``skip`` is 0; ``step`` counts the updates before this one."""
    skipped, dtype = skip != 0, at_least_fp32(p.dtype)
    k = step + 1
    w, g = p.to(dtype), gradient.to(dtype)
    if grad_scale is not None:
        g = g / grad_scale
    m = torch.lerp(_read(exp_avg, dtype), g, 1 - beta1)
    v = torch.lerp(_read(exp_avg_sq, dtype), g.square(), 1 - beta2)
    size = (v / (1 - beta2**k)).sqrt() + eps
    w = w - lr * weight_decay * w - lr * (m / (1 - beta1**k)) / size
    if keys is None:
        _write(p, w, skipped)
        _write(exp_avg_sq, v, skipped)
    else:
        words = random_words(p.shape, keys, k)
        _write(p, rounded(w, words >> 16), skipped)
        plain = isinstance(exp_avg_sq, Tensor)
        _write(exp_avg_sq, rounded(v, words & 0xFFFF) if plain else v, skipped)
    _write(exp_avg, m, skipped)


def _read(moment: Moment, dtype: torch.dtype) -> Tensor:
    if isinstance(moment, Tensor):
        return moment.to(dtype)
    from torchao.optim.quant_utils import dequant_with_qmap

    codes, scale, values = moment
    return dequant_with_qmap(codes.contiguous(), values, scale).to(dtype)


def _write(target: Moment, value: Tensor, skipped: Tensor) -> None:
    """Write ``value`` to ``target`` unless ``skipped`` is true."""
    if isinstance(target, Tensor):
        target.copy_(torch.where(skipped, target, value.to(target.dtype)))
    else:
        from torchao.optim.quant_utils import quantize_8bit_with_qmap, scale_tensor

        codes, scale, values = target
        unit, new_scale = scale_tensor(value.contiguous(), value.numel() // len(scale))
        codes.copy_(torch.where(skipped, codes, quantize_8bit_with_qmap(unit, values)))
        scale.copy_(torch.where(skipped, scale, new_scale))


# ----------------------------------------------------------------------------------------------------
# Stochastic rounding


def rounding_keys(parameters: Mapping[str, Tensor], seed: int | None) -> dict[Tensor, Tensor]:
    """The rounding keys of each bf16 parameter, by the tensor of this rank's rows; empty without a seed."""
    if seed is None:
        return {}
    return {
        sharded.local_rows(p): keys(seed, name, sharded.span(p)[0] * p.shape[1:].numel(), p.device)
        for name, p in parameters.items()
        if p.dtype == torch.bfloat16
    }


def keys(seed: int, name: str, first: int, device: torch.device) -> Tensor:
    """Two 32-bit words hashed from seed and name, then the index of this rank's first entry, as int64 [3]."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    words = [int.from_bytes(digest[i : i + 4], "little") for i in (0, 4)]
    return torch.tensor([*words, first], dtype=torch.int64, device=device)


def random_words(shape: torch.Size, keys: Tensor, step: Tensor) -> Tensor:
    """32 uniform bits per entry, as int64. Entries are numbered in row-major order, not by memory layout."""
    of_step = _mixed(keys[1] ^ step.to(torch.int64))
    index = torch.arange(shape.numel(), device=keys.device).view(shape) + keys[2]
    return _mixed(_mixed(index ^ keys[0]) ^ of_step)


def _mixed(word: Tensor) -> Tensor:
    """A permutation of 32-bit words that spreads every bit over all others; products stay below 2^63.

    Multiply and xor-shift, after Wellons' hash prospector.
    """
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & MASK_32_BITS
    word = ((word ^ (word >> 15)) * 0x735A2D97) & MASK_32_BITS
    return word ^ (word >> 15)


def rounded(value: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 ``value`` to bf16: add 16 random ``bits`` to each entry's bit pattern and keep its upper half.

    The rounding is unbiased if a value's neighbours are finite. Exact bf16 values, infinities and NaN do not change.
    """
    pattern = (value.view(torch.int32) + bits.to(torch.int32)) & -0x10000
    return torch.where(value.isfinite(), pattern.view(torch.float32), value).to(torch.bfloat16)
