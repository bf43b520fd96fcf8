"""Names, dtypes, random generators and norms that all code with tensors shares."""

import hashlib

import torch
from torch import Tensor

ALPHA = "dlr_alpha"  # the name of the learned strengths of residuals (DLR) among a model's tensors
IGNORE = -100  # the target of a position without one
# The dtype of the weights in the forward pass, by precision.
WORKING_DTYPE = {"fp32": torch.float32} | dict.fromkeys(("bf16", "bf16_sr", "bf16_mixed"), torch.bfloat16)
# The dtype of the weights that the optimizer updates and a checkpoint holds.
STATE_DTYPE = WORKING_DTYPE | {"bf16_mixed": torch.float32}
BF16_RANKS = 64  # the most that sum gradients in bf16
SUMS_IN_FLIGHT = 2  # of blocks' gradients at a time, where a sum needs an fp32 copy of them
# Values per piece of a norm on a CPU. Without pieces, torch casts a whole tensor to fp32, which no cache holds, and
# adds up the squares one by one: with 16 million values the norm is off by 2.5e-4.
NORM_PIECE = 1 << 15


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype for computing with values of ``dtype`` before they are rounded once: fp32, or fp64 for fp64."""
    return dtype if dtype == torch.float64 else torch.float32


def named_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator whose values depend on (seed, name) alone."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def global_norm(gradients: list[Tensor]) -> Tensor:
    """The l2 norm of all gradients together, in fp32, on the device."""
    return torch.linalg.vector_norm(torch.stack(norms(gradients)))


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """The l2 norm of each tensor, in fp32, on the device."""
    if tensors[0].device.type != "cpu":  # in few launches, for which torch has no public name
        return list(torch._foreach_norm(tensors, 2.0, dtype=torch.float32))
    pieces = [_flat(tensor).split(NORM_PIECE) for tensor in tensors]
    return [torch.linalg.vector_norm(torch.stack(torch._foreach_norm(p, 2.0, dtype=torch.float32))) for p in pieces]


def _flat(tensor: Tensor) -> Tensor:
    """The values of ``tensor`` in memory order; a transposed tensor is not copied."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).reshape(-1)


def sum_dtype(precision: str, world_size: int) -> torch.dtype:
    """The dtype in which gradients are summed over ranks.

    A ring rounds at every rank. Sums of equal terms in bf16 lose half their value over 1,024 ranks, and 3% over 64
    (``python -m benchmarks sums``). So more than ``BF16_RANKS`` sum in fp32. Gradients of fp32 masters are fp32 on any
    number of ranks.
    """
    return torch.float32 if precision == "bf16_mixed" or world_size > BF16_RANKS else WORKING_DTYPE[precision]
