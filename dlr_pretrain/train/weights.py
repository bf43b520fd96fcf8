"""What the optimizer updates, and what the model multiplies by: the precisions, with DLR published on top.

=============  =================  ============================  ======================
precision      working weights    state (optimizer, checkpoint)  gradients and moments
=============  =================  ============================  ======================
bf16           bf16               the working weights            bf16
bf16_mixed     bf16               fp32 masters                   bf16; moments fp32
fp32           fp32               the working weights            fp32
=============  =================  ============================  ======================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dlr_pretrain.models import dlr

STATE_DTYPE = {"bf16": torch.bfloat16, "bf16_mixed": torch.float32, "fp32": torch.float32}


class Weights:
    """The parameters of ``model``, given in ``STATE_DTYPE[precision]``, under that precision."""

    def __init__(self, model: nn.Module, precision: str):
        self.model = model
        self.masters: dict[str, Tensor] | None = None
        if precision == "bf16_mixed":
            self.masters = {name: p.detach().clone() for name, p in model.named_parameters()}
            model.to(torch.bfloat16)
        self.names = [name for name, _ in model.named_parameters()]
        self.working = [p for _, p in model.named_parameters()]

    @property
    def state(self) -> dict[str, Tensor]:
        """Parameter name -> what the optimizer updates and a checkpoint holds; B without its residual."""
        return self.masters if self.masters is not None else dict(zip(self.names, self.working, strict=True))

    @contextmanager
    def published(self) -> Iterator[None]:
        """Within, the model multiplies by the rounded state plus the residual; the state itself never shows it."""
        if self.masters is not None:
            dlr.publish(self.model, self.masters)
            yield
        else:
            with dlr.active(self.model):
                yield

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over a checkpoint's state."""
        for name, value in self.state.items():
            value.copy_(tensors[name])

    def folded(self) -> dict[str, Tensor]:
        """The state with every residual folded in: what is deployed."""
        return dlr.folded_state(self.model, {name: value.detach() for name, value in self.state.items()})
