"""Results of fine-tuning: zero-shot accuracy of every tuned folder, and a table of models over their seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

from dlr_pretrain.deploy.folder import open_folder
from dlr_pretrain.deploy.sft import RECORD, tuned_in
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import write_durably
from dlr_pretrain.util.text import table

Measures = dict[str, dict[str, float]]  # by task, from zero_shot.measures


def measure(folder: Path, record: dict, evaluate: Callable[..., Measures], setting: dict, first: bool = True) -> dict:
    """Add the zero-shot accuracy of ``folder``, by ``evaluate(model, tokenizer)``, to ``record`` and to its sft.json.

    ``setting`` says how to measure; if ``record`` has a result with the same setting, nothing is measured. Every rank
    calls this function, and only the ``first`` writes. Returns ``record``.
    """
    if record.get("zero_shot", {}).get("setting") != setting:
        record["zero_shot"] = {"setting": setting, "tasks": evaluate(*open_folder(folder))}
        if first:
            write_durably(folder / RECORD, json.dumps(record, indent=1) + "\n")
    return record


def write_table(output: Path, records: list[dict]) -> str:
    """Write ``table.json`` and ``table.md`` into ``output``; returns the latter's text. Accuracies are in percent.

    After the models of ``records`` the table lists those that earlier commands tuned there in the same way. A note
    names the others.
    """
    others, left_out = _beside(records, output)
    records = records + others
    models: dict[str, list[dict]] = {}
    for record in records:
        models.setdefault(record["name"], []).append(record)
    rows = {name: summary(seeds) for name, seeds in models.items()}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row["columns"]))
    shown = [
        [name, " ".join(map(str, row["seeds"])), *(_shown(column, row["columns"].get(column)) for column in columns)]
        for name, row in rows.items()
    ]
    lines = [table(["model", "seeds", *columns], shown)]
    settings = {"setting": records[0]["setting"]}
    measured = [record["zero_shot"]["setting"] for record in records if "zero_shot" in record]
    if any(setting != measured[0] for setting in measured):
        raise UserError(f"{output}: its zero-shot accuracies were measured in different ways. Give --tasks again")
    if measured:
        settings["zero_shot"] = measured[0]
        lines += ["", f"Zero-shot: {', '.join(f'{name}={value}' for name, value in measured[0].items())}."]
    if left_out:
        lines += ["", f"Left out, tuned or measured in another way: {', '.join(left_out)}."]
    output.mkdir(parents=True, exist_ok=True)
    (output / "table.json").write_text(json.dumps({"models": rows, **settings}, indent=1) + "\n")
    (output / "table.md").write_text("\n".join(lines) + "\n")
    return "\n".join(lines)


def _beside(records: list[dict], output: Path) -> tuple[list[dict], list[str]]:
    """The other records in ``output`` that may stand in one table with ``records``, and the folders of those that may
    not: with another recipe, other weights under the same name, or zero-shot accuracies measured in another way."""
    here = {(record["name"], record["seed"]) for record in records}
    models = {record["name"]: record["setting"].get("model") for record in records}
    recipe = _without_model(records[0])
    ways = [record["zero_shot"]["setting"] for record in records if "zero_shot" in record]
    others, left_out = [], []
    for other in tuned_in(output):
        if (other["name"], other["seed"]) in here:
            continue
        model = models.setdefault(other["name"], other["setting"].get("model"))
        way = other.get("zero_shot", {}).get("setting")
        ways += [way] if way and not ways else []
        same_weights = other["setting"].get("model") == model
        if same_weights and _without_model(other) == recipe and way in (None, *ways[:1]):
            others.append(other)
        else:
            left_out.append(f"{other['name']}/s{other['seed']}")
    return others, left_out


def _without_model(record: dict) -> dict:
    return {name: value for name, value in record["setting"].items() if name != "model"}


def summary(records: list[dict]) -> dict:
    """The seeds of one model: mean and standard deviation (n - 1; None for one seed) of each figure that all have."""
    columns = {
        "loss before": _spread([records[0]["response_loss_before"]]),
        "loss after": _spread([record["response_loss"] for record in records]),
    }
    tasks = [record["zero_shot"]["tasks"] if "zero_shot" in record else {} for record in records]
    for task in tasks[0]:
        columns[task] = _spread([100 * each[task]["acc"] if task in each else None for each in tasks])
    if tasks[0]:
        averages = [statistics.fmean(task["acc"] for task in each.values()) if each else None for each in tasks]
        columns["average"] = _spread([100 * average if average is not None else None for average in averages])
    return {
        "seeds": [record["seed"] for record in records],
        "columns": {name: column for name, column in columns.items() if column is not None},
    }


def _spread(values: list[float | None]) -> dict[str, float | None] | None:
    if None in values:
        return None
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else None}


def _shown(column: str, figure: dict[str, float | None] | None) -> str:
    if figure is None:
        return ""
    digits = 4 if column.startswith("loss") else 2
    spread = "" if figure["std"] is None else f" ± {figure['std']:.{digits}f}"
    return f"{figure['mean']:.{digits}f}{spread}"
