"""Writes the tables of docs/evidence-geometry.md from the numbers beside it.

    python -m benchmarks.evidence.geometry runs/study runs/scale     # packs a study and a report of scales, first
    python -m benchmarks.evidence.geometry                           # the tables again

The text between ``<!-- spectra -->`` and ``<!-- end -->`` is replaced by the table of that section; ``with_dlr`` has
the differences that are shown, and ``scale`` is the table of the report.
"""

import argparse
import re
import shutil
from pathlib import Path

import pandas as pd

from dlr_pretrain.analysis.runs import spread
from dlr_pretrain.analysis.tables import Table, table
from dlr_pretrain.util.text import markdown_table
from scripts.geometry.page import differences

PAGE = Path(__file__).parents[2] / "docs" / "evidence-geometry.md"
PACKED = PAGE.parent / "evidence" / "geometry"
FIGURES = ("effective_rank_of_W_t_-_W_0", "rise_along_random_directions", "loss_on_the_line_seeds", "CKA_reference")


def pack(study: Path, scale: Path) -> None:
    """Copy the numbers and some figures of a study and of a report."""
    PACKED.mkdir(parents=True, exist_ok=True)
    shutil.copy(study / "numbers.csv", PACKED / "numbers.csv")
    shutil.copy(scale / "tables" / "scale.csv", PACKED / "scale.csv")
    for name in FIGURES:
        shutil.copy(study / "figures" / f"{name}_tiny.png", PACKED / f"{name}.png")
    for name in ("scale_parameters", "scale_difference"):
        shutil.copy(scale / "figures" / f"{name}.png", PACKED / f"{name}.png")


def section(every: pd.DataFrame, name: str) -> str:
    """The table of a section, in Markdown."""
    if name == "scale":
        frame = pd.read_csv(PACKED / "scale.csv").map(lambda cell: str(cell).lstrip("'"))
    elif name == "with_dlr":
        (shown,) = differences(every)
        frame = shown.frame[shown.frame["With DLR"] != "none"].drop(columns="Scale")
    else:
        frame = by_method(every[every.section == name]).frame
    return markdown_table([*frame], frame.to_numpy().tolist())


def by_method(numbers: pd.DataFrame) -> Table:
    """A row for each method, a column for each number."""
    rows: dict[str, dict] = {}
    for (method, number), group in numbers.groupby(["method", "number"], sort=False):
        rows.setdefault(method, {"Method": method})[number] = spread(group.value, ".3g")
    return table("numbers", "Numbers", [*rows.values()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="folder", help="of a study, and of a report of scales")
    given = parser.parse_args()
    if given.folders:
        pack(*given.folders)
    PAGE.write_text(filled(PAGE.read_text()))


def filled(text: str) -> str:
    """The page's ``text`` with the tables of the packed numbers."""
    every = pd.read_csv(PACKED / "numbers.csv")
    pattern = r"(<!-- (spectra|residuals|landscape|interpolation|activations|with_dlr|scale) -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda m: f"{m[1]}\n{section(every, m[2])}\n\n{m[3]}", text, flags=re.DOTALL)


if __name__ == "__main__":
    main()
