"""The DLR paper's figures, and in what a run of ours differs from the setting that they were made in."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

from dlr_pretrain.analysis.groups import Group

SEEDS = (41, 42, 43, 44, 45)
SCALES = ("60m", "130m", "350m", "1b")
MILESTONES = (10_000, 40_000, 80_000, 120_000, 150_000)
TASKS = ("arc_challenge", "boolq", "hellaswag", "mmlu", "piqa", "winogrande")
OWN_RATES = ("lowrank", "cola", "lost", "lax", "cola_lax")  # backbones that the paper trains with its own settings
EVAL_TOKENS = 10_000_000


@cache
def facts(name: str) -> list[dict[str, str]]:
    """The rows of one of the paper's tables: table1, table7b, system_1b, ablations or downstream_1b."""
    with Path(__file__).with_name(f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def fact(name: str, column: str, **where: str) -> float | None:
    """One figure; None where the paper has none."""
    rows = (row for row in facts(name) if all(row[key] == value for key, value in where.items()))
    text = next((row[column] for row in rows), "")
    return float(text) if text and text != "oom" else None


def marks(group: Group) -> list[str]:
    """What of a group's setting is not the paper's, in a few words each; nothing for a scale that it does not have."""
    config = group.config
    if group.scale not in (*SCALES, "7b"):
        return ["not a scale of the paper"]
    train, data, evaluation = config["train"], config["data"], config["eval"]
    return [
        *_differs("precision", config["precision"]["name"], "bf16"),
        *_differs("optimizer", config["optimizer"]["name"], _optimizer(group)),
        *_differs("packing", data["packing"], "pad"),
        *_text(data),
        *_differs("sequence length", train["seq_len"], 256),
        *_differs("sequences a step", train["global_batch"], 512),
        *_tokens(group),
        *_recipe(group),
        *_differs("evaluated on", evaluation["packing"], "pad"),
        *_differs("evaluation tokens", evaluation["tokens"], EVAL_TOKENS),
    ]


def _differs(what: str, ours: object, theirs: object) -> list[str]:
    return [] if ours == theirs else [f"{what} {_short(ours)}, not {_short(theirs)}"]


def _short(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _optimizer(group: Group) -> str:
    base = group.method.partition("+")[0]
    if base in ("galore", "fira", "loro"):
        return base
    return "adamw_8bit" if (base, group.scale) == ("sltrain", "7b") else "adamw_foreach"


def _text(data: dict) -> list[str]:
    if data["source"] == "sample" or (data["source"] == "c4" and data["dataset"] != "allenai/c4"):
        return [f"text of {data['dataset'] or data['source']}, not C4"]
    return []


def _tokens(group: Group) -> list[str]:
    """Positions of the run against the Tokens row of Table 1, which the paper's own steps exceed."""
    budget = fact("table1", "tokens_b", scale=group.scale) or 19.7
    ours = group.config["train"]["steps"] * group.runs[0].positions / 1e9
    return [] if abs(ours / budget - 1) < 0.03 else [f"{ours:.3g}B tokens, not {budget:g}B"]


def _recipe(group: Group) -> list[str]:
    """The settings that the paper prints for its own rows."""
    scale, train, optimizer = (group.config[name] for name in ("scale", "train", "optimizer"))
    if group.method.partition("+")[0] not in OWN_RATES:
        return []
    return [
        *_differs("lr", train["lr"], scale["lr"]),
        *_differs("rank", group.config["backbone"].get("rank"), scale["rank"]),
        *_differs("weight decay", optimizer.get("weight_decay"), 0.1),
        *_differs("clipping", train["clip"], 0.5),
        *_differs("eps", optimizer.get("eps"), scale["adam_eps"]),
    ]
