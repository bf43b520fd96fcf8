"""LoRA from scratch, y = (W0 + s B A) x with frozen W0 (Hu et al., 2022), as a pre-training baseline."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dlr_pretrain.config.key import key
from dlr_pretrain.config.tree import BackboneOptions
from dlr_pretrain.models.layer import INIT_STD, Layer, SeededInit, Spec
from dlr_pretrain.util.tensors import at_least_fp32


@dataclass
class Options(BackboneOptions):
    rank: int = key("rank r of the factors", ge=1)
    alpha: float = key("s = alpha / rank", gt=0)


class Lora(Layer):
    """y = (W0 + s B A) x, s = alpha / rank.

    W0 (``w``) is drawn from N(0, 0.02^2) or loaded from a dense model, and never trained. A starts as uniform noise
    with bound 1/sqrt(d_in), and B starts at zero. The export contains the dense weight W0 + s B A.
    """

    deployed_dense = True
    options: Options
    w: nn.Parameter
    a: nn.Parameter
    b: nn.Parameter

    def __init__(self, spec: Spec, options: Options):
        super().__init__(spec, options)
        rank, self.scale = options.rank, options.alpha / options.rank
        self.fuse("w", "weight", (spec.d_out, spec.d_in), (spec.pad_out, spec.pad_in), trained=False)
        self.fuse("a", "a.weight", (rank, spec.d_in), (rank, spec.pad_in))
        self.fuse("b", "b.weight", (spec.d_out, rank), (spec.pad_out, rank))

    def initial(self, seeded: SeededInit, name: str) -> dict[str, Tensor]:
        d_out, d_in, rank = self.spec.d_out, self.spec.d_in, self.options.rank
        return {
            "weight": seeded.normal(f"{name}.weight", (d_out, d_in), INIT_STD),
            "a.weight": seeded.kaiming(f"{name}.a.weight", (rank, d_in)),
            "b.weight": torch.zeros(d_out, rank),
        }

    def expand(self, z: Tensor) -> Tensor:
        learned = self.batched(self.scale * self.shared(z, self.a), self.b)
        return self.shared(z, self.w).movedim(-2, 0) + learned

    def dense(self, tensors: dict[str, Tensor]) -> Tensor:
        return merged(tensors["weight"], tensors["b.weight"], tensors["a.weight"], self.scale)


def merged(weight: Tensor, b: Tensor, a: Tensor, scale: float) -> Tensor:
    """W0 + scale B A, formed in fp32 (fp64 for fp64) and rounded once to the dtype of ``weight``."""
    wide = at_least_fp32(weight.dtype)
    return torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scale).to(weight.dtype)


Options.layer = Lora
