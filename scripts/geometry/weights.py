"""The weights of a run at its checkpoints, with every residual folded in, as matrices by block and projection.

A linear projection is one matrix, W = B A for factors. A projection with a nonlinearity inside is no single matrix: its
factors A and B, and LOST's sparse S, stand apart. Gates and norms are not among the matrices.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dlr_pretrain.config import Config, parse
from dlr_pretrain.config.run_folder import read_config
from dlr_pretrain.deploy.export import deployed, loaded_model
from dlr_pretrain.deploy.fold import batches, by_exported_name, folded_tensors, validation_of
from dlr_pretrain.models import Llama, build_model
from dlr_pretrain.models.residual import add_, strengths
from dlr_pretrain.train.checkpoint import directories, fault, load, step_of
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.tensors import ALPHA, STATE_DTYPE

Point = dict[str, Tensor]  # tensors by their exported names
Inputs = list[tuple[Tensor, ...]]  # (ids, targets[, documents]) of a few sequences each
PROJECTION = re.compile(r"model\.layers\.(\d+)\.\w+\.(\w+)\.(?:(a|b|s)\.)?weight")
META = torch.device("meta")


class Place(NamedTuple):
    """Which matrix of a model: ``matrix`` is W, or A, B or S of a projection that is no single matrix."""

    block: int
    projection: str
    matrix: str


def places(point: Point) -> dict[str, Place]:
    """The matrices of the projections in ``point``, by their exported names."""
    found = ((name, PROJECTION.fullmatch(name)) for name in point)
    return {name: Place(int(m[1]), m[2], (m[3] or "w").upper()) for name, m in found if m}


class Trained:
    """A finished run, from its row in ``analysis.runs``, with at most ``most`` checkpoints, evenly spread.

    ``steps`` ascend. Step 0 are the initial weights, drawn again from the configuration; a run that started from other
    weights (run.start_from) has none. Raises UserError if checkpoints are missing or damaged.
    """

    def __init__(self, row: pd.Series, most: int):
        self.folder, self.name, self.scale = Path(row.run), row["name"], row.scale
        self.method, self.family, self.seed = row.label, row.method, row.seed
        self.tokenizer, self.shards = (row.identity.get(key) for key in ("tokenizer.pieces", "data.shards"))
        self.cfg: Config = parse(read_config(self.folder))
        self.residual = self.cfg.dlr.enabled and self.cfg.dlr.mode == "residual"
        saved = sorted(directories(self.folder / "checkpoints"), key=step_of)
        if not saved:
            raise UserError(f"{self.folder}: has no checkpoint. Name a run that has kept one")
        chosen = np.unique(np.linspace(len(saved) - 1, 0, min(most, len(saved))).round().astype(int))
        self.checkpoints = {step_of(saved[i]): saved[i] for i in chosen}
        for path in self.checkpoints.values():
            if damage := fault(path):
                raise UserError(f"{path}: {damage}. Move it away")
        self.steps = [*([0] if self.cfg.run.start_from is None else []), *self.checkpoints]
        last = load(saved[-1])
        self.vocabulary = last.model["model.embed_tokens.weight"].shape[0]

    @cached_property
    def made_from(self) -> dict[str, str]:
        """The checksums of the checkpoints, by step."""
        return {str(step): load(path).sha256 for step, path in self.checkpoints.items()}

    def state(self, step: int) -> dict[str, Tensor]:
        """The tensors at ``step`` as a checkpoint stores them: fused, and B without its residual."""
        if step:
            return {name: stored.whole() for name, stored in load(self.checkpoints[step]).model.items()}
        model = build_model(self.cfg, self.vocabulary, torch.device("cpu"), STATE_DTYPE[self.cfg.precision.name])
        return model.state_dict() | strengths(model, self.cfg.dlr, model.lm_head.weight)

    def point(self, step: int) -> tuple[Config, Point]:
        """The model at ``step`` in fp32, as a configuration and its tensors: of a plain LLaMA where all is linear."""
        tensors = self.state(step)
        folded = folded_tensors(self.cfg, tensors) if self.residual else by_exported_name(self.cfg, tensors)
        try:
            return deployed(self.cfg, folded, merge=True, dtype=torch.float32)
        except UserError:  # a projection is no single matrix
            return deployed(self.cfg, folded, dtype=torch.float32)

    def model(self, step: int, device: torch.device) -> Llama:
        return loaded_model(*self.point(step), device, torch.float32)

    def residuals(self, step: int) -> tuple[Point, Point]:
        """B and beta R^T [d_out, r] of each projection, by the exported name of B, at ``step`` of a run with DLR."""
        b = {name: tensor.float() for name, tensor in self.state(step).items() if name.endswith(".b") or name == ALPHA}
        residual = {name: tensor if name == ALPHA else torch.zeros_like(tensor) for name, tensor in b.items()}
        add_(residual, build_model(self.cfg, self.vocabulary, META), self.cfg.dlr)
        embedding = {"model.embed_tokens.weight": torch.empty(self.vocabulary, 0)}
        of_b, of_residual = (by_exported_name(self.cfg, embedding | side) for side in (b, residual))
        return {name: of_b[name] for name in places(of_b)}, of_residual

    def text(self, sequences: int, device: torch.device) -> Inputs:
        """The first ``sequences`` of the run's validation text."""
        text = validation_of(self.folder, self.cfg, sequences * self.cfg.train.seq_len)
        return list(batches(replace(text, tokens=text.tokens[:sequences], lengths=text.lengths[:sequences]), device))


def misfit(one: Point, other: Point) -> str:
    """Why two points cannot be mixed; empty if they can."""
    if only := sorted(one.keys() ^ other.keys()):
        return f"the models have different tensors, such as {only[0]}"
    for name, tensor in one.items():
        if tensor.shape != other[name].shape:
            return f"{name} is {list(tensor.shape)} in one and {list(other[name].shape)} in the other"
        if not tensor.is_floating_point() and not torch.equal(tensor, other[name]):
            return f"{name} selects other inputs in each"
    return ""


def mixed(one: Point, other: Point, t: float) -> Point:
    """(1 - t) ``one`` + t ``other``."""
    return {name: torch.lerp(a, other[name], t) if a.is_floating_point() else a for name, a in one.items()}


def inner(one: Point, other: Point) -> float:
    """The inner product of two points, in float64."""
    return sum((tensor.double() * other[name].double()).sum().item() for name, tensor in one.items())


def plus(point: Point, t: float, direction: Point) -> Point:
    """``point`` plus t times a ``direction``, which has some of its tensors."""
    return point | {name: point[name] + t * tensor for name, tensor in direction.items()}
