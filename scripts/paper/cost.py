"""What runs of the paper take: GPU hours, disk, parameters and memory."""

import hashlib
import json
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from dlr_pretrain.analysis.plan import disk_bytes, parameters, state_and_moments, utilisations
from dlr_pretrain.config import Config, identity
from dlr_pretrain.config.run_folder import read_record
from dlr_pretrain.config.tree import CONFIG_DIR, PACKAGE
from dlr_pretrain.launch.runs import PlannedRun, map_on_cores
from dlr_pretrain.models.flops import PEAK_FLOPS, flops_per_token
from dlr_pretrain.util.files import NUMBER, read_metrics, user_cache, write_durably

from .items import HERE, without_seed


@dataclass(frozen=True)
class Size:
    """What a run takes: FLOPs per position, millions of trained parameters, GB of weights and optimizer state without
    padding, and bytes on the disk."""

    flops: float
    trained: float
    state: float
    disk: int


T = TypeVar("T")


@cache
def _store() -> tuple[Path, bytes, dict[str, Any]]:
    """A file in the user's cache, the digest of this code, and what the code has computed so far, by its input."""
    code = hashlib.sha256(torch.__version__.encode())
    for source in sorted(file for folder in {PACKAGE, CONFIG_DIR, HERE} for file in folder.rglob("*.[py][ya]*")):
        code.update(source.read_bytes())
    path = user_cache() / "paper.pickle"
    with suppress(Exception):  # none yet, or one of other code, which may not even be read
        made_by, kept = pickle.loads(path.read_bytes())
        if made_by == code.digest():
            return path, made_by, kept
    return path, code.digest(), {}


def remembered(made: Mapping[str, T], make: Callable[[Sequence[T]], Sequence[Any]]) -> list[Any]:
    """For each input in ``made`` what ``make`` returns, which depends on nothing else. Results are kept for later."""
    path, code, kept = _store()
    if due := [key for key in made if key not in kept]:
        kept.update(zip(due, make([made[key] for key in due]), strict=True))
        write_durably(path, pickle.dumps((code, kept)))
    return [kept[key] for key in made]


def sizes(configs: Iterable[Config]) -> list[Size]:
    """The size of each configuration. Equal models are counted once, on all cores."""
    deciding = ("scale.", "backbone.", "optimizer.", "precision.", "train.s", "dlr.learn_alpha", "dlr.train_b")
    keyed = []
    for cfg in configs:
        model = {key: value for key, value in identity(cfg).items() if key.startswith(deciding)}
        keyed.append((json.dumps([model, cfg.micro_batch(1), vars(cfg.checkpoint)]), cfg))
    counted = dict(zip(unique := dict(keyed), remembered(unique, partial(map_on_cores, _size, fewest=4)), strict=True))
    return [counted[key] for key, _ in keyed]


def _size(cfg: Config) -> Size:
    vocabulary = cfg.planned_vocab_size
    return Size(
        flops_per_token(cfg, vocabulary, cfg.micro_batch(1)),
        parameters(cfg, vocabulary)["trainable"] / 1e6,
        state_and_moments(cfg, vocabulary, alignment=1) / 1e9,
        disk_bytes(cfg, vocabulary)["run"],
    )


def hours_of(planned: Iterable[PlannedRun], gpu: str, mfu: float | None = None) -> dict[Path, tuple[float, ...]]:
    """GPU hours of each run by its directory, from FLOPs and the peak of ``gpu`` at ``mfu`` or at the plan's
    ``utilisations``; ascending.

    If a run was trained on that GPU, the runs that differ from it only in the seed have its measured speed instead.
    """
    runs = {run.dir: run for run in planned}
    speeds = {without_seed(run.line): speed for run in runs.values() if (speed := measured_speed(run.dir, gpu))}
    hours = {}
    for run, size in zip(runs.values(), sizes(run.cfg for run in runs.values()), strict=True):
        positions = run.cfg.train.steps * run.cfg.train.global_batch * run.cfg.train.seq_len
        shares = reversed(utilisations(run.cfg, size.flops)) if mfu is None else [mfu]
        rates = [PEAK_FLOPS[gpu] * share / size.flops for share in shares]
        if speed := speeds.get(without_seed(run.line)):
            rates = [speed]
        hours[run.dir] = tuple(positions / rate / 3600 for rate in rates)
    return hours


def measured_speed(folder: Path, gpu: str) -> float | None:
    """Tokens/s of one ``gpu`` in the last steps of a run; None if the run was not trained on it."""
    start = (read_record(folder).get("starts") or [{}])[-1]
    lines = read_metrics(folder / "metrics.jsonl")[-100:] if start.get("device") == gpu else []
    speeds = [speed for line in lines if isinstance(speed := line.get("perf/tokens_per_second"), NUMBER)]
    return median(speeds) / start["world_size"] if speeds else None


def total(hours: Sequence[tuple[float, ...]], unit: float = 1) -> str:
    """The sum of hours, as a range from the least to the most. ``unit`` is the shown unit in hours."""
    sums = (sum(times[0] for times in hours) / unit, sum(times[-1] for times in hours) / unit)
    return " to ".join(dict.fromkeys(f"{time:,.0f}" if time >= 10 else f"{time:.2g}" for time in sums))


def disk_of(runs: Sequence[PlannedRun]) -> str:
    """The most that the runs keep on the disk."""
    return f"{sum(size.disk for size in sizes(run.cfg for run in runs)) / 1e9:,.0f} GB"
