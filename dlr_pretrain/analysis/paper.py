"""The DLR paper's figures, our recipe for each of its rows, and how the setting of a run differs from the recipe."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd

from dlr_pretrain.analysis.runs import differing
from dlr_pretrain.config.command_line import read
from dlr_pretrain.config.compose import check
from dlr_pretrain.config.tree import CONFIG_DIR
from dlr_pretrain.config.written import ORIGIN, identity

C4, T5 = "allenai/c4", "d60acb128cf7b7f2536e8f38a5b18a05535c9e14c7a355904270e15b0945ea86"  # T5's spiece.model
C4_SHARDS = "1024 train and 8 validation shards"  # of C4's English text, as ``describe`` of a source puts it


@cache
def facts(name: str) -> pd.DataFrame:
    """One of the paper's tables: table1, measured or ablations."""
    return pd.read_csv(Path(__file__).with_name(f"{name}.csv"))


def printed(name: str, method: str, scale: str) -> dict | None:
    """What a table prints for a method at a scale, by column; None if nothing."""
    table = facts(name)
    rows = table[(table.method == method) & (table.scale == scale)].to_dict("records")
    return {column: value for column, value in rows[0].items() if not pd.isna(value)} if rows else None


def recipe(method: str) -> list[str]:
    """The overrides of our recipe for a method of the paper, such as cola+dlr: its own, or ``experiment=paper``."""
    base, _, residual = method.partition("+")
    own = (CONFIG_DIR / "experiment" / "table1" / f"{base}.yaml").exists()
    words = [f"experiment=table1/{base}"] if own else ["experiment=paper", f"backbone={base}"]
    return [*words, f"dlr={'on' if residual == 'dlr' else residual}"] if residual else words


def marks(run: pd.Series) -> str:
    """How a run's setting differs from our recipe for the paper's row; empty if it does not."""
    theirs = recipe_identity(run.method, run.scale)
    if theirs is None:
        return "no recipe of the paper"
    both = [k for k in theirs if k in run.identity and k not in ("seed", "data.seed", "scale.name", *ORIGIN)]
    found = differing([{k: of[k] for k in both} for of in (run.identity, theirs)])
    other = tuple(key.removesuffix("name") for key in found if key.endswith(".name"))  # another choice has other keys
    found = [key for key in found if key.endswith(".name") or not key.startswith(other)]
    told = [f"{key.removesuffix('.name')} {run.identity[key]}, not {theirs[key]}" for key in found]
    data = run.config["data"]
    if C4_SHARDS not in run.start.get("text", "") and (data["source"], data["dataset"]) != ("c4", C4):
        told.append("text that is not known to be all of C4")
    if run.identity.get("tokenizer.pieces") != T5:
        told.append("another tokenizer than T5's")
    return "; ".join(told)


@cache
def recipe_identity(method: str, scale: str) -> dict | None:
    """The identity of our recipe for a row of the paper; None if the paper has no such row."""
    table = facts("table1")
    if method.partition("+")[0] not in set(table.method) or scale not in set(table.scale):
        return None
    (cfg,) = check(read([f"scale={scale}", *recipe(method)]), None, machine=False)
    return identity(cfg)
