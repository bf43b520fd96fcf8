"""What is measured, of which runs and pairs of runs. Each result is kept as a CSV file and not computed again."""

import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from dlr_pretrain.models.full import DENSE
from dlr_pretrain.util.errors import write_to_stderr
from dlr_pretrain.util.files import write_durably

from . import activations, landscape, spectra
from .weights import Point, Trained, misfit

VERSION = 2  # of the measures: results of another one are computed again
POINTS = 11  # losses on a line, an odd number
Pair = tuple[str, Trained, Trained]  # "seeds" of one method, "backbone" of a method with DLR, or "reference"


def kept(path: Path, made_from: dict, compute: Callable[[], Iterable[dict]]) -> pd.DataFrame:
    """The rows of ``compute()``, or those in ``path`` if they were made from the same."""
    head = f"# {json.dumps(made_from, sort_keys=True)}\n"
    if not path.exists() or not path.read_text(encoding="utf-8").startswith(head):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, head + pd.DataFrame(compute()).to_csv(index=False))
    return pd.read_csv(io.StringIO(path.read_text(encoding="utf-8")), skiprows=1)


def compared_pairs(runs: Sequence[Trained]) -> Iterator[Pair]:
    """All pairs that are compared. The reference of a scale is ``full``, or else its first method without DLR.

    Runs of two methods are paired by seed, or the first of each if they share no seed.
    """
    groups: dict[tuple[str, str], dict[str, Trained]] = {}
    for run in runs:
        groups.setdefault((run.scale, run.method), {})[run.seed] = run
    for (scale, _), group in groups.items():
        yield from (("seeds", *two) for two in combinations(group.values(), 2))
        of_scale = {next(iter(other.values())): other for (where, _), other in groups.items() if where == scale}
        plain = [one for one in of_scale if not one.cfg.dlr.enabled] or [*of_scale]
        first = next(iter(group.values()))
        backbone = next((one for one in plain if one.pair == first.pair), first)
        reference = next((one for one in plain if one.family == DENSE.name), plain[0])
        for kind, one in (("backbone", backbone), ("reference", reference)):
            if one.method != first.method:
                both = [(run, of_scale[one][seed]) for seed, run in group.items() if seed in of_scale[one]]
                yield from ((kind, *two) for two in both or [(first, one)])


def differ(one: Trained, other: Trained) -> str:
    """Why two runs cannot be compared block by block; empty if they can."""
    if one.reads != other.reads:
        return "their tokenizers differ"
    shapes = [(run.cfg.scale.num_layers, run.cfg.scale.num_heads) for run in (one, other)]
    return "their numbers of blocks or heads differ" if shapes[0] != shapes[1] else ""


