"""``probe=on``: measures gradient paths at some steps, in a separate pass over the step's first micro-batch.

The probe does not affect training: the state is the same after the pass as before it, the pass is eager and leaves no
``.grad``, and it draws no random number.
"""

from __future__ import annotations

import torch

from dlr_pretrain.config import Config
from dlr_pretrain.config.rules import probed
from dlr_pretrain.data import Batch, inputs_and_targets
from dlr_pretrain.models.gradient_paths import SUMS, PlainPath, counted, isotropic, means, residual_matrix, sums
from dlr_pretrain.models.residual import Residual
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.weights import Weights
from dlr_pretrain.util.tensors import IGNORE

SEQUENCES = 4  # in one pass: with more, eager code would need more memory than the compiled step


class Probe:
    """Measures the gradient paths of the projections that ``cfg.probe`` names."""

    def __init__(self, cfg: Config, ranks: Ranks, weights: Weights):
        self.cfg, self.ranks, self.weights = cfg, ranks, weights
        self.layers = {f"model.layers.{name}.b": name for name in probed(cfg)} if cfg.probe.enabled else {}
        if self.layers:
            self.path = PlainPath(cfg, weights.state["lm_head.weight"].shape[0])

    def is_due(self, updates: int) -> bool:
        """Whether to probe the weights after this number of ``updates``."""
        every = self.cfg.probe.every
        early = updates < every and str(updates).rstrip("0") in ("", "1", "3")  # 0, 1, 3, 10, 30, ...
        return bool(self.layers) and (early or updates % every == 0)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> dict[str, float | None]:
        """The metrics ``probe/<projection>/...``: ``means`` over all ranks, and ``isotropic`` of the weights.

        The loss is the mean over the scored targets of the first micro-batches of all ranks.
        """
        ranks, first = self.ranks, self.cfg.micro_batch(self.ranks.world_size)
        tokens, lengths = (ranks.to_device(part[:first]) for part in (batch.tokens, batch.lengths))
        inputs = inputs_and_targets(tokens, lengths, batch.separator)
        count = ranks.sum((inputs[1] != IGNORE).sum()).clamp(min=1)

        state = dict(self.weights.state)
        pieces = list(zip(*(rows.split(SEQUENCES) for rows in inputs), strict=True))
        matrices = {name: self._matrices(name, state) for name in self.layers}
        totals = torch.zeros(len(self.layers), SUMS, dtype=torch.float64, device=ranks.device)
        with self.weights.with_residual():
            model = self.weights.model
            multiplied = dict(model.named_parameters()) | dict(model.named_buffers())
            for piece in ranks.heartbeat(pieces):
                scored = piece[1] != IGNORE
                gradients = self.path.output_gradients(multiplied, self.layers, piece, count)
                for total, name in zip(totals, self.layers, strict=True):
                    total += sums(gradients[name][counted(name, scored, *piece[2:])], *matrices[name])
        ideal = torch.stack([isotropic(*matrices[name]) for name in self.layers]).tolist()
        found: dict[str, float | None] = {}
        for name, values, expected in zip(self.layers.values(), ranks.sum(totals).tolist(), ideal, strict=True):
            numbers = means(values) | {"isotropic": expected}
            found |= {f"probe/{name}/{key}": value for key, value in numbers.items()}
        return found

    def _matrices(self, name: str, state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """B as the state holds it, without the residual, and beta R^T; both in new memory."""
        b = state[f"{name}.weight"].detach().clone()
        residual = self.weights.model.get_submodule(name).residual
        assert isinstance(residual, Residual)
        return b, residual_matrix(residual, b, state.get(f"{name}.dlr_alpha"))
