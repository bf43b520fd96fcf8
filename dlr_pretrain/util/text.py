"""Text for a terminal of 80 columns, large numbers in few digits, and Markdown."""

import html
import math
import re
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 80
MAX_LINES = 10  # of a list in a message


def fill(text: str, indent: int = 0) -> str:
    """``text`` wrapped at 80 columns; lines after the first are indented."""
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def shortened(lines: Sequence[str]) -> list[str]:
    """The first 10 of ``lines``, and a line with the number of the others."""
    return [*lines[:MAX_LINES], *([f"and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else [])]


def amount(number: float, digits: int = 3) -> str:
    """A number with a unit: 1234567 -> 1.23M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if float(shown := f"{number / size:.{digits}g}") >= 1:  # 999,999 is 1M, not 1e+03k
            return f"{shown}{unit}"
    return f"{number:.{digits}g}"


def perplexity(loss: float) -> float:
    """The perplexity of a loss in nats per token; infinite if it exceeds the range of a float."""
    return math.exp(loss) if loss < 700 else math.inf


def plural(n: int, noun: str) -> str:
    """A count and its noun: 1 rank, 2 ranks, 3 micro-batches."""
    return f"{n} {noun}" if n == 1 else f"{n:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def one_line(text: str) -> str:
    """``text`` without line breaks, control characters, or characters that UTF-8 cannot encode."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def markdown(text: str) -> str:
    """``text`` escaped for Markdown: HTML, links and code are shown as they are; **bold** still works."""
    return re.sub(r"([\\`\[\]])", r"\\\1", html.escape(one_line(text), quote=False))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    """A Markdown table without a final newline. ``right`` has the indices of right-aligned columns."""
    numeric = set(right)
    rule = ["---:" if i in numeric else "---" for i in range(len(header))]
    return "\n".join([_line(header), f"| {' | '.join(rule)} |", *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    escaped = [cell.replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def loading(folder: str, trust: bool) -> str:
    """Python code that loads an exported ``folder``; with ``trust`` it runs the folder's own modeling file."""
    more = ", trust_remote_code=True" if trust else ""
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'folder = "{folder}"\n'
        f"tokenizer = AutoTokenizer.from_pretrained(folder{more})\n"
        f'model = AutoModelForCausalLM.from_pretrained(\n    folder, dtype="auto"{more}\n)'
    )
