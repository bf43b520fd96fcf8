"""Compares runs: the differences between their configurations and between their curves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dlr_pretrain.analysis.groups import (
    PERPLEXITY,
    Group,
    Spread,
    differing,
    differing_text,
    grouped,
    ordered_by_seed,
    spread,
)
from dlr_pretrain.analysis.measured import measured
from dlr_pretrain.analysis.records import RunRecord
from dlr_pretrain.analysis.report import smoothed
from dlr_pretrain.config import flatten
from dlr_pretrain.config.problems import shown
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.text import WIDTH, amount, diverged_of, fill

PLACES = ("run.dir", "run.root")
ROWS = 10  # printed steps of a curve, at most
QUARTERS = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Side:
    """A group of seeds, or one run; ``letter`` is its name in the tables."""

    letter: str
    label: str
    runs: tuple[RunRecord, ...]

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]


def versus(runs: Sequence[RunRecord]) -> dict:
    """Compare runs. Returns everything that ``render`` shows, as plain values with stable keys.

    Runs that differ only in their seed form one side; if all runs do, each run is a side. The figures of a side are
    means and standard deviations over its seeds. Each difference is a side minus the first side: by seed over the seeds
    that both have, or between the means if they share no seed. Raises UserError if there are fewer than two sides.
    """
    groups, remarks = grouped(runs)
    groups.sort(key=lambda group: min(runs.index(run) for run in group.runs))
    sides = _sides(groups)
    if len(sides) < 2:
        raise UserError("there is one run to compare. Name another, or a group of seeds of another configuration")
    return {
        "sides": [
            {"side": s.letter, "label": s.label, "seeds": s.seeds, "runs": [run.name for run in s.runs]} for s in sides
        ],
        "warnings": remarks + _warnings(sides),
        "configuration": [
            {"key": key, "values": [_values(side, key) for side in sides]} for key in _differing_keys(sides)
        ],
        "evaluation": _curve(sides, _evaluated, every=True),
        "training": _curve(sides, _trained, every=False),
        "final": [_final(side) for side in sides],
    }


def _sides(groups: Sequence[Group]) -> list[Side]:
    if len(groups) == 1:
        each = [(f"seed {run.seed}", (run,)) for run in groups[0].runs]
    else:
        labels = [f"{group.scale} {group.label}" for group in groups]
        each = [(label, group.runs) for label, group in zip(labels, groups, strict=True)]
    if len(each) > 26:
        raise UserError(f"{len(each)} configurations are too many to compare: at most 26. scripts/report.py takes more")
    return [Side(chr(ord("A") + i), label, runs) for i, (label, runs) in enumerate(each)]


# ----------------------------------------------------------------------------------------------------
# Configurations


def facts(run: RunRecord) -> dict[str, object]:
    """The configuration without ``PLACES``, the fingerprints of the data, and the code, torch version and machine."""
    torch = (run.starts[-1] if run.starts else {}).get("packages", {}).get("torch")
    made = {"(code)": ", then ".join(run.codes), "(torch)": torch, "(machine)": run.machine}
    return {k: v for k, v in (flatten(run.config) | run.identity | made).items() if k not in PLACES}


def _differing_keys(sides: Sequence[Side]) -> list[str]:
    keys = differing([facts(run) for side in sides for run in side.runs])
    if all(len(side.runs) == 1 for side in sides):
        return keys
    follows = all(ordered_by_seed(run) for side in sides for run in side.runs)
    return [key for key in keys if key != "seed" and not (follows and key == "data.seed")]


def _values(side: Side, key: str) -> list[object]:
    """The distinct values of a key in a side. Its runs may differ in keys that do not set groups apart."""
    found = [facts(run).get(key, "absent") for run in side.runs]
    return [value for i, value in enumerate(found) if value not in found[:i]]


def _warnings(sides: Sequence[Side]) -> list[str]:
    runs = [run for side in sides for run in side.runs]
    warnings = []
    if other := differing_text(runs):
        warnings.append(f"evaluations are not of the same text ({', '.join(other)}): their losses do not compare")
    if len({run.positions for run in runs}) > 1:
        warnings.append("updates are of different sizes: equal steps are not equal tokens")
    warnings += [f"{run.name}: {remark}" for run in runs for remark in run.remarks]
    for run in runs:
        if run.diverged:
            warnings.append(f"{run.name} diverged after step {run.step:,}: there is no mean with it beyond that")
        elif run.step < run.planned:
            warnings.append(f"{run.name} is unfinished: step {run.step:,} of {run.planned:,}")
    return warnings


# ----------------------------------------------------------------------------------------------------
# Curves


def _evaluated(run: RunRecord) -> dict[int, float]:
    return {r["step"]: math.inf if r["eval/loss"] is None else r["eval/loss"] for r in run.evaluations}


def _trained(run: RunRecord) -> dict[int, float]:
    """The training loss by step: its running median at the nearest step for which ``smoothed`` gives one."""
    steps = run.column("step")
    at, level = smoothed(run.column("train/loss"))
    return {int(step): float(level[np.abs(at - i).argmin()]) for i, step in enumerate(steps)}


def common_steps(curves: Sequence[tuple[RunRecord, dict[int, float]]]) -> list[int]:
    """The steps at which every run has a value or has already diverged."""
    found = sorted(set[int]().union(*(curve for _, curve in curves)))
    return [s for s in found if all(s in curve or (run.diverged and s > run.step) for run, curve in curves)]


def _quarters(steps: Sequence[int]) -> list[int]:
    """The steps that are nearest to each quarter of the last step."""
    return sorted(
        {min(steps, key=lambda step, at=part: abs(step - round(at * steps[-1]))) for part in QUARTERS if steps}
    )


def _curve(sides: Sequence[Side], of: Callable[[RunRecord], dict[int, float]], every: bool) -> list[dict]:
    """Losses and differences at ``every`` common step, or at the quarters. A run is infinite after it has diverged."""
    curves = {id(run): of(run) for side in sides for run in side.runs}
    steps = common_steps([(run, curves[id(run)]) for side in sides for run in side.runs])
    rows = []
    for step in steps if every else _quarters(steps):
        values = [{run.seed: curves[id(run)].get(step, math.inf) for run in side.runs} for side in sides]
        rows.append(
            {
                "step": step,
                "tokens": step * sides[0].runs[0].positions,
                "loss": [_plain(spread(value.values())) for value in values],
                "difference": [_difference(values[0], value) for value in values[1:]],
            }
        )
    return rows


def _difference(a: dict[int, float], b: dict[int, float]) -> dict:
    """b - a: by seed over the seeds that both have, or between the means if they share no seed."""
    both = [seed for seed in a if seed in b]
    if both:
        gaps = (b[seed] - a[seed] for seed in both)
        return _plain(spread(map(_finite, gaps))) | {"paired": True}
    gap = spread(b.values()).mean - spread(a.values()).mean
    diverged = sum(not math.isfinite(value) for side in (a, b) for value in side.values())
    return {"mean": _finite(gap), "std": None, "n": 0, "diverged": diverged, "paired": False}


def _final(side: Side) -> dict:
    return {
        "perplexity": _plain(spread(run.final.get(PERPLEXITY) for run in side.runs if run.final)),
        "tokens_per_second": _plain(measured(side.runs, "perf/tokens_per_second", np.median)),
        "memory_gb": _plain(measured(side.runs, "perf/max_memory_gb", np.max)),
    }


def _plain(found: Spread | None) -> dict | None:
    return found and {"mean": _finite(found.mean), "std": found.std, "n": found.n, "diverged": found.diverged}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ----------------------------------------------------------------------------------------------------
# Showing


def render(found: dict) -> str:
    """The comparison as text of 80 columns."""
    letters = [side["side"] for side in found["sides"]]
    lines = [
        fill(f"{s['side']}  {s['label']}; seed{'s' * (len(s['seeds']) > 1)} {' '.join(map(str, s['seeds']))}", indent=3)
        for s in found["sides"]
    ]
    lines += ["", *(fill(f"warning: {warning}", indent=9) for warning in found["warnings"])]
    lines += ["", "What differs" if found["configuration"] else "The configurations do not differ"]
    for entry in found["configuration"]:
        lines += _entry(entry["key"], [" | ".join(map(_shown, values)) for values in entry["values"]], letters)
    for name, title in (
        ("evaluation", "Evaluation loss, nats a token, at steps that all have evaluated"),
        ("training", "Training loss, running median"),
    ):
        rows = found[name]
        if not rows:
            lines += ["", f"{title.partition(',')[0]}: there is no common step"]
        for i, letter in enumerate(letters[1:], 1):
            lines += ["", *(_table(title, letters[0], letter, some(rows), i) if rows else [])]
    if any(len(side["seeds"]) > 1 for side in found["sides"]):
        lines += ["", "± is the standard deviation over seeds; behind a difference, of the differences"]
    lines += ["", *_finals(found["final"], letters)]
    return "\n".join(line.rstrip() for line in lines).replace("\n\n\n", "\n\n")


def _entry(key: str, values: Sequence[str], letters: Sequence[str]) -> list[str]:
    """A key and its values, on one line if they fit."""
    line = f"  {key:28}  " + "   ".join(f"{letter} {value}" for letter, value in zip(letters, values, strict=True))
    if len(line) <= WIDTH:
        return [line]
    return [f"  {key}", *(fill(f"    {a} {value}", indent=6) for a, value in zip(letters, values, strict=True))]


def _shown(value: object) -> str:
    text = json.dumps(value) if isinstance(value, dict | list) else shown(value)
    return text if len(text) < 40 or "/" in text or " " in text else f"{text[:12]}…"  # a digest


def some(rows: Sequence[dict]) -> list[dict]:
    """At most ``ROWS`` of the rows, evenly spaced, including the first and the last."""
    return [rows[i] for i in sorted(set(np.linspace(0, len(rows) - 1, ROWS).round().astype(int)))]


def _table(title: str, first: str, letter: str, rows: Sequence[dict], i: int) -> list[str]:
    lines = [title, f"{'step':>10}{'tokens':>10}{first:>18}{letter:>18}{f'{letter} - {first}':>24}"]
    for row in rows:
        gap = row["difference"][i - 1]
        seeds = "" if gap["mean"] is None else f" ({gap['n']})" if gap["paired"] else " (means)"
        losses = f"{number(row['loss'][0]):>18}{number(row['loss'][i]):>18}"
        lines.append(f"{row['step']:>10,}{amount(row['tokens'], 4):>10}{losses}{number(gap, '+') + seeds:>24}")
    return lines


def _finals(finals: Sequence[dict], letters: Sequence[str]) -> list[str]:
    lines = [f"{'':4}{'perplexity':>24}{'positions a second':>24}{'GB a rank':>24}"]
    for letter, final in zip(letters, finals, strict=True):
        cells = (number(final[name], "", digits) for name, digits in COLUMNS)
        lines.append(f"{letter:4}" + "".join(f"{cell:>24}" for cell in cells))
    return lines


COLUMNS = (("perplexity", 2), ("tokens_per_second", 0), ("memory_gb", 2))


def number(figure: dict | None, sign: str = "", digits: int = 4) -> str:
    """A figure as text, such as 4.1234 ± 0.0123; – if there is none; how many seeds diverged if it is not finite."""
    if figure is None:
        return "–"
    if figure["mean"] is None:
        return diverged_of(figure["diverged"], figure["n"]) if figure["n"] else "diverged"
    spread = "" if figure["std"] is None else f" ± {figure['std']:,.{digits}f}"
    return f"{figure['mean']:{sign},.{digits}f}{spread}"
