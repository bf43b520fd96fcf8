"""Problems of a configuration, with messages that say how to fix them."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from importlib import resources

import yaml

from dlr_pretrain.util.errors import EXIT_CONFIG, UserError
from dlr_pretrain.util.secrets import redact


class MISSING:
    """Stands for a value that was not given. It is a class because a class stays the same object after pickling."""


@dataclass(frozen=True)
class Problem:
    """A mistake: the key, its value (or MISSING), the rule that it breaks, and the fix."""

    key: str
    value: object
    rule: str
    fix: str = ""

    def __str__(self) -> str:
        given = self.key if self.value is MISSING else f"{self.key}={as_typed(self.value)}"
        return redact(f"{given}: {self.rule}" + (f". {self.fix}" if self.fix else ""))


class ConfigError(UserError):
    """All problems of a configuration, one per line."""

    exit_code = EXIT_CONFIG

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        lines = list(dict.fromkeys(map(str, problems)))
        super().__init__(lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} problems", *lines]))

    def __reduce__(self):  # unpickling would otherwise call __init__ with the text
        return type(self), (self.problems,)


@cache
def synonyms() -> dict[str, list[str]]:
    """Words of other trainers, each with ours or with advice (which has spaces); read from ``foreign.yaml``."""
    foreign = yaml.safe_load(resources.files(__package__).joinpath("foreign.yaml").read_text(encoding="utf-8"))
    pairs = [(name, meant) for meant, names in foreign.items() for name in names.split()]
    return {name: [meant for other, meant in pairs if other == name] for name, _ in pairs}


def did_you_mean(name: str, known: Collection[str], otherwise: str = "", written: Callable[[str], object] = str) -> str:
    """A fix that names the nearest known name, as it is ``written``, or gives advice; ``otherwise`` if none is near."""
    near = nearest(name, known) or otherwise
    return f"Did you mean {written(near)}?" if near in known else near


def nearest(name: str, known: Collection[str]) -> str:
    """The known name most likely meant by another trainer's key, by a key in the wrong section, or by a typo.

    Returns advice for another trainer's key that has no counterpart here, and "" if nothing is near.
    """
    name = name.lower()
    leaf = name.rpartition(".")[2]
    for written in (name, leaf):
        meant = [ours for ours in synonyms().get(written, []) if ours in known or " " in ours]
        if meant and name not in known:
            return meant[0]
    if leaf in known:
        return leaf

    def likeness(other: str) -> float:
        return SequenceMatcher(None, name, other if "." in name else other.rpartition(".")[2]).ratio()

    candidates = sorted(known, key=lambda other: "." in other)  # keys without a section first
    same = [other for other in candidates if other.rpartition(".")[2] == leaf]
    best = max(same or candidates, key=likeness, default="")
    return best if same or likeness(best) >= 0.75 else ""


def as_typed(value: object) -> str:
    """A value as a user types it: null, true, 0.5."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
