"""The runs of ``cases.toml``, as words of the command line."""

from __future__ import annotations

import tomllib
from pathlib import Path

CASES: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
RUNS = {name: (words.split(), ranks) for ranks, key in ((1, "one_rank"), (2, "two_ranks"))
        for name, words in CASES[key].items()}  # fmt: skip
COLA = ("backbone=cola", "dlr=on")
LONG = (*COLA, "train.steps=60", "eval.every=20")
# Pairs of runs that must be equal to the last bit, in every recording.
SAME = [("killed", "long"), ("stopped", "long"), ("tokens", "cola dlr"), ("swept 42", "cola dlr"),
        ("swept 43", "another start"), ("folded later", "cola dlr")]  # fmt: skip


def overrides(*words: str) -> list[str]:
    """``[common]`` and ``words``, which replace those of the same key."""
    given = dict(word.split("=", 1) for word in words)
    left_out = {"scale.rank"} if given.get("backbone") == "full" and "optimizer" not in given else set()
    return [f"{key}={value}" for key, value in (CASES["common"] | given).items() if key not in left_out]
