"""Table 1 of the DLR paper beside our counts: parameters in millions, and memory by the convention of each row.

The paper's memory is an estimate: 2 bytes a weight, and 4 a trained weight for two moments, without gradients. Most of
its cells are reproduced to the digit if each part is rounded to 0.01 before the parts are added. The unit and the parts
differ between rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
import torch

from dlr_pretrain.analysis.paper import facts, recipe
from dlr_pretrain.config import Config
from dlr_pretrain.models.llama import build
from dlr_pretrain.optim.build import state_bytes
from dlr_pretrain.util.text import fill

GB, GIB = 1e9, 2.0**30
OUTSIDE = ("model.embed_tokens", "lm_head", "model.norm")

CONVENTIONS = {
    "a": "2 bytes a weight and the optimizer's state in bf16, each rounded to 0.01 GB, then added",
    "b": "as a, in GiB at 60m and in GB otherwise",
    "c": "2 bytes for each weight of the dense model in GB, and b for what is trained: embedding, head and norms twice",
    "d": "as a, and 8 bytes for each index",
    "e": "8 bytes for each of the millions of parameters, in GiB: with gradients, unlike all other rows",
}
OF_BACKBONE = {  # the convention of its row; the others' is b
    **dict.fromkeys(("full", "galore", "fira"), "a"),
    **{"lora": "c", "sltrain": "d", "lax": "e", "cola_lax": "e"},
}
UNREACHABLE = {
    ("sltrain", "parameters"): "no one share of trained entries gives 47, 104, 215 and 732: the authors' 3% gives 44, "
    "97, 194 and 646, 10% 45, 102, 215 and 730",
    ("sltrain", "memory"): "follows from its parameters; 10% gives 0.29, 0.68, 1.53 and 5.35",
    ("lax", "parameters"): "609 has no gate with weights; the table of measured memory has 610, as we count",
    ("cola_lax", "parameters"): "as lax",
    ("galore", "memory"): "1.59 is what rank 384 takes, and the row says 256; the other scales agree",
    ("fira", "memory"): "as galore",
}


def token_budget(scale: str) -> float | None:
    """The tokens that the paper's table names for a scale; None for a scale that is not in it."""
    table = facts("table1")
    found = table.tokens_b[table.scale == scale]
    return float(found.iloc[0]) * 1e9 if len(found) else None


@dataclass(frozen=True)
class Counts:
    """Numbers of a model's entries, and bytes of its optimizer's state with moments in bf16."""

    total: int
    trained: int
    outside: int  # embedding, head and norms
    indices: int
    state: int


def counts(cfg: Config, vocab_size: int | None = None) -> Counts:
    model = build(cfg, vocab_size or cfg.planned_vocab_size, torch.device("meta"), torch.bfloat16)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    outside = (p for name, p in model.named_parameters() if name.startswith(OUTSIDE) or "layernorm" in name)
    return Counts(
        total=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in trained.values()),
        outside=sum(p.numel() for p in outside),
        indices=sum(b.numel() for b in model.buffers()),
        state=state_bytes(cfg.optimizer, trained),
    )


def convention(method: str) -> str:
    """The convention of a method's row. DLR changes neither column."""
    return OF_BACKBONE.get(method.removesuffix("+dlr"), "b")


def printed_memory(method: str, scale: str, of: Counts) -> str:
    """Our memory by the convention of the paper's row, in its format: gigabytes, though some cells are in GiB."""
    letter = convention(method)
    unit = GIB if letter in "bc" and scale == "60m" else GB
    trained = round(2 * of.trained / unit, 2) + round(of.state / unit, 2)
    memory = {
        "a": trained,
        "b": trained,
        "c": round(2 * (of.total - of.trained + of.outside) / GB, 2) + trained,
        "d": trained + round(8 * of.indices / GB, 2),
        "e": 8e6 * round(of.trained / 1e6) / GIB,
    }
    return f"{memory[letter]:.2f}"


def compare(configure: Callable[[Sequence[str]], Config]) -> pd.DataFrame:
    """A row for every cell of both columns, as the paper prints it and as we do; ``reason`` where ours cannot agree.

    ``configure`` composes a configuration from overrides.
    """
    cells = []
    for row in facts("table1").itertuples():
        of = counts(configure([f"scale={row.scale}", *recipe(row.method)]))
        both = {
            "parameters": (f"{row.params_m:.0f}", f"{of.trained / 1e6:.0f}", "trained parameters"),
            "memory": (f"{row.mem_gb:.2f}", printed_memory(row.method, row.scale, of), convention(row.method)),
        }
        for column, (paper, ours, by) in both.items():
            reason = UNREACHABLE.get((row.method.removesuffix("+dlr"), column), "unknown") if paper != ours else None
            cells.append((row.method, row.scale, column, paper, ours, by, paper == ours, reason))
    names = ["method", "scale", "column", "paper", "ours", "convention", "agrees", "reason"]
    return pd.DataFrame(cells, columns=names)


def render(cells: pd.DataFrame) -> str:
    """Both columns of the paper as text; = if the printed digits agree, ! if they do not."""
    shown = cells.assign(pair=cells.paper + cells.agrees.map({True: " = ", False: " ! "}) + cells.ours)
    lines = []
    for column, title in (("parameters", "Trained parameters, millions"), ("memory", "Memory by convention")):
        index = ["method", "convention"] if column == "memory" else ["method"]
        of_column = shown[shown.column == column]
        wide = of_column.pivot(index=index, columns="scale", values="pair")[of_column.scale.unique()]
        order = of_column.method.unique()
        wide = wide.reindex(order, level="method") if column == "memory" else wide.loc[order]
        lines += [f"{title}: the paper's, and ours", wide.to_string(), ""]
    lines += [fill(f"{letter}  {text}", indent=3) for letter, text in CONVENTIONS.items()]
    wrong = cells[~cells.agrees]
    lines += ["", f"{len(cells) - len(wrong)} of {len(cells)} cells agree to the printed digit. The others:"]
    for (method, column, reason), of in wrong.groupby(["method", "column", "reason"], sort=False):
        lines.append(fill(f"{method}, {column}, {' '.join(of.scale)}: {reason}", indent=2))
    return "\n".join(lines)
