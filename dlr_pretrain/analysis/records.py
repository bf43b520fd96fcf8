"""Runs read from their directories: what was trained, how far it got, and remarks on the record."""

from __future__ import annotations

import math
from calendar import timegm
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from glob import glob, has_magic
from pathlib import Path
from time import strptime

import numpy as np

from dlr_pretrain.config import flatten
from dlr_pretrain.config.identity import NEWER
from dlr_pretrain.config.parse import KNOWN
from dlr_pretrain.config.written import read_config, read_record
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.history import read_metrics, sound_records

SECTIONS = ("seed", "scale", "backbone", "dlr", "optimizer", "data", "precision", "train", "eval")  # must be there
NAMING_OPTIMIZERS = ("galore", "fira", "loro")  # the papers' tables name these methods by the optimizer
THINNED = "metrics_every"  # in the manifest of a run that keep.py has thinned: updates between its records
VOCABULARY = "vocab_size"  # in such a manifest: the vocabulary size of the model, which is not kept
OTHER = {name for name, key in KNOWN.items() if not key.identity}  # keys that do not change the mathematics


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run directory.

    ``config`` is ``config.yaml``, nested; ``identity`` has dotted keys and the fingerprints of data and tokenizer;
    ``metrics`` has a record for each update; ``manifest`` is ``manifest.json``. ``remarks`` say what is wrong with
    these files.
    """

    folder: Path
    config: dict
    identity: dict
    metrics: list[dict] = field(repr=False)
    manifest: dict = field(repr=False)
    remarks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def starts(self) -> list[dict]:
        return self.manifest.get("starts", [])

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def scale(self) -> str:
        return self.config["scale"]["name"]

    @cached_property
    def method(self) -> str:
        """The name in the paper's tables, such as cola+dlr; other residuals keep theirs, such as cola+uncorrected."""
        backbone, dlr, optimizer = (self.config[group]["name"] for group in ("backbone", "dlr", "optimizer"))
        base = optimizer if optimizer in NAMING_OPTIMIZERS else backbone
        return base if dlr == "off" else f"{base}+{'dlr' if dlr == 'on' else dlr}"

    @property
    def planned(self) -> int:
        """Updates of the whole schedule."""
        return self.config["train"]["steps"]

    @property
    def step(self) -> int:
        return self.metrics[-1]["step"] if self.metrics else 0

    @property
    def positions(self) -> int:
        """Tokens of an update, padding included."""
        return self.config["train"]["global_batch"] * self.config["train"]["seq_len"]

    @cached_property
    def evaluations(self) -> list[dict]:
        return [record for record in self.metrics if "eval/loss" in record]

    @property
    def diverged(self) -> bool:
        return self.manifest.get("state", {}).get("name") == "diverged"

    @property
    def final(self) -> dict | None:
        """The evaluation after the last update of the schedule; None before it.

        For a run that has diverged it has no numbers.
        """
        if self.diverged:
            return {"step": self.step}
        last = self.evaluations[-1] if self.evaluations else None
        return last if last and last["step"] >= self.planned else None

    @cached_property
    def trained(self) -> list[dict]:
        """The starts with updates in ``metrics``: none that only evaluated or exported, or whose updates were lost."""
        if not self.metrics or "time" not in self.metrics[-1]:
            return self.starts[-1:]
        bounds = [_epoch(start["time"]) if "time" in start else -math.inf for start in self.starts]
        times = self.column("time")
        lasted = zip(self.starts, bounds, [*bounds[1:], math.inf], strict=True)
        return [start for start, began, ended in lasted if ((times >= began) & (times < ended)).any()]

    @property
    def _trained_or_last(self) -> list[dict]:
        return self.trained or self.starts[-1:] or [{}]

    @property
    def machines(self) -> list[str]:
        """The device and the number of ranks of each start that trained."""
        return list(dict.fromkeys(map(_machine, self._trained_or_last)))

    @property
    def machine(self) -> str:
        """The machine of the last start that trained."""
        return _machine(self._trained_or_last[-1])

    @property
    def codes(self) -> list[str]:
        """The commit of each start that trained; a "+" after it marks local changes."""
        return list(dict.fromkeys(_commit(start) for start in self._trained_or_last))

    def column(self, name: str) -> np.ndarray:
        """One metric of every update as floats; NaN where it is absent or null."""
        return column(self.metrics, name)

    def since_last_start(self, name: str) -> np.ndarray:
        """The finite values of a metric since the last start that trained."""
        values = self.column(name)
        if self.trained and "time" in self.trained[-1]:
            values = values[self.column("time") >= _epoch(self.trained[-1]["time"])]
        return values[np.isfinite(values)]

    def hours(self) -> np.ndarray:
        """Hours of training up to every update, with evaluations and saves, without the pauses between starts."""
        stamps, steps = self.column("time"), self.column("step")
        gaps, updates = np.diff(stamps, prepend=stamps[:1]), np.diff(steps, prepend=steps[:1] - 1)
        usual = float(np.median(gaps[1:] / updates[1:])) if len(gaps) > 1 else 0.0
        started = [start["time"] for start in self.starts if "time" in start]
        started += self.manifest.get("forked", {}).get("starts", [])
        for i in {0, *(int(np.searchsorted(stamps, _epoch(time))) for time in started)}:
            if i < len(gaps):
                gaps[i] = usual * updates[i]
        return np.cumsum(gaps) / 3600