class Study:
    """The measures of ``runs`` and their pairs, on ``sequences`` of validation text, in files below ``folder``."""

    def __init__(self, runs: Sequence[Trained], sequences: int, directions: int, folder: Path, device: torch.device):
        self.runs, self.folder, self.device = runs, folder, device
        self.settings = {"sequences": sequences, "directions": directions}
        self.text = lru_cache(maxsize=8)(lambda source: source.text(sequences, device))
        self.outputs = lru_cache(maxsize=8)(
            lambda run, step: activations.outputs(run.model(step, device), self.text(self.source(run)))
        )

    def measure(self, parts: Iterable[str]) -> dict[str, pd.DataFrame]:
        """The frame of each of ``parts``, with columns that name the runs."""
        alone: list[Pair] = [("", run, run) for run in self.runs]
        with_residual = [each for each in alone if each[1].cfg.dlr.has_residual and each[1].cfg.dlr.train_b]
        checkpoints, compared = [("checkpoints", run, run) for run in self.runs], [*compared_pairs(self.runs)]
        work: dict[str, tuple[list[Pair], Callable[[Trained, Trained], Iterable[dict]]]] = {
            "spectra": (alone, lambda run, _: spectra.spectra(run, self.device)),
            "residuals": (with_residual, lambda run, _: spectra.residuals(run, self.text(self.source(run)))),
            "landscape": (alone, lambda run, _: self.landscape(run)),
            "interpolation": ([*checkpoints, *compared], self.interpolation),
            "activations": (compared, self.similarity),
        }
        frames: dict[str, list[pd.DataFrame]] = {}
        for part in parts:
            pairs, compute = work[part]
            for number, (kind, one, other) in enumerate(pairs, 1):
                title = one.name if one is other else f"{one.name}--{other.name}"
                write_to_stderr(f"{part} {number}/{len(pairs)}: {title}")
                made_from = {"version": VERSION, **self.settings, "text": self.source(one).evaluated_on}
                made_from["runs"] = [one.made_from, other.made_from]
                frame = kept(self.folder / part / f"{title}.csv", made_from, partial(compute, one, other))
                about = {"scale": one.scale, "method": one.method, "seed": one.seed, "dlr": one.cfg.dlr.enabled}
                frames.setdefault(part, []).append(frame.assign(**about, kind=kind, against=other.method, run=title))
        return {part: pd.concat(of_part, ignore_index=True) for part, of_part in frames.items()}

    def landscape(self, run: Trained) -> Iterator[dict]:
        """The losses along each direction, with its two curvatures in each row; of the sharpest only the centre."""
        surface = landscape.Surface(run.model(run.steps[-1], self.device), self.text(self.source(run)))
        point = self.point(run, run.steps[-1])
        numbers = range(self.settings["directions"])
        directions = {f"random {i}": (landscape.random_direction(point, i), math.nan) for i in numbers}
        if len(run.steps) > 2:
            found = landscape.principal_directions([self.point(run, step) for step in run.steps], 2)
            directions |= {f"principal {i}": one for i, one in enumerate(found)}
        directions["sharpest"] = landscape.sharpest(surface, point)[1], math.nan
        space = "W" if run.point(run.steps[-1])[0].backbone.name == DENSE.name else "A, B"
        base = surface(point)
        for name, (direction, share) in directions.items():
            fit, hessian = landscape.curvature(surface, point, direction)
            about = {"space": space, "direction": name, "variance": share, "fit": fit, "hessian": hessian}
            for t in [0.0] if name == "sharpest" else np.linspace(-1, 1, POINTS).tolist():
                loss = surface(landscape.plus(point, t, direction))
                yield about | {"t": t, "loss": loss, "rise": loss - base}

    def interpolation(self, one: Trained, other: Trained) -> Iterator[dict]:
        """The losses between the ends of two runs, or between the checkpoints of one; or why there are none."""
        ends = [(run, run.steps[-1]) for run in (one, other)]
        if one is other:
            legs = [[(one, since), (one, step)] for since, step in pairwise(one.steps)]
            reason = "" if legs else "it has one checkpoint, and began with other weights"
        else:
            legs, reason = [ends], self.apart(one, other)
        if reason:
            yield {"refused": reason, "step": one.steps[-1]}
            return
        surface = landscape.Surface(one.model(one.steps[-1], self.device), self.text(self.source(one)))
        distances = np.linspace(0, 1, POINTS).tolist()
        for first, second in legs:
            losses, barrier = landscape.path(surface, self.point(*first), self.point(*second), distances)
            for t, loss in zip(distances, losses, strict=True):
                yield {"since": first[1], "step": second[1], "t": t, "loss": loss, "barrier": barrier, "refused": ""}

    def apart(self, one: Trained, other: Trained) -> str:
        """Why there is no line between the last weights of two runs; empty if there is one."""
        if reason := differ(one, other):
            return reason
        (cfg, point), (cfg_of_other, point_of_other) = (run.point(run.steps[-1]) for run in (one, other))
        if cfg.backbone != cfg_of_other.backbone:
            return f"layers of {cfg.backbone.name} and {cfg_of_other.backbone.name} compute different functions"
        return misfit(point, point_of_other)

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
        return next(each for each in self.runs if each.reads == run.reads)

    def point(self, run: Trained, step: int) -> Point:
        return {name: tensor.to(self.device) for name, tensor in run.point(step)[1].items()}
