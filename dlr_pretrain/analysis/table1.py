"""Table 1 of the DLR paper beside our counts: parameters in millions, and memory by the convention of each row.

The paper's memory is an estimate: 2 bytes a weight, and 4 a trained weight for two moments, without gradients. Most of
its cells are reproduced to the digit if each part is rounded to 0.01 before the parts are added. The unit and the parts
differ between rows.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

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


@dataclass(frozen=True)
class Row:
    """What the paper prints for a method at a scale; ``mem_gb`` is its label, though some cells are in GiB."""

    method: str
    scale: str
    tokens_b: str
    params_m: str
    mem_gb: str

    @property
    def backbone(self) -> str:
        """The method without DLR. DLR changes neither column."""
        return self.method.removesuffix("+dlr")

    @property
    def recipe(self) -> str:
        return f"table1/{self.method.replace('+', '_')}"

    @property
    def convention(self) -> str:
        return OF_BACKBONE.get(self.backbone, "b")


@dataclass(frozen=True)
class Cell:
    """A figure of the paper and ours in the same form; if they differ, ``reason`` says why ours cannot agree."""

    method: str
    scale: str
    column: str  # parameters or memory
    paper: str
    ours: str
    convention: str

    @property
    def agrees(self) -> bool:
        return self.paper == self.ours

    @property
    def reason(self) -> str | None:
        return None if self.agrees else UNREACHABLE.get((self.method.removesuffix("+dlr"), self.column), "unknown")


def rows() -> list[Row]:
    names = ("method", "scale", "tokens_b", "params_m", "mem_gb")
    with Path(__file__).with_name("table1.csv").open() as file:
        return [Row(**{name: row[name] for name in names}) for row in csv.DictReader(file)]


def token_budget(scale: str) -> float | None:
    """The tokens that the paper's table names for a scale; None for a scale that is not in it."""
    return next((float(row.tokens_b) * 1e9 for row in rows() if row.scale == scale), None)


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


def printed_memory(row: Row, of: Counts) -> str:
    """Our memory by the convention of ``row``, in the paper's format."""
    unit = GIB if row.convention in "bc" and row.scale == "60m" else GB
    trained = round(2 * of.trained / unit, 2) + round(of.state / unit, 2)
    memory = {
        "a": trained,
        "b": trained,
        "c": round(2 * (of.total - of.trained + of.outside) / GB, 2) + trained,
        "d": trained + round(8 * of.indices / GB, 2),
        "e": 8e6 * round(of.trained / 1e6) / GIB,
    }
    return f"{memory[row.convention]:.2f}"


def compare(configure: Callable[[str, str], Config]) -> Iterator[Cell]:
    """Every cell of both columns. ``configure(recipe, scale)`` composes a configuration."""
    for row in rows():
        of = counts(configure(row.recipe, row.scale))
        millions = f"{of.trained / 1e6:.0f}"
        yield Cell(row.method, row.scale, "parameters", row.params_m, millions, "trained parameters")
        yield Cell(row.method, row.scale, "memory", row.mem_gb, printed_memory(row, of), row.convention)


def render(cells: list[Cell]) -> str:
    """Both columns of the paper as text, 80 characters wide; = if the printed digits agree, ! if they do not."""
    scales = list(dict.fromkeys(cell.scale for cell in cells))
    lines = []
    for column, title in (("parameters", "Trained parameters, millions"), ("memory", "Memory by convention")):
        lines += [f"{title}: the paper's, and ours", f"{'':14}" + "".join(f"{scale:>14}" for scale in scales)]
        of_column = [cell for cell in cells if cell.column == column]
        for method in dict.fromkeys(cell.method for cell in of_column):
            own = [cell for cell in of_column if cell.method == method]
            pairs = (f"{cell.paper:>6} {'=' if cell.agrees else '!'} {cell.ours:<5}" for cell in own)
            letter = f"  {own[0].convention}" if column == "memory" else ""
            lines.append((f"{method:14}" + "".join(pairs) + letter).rstrip())
        lines.append("")
    lines += [fill(f"{letter}  {text}", indent=3) for letter, text in CONVENTIONS.items()]
    wrong = [cell for cell in cells if not cell.agrees]
    lines += ["", f"{len(cells) - len(wrong)} of {len(cells)} cells agree to the printed digit. The others:"]
    for method, column, reason in dict.fromkeys((c.method, c.column, c.reason) for c in wrong):
        where = " ".join(c.scale for c in wrong if (c.method, c.column) == (method, column))
        lines.append(fill(f"{method}, {column}, {where}: {reason}", indent=2))
    return "\n".join(lines)
