"""Singular values of the weights, of what training has added, and of what it adds between checkpoints; DLR's share."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dlr_pretrain.models import build_model
from dlr_pretrain.util.tensors import ALPHA

from ..gradient_paths import measure
from .weights import Inputs, Point, Trained, places


def measures(values: Tensor, first: int = 8) -> dict[str, float]:
    """The measures of a matrix with singular ``values`` [n], in any order; NaN for a zero matrix.

    ``stable_rank`` is |W|_F^2 / |W|_2^2 (Rudelson and Vershynin, 2007). ``effective_rank`` is exp(H(p)), where p_i is
    s_i / sum(s), and H the entropy in nats (Roy and Vetterli, 2007). ``energy`` is |W|_F^2's share in ``first``.
    """
    values = values.double().sort(descending=True).values
    squares, p = values.square(), values / values.sum()
    return {
        "norm": squares.sum().sqrt().item(),
        "stable_rank": (squares.sum() / squares[0]).item(),
        "effective_rank": torch.special.entr(p).sum().exp().item(),
        "energy": (squares[:first].sum() / squares.sum()).item(),
    }


def spectra(run: Trained, device: torch.device) -> Iterator[dict]:
    """A row for each matrix of a run, at each of its steps.

    ``of`` is "weights" for W_t, "update" for W_t - W_0, and "between" for W_t - W_s, where s is the step before t. Rows
    of "value" have the singular values of the last weights by ``number``, divided by the largest.
    """
    start, before = Point(), Point()
    for step in run.steps:
        point = run.point(step)[1]
        now = {name: point[name].to(device) for name in places(point)}
        start = now if step == 0 else start
        for name, place in places(now).items():
            for of, origin in {"weights": None, "update": start.get(name), "between": before.get(name)}.items():
                if of == "weights" or (origin is not None and step):
                    values = torch.linalg.svdvals(now[name] if origin is None else now[name] - origin)
                    yield {"step": step, **place, "of": of, **measures(values)}
                    if of == "weights" and step == run.steps[-1]:
                        for number, value in enumerate((values / values.max()).tolist(), 1):
                            yield {"step": step, **place, "of": "value", "number": number, "value": value}
        before = now


def residuals(run: Trained, text: Inputs) -> Iterator[dict]:
    """A row for each B of a run that trains it beside a residual, at each step: see ``gradient_paths.measure``."""
    for step in run.steps:
        state = run.state(step)
        learned = state.pop(ALPHA, None)
        model = build_model(run.cfg, run.vocabulary, text[0][0].device, initialize=False)
        model.load_state_dict(state)
        for name, numbers in measure(model, run.cfg.dlr, learned, text).items():
            block, _, projection = name.split(".")
            yield {"step": step, "block": block, "projection": projection, **numbers}
