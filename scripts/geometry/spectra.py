"""Singular values of the weights, of what training has added, and of what it adds between checkpoints; DLR's share."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dlr_pretrain.models import build_model
from dlr_pretrain.util.tensors import ALPHA

from ..gradient_paths import measure
from .weights import Inputs, Point, Trained, places


def measures(values: Tensor, first: int) -> dict[str, float]:
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


def spectra(run: Trained, first: int, device: torch.device) -> Iterator[dict]:
    """A row for each matrix of a run, at each of its steps.

    ``of`` is "weights" for W_t, "update" for W_t - W_0, and "between" for W_t - W_s, where s (``since``) is the step
    before t. Rows of "value" have the singular values of the last weights by ``number``, divided by the largest.
    """
    start: Point = {}
    before: Point = {}
    since = None
    for step in run.steps:
        point = run.point(step)[1]
        now = {name: point[name].to(device) for name in places(point)}
        start = now if step == 0 else start
        for name, place in places(now).items():
            about = {"step": step, **place._asdict()}
            origins = {"weights": (None, None), "update": (0, start.get(name)), "between": (since, before.get(name))}
            for of, (origin, weight) in origins.items():
                if of == "weights" or (weight is not None and step):
                    values = torch.linalg.svdvals(now[name] if weight is None else now[name] - weight)
                    yield about | {"of": of, "since": origin, **measures(values, first)}
                    if of == "weights" and step == run.steps[-1]:
                        shares = (values / values.max()).tolist()
                        yield from (about | {"of": "value", "number": i, "value": v} for i, v in enumerate(shares, 1))
        before, since = now, step


def residuals(run: Trained, text: Inputs) -> Iterator[dict]:
    """A row for each B of a run with DLR, at each step: see ``residual_in``, and ``gradient_paths.measure``.

    The paths of the gradient need a trained B.
    """
    for step in run.steps:
        b, residual = run.residuals(step)
        names = {name: name.removeprefix("model.layers.").removesuffix(".b.weight") for name in b}
        paths: dict[str, dict] = {}
        if run.cfg.dlr.train_b:
            state = run.state(step)
            learned = state.pop(ALPHA, None)
            model = build_model(run.cfg, run.vocabulary, text[0][0].device, initialize=False)
            model.load_state_dict(state)
            paths = measure(model, run.cfg.dlr, learned, list(names.values()), text)
        for name, place in places(b).items():
            where = {"step": step, "block": place.block, "projection": place.projection}
            yield where | residual_in(b[name], residual[name]) | paths.get(names[name], {})


def residual_in(b: Tensor, residual: Tensor) -> dict[str, float]:
    """How beta R^T (``residual``) stands in W = B + beta R^T, all [d_out, r].

    ``share`` is |beta R^T|_F / |W|_F, and ``angle`` the degrees between B and R^T as vectors of d_out r entries.
    """
    b, residual = b.double(), residual.double()
    cosine = ((b * residual).sum() / (b.norm() * residual.norm())).clamp(-1, 1).item()
    return {"share": (residual.norm() / (b + residual).norm()).item(), "angle": math.degrees(math.acos(cosine))}
