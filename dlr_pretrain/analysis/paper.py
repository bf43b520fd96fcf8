"""The DLR paper's figures, and how the setting of a run of ours differs from the paper's."""

from __future__ import annotations

import csv
import re
from functools import cache
from pathlib import Path

from dlr_pretrain.analysis.groups import TAKEN_FROM_SCALE, Group
from dlr_pretrain.config.composition import build, session
from dlr_pretrain.config.identity import ORIGIN, identity
from dlr_pretrain.config.problems import shown
from dlr_pretrain.config.tree import CONFIG_DIR

C4, T5 = "allenai/c4", "d60acb128cf7b7f2536e8f38a5b18a05535c9e14c7a355904270e15b0945ea86"  # T5's spiece.model
C4_SHARDS = "1024 train and 8 validation shards"  # of C4's English text, as ``describe`` of a source puts it
SEEDS = (41, 42, 43, 44, 45)
SCALES = ("60m", "130m", "350m", "1b")
MILESTONES = (10_000, 40_000, 80_000, 120_000, 150_000)
TASKS = ("arc_challenge", "boolq", "hellaswag", "mmlu", "piqa", "winogrande")
OWN_RATES = ("lowrank", "cola", "lost", "lax", "cola_lax")  # backbones that the paper trains with its own settings


@cache
def facts(name: str) -> list[dict[str, str]]:
    """The rows of one of the paper's tables: table1, table7b, system_1b, ablations or downstream_1b."""
    with Path(__file__).with_name(f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def fact(name: str, column: str, **where: str) -> float | None:
    """One figure of the paper; None if it has none."""
    rows = (row for row in facts(name) if all(row[key] == value for key, value in where.items()))
    text = next((row[column] for row in rows), "")
    return float(text) if text and text != "oom" else None


def marks(group: Group, studied: str | None = None) -> list[str]:
    """How a group's setting differs from the paper's, a few words for each difference.

    ``studied`` is a key that the paper varied: it is not compared.
    """
    if group.scale not in (*SCALES, "7b"):
        return ["not a scale of the paper"]
    theirs = recipe(group.base, group.config["dlr"]["name"], group.scale)
    if theirs is None:
        return ["not a method of the paper"]
    passed = {studied, *UNMARKED, *ORIGIN, *TAKEN_FROM_SCALE}
    differ = [k for k, v in theirs.items() if k not in passed and k in group.shared and group.shared[k] != v]
    other = {key.removesuffix("name") for key in differ if key.endswith(".name")}  # another choice has other keys
    shown = [key for key in differ if key.endswith(".name") or not key.startswith(tuple(other))]
    ours = {key: group.shared[key] for key in shown}
    return [
        *(f"{key.removesuffix('.name')} {_short(ours[key])}, not {_short(theirs[key])}" for key in shown),
        *_text(group, theirs),
        *_tokens(group),
        *_warmup(group, theirs),
    ]


# ``_tokens`` checks the steps and ``_warmup`` the warm-up; the other keys say nothing about the method.
UNMARKED = ("seed", "data.seed", "scale.name", "train.steps", "train.warmup_steps", "scale.warmup_steps")


@cache
def recipe(base: str, residual: str, scale: str) -> dict | None:
    """The identity of our recipe for a row of the paper; None if there is no such recipe."""
    whole = f"7b/{base}{'_dlr' if residual == 'on' else ''}"
    name = whole if scale == "7b" and (CONFIG_DIR / "experiment" / f"{whole}.yaml").exists() else f"table1/{base}"
    if not (CONFIG_DIR / "experiment" / f"{name}.yaml").exists():
        return None
    with session():
        cfg, _ = build("train", [f"scale={scale}", f"experiment={name}", f"dlr={residual}"])
    return identity(cfg) if cfg else None


def _short(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else shown(value)


def _text(group: Group, theirs: dict) -> list[str]:
    """How text and tokenizer differ from English C4 and T5's. Shards on disk are recognised by their number."""
    data, starts = group.config["data"], group.runs[0].starts
    told = starts[-1].get("text", "") if starts else ""
    found = []
    if data["source"] == "sample" or (data["source"] == "c4" and data["dataset"] != C4):
        found.append(f"text of {data['dataset'] or data['source']}, not C4")
    elif data["source"] == "c4":
        other = [k for k in ("train_files", "validation_files", "text_key") if data[k] != theirs[f"data.{k}"]]
        found += [f"data.{key} {data[key]}, not {theirs[f'data.{key}']}" for key in other]
    elif C4_SHARDS not in told:
        shards = re.search(r"\d+ train and \d+ validation shards", told)
        found.append(f"text of {shards[0] if shards else 'unknown shards'}, not C4's {C4_SHARDS}")
    pieces = group.shared.get("tokenizer.pieces", "unknown")
    return found if pieces == T5 else [*found, f"tokenizer {pieces[:8]}, not T5's"]


def _warmup(group: Group, theirs: dict) -> list[str]:
    """How the warm-up differs from the paper's share of the steps."""
    ours, steps = _warmup_steps(group.shared), group.shared["train.steps"]
    expected = round(_warmup_steps(theirs) / theirs["train.steps"] * steps)
    return [] if abs(ours - expected) <= 1 else [f"warm-up {ours:,} of {steps:,} steps, not {expected:,}"]


def _warmup_steps(identity: dict) -> int:
    """The same as ``Config.warmup_steps``, for an identity."""
    if (given := identity["train.warmup_steps"]) is not None:
        return given
    return round(identity["train.steps"] * identity["scale.warmup_steps"] / identity["scale.steps"])


def _tokens(group: Group) -> list[str]:
    """How the run's positions differ from the Tokens row of Table 1, which the paper's own steps exceed."""
    budget = fact("table1", "tokens_b", scale=group.scale) or 19.7
    ours = group.config["train"]["steps"] * group.runs[0].positions / 1e9
    return [] if abs(ours / budget - 1) < 0.03 else [f"{ours:.3g}B tokens, not {budget:g}B"]
