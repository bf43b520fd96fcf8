"""Reads run directories into two frames: ``runs`` has a row for each run, ``metrics`` a row for each update.

Runs that differ only in their seed form a group. Everything in a report is a function of these frames.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import numpy as np
import pandas as pd

from dlr_pretrain.config.identity import TEXT, facts
from dlr_pretrain.config.run_folder import read_config, read_record
from dlr_pretrain.config.tree import Data
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import Shape, misfit, sound_records
from dlr_pretrain.util.text import one_line, plural

NAMING_OPTIMIZERS = ("galore", "fira", "loro")  # papers name these methods by their optimizer
METRICS = ("step", "time", "train/loss", "train/grad_norm", "train/tokens", "perf/tokens_per_second", "perf/mfu",
           "perf/max_memory_gb", "eval/loss", "eval/perplexity")  # fmt: skip
# Labels show the name of what a hash stands for.
NAME_OF = {"data.shards": "data.root", "tokenizer.pieces": "tokenizer.path", "run.start_from.weights": "run.start_from"}
SEEDS = ("seed", "data.seed")
EVALUATED = "eval.text."  # of an identity: the text of a named validation set
NONE = "–"  # what a table shows for a missing value
LARGEST_METRIC = 1e30  # above that a number is damaged, and no figure can show it
CONFIG: Shape = {
    "seed": int, "data": {"seed": int}, "train": {"steps": int},
    **{group: {"name": str} for group in ("scale", "backbone", "dlr", "optimizer")},
}  # fmt: skip
IDENTITY: Shape = {"precision.name": str, "data.packing": str}


def method_name(backbone: str, dlr: str, optimizer: str) -> str:
    """The name of a method as in the paper's tables, such as cola+dlr or galore, from the names of its options.

    A method that the paper has not trained ends with its optimizer: cola (muon).
    """
    base = optimizer if optimizer in NAMING_OPTIMIZERS else backbone
    name = base if dlr == "off" else f"{base}+{'dlr' if dlr == 'on' else dlr}"
    return name if base == optimizer or optimizer.startswith("adamw") else f"{name} ({optimizer})"


def digits(value: float | None, spec: str) -> str:
    """A number as text; a missing one as –."""
    return NONE if pd.isna(value) else f"{value:{spec}}"


def spread(values: Iterable[float], spec: str = ",.2f") -> str:
    """The mean over seeds ± the standard deviation (divisor n - 1), and the number of seeds, as text.

    Infinite values stand for diverged runs. They are counted instead, because no mean may leave them out. If there are
    no values, or one is missing, the text is –.
    """
    numbers = np.array(list(values), dtype=float)
    if not len(numbers) or np.isnan(numbers).any():
        return NONE
    if diverged := np.isinf(numbers).sum():
        return f"{diverged} of {len(numbers)} diverged"
    deviation = f" ± {numbers.std(ddof=1):{spec.lstrip('+')}}" if len(numbers) > 1 else ""
    return f"{numbers.mean():{spec}}{deviation} ({len(numbers)})"


def ended(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs that take part in means: those that have finished or diverged."""
    return runs[runs.state != "unfinished"]


# ----------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True)
class Runs:
    """``runs``: what was trained, its state and its last numbers. ``metrics``: every update, with its ``run``.

    ``loss``, ``ppl`` and ``convention`` are those after the last update of the schedule: infinite for a diverged run,
    NaN for an unfinished one. They are of the validation text, or of the named set ``of_set``. ``remarks`` say what a
    mean would hide and what is wrong with the files.
    """

    runs: pd.DataFrame
    metrics: pd.DataFrame
    remarks: list[str]
    of_set: str = ""

    def groups(self) -> list[tuple[pd.Series, pd.DataFrame]]:
        """For each group its first run, to read what all share, and all its runs, in the order of scale and name."""
        return [(runs.iloc[0], runs) for _, runs in self.runs.groupby("key", sort=False)]


