"""A ``Config`` from a composed mapping and back, with every problem of a key instead of only the first."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

from dlr_pretrain.config.knobs import OPTIONS
from dlr_pretrain.config.problems import MISSING, Problem, did_you_mean
from dlr_pretrain.config.tree import GROUPS, KEYS, MANDATORY, OPEN_GROUPS, SECTIONS, Choice, Config, Key, keys_of

KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[str]: "a list such as [a,b]",
}
BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
NAME = Key(str, "", {"fixed": True})


def flatten(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested mapping by their dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        nested = isinstance(value, dict) and value
        flat |= flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def to_dict(cfg: Config) -> dict[str, Any]:
    """The configuration as plain nested mappings, as it is written to ``config.yaml``."""
    tree: dict[str, Any] = {}
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if isinstance(value, Choice):
            tree[f.name] = {"name": value.name, **value.knobs}
        else:
            tree[f.name] = dataclasses.asdict(value) if f.name in SECTIONS else value
    return tree


def declared_by(values: Mapping[str, object]) -> dict[str, Key]:
    """The knobs that the YAML file of a user's own option declares by their defaults, whose types they have."""
    keys = {}
    for knob, default in values.items():
        untyped = default is None or (isinstance(default, str) and "${" in default)
        keys[knob] = Key(object if untyped else type(default), default, {"fixed": knob == "factorized"})
    return keys


def all_keys(tree: Mapping, own: Mapping[str, Mapping[str, Key]] | None = None) -> dict[str, Key]:
    """Every dotted key that a tree may have.

    ``own`` gives the knobs of a user's own options by group. Without it, the knobs that the tree has are taken for
    declared.
    """
    keys = dict(KEYS)
    for group in OPEN_GROUPS:
        chosen = tree.get(group)
        chosen = chosen if isinstance(chosen, Mapping) else {}
        if section := OPTIONS[group].get(str(chosen.get("name"))):
            knobs: Mapping[str, Key] = dict(keys_of(section))
        else:
            knobs = declared_by(chosen) if own is None else own.get(group, {})
        keys |= {f"{group}.{knob}": found for knob, found in {**knobs, "name": NAME}.items()}
    return keys


def parse(
    tree: Mapping, own: Mapping[str, Mapping[str, Key]] | None = None, typed: Collection[str] = ()
) -> tuple[Config | None, list[Problem]]:
    """The ``Config`` of a composed mapping (None if it cannot be built), and the problems of its keys.

    ``own`` is as in ``all_keys``; ``typed`` are the keys of a command line, which cannot set all. A key that the
    mapping lacks gets its default, if that is a plain value.
    """
    keys, given = all_keys(tree, own), flatten(tree)
    unknown = [name for name in given if name not in keys]
    problems = [_unknown(name, given[name], keys, tree) for name in unknown]
    values: dict[str, Any] = {}
    for name, spec in keys.items():
        if name in given and given[name] != MANDATORY:
            values[name] = _value(name, given[name], spec, problems)
        elif name not in given and not isinstance(spec.default, str):
            values[name] = spec.default
        elif not any(_above(name, other) or _above(other, name) for other in unknown):
            fix = f"Choose an option: {name.partition('.')[0]}=<option>" if spec.fixed else f"Set {name}=<value>"
            problems.append(Problem(name, MISSING, "needs a value", fix))
    problems += [_fixed(name, values.get(name)) for name in sorted(typed) if name in keys and keys[name].fixed]
    return (None if problems else _build(values)), problems


def _fixed(name: str, value: object) -> Problem:
    group = name.split(".", 1)[0]
    rule = f"belongs to the option that is chosen by {group}=<option>, and cannot be set by itself"
    return Problem(name, value, rule, f"Choose another option: {group}=<option>")


def _above(name: str, other: str) -> bool:
    return other.startswith(f"{name}.")


def _unknown(name: str, value: object, keys: Mapping[str, Key], tree: Mapping) -> Problem:
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
    return Problem(
        name,
        value,
        f"no such key{whose}",
        did_you_mean(name, [k for k in keys if not keys[k].fixed], "See docs/configuration.md"),
    )


def _build(values: Mapping[str, Any]) -> Config:
    sections: dict[str, Any] = {}
    for name, section in SECTIONS.items():
        own = {key.split(".", 1)[1]: value for key, value in values.items() if _above(name, key)}
        sections[name] = Choice(own.pop("name"), own) if section is Choice else section(**own)
    return Config(**sections, **{key: value for key, value in values.items() if "." not in key})


def _value(name: str, value: object, spec: Key, problems: list[Problem]) -> Any:
    """Convert ``value`` to the type of its key and check its bounds; appends to ``problems``."""
    hint, words, optional = spec.kinds()
    if (optional and value is None) or (isinstance(value, str) and value in words):
        return value
    if hint is None:
        problems.append(Problem(name, value, "must be one of " + ", ".join(words), did_you_mean(str(value), words)))
        return value
    converted = _convert(value, hint)
    if converted is MISSING:
        kinds = " or ".join([f"must be {KINDS[hint]}", *words, *(["null"] if optional else [])])
        text = hint is str and isinstance(value, (int, float))
        fix = f"Quote a number that is meant as text: \"{name}='...'\"" if text else spec.about.get("off", "")
        problems.append(Problem(name, value, kinds, fix))
    elif rule := _broken_bound(converted, spec.about):
        off = "null switches it off" if optional else spec.about.get("off", "")
        problems.append(Problem(name, value, rule, "" if converted else off))
    return converted


def _convert(value: Any, hint: object) -> Any:
    """``value`` as a ``hint``, or MISSING if it is not one. Nothing is rounded, and true and false are not numbers."""
    if hint in (int, float) and isinstance(value, str):  # of a variable: ${oc.env:LR}
        try:
            value = float(value)
        except ValueError:
            return MISSING
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


BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "gt": (operator.gt, "must be greater than"),
    "ge": (operator.ge, "must be at least"),
    "le": (operator.le, "must be at most"),
    "lt": (operator.lt, "must be below"),
}


def _broken_bound(value: Any, about: Mapping[str, Any]) -> str:
    for name, (holds, rule) in BOUNDS.items():
        if about.get(name) is not None and not holds(value, about[name]):
            return f"{rule} {about[name]}"
    return ""
