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
from dlr_pretrain.models.precision import STATE_DTYPE, WORKING_DTYPE


class Weights:
    """The parameters of ``model``, given in ``STATE_DTYPE[precision]``, under that precision."""

    def __init__(self, model: nn.Module, precision: str):
        self.model = model
        self.masters: dict[str, Tensor] | None = None
        if STATE_DTYPE[precision] != WORKING_DTYPE[precision]:
            self.masters = {name: p.detach().clone() for name, p in model.named_parameters()}
            model.to(WORKING_DTYPE[precision])
        self.trained = [name for name, p in model.named_parameters() if p.requires_grad]
        self.strengths = list(dlr.learned_strengths(model))  # their gradients follow from those of the weights
        self.working = {n: p for n, p in model.named_parameters() if p.requires_grad and n not in self.strengths}

    @property
    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds, by name: parameters, B without its residual, frozen ones included, and buffers."""
        parameters = dict(self.model.named_parameters()) if self.masters is None else self.masters
        return parameters | dict(self.model.named_buffers())

    @property
    def optimized(self) -> dict[str, Tensor]:
        """The part of the state that the optimizer updates."""
        state = self.state
        return {name: state[name] for name in self.trained}

    @property
    def undecayed(self) -> list[str]:
        """What has no weight decay: learned scalars (alpha, theta), for which zero means that there is no branch."""
        return [name for name in self.trained if self.model.get_parameter(name).dim() == 0]

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
    def checksums(self) -> dict[str, int]:
        """A sum over the bits of each tensor of the state: equal states have equal sums."""
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        state = self.state
        sums = [t.contiguous().view(whole[t.element_size()]).sum(dtype=torch.int64) for t in state.values()]
        return dict(zip(state, torch.stack(sums).tolist(), strict=True))

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over a checkpoint's state."""
        for name, value in self.state.items():
            value.copy_(tensors[name])

    def folded(self) -> dict[str, Tensor]:
        """The state with every residual folded in: what is deployed."""
        return dlr.folded_state(self.model, {name: value.detach() for name, value in self.state.items()})
