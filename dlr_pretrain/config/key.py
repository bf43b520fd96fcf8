"""A key of the configuration, with everything that is true of it alone. Rules between keys are in ``rules``."""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

MANDATORY = "???"  # OmegaConf's mark for a value that an option or the user must set
NULL_SPELLINGS = ("none", "null", "~", "")  # users type these for null; all but a bare null arrive as text
ON_THE_HUB = re.compile(r"[\w.-]+/[\w.-]+")  # the name of a repository there
TYPE_NAMES: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[str]: "a list such as [a,b]",
    dict: "named entries",
}
BOUNDS = {
    "gt": ("above", operator.gt),
    "ge": ("of at least", operator.ge),
    "le": ("at most", operator.le),
    "lt": ("below", operator.lt),
}


def key(doc: str, default: object = MANDATORY, *, read_if: Mapping[str, object] | None = None, **facts: Any) -> Any:
    """A documented field. ``facts`` are other fields of ``Key``, and its ``BOUNDS``.

    The default may be an interpolation such as ``${scale.rank}``.
    """
    bounds = {name: facts.pop(name) for name in BOUNDS if name in facts}
    declared = Key(None, default, doc, read_if=_conditions(read_if), bounds=bounds, **facts)
    initial: dict[str, Any] = {"default_factory": dict} if default == {} else {"default": default}
    return field(**initial, metadata={"key": declared})


def section(*, read_if: Mapping[str, object] | None = None, **facts: Any) -> Key:
    """What is true of all keys of a section, and of what a run records under its name; see ``key``."""
    return Key(None, read_if=_conditions(read_if), **facts)


def is_value(default: object) -> bool:
    """Whether a default is a value, so that no option, user or other key has to set it."""
    return default != MANDATORY and not (isinstance(default, str) and "${" in default)


def _conditions(read_if: Mapping[str, object] | None) -> dict[str, tuple]:
    return {name: value if isinstance(value, tuple) else (value,) for name, value in (read_if or {}).items()}


@dataclass(frozen=True)
class Key:
    """A key of a section or of an option."""

    hint: object
    default: object = MANDATORY
    doc: str = ""
    fixed: bool = False  # defines an option: only the option's YAML file can set it
    path: bool = False  # of a file or folder, without globs, or an address
    changes: bool = False  # may change on resume, because it does not affect the mathematics of a run
    origin: bool = False  # may change on resume if text and tokenizer stay the same, which their fingerprints ensure
    binds: str | None = None  # what of a checkpoint fits only this value: its weights, moments or position in the data
    evaluates: bool = False  # losses on the validation text of runs with different values are not comparable
    # other keys, or ".source" for one of the same section, each with the values for which this key is read
    read_if: Mapping[str, tuple] = field(default_factory=dict)
    bounds: Mapping[str, float] = field(default_factory=dict)

    def within(self, section: Key, name: str) -> Key:
        """This key with what is true of all keys of its section, which has this ``name``."""
        own = {f"{name}{other}" if other.startswith(".") else other: values for other, values in self.read_if.items()}
        changes, read_if = self.changes or section.changes, {**section.read_if, **own}
        return dataclasses.replace(self, changes=changes, binds=self.binds or section.binds, read_if=read_if)

    def kinds(self) -> tuple[Any, tuple[str, ...], bool]:
        """The type of a plain value or None, the words of a Literal, and whether null is allowed."""
        union = typing.get_origin(self.hint) in (typing.Union, types.UnionType)
        hints = typing.get_args(self.hint) if union else (self.hint,)
        words = tuple(w for hint in hints if typing.get_origin(hint) is Literal for w in typing.get_args(hint))
        plain = [h for h in hints if h is not type(None) and typing.get_origin(h) is not Literal]
        plain = [dict if typing.get_origin(h) is dict else h for h in plain]
        return plain[0] if plain else None, words, type(None) in hints

    def takes(self) -> str:
        """The allowed values in words, such as ``a whole number of at least 1 or null``."""
        kind, words, optional = self.kinds()
        limits = [f"{BOUNDS[name][0]} {limit}" for name, limit in self.bounds.items()]
        plain = [f"{TYPE_NAMES.get(kind, 'a value')} {' and '.join(limits)}".strip()] if kind else []
        return " or ".join([*plain, *words, *(["null"] if optional else [])])

    def means_null(self, value: object) -> bool:
        """Whether a value is text that a user may have typed for null, where the key allows null or is a path."""
        spelt = isinstance(value, str) and value.strip().lower() in NULL_SPELLINGS
        return spelt and (self.path or self.kinds()[2])

    def read(self, value: Any) -> Any:
        """``value`` in the key's type. Raises ValueError if it is not allowed.

        Nothing is rounded, and true and false are not numbers. A number may be given as text, because an environment
        variable is text, as in ``train.lr=${oc.env:LR}``. A text key refuses numbers: Hydra turns 2026_11_22 into
        20261122.
        """
        kind, words, optional = self.kinds()
        if (optional and value is None) or (isinstance(value, str) and value in words):
            return value
        fits = kind is object
        if kind is bool or (kind is int and type(value) is int):  # a float would round it
            fits = type(value) is kind and abs(value) < 1 << 63
        elif kind is str:
            fits = isinstance(value, str) and value.strip() != "" and bool(value.encode())  # raises ValueError
            value = self.normal_path(os.path.expanduser(value)) if fits else value
        elif kind is dict:
            fits = value == {}  # its entries have keys of their own: see ``tree.ENTRIES``
        elif kind == list[str]:
            value = [value] if isinstance(value, str) else value
            fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
        elif kind in (int, float) and isinstance(value, (int, float, str)) and not isinstance(value, bool):
            number = float(value)
            fits = math.isfinite(number) and number == kind(number) and (kind is float or abs(number) < 1 << 63)
            value = kind(number) if fits else value
        if not fits or not all(BOUNDS[name][1](value, limit) for name, limit in self.bounds.items()):
            raise ValueError(f"must be {self.takes()}")
        return value

    def normal_path(self, value: Any) -> Any:
        """A path x for x/, x// and ./x; any other value as it is. The target of .. depends on links, so .. stays."""
        if not self.path or not isinstance(value, str):
            return value
        if "://" in value:  # in an address, a second slash is part of a name
            return value if value.endswith("//") else value.removesuffix("/")
        return str(Path(value))


_type_hints = cache(typing.get_type_hints)


def keys_of(section: type) -> Iterator[tuple[str, Key]]:
    """Yields the name and the key of each field that a dataclass declares with ``key``."""
    hints = _type_hints(section)
    for declared in dataclasses.fields(section):
        if "key" in declared.metadata:
            yield declared.name, dataclasses.replace(declared.metadata["key"], hint=hints[declared.name])
