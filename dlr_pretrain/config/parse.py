"""Turns a composed mapping into a ``Config``, and collects every problem instead of only the first."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field

from dlr_pretrain.config.knobs import rules
from dlr_pretrain.config.problems import MISSING, Problem, did_you_mean
from dlr_pretrain.config.tree import GROUPS, OPEN_GROUPS, SECTIONS, Choice, Config

KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[str]: "a list such as [a,b]",
}
BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
# knobs that say what an option of an open group is, not how it is tuned
FIXED_KNOBS = ("name", "factorized")


@dataclass(frozen=True)
class Key:
    """The type of a dotted key, and the metadata with which it was declared."""

    hint: object
    rules: Mapping = field(default_factory=dict)

    @property
    def identity(self) -> bool:
        return self.rules.get("identity", True)

    @property
    def fixed(self) -> bool:
        return self.rules.get("fixed", False)


def flatten(tree: dict, prefix: str = "") -> dict[str, object]:
    """The leaves of a nested mapping by their dotted keys."""
    flat = {}
    for name, value in tree.items():
        nested = isinstance(value, dict) and value
        flat |= flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def is_fixed(name: str) -> bool:
    """Whether a dotted key says what an option is, so that only the option's file may set it."""
    section, _, leaf = name.partition(".")
    return (section in OPEN_GROUPS and leaf in FIXED_KNOBS) or (name in KNOWN and KNOWN[name].fixed)


def all_keys(declared: dict[str, dict]) -> dict[str, Key]:
    """Every dotted key of the tree. ``declared`` has the keys and defaults of the chosen option of each open group."""
    keys = {}
    hints = typing.get_type_hints(Config)
    for f in dataclasses.fields(Config):
        if hints[f.name] is Choice:
            option = declared.get(f.name, {})
            for knob, default in {"name": "", **option}.items():
                known = rules(f.name, option.get("name", ""), knob)
                keys[f"{f.name}.{knob}"] = Key(_knob_hint(default, known.get("kind")), known)
        elif f.name in SECTIONS:
            inner = typing.get_type_hints(SECTIONS[f.name])
            for g in dataclasses.fields(SECTIONS[f.name]):
                keys[f"{f.name}.{g.name}"] = Key(inner[g.name], g.metadata)
        else:
            keys[f.name] = Key(hints[f.name], f.metadata)
    return keys


def _knob_hint(default: object, kind: type | None) -> object:
    if kind is not None:
        return kind | None
    return object if default is None else type(default)


KNOWN = all_keys({})


def parse(tree: dict, declared: dict[str, dict]) -> tuple[Config | None, list[Problem]]:
    """Build a ``Config`` from a composed mapping.

    ``declared`` gives, for each open group (backbone, optimizer), the keys of the chosen option's own YAML file with
    their defaults. Returns the configuration (None if it cannot be built) and every problem found.
    """
    keys, given = all_keys(declared), flatten(tree)
    unknown = [name for name in given if name not in keys]
    problems = [_unknown(name, given[name], keys, tree) for name in unknown]
    values = {}
    for name, spec in keys.items():
        if name in given:
            values[name] = _value(name, given[name], spec, problems)
        elif not any(_above(name, other) or _above(other, name) for other in unknown):
            problems.append(Problem(name, MISSING, "missing from the configuration"))
    return (None if problems else _build(values)), problems


def _above(name: str, other: str) -> bool:
    return other.startswith(f"{name}.")


def _unknown(name: str, value: object, keys: dict[str, Key], tree: dict) -> Problem:
    """The problem of a key that does not exist, with the nearest one that does."""
    inside = [known for known in keys if _above(name, known)]
    if name in GROUPS:
        return Problem(name, value, "a group, not a value", f"Choose an option: {name}=<option>")
    if inside:
        return Problem(name, value, "a section, not a value", f"Set one of its keys, such as {inside[0]}")
    if above := [known for known in keys if _above(known, name)]:
        return Problem(name, value, f"{above[0]} is a value, not a section", f"Write {above[0]}=<value>")
    section, whose = name.split(".", 1)[0], ""
    if section in OPEN_GROUPS and "name" in tree[section]:
        whose = f" of {section}={tree[section]['name']}"
    return Problem(name, value, f"no such key{whose}", did_you_mean(name, keys, "See docs/configuration.md"))


def _build(values: dict[str, object]) -> Config:
    sections = {}
    for name, section in SECTIONS.items():
        own = {key.split(".", 1)[1]: value for key, value in values.items() if _above(name, key)}
        sections[name] = Choice(own.pop("name"), own) if section is Choice else section(**own)
    return Config(**sections, **{key: value for key, value in values.items() if "." not in key})


def _value(name: str, value: object, spec: Key, problems: list[Problem]) -> object:
    """Convert ``value`` to the type of its key and check its bounds; appends to ``problems``."""
    hint, optional = spec.hint, False
    if isinstance(hint, types.UnionType):
        hint, optional = typing.get_args(hint)[0], True
    if (optional and value is None) or value in spec.rules.get("words", ()):
        return value
    converted = _convert(value, hint)
    if converted is MISSING:
        others = [*spec.rules.get("words", ()), *(["null"] if optional else [])]
        problems.append(
            Problem(name, value, " or ".join([f"must be {KINDS[hint]}", *others]), _quotes(name, value, hint))
        )
    elif rule := _broken_rule(converted, spec.rules):
        fix = did_you_mean(str(converted), spec.rules["choices"]) if spec.rules.get("choices") else ""
        problems.append(Problem(name, value, rule, fix))
    return converted


def _quotes(name: str, value: object, hint: object) -> str:
    """The fix for a number that is quoted and should not be, or the other way round; else empty."""
    if hint is str and isinstance(value, (int, float)):
        return f"Quote a number that is meant as text: \"{name}='...'\""
    number = re.fullmatch(r"[+-]?[\d_]*\.?\d+(e[+-]?\d+)?", value, re.IGNORECASE) if isinstance(value, str) else None
    return "A quoted number is text: leave the quotes out" if number and hint in (int, float) else ""


def _convert(value: object, hint: object) -> object:
    """``value`` as a ``hint``, or MISSING if it is not one. Nothing is rounded, and true and false are not numbers."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is bool:
        return BOOLS.get(str(value).lower(), MISSING)
    if hint is int:
        return int(value) if number and math.isfinite(value) and value == int(value) else MISSING
    if hint is float:
        return float(value) if number and math.isfinite(value) else MISSING
    if hint is str:  # a number is refused: Hydra has turned 2026_11_22 into 20261122, and 1e3 into 1000.0
        return value if isinstance(value, str) and value.strip() else MISSING
    if hint == list[str]:
        items = [value] if isinstance(value, str) else value
        return items if isinstance(items, list) and all(isinstance(item, str) for item in items) else MISSING
    return value


def _broken_rule(value: object, rules: Mapping) -> str:
    if rules.get("choices") and value not in rules["choices"]:
        return "must be one of " + ", ".join(rules["choices"])
    if rules.get("above") is not None and not value > rules["above"]:
        return f"must be greater than {rules['above']}"
    if rules.get("at_least") is not None and value < rules["at_least"]:
        return f"must be at least {rules['at_least']}"
    if rules.get("at_most") is not None and value > rules["at_most"]:
        return f"must be at most {rules['at_most']}"
    if rules.get("below") is not None and not value < rules["below"]:
        return f"must be below {rules['below']}"
    return ""
