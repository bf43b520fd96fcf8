"""ReLoRA: LoRA whose product is merged into the frozen weight repeatedly (Lialin et al., 2023)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dlr_pretrain.models.linear import SeededInit
from dlr_pretrain.models.lora import Lora, merged
from dlr_pretrain.util import sharded


class Relora(Lora):
    """y = (W0 + s B A) x. W0 accumulates products of rank r, whose sum may have any rank.

    The trainer merges after every ``merge_every`` updates, drops most of the factors' optimizer state and warms the
    learning rate up again.
    """

    @torch.no_grad()
    def merge_(self, state: Mapping[str, Tensor], seeded: SeededInit, prefix: str, number: int) -> list[str]:
        """Do merge ``number`` (counted from 1) on ``state`` (parameter name -> tensor): W0 += s B A, a new A, B = 0.

        Returns the names of the factors, which start anew. The new A depends on the draw's seed, the parameter's name
        and ``number`` alone.
        """
        factors = []
        for name in self.spec.names:
            w, a, b = (f"{prefix}{name}.{leaf}" for leaf in ("weight", "a.weight", "b.weight"))
            own_w, own_a, own_b = (sharded.local_rows(state[name]) for name in (w, a, b))  # the same rows of W0 and B
            own_w.copy_(merged(own_w, own_b, sharded.gathered(state[a]), self.scale))
            own_a.copy_(sharded.own_part(state[a], seeded.kaiming(f"{a}/{number}", state[a].shape)))
            own_b.zero_()
            factors += [a, b]
        return factors


BACKBONE = Relora
