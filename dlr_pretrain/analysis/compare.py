"""What differs between runs: their configurations, and their losses at common steps."""

from __future__ import annotations

import math
from dataclasses import asdict

import pandas as pd

from dlr_pretrain.analysis.runs import Runs, Spread, differences, differing, differing_text, spread
from dlr_pretrain.analysis.tables import text
from dlr_pretrain.config import flatten
from dlr_pretrain.util.errors import UserError

PLACES = ("run.dir", "run.root")
ROWS = 10  # printed steps of a curve, at most
FORMATS = {"ppl": ",.2f", "speed": ",.0f", "memory": ".2f"}


def compare(found: Runs) -> dict:
    """Everything that ``render`` shows, as plain values with stable keys.

    Runs that differ only in their seed form one side; if all runs do, each run is a side. Each difference is a side
    minus the first side, by seed over the seeds that both have; None if they share none. Raises UserError if there are
    fewer than two sides.
    """
    sides = found.groups()
    if len(sides) == 1:
        sides = [of for _, of in found.runs.groupby("run", sort=False)]
    if len(sides) < 2:
        raise UserError("there is one run to compare. Name another, or a group of seeds of another configuration")
    told = {run.run: _facts(run) for run in found.runs.itertuples()}
    seeds = () if all(len(of) == 1 for of in sides) else ("seed", "data.seed")
    keys = [key for key in differing(told.values()) if key not in seeds]
    warnings = list(found.remarks)
    if other := ", ".join(differing_text(found.runs)):
        warnings.append(f"evaluations are not of the same text ({other}): their losses do not compare")
    if found.runs.positions.nunique() > 1:
        warnings.append("updates are of different sizes: equal steps are not equal tokens")
    wide = found.metrics.pivot(index="step", columns="run", values="eval/loss").reindex(columns=found.runs.run)
    for run in found.runs[found.runs.state == "diverged"].itertuples():
        wide.loc[wide.index > run.step, run.run] = math.inf
    return {
        "sides": [
            {"label": f"{of.scale.iloc[0]} {of.label.iloc[0]}", "seeds": of.seed.tolist(), "runs": of["name"].tolist()}
            for of in sides
        ],
        "warnings": warnings,
        "configuration": {
            key: [sorted({str(told[run].get(key, "absent")) for run in of.run}) for of in sides] for key in keys
        },
        "evaluation": [_at(int(step), values, sides) for step, values in wide.dropna().iterrows()],
        "final": [{name: _plain(spread(of[name].dropna())) for name in FORMATS} for of in sides],
    }


def _facts(run) -> dict[str, object]:
    """The configuration without ``PLACES``, the fingerprints of the data, and the code, torch version and machine."""
    torch = run.start.get("packages", {}).get("torch")
    made = {"(code)": ", then ".join(run.code), "(torch)": torch, "(machine)": run.machine}
    return {key: value for key, value in (flatten(run.config) | run.identity | made).items() if key not in PLACES}


def _at(step: int, losses: pd.Series, sides: list[pd.DataFrame]) -> dict:
    first, *others = [losses[of.run].set_axis(of.seed) for of in sides]
    gaps = [differences(first, side) for side in others]
    spreads = {"loss": [first, *others], "difference": gaps}
    return {"step": step} | {name: [_plain(spread(values)) for values in found] for name, found in spreads.items()}


def _plain(found: Spread | None) -> dict | None:
    return found and {key: value if math.isfinite(value) else None for key, value in asdict(found).items()}


def render(found: dict) -> str:
    """The comparison as text."""
    letters = [chr(ord("A") + i) for i in range(len(found["sides"]))]
    lines = [
        f"{letter}  {side['label']}; seeds {side['seeds']}"
        for letter, side in zip(letters, found["sides"], strict=True)
    ]
    lines += [f"warning: {warning}" for warning in found["warnings"]]
    differ = {key: [", ".join(value) for value in values] for key, values in found["configuration"].items()}
    lines += ["", "What differs", pd.DataFrame(differ, index=letters).T.to_string() if differ else "nothing"]
    curve = {
        row["step"]: [*map(_shown, row["loss"]), *(_shown(gap, "+.4f") for gap in row["difference"])]
        for row in found["evaluation"][:: max(1, len(found["evaluation"]) // ROWS)]
    }
    columns = [*letters, *(f"{letter} - A" for letter in letters[1:])]
    lines += ["", "Evaluation loss, nats/token, at steps that all have evaluated: mean ± standard deviation (seeds)"]
    lines.append(
        pd.DataFrame.from_dict(curve, "index", columns=columns).to_string() if curve else "there is no common step"
    )
    last = {name: [_shown(side[name], spec) for side in found["final"]] for name, spec in FORMATS.items()}
    names = {"ppl": "perplexity", "speed": "tokens/s", "memory": "GB a rank"}
    return "\n".join([*lines, "", pd.DataFrame(last, index=letters).rename(columns=names).to_string()])


def _shown(figure: dict | None, spec: str = ".4f") -> str:
    return text(figure and Spread(**{key: math.nan if value is None else value for key, value in figure.items()}), spec)