def read_runs(places: Sequence[str | Path], of_set: str = "") -> Runs:
    """The runs in ``places``: run directories, folders of them (such as ``run.root``), or globs of either.

    Their losses are those of the validation set ``of_set``: a source of a mixture, or one of ``eval.sets``. Where
    several runs have the same configuration and seed, the one with the most steps is kept. Raises UserError if no run
    can be read.
    """
    rows: list[dict] = []
    metrics: list[pd.DataFrame] = []
    remarks: list[str] = []
    for folder in _folders(places, remarks):
        try:
            row, updates = _read(folder, remarks, of_set)
        except Exception as error:  # whatever is wrong with this run, the others get their report
            kind = "" if isinstance(error, UserError) else f"damaged: {type(error).__name__}: "
            remarks.append(f"{folder.name} is left out: {kind}{error}")
            continue
        rows.append(row)
        metrics.append(updates)
    if not rows:
        raise UserError("no run could be read. " + " ".join(map(one_line, remarks)))
    runs = _in_groups(pd.DataFrame(rows).assign(order=range(len(rows))), remarks)
    remarks += _remarks_on(runs, of_set)
    return Runs(runs, pd.concat(metrics, ignore_index=True), [*map(one_line, remarks)], of_set)


def _folders(places: Sequence[str | Path], remarks: list[str]) -> list[Path]:
    """The run directories in ``places``, each once."""
    folders: dict[Path, Path] = {}
    for place in map(str, places):
        tops = [place] if Path(place).exists() else sorted(glob(place))
        patterns = ("config.yaml", "*/config.yaml", "*/*/config.yaml")
        configs = [path for top in tops for pattern in patterns for path in sorted(Path(top).glob(pattern))]
        for path in configs:
            folders.setdefault(path.parent.resolve(), path.parent)
        if not configs:
            remarks.append(f"{place}: no run directory there (a run directory has a config.yaml)")
    return list(folders.values())


def _read(folder: Path, remarks: list[str], of_set: str) -> tuple[dict, pd.DataFrame]:
    """The row of a run, and its updates. Raises UserError if the run cannot be read."""
    config, manifest = read_config(folder), read_record(folder)
    if not manifest:
        raise UserError(f"{folder / 'manifest.json'} is missing: it is not known what was trained there")
    if wrong := misfit(config, CONFIG) or misfit(manifest["identity"], IDENTITY):
        raise UserError(f"{folder} is damaged: {wrong}")
    records, lines = sound_records(folder / "metrics.jsonl")
    records = [*{record["step"]: record for record in records}.values()]
    if lines:
        remarks.append(f"{folder.name}: {plural(lines, 'damaged line')} of metrics.jsonl left out")
    names = dict.fromkeys([*METRICS, *(name for record in records for name in record)])
    metrics = pd.DataFrame(records, columns=list(names)).apply(pd.to_numeric, errors="coerce").astype(float)
    metrics = metrics.where(metrics.abs() < LARGEST_METRIC)
    metrics["run"] = str(folder)
    metrics["flops"] = metrics["train/tokens"] * _as_float(manifest.get("flops_per_token"))

    began = {pd.Timestamp(start["time"]).timestamp(): start for start in manifest["starts"]}
    metrics["hours"] = _hours(metrics.time, sorted(began))
    trained = {moment: start for moment, start in began.items() if moment <= metrics.time.max()} or began or {0.0: {}}
    recent = metrics[metrics.time >= max(trained)]  # since the last start that trained rather than only exported
    last = trained[max(trained)]
    seed, order = config["seed"], config["data"]["seed"]
    row = {
        "run": str(folder),
        "name": folder.resolve().name,
        "scale": config["scale"]["name"],
        "method": method_name(*(config[group]["name"] for group in ("backbone", "dlr", "optimizer"))),
        "dlr": config["dlr"]["name"],
        "seed": str(seed) if order == Data.seed else f"{seed}/{order}",
        "planned": config["train"]["steps"],
        "planned_tokens": math.prod(config["train"].get(key, 0) for key in ("steps", "global_batch", "seq_len")),
        "identity": manifest["identity"],
        "start": last,
        "code": {f"{git:.12}{git[40:]}" for git in (str(start.get("git")) for start in trained.values())},
        "machine": f"{last.get('world_size', '?')} x {last.get('device', 'unknown device')}",
        "lr": _as_float(manifest["identity"].get("train.lr")),
        "parameters": _as_float(manifest.get("parameters")),
        "flops": metrics.flops.max(),
        "evaluated": _as_float(manifest.get("evaluated_tokens")),
        "hours": metrics.hours.max(),
        "speed": recent["perf/tokens_per_second"].median(),
        "mfu": recent["perf/mfu"].median(),
        "memory": recent["perf/max_memory_gb"].max(),
    }
    row |= {name: one_line(value) for name, value in row.items() if isinstance(value, str) and name != "run"}
    return row | _progress_of(config["train"]["steps"], manifest, records, of_set), metrics


