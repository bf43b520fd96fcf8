"""Dense linear layers: the full-rank LLaMA."""

from torch import Tensor, nn

from dlr_pretrain.config.tree import BackboneOptions
from dlr_pretrain.models.layer import INIT_STD, Layer, SeededInit, Spec


class Options(BackboneOptions):
    """A dense layer has no options."""


class Full(Layer):
    """y = W x, W ~ N(0, 0.02^2)."""

    w: nn.Parameter

    def __init__(self, spec: Spec, options: BackboneOptions):
        super().__init__(spec, options)
        self.fuse("w", "weight", (spec.d_out, spec.d_in), (spec.pad_out, spec.pad_in))

    def initial(self, seeded: SeededInit, name: str) -> dict[str, Tensor]:
        return {"weight": seeded.normal(f"{name}.weight", (self.spec.d_out, self.spec.d_in), INIT_STD)}

    def expand(self, z: Tensor) -> Tensor:
        return self.shared(z, self.w).movedim(-2, 0)


Options.layer = Full
DENSE = Options(name="full")
