"""ReLoRA: LoRA that repeatedly merges its product into the frozen weight (Lialin et al., 2023)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dlr_pretrain.config import Config, Problem
from dlr_pretrain.config.key import key
from dlr_pretrain.models import lora
from dlr_pretrain.models.layer import SeededInit, projections
from dlr_pretrain.models.lora import Lora, merged
from dlr_pretrain.util import sharded


@dataclass
class Options(lora.Options):
    merge_every: int = key("steps between merges", ge=1)
    restart_warmup: int = key("steps of linear warm-up after each merge", ge=0)
    prune_ratio: float = key("share of the optimizer state, drawn at random, that a merge zeroes", ge=0, le=1)

    def problems(self, cfg: Config) -> Iterator[Problem]:
        every = self.merge_every
        if every >= cfg.train.steps:
            rule = f"must be below train.steps={cfg.train.steps}: nothing would be merged"
            yield Problem("backbone.merge_every", every, rule, "Use backbone=lora for that")
        elif self.restart_warmup >= every:
            yield Problem("backbone.restart_warmup", self.restart_warmup, f"must be below backbone.merge_every={every}")


class Relora(Lora):
    """y = (W0 + s B A) x. W0 accumulates products of rank r, whose sum may have any rank.

    After every ``merge_every`` updates, the trainer merges, drops most of the factors' optimizer state, and warms up
    the learning rate again.
    """

    options: Options

    @torch.no_grad()
    def merge_(self, state: Mapping[str, Tensor], seeded: SeededInit, path: str, number: int) -> list[str]:
        """Perform merge ``number`` (from 1) of the layer at ``path`` of the model: W0 += s B A, a new A, B = 0.

        ``state`` has the parameters of the model by name. Returns the names of the factors, which start anew. The new A
        depends on the seed, the exported name and ``number`` alone.
        """
        w, a, b = (state[f"{path}.{name}"] for name in "wab")
        rank, (first, end) = self.options.rank, sharded.span(w)
        own_w, own_b, whole_a = sharded.local_rows(w), sharded.local_rows(b), self.each(sharded.gathered(a))
        new_a = torch.zeros(whole_a.shape)
        for i, name in enumerate(projections(path, self)):
            top = i * self.spec.pad_out
            rows = slice(max(top, first) - first, max(min(top + self.spec.pad_out, end) - first, 0))  # on this rank
            own_w[rows] = merged(own_w[rows], own_b[rows], whole_a[i], self.scale)
            new_a[i, :, : self.spec.d_in] = seeded.kaiming(f"{name}.a.weight/{number}", (rank, self.spec.d_in))
        sharded.local_rows(a).copy_(sharded.own_part(a, new_a.flatten(0, 1)))
        own_b.zero_()
        return [f"{path}.a", f"{path}.b"]


Options.layer = Relora