def _hours(times: pd.Series, starts: Sequence[float]) -> pd.Series:
    """Hours of training until each update: those of earlier starts, from a start to its last update, and its own."""
    start = pd.Series(np.searchsorted(starts, times, side="right"), times.index)
    within = times - start.map(lambda number: starts[max(number - 1, 0)] if starts else math.nan)
    earlier = within.groupby(start).max().cumsum().shift(fill_value=0.0)
    return (within + start.map(earlier)) / 3600


def _progress_of(planned: int, manifest: dict, records: list[dict], of_set: str) -> dict:
    """The state of a run and its last numbers."""
    last = records[-1] if records else {"step": 0}
    final: dict = next((r for r in reversed(records) if "eval/loss" in r and r["step"] >= planned), {})
    diverged = manifest.get("state", {}).get("name") == "diverged" or (final and final["eval/loss"] is None)
    progress = {
        "state": "diverged" if diverged else "finished" if final else "unfinished",
        "step": int(_as_float(last["step"])),
        "tokens": _as_float(last.get("train/tokens", 0)),
        "skipped": _as_float(last.get("train/skipped")),
    }
    if of_set and final and f"eval/{of_set}/loss" not in final:
        raise UserError(f"it has no validation set {of_set}")
    names = {"loss": "loss", "loss_a": "loss_a", "loss_b": "loss_b"}
    for name, key in (names | {"ppl": "perplexity", "convention": "perplexity_galore"}).items():
        evaluated = final.get(f"eval/{of_set}/{key}" if of_set else f"eval/{key}")
        progress[name] = math.inf if diverged else _as_float(evaluated)
    sets = {key: value for key, value in final.items() if key.count("/") == 2 and key.endswith("/perplexity")}
    return progress | {"sets": {key.split("/")[1]: _as_float(value) for key, value in sets.items()}}


def _as_float(value: object) -> float:
    """A value of a file as a number; NaN if it is not one. Raises OverflowError if it is too large."""
    return float(value) if isinstance(value, (int, float)) else math.nan


# ----------------------------------------------------------------------------------------------------
# Groups


def _in_groups(runs: pd.DataFrame, remarks: list[str]) -> pd.DataFrame:
    """``runs`` in order and without duplicates, with more columns.

    ``shared`` is the identity without the seeds, and ``label`` the group's name. ``key`` is equal within a group,
    ``pair`` in groups that differ only in DLR, and ``family`` (a name) in groups that differ only in the learning rate.
    """
    recorded = _keys(runs.identity)
    apart = {key for key in recorded if not (key in SEEDS or facts(key).origin or key.startswith(EVALUATED))}
    same = [{key: value for key, value in one.items() if key in apart} for one in runs.identity]
    without = [{key: value for key, value in shared.items() if not key.startswith("dlr.")} for shared in same]
    runs = runs.assign(shared=same, key=[*map(_text, same)], pair=[*map(_text, without)])
    runs = runs.sort_values(["seed", "step"], ascending=[True, False], kind="stable")
    duplicated = runs.duplicated(["key", "seed"])
    for run in runs[duplicated].itertuples():
        remarks.append(f"{run.run} is left out: another run has the same configuration and seed")
    runs = runs[~duplicated]
    short = runs.assign(label=_labels(runs, True)).groupby(["scale", "label"]).key.nunique().max() == 1
    runs = runs.assign(label=_labels(runs, short), family=_labels(runs, short, without="train.lr"))
    runs = runs.assign(size=runs.groupby("scale").parameters.transform("min"))
    return runs.sort_values(["size", "scale", "label", "seed"]).reset_index(drop=True)