def column(records: list[dict], name: str) -> np.ndarray:
    """One metric as floats; NaN where it is absent or null."""
    values = (record.get(name) for record in records)
    return np.array([math.nan if value is None else value for value in values], dtype=float)


def _commit(start: dict) -> str:
    git = start.get("git")
    return git[:12] + "+" * git.endswith("+") if git else "unknown code"


def _epoch(time: str) -> float:
    return float(timegm(strptime(time, "%Y-%m-%dT%H:%M:%SZ")))


# ----------------------------------------------------------------------------------------------------
# Reading


def read_run(folder: Path) -> RunRecord:
    """The run in ``folder``. Damaged lines are left out, with a remark. Raises UserError if it cannot be read."""
    config = read_config(folder)
    if missing := [key for key in SECTIONS if key not in config]:
        raise UserError(f"{folder / 'config.yaml'} has no {', '.join(missing)}: it is not of a run")
    manifest, remarks = _manifest(folder)
    metrics, damaged = _metrics(folder / "metrics.jsonl")
    gaps = sorted(set(range(metrics[0]["step"], metrics[-1]["step"])) - {r["step"] for r in metrics}) if metrics else []
    if damaged:
        remarks.append(damaged)
    late = bool(metrics) and metrics[0]["step"] != 1 and not config.get("run", {}).get("fork_from")
    if (gaps or late) and THINNED not in manifest:
        remarks.append(f"metrics.jsonl lacks {len(gaps) + metrics[0]['step'] - 1:,} updates")
    identity = manifest.get("identity") or {k: v for k, v in flatten(config).items() if k not in OTHER}
    return RunRecord(folder, config, NEWER | identity, metrics, manifest, tuple(remarks))


def _machine(start: dict) -> str:
    return f"{start.get('world_size', '?')} x {start.get('device', 'unknown device')}"


def _manifest(folder: Path) -> tuple[dict, list[str]]:
    try:
        manifest, missing = read_record(folder), "there is no manifest.json"
    except UserError:
        manifest, missing = {}, "manifest.json is damaged"
    return manifest, [] if manifest else [f"{missing}: data, tokenizer, code and machine are not known"]


def _metrics(path: Path) -> tuple[list[dict], str]:
    try:
        return read_metrics(path), ""
    except UserError:
        return sound_records(path)[0], "damaged lines of metrics.jsonl are left out"


def find_runs(places: Sequence[str | Path]) -> tuple[list[RunRecord], list[str]]:
    """The runs in ``places``: run directories, folders of them (such as ``run.root``), or globs of either.

    Returns them in order, each once, and remarks on runs that cannot be read. A folder without a run is a remark, too,
    if there are other places (a shell expands ``runs/*`` to all folders). Raises UserError for any other place without
    a run.
    """
    runs: dict[Path, RunRecord] = {}
    remarks: list[str] = []
    for place in map(str, places):
        folders = list(dict.fromkeys(_run_folders(place)))
        if not folders:
            rule = f"{place}: no run directory there (one has a config.yaml)"
            if len(places) == 1 or not Path(place).is_dir():
                raise UserError(f"{rule}. Name runs, or the folder above")
            remarks.append(rule)
        for folder in folders:
            if folder.resolve() not in runs:
                try:
                    runs[folder.resolve()] = read_run(folder)
                except UserError as error:
                    remarks.append(f"{folder.name} is left out: {error}")
    return list(runs.values()), remarks


def _run_folders(place: str) -> Iterator[Path]:
    for path in sorted(map(Path, glob(place))) if has_magic(place) and not Path(place).exists() else [Path(place)]:
        if (path / "config.yaml").exists():
            yield path
        else:
            yield from (found.parent for depth in ("*", "*/*") for found in sorted(path.glob(f"{depth}/config.yaml")))
