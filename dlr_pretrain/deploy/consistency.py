"""Checks that folding changes nothing: the paper's check and a stronger one, on a checkpoint's own validation text.

Three models are compared: the residual as the paper's branch in activation space, the training forward (B + beta R^T
published into the weights), and the folded model. The last two must be equal bit for bit, in weights and in logits. The
first rounds differently; the report says by how much, as the paper does: perplexity before and after, error of the
logits, latency.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dlr_pretrain.config import Config
from dlr_pretrain.data import ValidationSet, inputs_and_targets
from dlr_pretrain.models import Llama, build
from dlr_pretrain.models.dlr import marks
from dlr_pretrain.models.precision import STATE_DTYPE, WORKING_DTYPE
from dlr_pretrain.models.publisher import Publisher
from dlr_pretrain.util.tensors import IGNORE

SEQUENCES = 8  # in one forward pass
FORWARDS = 15  # timed forward passes of each model


@dataclass(frozen=True)
class Consistency:
    """What folding has changed. Errors and perplexities are those of the working dtype, latencies are in ms."""

    layers: int
    parameters_before: int
    parameters_after: int
    weights_identical: bool | None  # folded weights and those that training multiplied by; None: it had branches
    logits_identical: bool | None
    targets: int
    perplexity_before: float  # with the branch
    perplexity_after: float
    logits_mean_absolute_error: float  # of the folded model against the branch
    logits_mean_relative_error: float  # the same over the mean absolute logit
    latency_before: float  # medians
    latency_after: float
    shape: str

    @property
    def differs(self) -> bool:
        """Whether the folded model differs from the one that was trained."""
        return False in (self.weights_identical, self.logits_identical)

    def lines(self) -> list[str]:
        """The report, one line per finding."""
        trained = {None: "came of branches", True: "equal the folded bit for bit", False: "DIFFER from the folded"}
        return [
            f"layers        {self.layers} folded",
            f"parameters    {self.parameters_before:,} before, {self.parameters_after:,} after",
            f"training      its weights {trained[self.weights_identical]}, its logits {trained[self.logits_identical]}",
            f"perplexity    {self.perplexity_before:.4f} with the residual as a branch, {self.perplexity_after:.4f} "
            f"folded ({self.targets:,} targets)",
            f"logits        mean absolute error {self.logits_mean_absolute_error:.3g} against the branch, "
            f"{self.logits_mean_relative_error:.2%} of their mean size",
            f"latency       {self.latency_before:.2f} ms with the branch, {self.latency_after:.2f} ms folded "
            f"({self.shape})",
        ]

    def numbers(self) -> dict[str, object]:
        return {f"fold/{f.name}": getattr(self, f.name) for f in fields(self)}


@torch.no_grad()
def consistency(
    cfg: Config,
    state: dict[str, Tensor],
    folded: dict[str, Tensor],
    validation: ValidationSet,
    device: torch.device,
) -> Consistency:
    """Compare the model of ``cfg`` before folding (a checkpoint's ``state``) and after (``folded_state`` of it)."""
    branch = _model(cfg, replace(cfg.dlr, impl="branch"), state, device)
    trained = _model(cfg, cfg.dlr, state, device)
    plain = _model(cfg, replace(cfg.dlr, enabled=False), folded, device)
    publisher = Publisher(trained)
    if STATE_DTYPE[cfg.precision.name] == WORKING_DTYPE[cfg.precision.name]:
        publisher.publish()
    else:
        publisher.publish({name: state[name].to(device) for name, _ in trained.named_parameters()})
    after = dict(plain.named_parameters())
    working = ((n, p) for n, p in trained.named_parameters() if n in after)
    identical, found = _compare(branch, trained, plain, validation, device)
    branches = cfg.dlr.impl == "branch"
    before, then, shape = _latencies(branch, plain, validation, device)
    return Consistency(
        layers=len(publisher.carrying),
        parameters_before=sum(p.numel() for p in trained.parameters()),
        parameters_after=sum(p.numel() for p in plain.parameters()),
        weights_identical=None if branches else all(torch.equal(p, after[name]) for name, p in working),
        logits_identical=None if branches else identical,
        latency_before=before,
        latency_after=then,
        shape=shape,
        **found,
    )


def _model(cfg: Config, dlr, tensors: dict[str, Tensor], device: torch.device) -> Llama:
    """The model of ``cfg`` with the DLR choice ``dlr``, in the working dtype; its products are those of training."""
    dtype = WORKING_DTYPE[cfg.precision.name]
    model = build(replace(cfg, dlr=dlr), len(tensors["lm_head.weight"]), device, dtype, initialize=False)
    model.load_state_dict(dict(tensors) | marks(model))
    return model.requires_grad_(False)


def _batches(validation: ValidationSet, device: torch.device):
    """For a few sequences at a time, a mask [n, seq_len], false on padding, and (ids, targets[, documents])."""
    for start in range(0, len(validation.tokens), SEQUENCES):
        some = slice(start, start + SEQUENCES)
        tokens, lengths = (torch.from_numpy(a[some]).to(device) for a in (validation.tokens, validation.lengths))
        real = torch.arange(tokens.shape[1] - 1, device=device) < lengths[:, None]
        yield real, inputs_and_targets(tokens, lengths, validation.mask_documents)


def _compare(
    branch: Llama, trained: Llama, plain: Llama, validation: ValidationSet, device: torch.device
) -> tuple[bool, dict[str, float]]:
    """Whether the logits of ``trained`` and ``plain`` are equal, and perplexities and errors over all positions but the
    padding."""
    identical, targets = True, 0
    losses, error, size, count = [0.0, 0.0], 0.0, 0.0, 0
    for real, (ids, target, *documents) in _batches(validation, device):
        logits = [model.logits(ids, *documents) for model in (branch, trained, plain)]
        identical &= torch.equal(logits[1], logits[2])
        before, after = logits[0][real].float(), logits[2][real].float()
        for i, wide in enumerate((before, after)):
            losses[i] += F.cross_entropy(wide, target[real], ignore_index=IGNORE, reduction="sum").item()
        targets += (target != IGNORE).sum().item()
        error += (after - before).abs().sum(dtype=torch.float64).item()
        size += before.abs().sum(dtype=torch.float64).item()
        count += before.numel()
    return identical, {
        "targets": targets,
        "perplexity_before": math.exp(losses[0] / targets),
        "perplexity_after": math.exp(losses[1] / targets),
        "logits_mean_absolute_error": error / count,
        "logits_mean_relative_error": error / size,
    }


def _latencies(
    branch: Llama, plain: Llama, validation: ValidationSet, device: torch.device
) -> tuple[float, float, str]:
    """Median milliseconds of a forward pass of ``branch`` and of ``plain``, and the input in words."""
    ids, _, *documents = next(_batches(validation, device))[1]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(FORWARDS):
        for model, own in zip((branch, plain), times, strict=True):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            model.logits(ids, *documents)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            own.append(1000 * (time.perf_counter() - start))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    kind = str(plain.lm_head.weight.dtype).removeprefix("torch.")
    medians = [statistics.median(own[3:]) for own in times]  # the first ones warm up
    return *medians, f"{len(ids)} x {ids.shape[1]} tokens, {kind}, eager, {name}"