def _labels(runs: pd.DataFrame, short: bool, without: str = "") -> pd.Series:
    """Each run's method, with the settings that set it apart from the method's first run: ``cola (rank=64)``.

    In ``short`` labels a key loses its section, and a hash shows as the name of what it identifies.
    """
    labels = runs.method.copy()
    for _, of_method in runs.groupby(["scale", "method"]):
        first = of_method.shared[of_method.order.idxmin()]
        for i, run in of_method.iterrows():
            apart = {}
            for key in differing([first, run.shared]):
                if key in run.shared and key != without:
                    value = Path(str(run.identity[NAME_OF[key]])).name if key in NAME_OF else str(run.shared[key])
                    name = key.removesuffix(".name").split(".", 2)[-1] if short else key
                    apart[name] = (value if short else str(run.shared[key]))[:24]
            listed = ", ".join(f"{name}={value}" for name, value in apart.items())
            labels[i] = one_line(f"{run.method} ({listed})" if listed else run.method)
    return labels


def differing(identities: Iterable[dict]) -> list[str]:
    """The keys whose values are not the same in all ``identities``."""
    identities = list(identities)
    return [key for key in _keys(identities) if len({_text(identity.get(key)) for identity in identities}) > 1]


def differing_text(runs: pd.DataFrame, of_set: str = "") -> list[str]:
    """The keys by which runs are evaluated on different text. If there are any, losses cannot be compared."""
    keys = [*TEXT, *(key for key in _keys(runs.identity) if key not in TEXT and facts(key).evaluates)]
    if of_set:  # it has a text of its own
        keys = [f"{EVALUATED}{of_set}", *(key for key in TEXT if key != "data.shards")]
    scored = [{key: identity.get(key) for key in keys} for identity in runs.identity]
    padded = {"data.mask_documents": False}  # a row holds one document, so masking changes nothing
    return differing([one | padded if one["eval.packing"] == "pad" else one for one in scored])


def _keys(identities: Iterable[dict]) -> list[str]:
    """The keys of all ``identities``, each once."""
    return [*dict.fromkeys(key for identity in identities for key in identity)]


def _remarks_on(runs: pd.DataFrame, of_set: str) -> Iterator[str]:
    """Remarks on what means would hide: unfinished and diverged runs, different code or evaluation text."""
    for run in runs.to_dict("records"):
        if run["state"] == "unfinished":
            yield f"{run['name']} is unfinished, step {run['step']:,} of {run['planned']:,}: in curves, not in means"
        elif run["state"] == "diverged":
            yield f"{run['name']} diverged after step {run['step']:,}: it counts as infinite in means"
        if run["skipped"] > 0:
            yield f"{run['name']} has skipped {run['skipped']:,.0f} updates that were not finite"
    for (scale, label), group in runs.groupby(["scale", "label"], sort=False):
        if len(codes := set().union(*group.code)) > 1:
            yield f"{label} at {scale} was trained by different code: {', '.join(sorted(codes))}"
    for scale, group in runs.groupby("scale", sort=False):
        if keys := ", ".join(differing_text(group, of_set)):
            yield f"evaluations at {scale} are not all of the same text ({keys}): their losses cannot be compared"


def _text(value: object) -> str:
    """``value`` as text, to compare it."""
    return json.dumps(value, sort_keys=True, default=str)
