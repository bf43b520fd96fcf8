"""The figures of the DLR paper, and our recipe for each of its rows."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd

from dlr_pretrain.config.tree import CONFIG_DIR


@cache
def facts(name: str) -> pd.DataFrame:
    """One of the paper's tables: table1 or measured."""
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
