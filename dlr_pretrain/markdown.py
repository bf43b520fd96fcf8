"""Text that pages of several packages share: Markdown tables, and the code that loads an exported folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    """A table without a final line feed; the columns whose indices are in ``right`` are right-aligned."""
    numeric = set(right)
    rule = ["---:" if i in numeric else "---" for i in range(len(header))]
    return "\n".join([_line(header), f"| {' | '.join(rule)} |", *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def loading(folder: str, trust: bool) -> str:
    """The Python that loads an exported ``folder``; with ``trust`` it runs the folder's own modeling file."""
    more = ", trust_remote_code=True" if trust else ""
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{folder}", dtype="auto"{more})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}"{more})'
    )
