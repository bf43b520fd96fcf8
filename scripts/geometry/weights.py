"""The weights of a run at its checkpoints, with every residual folded in, as matrices by block and projection.

A linear projection is one matrix, W = B A for factors. A projection with a nonlinearity inside is no single matrix: its
factors A and B, and LOST's sparse S, stand apart. Gates and norms are not among the matrices.
"""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dlr_pretrain.config import Config, parse
from dlr_pretrain.config.run_folder import read_config
from dlr_pretrain.deploy.export import deployed, loaded_model
from dlr_pretrain.deploy.fold import batches, folded_tensors, validation_of
from dlr_pretrain.models import Llama, build_model
from dlr_pretrain.models.residual import strengths
from dlr_pretrain.train.checkpoint import directories, fault, load, step_of
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.tensors import STATE_DTYPE

MOST = 8  # checkpoints of a run, evenly spread: the trajectory is held in memory
PROJECTION = re.compile(r"model\.layers\.(?P<block>\d+)\.\w+\.(?P<projection>\w+)\.(?:(?P<matrix>[abs])\.)?weight")
Point = dict[str, Tensor]  # tensors by their exported names
Inputs = list[tuple[Tensor, ...]]  # (ids, targets[, documents]) of a few sequences each


def places(point: Point) -> dict[str, dict]:
    """The block, projection and matrix (A, B, S, or W for a single one) of the projections, by exported name."""
    matches = {name: PROJECTION.fullmatch(name) for name in point}
    return {name: m.groupdict() | {"matrix": (m["matrix"] or "w").upper()} for name, m in matches.items() if m}


class Trained:
    """A finished run, from its row in ``analysis.runs``.

    ``steps`` ascend. Step 0 are the initial weights, drawn again from the configuration; a run that started from other
    weights (run.start_from) has none. Raises UserError if checkpoints are missing or damaged.
    """

    def __init__(self, row: pd.Series):
        self.folder, self.name, self.scale, self.pair = Path(row.run), row["name"], row.scale, row.pair
        self.method, self.family, self.seed = row.label, row.method, row.seed
        self.cfg: Config = parse(read_config(self.folder))
        saved = sorted(directories(self.folder / "checkpoints"), key=step_of)
        if not saved:
            raise UserError(f"{self.folder}: has no checkpoint. Name a run that has kept one")
        chosen = np.unique(np.linspace(len(saved) - 1, 0, min(MOST, len(saved))).round().astype(int))
        self.checkpoints = {step_of(saved[i]): saved[i] for i in chosen}
        for path in self.checkpoints.values():
            if damage := fault(path):
                raise UserError(f"{path}: {damage}. Move it away")
        self.steps = [*([0] if self.cfg.run.start_from is None else []), *self.checkpoints]
        self.made_from = {str(step): load(path).sha256 for step, path in self.checkpoints.items()}
        self.vocabulary = load(saved[-1]).model["model.embed_tokens.weight"].shape[0]
        self.reads = row.identity.get("tokenizer.pieces"), self.vocabulary
        self.evaluated_on = row.identity.get("data.shards"), self.cfg.train.seq_len, self.cfg.eval.packing

    def state(self, step: int) -> dict[str, Tensor]:
        """The tensors at ``step`` as a checkpoint stores them: fused, and B without its residual."""
        if step:
            return {name: stored.whole() for name, stored in load(self.checkpoints[step]).model.items()}
        model = build_model(self.cfg, self.vocabulary, torch.device("cpu"), STATE_DTYPE[self.cfg.precision.name])
        return model.state_dict() | strengths(model, self.cfg.dlr, model.lm_head.weight)

    def point(self, step: int) -> tuple[Config, Point]:
        """The model at ``step`` in fp32, as a configuration and its tensors: of a plain LLaMA where all is linear."""
        folded = folded_tensors(self.cfg, self.state(step))
        try:
            return deployed(self.cfg, folded, dense=True, dtype=torch.float32)
        except UserError:  # a projection is no single matrix
            return deployed(self.cfg, folded, dtype=torch.float32)

    def model(self, step: int, device: torch.device) -> Llama:
        return loaded_model(*self.point(step), device, torch.float32)

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


def inner(one: Point, other: Point) -> float:
    """The inner product of two points, in float64."""
    return sum((tensor.double() * other[name].double()).sum().item() for name, tensor in one.items())


def plus(point: Point, t: float, direction: Point) -> Point:
    """``point`` plus t times a ``direction``, which has some of its tensors."""
    return point | {name: point[name] + t * tensor for name, tensor in direction.items()}
