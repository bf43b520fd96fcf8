"""What is measured, of which runs and pairs of runs. Each result is kept as a CSV file and not computed again."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dlr_pretrain.analysis.runs import Runs
from dlr_pretrain.models.full import DENSE
from dlr_pretrain.util.errors import UserError, write_to_stderr
from dlr_pretrain.util.files import write_durably

from . import activations, landscape, spectra
from .landscape import Surface
from .weights import Inputs, Point, Trained, misfit

VERSION = 1  # of the measures: results of another one are computed again
Pair = tuple[str, Trained, Trained]  # "seeds" of one method, "backbone" of a method with DLR, or "reference"


@dataclass(frozen=True)
class Settings:
    """What decides the numbers, besides the runs."""

    sequences: int
    directions: int
    points: int
    checkpoints: int
    first: int


def kept(path: Path, made_from: dict, compute: Callable[[], Iterable[dict]]) -> pd.DataFrame:
    """The rows of ``compute()``, or those in ``path`` if they were made from the same."""
    head = f"# {json.dumps(made_from, sort_keys=True)}\n"
    if not path.exists() or not path.read_text(encoding="utf-8").startswith(head):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, head + pd.DataFrame(compute()).to_csv(index=False))
    return pd.read_csv(io.StringIO(path.read_text(encoding="utf-8")), skiprows=1)


def finished(all_runs: Runs, checkpoints: int) -> list[list[Trained]]:
    """The finished runs by group. Raises UserError if there are none."""
    rows = all_runs.runs[all_runs.runs.state == "finished"]
    if rows.empty:
        raise UserError("no run has finished. Continue one with its command")
    groups = rows.groupby("key", sort=False)
    return [[Trained(row, checkpoints) for _, row in group.iterrows()] for _, group in groups]


def pairs(groups: Sequence[Sequence[Trained]], all_runs: Runs) -> Iterator[Pair]:
    """All pairs that are compared. The reference of a scale is ``full``, or else its first method without DLR.

    Runs of two methods are paired by seed, or the first of each if they share no seed.
    """
    pair = all_runs.runs.set_index("run").pair
    for scale in dict.fromkeys(group[0].scale for group in groups):
        here = [group for group in groups if group[0].scale == scale]
        plain = [group for group in here if not group[0].cfg.dlr.enabled] or here
        reference = next((group for group in plain if group[0].family == DENSE.name), plain[0])
        for group in here:
            yield from (("seeds", *two) for two in combinations(group, 2))
            backbone = next((g for g in plain if pair[str(g[0].folder)] == pair[str(group[0].folder)]), group)
            for kind, others in {"backbone": backbone, "reference": reference}.items():
                if others is not group:
                    by_seed = {other.seed: other for other in others}
                    both = [(run, by_seed[run.seed]) for run in group if run.seed in by_seed]
                    yield from ((kind, *two) for two in both or [(group[0], others[0])])


def differ(one: Trained, other: Trained, blocks: bool = True) -> str:
    """Why two runs cannot read the same tokens, or have other ``blocks``; empty if they can."""
    if (one.tokenizer, one.vocabulary) != (other.tokenizer, other.vocabulary):
        return "their tokenizers differ"
    shapes = [(run.cfg.scale.num_layers, run.cfg.scale.num_heads) for run in (one, other)]
    return "their numbers of blocks or heads differ" if blocks and shapes[0] != shapes[1] else ""


class Study:
    """The measures of ``runs`` and ``compared`` pairs of them, in files below ``folder``."""

    def __init__(
        self, runs: Sequence[Trained], compared: Sequence[Pair], settings: Settings, folder: Path, device: torch.device
    ):
        self.runs, self.compared, self.settings, self.folder, self.device = runs, compared, settings, folder, device
        self.distances = np.linspace(-1, 1, settings.points).tolist()
        self.outputs, self.text = lru_cache(maxsize=8)(self._outputs), lru_cache(maxsize=8)(self._text)

    def measure(self, parts: Sequence[str]) -> dict[str, pd.DataFrame]:
        """The frames of ``parts`` by name, with columns that name their runs; ``residuals`` belongs to spectra."""
        alone: list[Pair] = [("", run, run) for run in self.runs]
        with_residual = [each for each in alone if each[1].residual]
        work: dict[str, tuple[list[Pair], Callable[[Trained, Trained], Iterable[dict]]]] = {
            "spectra": (alone, lambda run, _: spectra.spectra(run, self.settings.first, self.device)),
            "residuals": (with_residual, lambda run, _: spectra.residuals(run, self.text(self.source(run)))),
            "landscape": (alone, self.landscape),
            "interpolation": ([*(("checkpoints", *each[1:]) for each in alone), *self.compared], self.interpolation),
            "activations": ([*self.compared], self.similarity),
        }
        frames = {}
        for name, (pairs, compute) in work.items():
            found = []
            for number, (kind, one, other) in enumerate(pairs if name in parts or name == "residuals" else [], 1):
                title = one.name if one is other else f"{one.name}--{other.name}"
                write_to_stderr(f"{name} {number}/{len(pairs)}: {title}")
                read = self.source(one)
                made_from = {"version": VERSION, **vars(self.settings), "runs": [one.made_from, other.made_from]}
                made_from["text"] = [read.shards, read.cfg.train.seq_len, read.cfg.eval.packing]
                frame = kept(self.folder / name / f"{title}.csv", made_from, lambda: compute(one, other))  # noqa: B023
                about = {"scale": one.scale, "method": one.method, "seed": one.seed, "dlr": one.cfg.dlr.enabled}
                found.append(frame.assign(**about, kind=kind, against=other.method, run=title))
            if found:
                frames[name] = pd.concat(found, ignore_index=True)
        return frames

    def landscape(self, run: Trained, _: Trained) -> Iterator[dict]:
        """The losses along each direction, with its two curvatures in each row; of the sharpest only the centre."""
        surface, point = self.surface(run), self.point(run, run.steps[-1])
        directions: dict[str, tuple[Point, float | None]] = {
            f"random {i}": (landscape.random_direction(point, i), None) for i in range(self.settings.directions)
        }
        if len(run.steps) > 2:
            found = landscape.principal_directions([self.point(run, step) for step in run.steps], 2)
            directions |= {f"principal {i}": one for i, one in enumerate(found)}
        directions["sharpest"] = landscape.sharpest(surface, point)[1], None
        space = "W" if run.point(run.steps[-1])[0].backbone.name == DENSE.name else "A, B"
        base = surface(point)
        for name, (direction, share) in directions.items():
            fit, hessian = landscape.curvature(surface, point, direction)
            about = {"space": space, "direction": name, "variance": share, "fit": fit, "hessian": hessian}
            distances = [0.0] if name == "sharpest" else self.distances
            for t, loss in zip(distances, landscape.along(surface, point, direction, distances), strict=True):
                yield about | {"t": t, "loss": loss, "rise": loss - base}

    def interpolation(self, one: Trained, other: Trained) -> Iterator[dict]:
        """The losses between the ends of two runs, or between the checkpoints of one; or why there are none."""
        ends = [(run, run.steps[-1]) for run in (one, other)]
        if one is other:
            legs = [((one, since), (one, step)) for since, step in zip(one.steps, one.steps[1:], strict=False)]
        else:
            backbones = [run.point(step)[0].backbone for run, step in ends]
            names = " and ".join(backbone.name for backbone in backbones)
            reason = differ(one, other)
            if not reason and backbones[0] != backbones[1]:
                reason = f"layers of {names} compute different functions"
            if reason := reason or misfit(*(run.point(step)[1] for run, step in ends)):
                yield {"refused": reason, "step": ends[0][1]}
            legs = [] if reason else [(ends[0], ends[1])]
        distances = np.linspace(0, 1, self.settings.points).tolist()
        for first, second in legs:
            losses, barrier = landscape.path(self.surface(one), self.point(*first), self.point(*second), distances)
            for t, loss in zip(distances, losses, strict=True):
                yield {"since": first[1], "step": second[1], "t": t, "loss": loss, "barrier": barrier, "refused": ""}

    def similarity(self, one: Trained, other: Trained) -> Iterator[dict]:
        """CKA by block, at each step that both runs have, and between their last ones; or why there is none."""
        if reason := differ(one, other):
            yield {"refused": reason, "step": one.steps[-1]}
            return
        steps = {step: step for step in one.steps if step in other.steps} | {one.steps[-1]: other.steps[-1]}
        for step, of_other in steps.items():
            for block, (x, y) in enumerate(zip(self.outputs(one, step), self.outputs(other, of_other), strict=True)):
                yield {"step": step, "block": block, "cka": activations.cka(x, y), "refused": ""}

    def source(self, run: Trained) -> Trained:
        """The run whose validation text ``run`` reads: the first with its tokenizer, so that all read the same."""
        return next(each for each in self.runs if not differ(run, each, blocks=False))

    def surface(self, run: Trained) -> Surface:
        return Surface(run.model(run.steps[-1], self.device), self.text(self.source(run)))

    def point(self, run: Trained, step: int) -> Point:
        return {name: tensor.to(self.device) for name, tensor in run.point(step)[1].items()}

    def _text(self, source: Trained) -> Inputs:
        return source.text(self.settings.sequences, self.device)

    def _outputs(self, run: Trained, step: int) -> list[Tensor]:
        return activations.outputs(run.model(step, self.device), self.text(self.source(run)))
