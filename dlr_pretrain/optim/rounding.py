"""Stochastic rounding from fp32 to bf16, by bits that are a function of (seed, name, step, entry) alone.

A value is rounded to one of its two bf16 neighbours, to the nearer one with the higher probability, so that the mean
over many draws is the value itself. Changes smaller than half a unit in the last place therefore still have an effect
(Gupta et al., 2015). No generator is involved: every rank, every device and every restart gets the same bits.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def keys(seed: int, name: str, first: int, device: torch.device) -> Tensor:
    """Two 32-bit words hashed from seed and name, then the index of this rank's first entry, as int64 [3]."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    words = [int.from_bytes(digest[i : i + 4], "little") for i in (0, 4)]
    return torch.tensor([*words, first], dtype=torch.int64, device=device)


def random_words(shape: torch.Size, keys: Tensor, step: Tensor) -> Tensor:
    """32 uniform bits per entry, as int64. Entries are numbered in row-major order, whatever their memory layout."""
    of_step = _mixed(keys[1] ^ step.to(torch.int64))
    index = torch.arange(shape.numel(), device=keys.device).view(shape) + keys[2]
    return _mixed(_mixed(index ^ keys[0]) ^ of_step)


def _mixed(word: Tensor) -> Tensor:
    """A permutation of 32-bit words that spreads every bit over all others (multiply and xor-shift, after Wellons' hash
    prospector). Products stay below 2^63.
    """
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & WORD
    word = ((word ^ (word >> 15)) * 0x735A2D97) & WORD
    return word ^ (word >> 15)


def rounded(value: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 ``value`` to bf16: add 16 random ``bits`` to each entry's bit pattern and keep its upper half.

    This is exactly unbiased if a value's neighbours are finite. Exact bf16 values, infinities and NaN do not change.
    """
    pattern = (value.view(torch.int32) + bits.to(torch.int32)) & -0x10000
    return torch.where(value.isfinite(), pattern.view(torch.float32), value).to(torch.bfloat16)
