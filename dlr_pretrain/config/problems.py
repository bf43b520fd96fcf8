"""The problems of a configuration, with messages that say how to fix them."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass

from dlr_pretrain.config.secrets import HIDDEN, named_in, redact
from dlr_pretrain.util.errors import EXIT_CONFIG, UserError


class MISSING:
    """Takes the place of a value that was not given. It is a class, so that it is the same object after pickling."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the key, its value (or MISSING), the rule it breaks, and the fix."""

    key: str
    value: object
    rule: str
    fix: str = ""

    def __str__(self) -> str:
        value = HIDDEN if named_in(f"{self.key}=") else shown(self.value)
        given = self.key if self.value is MISSING else f"{self.key}={value}"
        return redact(f"{given}: {self.rule}" + (f". {self.fix}" if self.fix else ""))


def no_home(key: str, value: str) -> Problem | None:
    """The problem of a path that starts with a ``~`` that the shell has not expanded; None for other values."""
    if value.partition("/")[0] != "~":
        return None
    fix = f"Write {key}=$HOME{value.removeprefix('~')}"
    return Problem(key, value, "~ is expanded only by the shell, and only at the start of a word", fix)


class ConfigError(UserError):
    """All problems of a configuration at once; its text has one line for each."""

    exit_code = EXIT_CONFIG

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        lines = list(dict.fromkeys(map(str, problems)))
        super().__init__(lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} problems", *lines]))

    def __reduce__(self):  # unpickling would otherwise call __init__ with the text
        return type(self), (self.problems,)


SYNONYMS = {  # the names of other trainers, and ours
    "batch_size": "train.global_batch",
    "total_batch_size": "train.global_batch",
    "grad_accum": "train.micro_batch",
    "gradient_accumulation": "train.micro_batch",
    "gradient_accumulation_steps": "train.micro_batch",
    "per_device_train_batch_size": "train.micro_batch",
    "learning_rate": "train.lr",
    "max_steps": "train.steps",
    "num_training_steps": "train.steps",
    "max_length": "train.seq_len",
    "block_size": "train.seq_len",
    "dtype": "precision",
    "model": "backbone",
    "model_config": "scale",
    "wandb": "logger",
    "data.path": "data.root",
    "data.dir": "data.root",
    "data.name": "data.dataset",
    "data.tokenizer": "tokenizer.path",
    "output_dir": "run.dir",
}


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that was most likely meant: the same in another section, or a similar one in a similar section."""
    section, _, leaf = name.lower().rpartition(".")
    for written in (name.lower(), leaf):
        if name not in known and SYNONYMS.get(written) in known:
            return SYNONYMS[written]
    best, best_likeness = None, 0.0
    for candidate in known:
        where, _, own = candidate.rpartition(".")
        like_leaf, like_section = _likeness(leaf, own), _likeness(section, where) if where else 0.6
        same = own == leaf
        likeness = like_leaf + like_section + same
        if like_leaf >= 0.6 and (like_section >= 0.6 or same) and likeness > best_likeness:
            best, best_likeness = candidate, likeness
    return best


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def did_you_mean(name: str, known: Collection[str], otherwise: str = "") -> str:
    """A fix that names the nearest of the known names, or ``otherwise`` if none is near."""
    near = nearest(name, known)
    return f"Did you mean {near}?" if near else otherwise


def shown(value: object) -> str:
    """A value as a user types it: null, true, 0.5."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
