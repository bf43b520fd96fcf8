"""The work of a GPU for one micro-batch: the FLOPs and bytes of every operation that the model's own code runs.

They are counted on the meta device, as in ``memory``: forward and backward, including recomputation and padding. A
compiled model runs the same matrix products, but reads and writes only a part of the bytes of the elementwise
operations between them. ``scaling`` assumes how large that part is.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dlr_pretrain.config import Config
from dlr_pretrain.models import dlr
from dlr_pretrain.models.flops import attention_as_on_a_gpu
from dlr_pretrain.models.llama import build
from dlr_pretrain.models.precision import WORKING_DTYPE

LOOKUPS = ("embedding", "index", "index_select", "gather", "nll_loss_forward", "nll_loss_backward")


class Operation(NamedTuple):
    """FLOPs, bytes read and written, and whether it is a matrix product or attention, not elementwise."""

    flops: int
    bytes: int
    product: bool


def work(cfg: Config, vocab_size: int, micro_batch: int) -> Counter[Operation]:
    """The operations of forward and backward for ``micro_batch`` sequences, and how often each is run."""
    depth = cfg.scale.num_layers
    last = _work(cfg, vocab_size, micro_batch, min(depth, 3))
    if depth <= 3:
        return last
    less = _work(cfg, vocab_size, micro_batch, 2)  # blocks are equal from the second on
    operations = last.keys() | less.keys()
    return Counter({op: n for op in operations if (n := last[op] + (depth - 3) * (last[op] - less[op]))})


def _work(cfg: Config, vocab_size: int, micro_batch: int, num_layers: int) -> Counter[Operation]:
    cfg = replace(cfg, scale=replace(cfg.scale, num_layers=num_layers))
    model = build(cfg, vocab_size, torch.device("meta"), WORKING_DTYPE[cfg.precision.name])
    with dlr.active(model) if cfg.dlr.enabled else nullcontext():
        ids = torch.zeros(micro_batch, cfg.train.seq_len, dtype=torch.int64, device="meta")
        with attention_as_on_a_gpu(), _Operations() as found:
            model(ids, ids, ids if cfg.data.mask_documents else None).backward()
    return found.counts


class _Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts: Counter[Operation] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        given, made = _tensors((args, kwargs)), _tensors(out)
        flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out) if packet in flop_registry else 0
        if "flash_attention" in str(packet):
            flops //= 2  # causal: half of the scores; the backward pass forms them again
        if size := _traffic(func, given, made):
            self.counts[Operation(flops, size, packet in flop_registry)] += 1
        return out


def _traffic(func, given: list[Tensor], made: list[Tensor]) -> int:
    """The bytes that an operation reads and writes; 0 if it only makes a view or an empty tensor."""
    name, known = func.overloadpacket.__name__, {_storage(t) for t in given}
    in_place = func._schema.is_mutable
    if "empty" in name or not (in_place or any(_storage(t) not in known for t in made)):
        return 0
    if name in LOOKUPS:
        return 2 * sum(map(_size, made))
    return sum(map(_size, given)) + sum(map(_size, made))


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _size(tensor: Tensor) -> int:
    """The bytes of a tensor's elements; an element that is expanded counts once."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
