"""Perplexity on a fixed set of validation sequences, the same for any number of ranks and any micro-batch."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from dlr_pretrain.data import ValidationSet, inputs_and_targets
from dlr_pretrain.models.llama import Llama
from dlr_pretrain.train.parallel import without_backward
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.util.tensors import IGNORE
from dlr_pretrain.util.text import perplexity

# The GaLore family of scripts divides the summed losses of n batches by n + 1. A batch there is 512 sequences over all
# ranks, with 195 real tokens each on average.
GALORE_BATCH_TOKENS = 195 * 512
MIN_BATCHES = 50  # with fewer, the convention's value is too far from that of the published tables, which had 101
STRIPES = 16  # parts of the validation set, which belong to its two halves in turn
ASKED_EVERY = 16  # batches between two times that ranks, or a GPU, are asked whether to go on
CUT = 64  # an evaluation batch has a multiple of this number of positions, so there are few shapes


class Evaluator:
    """Evaluates a model on ``validation`` and further ``sets``, in batches of ``micro_batch`` sequences on each rank.

    The longest sequences come first. A batch is cut after its longest sequence, and the last batch has only the
    sequences that are left. With ``one_shape``, all batches have the full shape, because a compiled model would be
    compiled again for any other.

    ``stop()`` tells whether this rank was asked to stop, and ``progress`` takes the share that is done.
    """

    def __init__(
        self, validation: ValidationSet, micro_batch: int, ranks: Ranks, one_shape: bool = False,
        stop: Callable[[], bool] = lambda: False, progress: Callable[[float], None] = lambda _: None,
        sets: Mapping[str, ValidationSet] = MappingProxyType({}),
    ):  # fmt: skip
        self.validation, self.micro_batch, self.ranks, self.one_shape = validation, micro_batch, ranks, one_shape
        self.stop, self.progress, self.sets = stop, progress, sets
        self.sequences = sum(len(one.tokens) for one in (validation, *sets.values()))

    @torch.no_grad()
    def __call__(self, model: Llama) -> dict[str, float | None] | None:
        """The metrics of ``model``; None, on all ranks, if any rank was asked to stop.

        ``eval/loss`` is the mean over all targets, in nats. ``eval/loss_a`` and ``eval/loss_b`` are the means over the
        two halves (NaN if a half is empty). ``eval/perplexity`` follows from ``eval/loss``. ``eval/perplexity_galore``
        does so by the GaLore convention; it is None if there is too little text. ``eval/<name>/loss`` and so on are
        those of a further set, or of a source of a mixture.
        """
        own, totals, done = self.validation.by_source or {"": self.validation}, dict[str, torch.Tensor](), 0
        for name, one in {**own, **self.sets}.items():
            halved = []
            for rows in halves(len(one.tokens)):
                with without_backward(model):
                    total = self._summed(model, one, rows, done)
                if total is None:
                    return None
                halved.append(total)
                done += len(rows)
            totals[name] = self.ranks.sum(torch.stack(halved))
        whole = losses("eval", torch.stack([totals[name] for name in own]).sum(0))
        metrics = whole | {"eval/perplexity_galore": galore_perplexity(whole["eval/loss"], self.validation.real_tokens)}
        for name in filter(None, totals):
            metrics |= losses(f"eval/{name}", totals[name])
        return metrics

    def _summed(self, model: Llama, validation: ValidationSet, rows: np.ndarray, done: int) -> torch.Tensor | None:
        """The loss summed over this rank's share of ``rows``, and the number of targets: fp64 [2]; None after a stop.

        ``done`` is the number of sequences before these.
        """
        device, n, world_size = self.ranks.device, self.micro_batch, self.ranks.world_size
        mine = rows[self.ranks.rank :: world_size]
        mine = mine[np.argsort(-validation.lengths[mine], kind="stable")]
        tokens, lengths = (torch.from_numpy(a[mine]) for a in (validation.tokens, validation.lengths))
        total = torch.zeros(2, dtype=torch.float64, device=device)
        share = -(-len(rows) // world_size)  # equal on all ranks: under fsdp each forward pass is a collective
        stopped = False
        for number, start in enumerate(range(0, share, n)):
            if stopped := self._stopped(number):
                break
            self.progress((done + start * world_size) / self.sequences)
            sequences, ends = (_filled(a[start : start + n], n if self.one_shape else 1) for a in (tokens, lengths))
            if not self.one_shape:  # what is left out is neither seen nor scored
                positions = max(CUT, -(-(int(ends.max()) - 1) // CUT) * CUT)
                sequences = sequences[:, : positions + 1].contiguous()
            to_device = self.ranks.to_device
            inputs = inputs_and_targets(to_device(sequences), to_device(ends), validation.separator)
            total += torch.stack((model(*inputs).double(), (inputs[1] != IGNORE).sum().double()))
        return None if stopped else total

    def _stopped(self, batch: int) -> bool:
        """Whether all ranks stop before a batch, because any was asked to. This waits for the batches before it."""
        if self.ranks.world_size == 1 and self.ranks.device.type == "cpu":
            return self.stop()
        if batch % ASKED_EVERY != ASKED_EVERY - 1:
            return False
        asked = torch.tensor(float(self.stop()), device=self.ranks.device)
        return bool(self.ranks.sum(asked).item())


def losses(prefix: str, totals: torch.Tensor) -> dict[str, Any]:
    """The losses and the perplexity of a set, from the sums of losses and targets in its two halves, fp64 [2, 2]."""
    summed, count = totals.unbind(1)
    a, b = (summed / count).tolist()
    loss = (summed.sum() / count.sum()).item()
    return {f"{prefix}/loss": loss, f"{prefix}/loss_a": a, f"{prefix}/loss_b": b,
            f"{prefix}/perplexity": perplexity(loss)}  # fmt: skip


def halves(sequences: int) -> tuple[np.ndarray, np.ndarray]:
    """The indices of the sequences in each half of a validation set: the even and the odd stripes.

    A drift along the files thus affects both halves, and at most ``STRIPES`` - 1 packed documents are in both.
    """
    odd = np.arange(sequences) * min(STRIPES, sequences) // sequences % 2 == 1
    return np.flatnonzero(~odd), np.flatnonzero(odd)


def galore_perplexity(loss: float, real_tokens: int) -> float | None:
    """The perplexity as the GaLore family of scripts reports it: exp(L n / (n + 1)), n = ceil(real tokens / 195 / 512).

    None if n < ``MIN_BATCHES``. Published figures have n = 101; n decides how far they are below exp(L).
    """
    n = math.ceil(real_tokens / GALORE_BATCH_TOKENS)
    return perplexity(loss * n / (n + 1)) if n >= MIN_BATCHES else None


def _filled(rows: torch.Tensor, n: int) -> torch.Tensor:
    """``rows`` padded to at least ``n`` with empty rows."""
    missing = rows.new_zeros((max(n - len(rows), 0), *rows.shape[1:]))
    return torch.cat((rows, missing)) if len(missing) else rows
