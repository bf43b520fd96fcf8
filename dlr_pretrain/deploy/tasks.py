"""The zero-shot tasks by name, and how they are asked for on a command line. Imports neither torch nor the harness."""

from __future__ import annotations

from argparse import ArgumentTypeError
from difflib import get_close_matches

OLDEST_HARNESS = (0, 4, 13)
# Task -> the folder of the harness that has it. Reading these alone saves the seconds that its 14,000 files take.
TASKS = {
    "arc_challenge": "arc",
    "boolq": "super_glue/boolq",
    "hellaswag": "hellaswag",
    "mmlu": "mmlu/default",
    "piqa": "piqa",
    "winogrande": "winogrande",
}


def names(text: str) -> list[str]:
    """Tasks from a comma-separated list, or "all", in the order of TASKS."""
    given = {name.strip() for name in text.split(",")}
    if given == {"all"}:
        return list(TASKS)
    for name in sorted(given.difference(TASKS)):
        near = get_close_matches(name, TASKS, 1)
        fix = f"did you mean {near[0]}?" if near else f"choose from {', '.join(TASKS)}, or all"
        raise ArgumentTypeError(f"{name!r} is no task: {fix}")
    return [name for name in TASKS if name in given]
