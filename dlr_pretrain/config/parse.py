"""A ``Config`` from a composed mapping and back, with every problem of a key instead of only the first."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from dlr_pretrain.config.knobs import OPTIONS
from dlr_pretrain.config.problems import MISSING, ConfigError, Problem, did_you_mean
from dlr_pretrain.config.tree import GROUPS, KEYS, MANDATORY, OPEN_GROUPS, SECTIONS, Choice, Config, Key, keys_of

NAME = Key(str, "", fixed=True)


def flatten(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested mapping by their dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        nested = isinstance(value, dict) and value
        flat |= flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def to_dict(cfg: Config) -> dict[str, Any]:
    """The configuration as plain nested mappings, as it is written to ``config.yaml``."""
    tree = dataclasses.asdict(cfg)
    for group in OPEN_GROUPS:
        choice = getattr(cfg, group)
        tree[group] = {"name": choice.name, **choice.knobs}
    return tree


def all_keys(tree: Mapping) -> dict[str, Key]:
    """Every dotted key that goes with the backbone and the optimizer of a tree.

    A user's own option has no class. Its keys are those that the tree has; their values have their types.
    """
    keys = dict(KEYS)
    for group in OPEN_GROUPS:
        chosen = tree.get(group)
        chosen = chosen if isinstance(chosen, Mapping) else {}
        if section := OPTIONS[group].get(str(chosen.get("name"))):
            knobs = dict(keys_of(section))
        else:
            knobs = {knob: _declared(knob, default) for knob, default in chosen.items()}
        keys |= {f"{group}.{knob}": found for knob, found in {**knobs, "name": NAME}.items()}
    return keys


def _declared(knob: str, default: object) -> Key:
    untyped = default is None or (isinstance(default, str) and "${" in default)
    return Key(object if untyped else type(default), default, fixed=knob == "factorized")


def parse(tree: Mapping, keys: Mapping[str, Key] | None = None, typed: Collection[str] = ()) -> Config:
    """The ``Config`` of a composed or a written mapping; raises ConfigError with the problems of all its keys.

    ``keys`` are those that the mapping may have (None: ``all_keys``); ``typed`` are the keys of a command line, which
    cannot set all. A key that the mapping lacks gets its default, if that is a plain value.
    """
    keys, given = all_keys(tree) if keys is None else keys, flatten(tree)
    problems = [_unknown(name, given[name], keys, tree) for name in given if name not in keys]
    values: dict[str, Any] = {}
    for name, spec in keys.items():
        value = given.get(name, spec.default)
        if value == MANDATORY or (name not in given and isinstance(value, str)):
            if name.partition(".")[0] in given:  # a section that was given as a value
                continue
            fix = f"Choose an option: {name.partition('.')[0]}=<option>" if spec.fixed else f"Set {name}=<value>"
            problems.append(Problem(name, MISSING, "needs a value", fix))
        else:
            values[name] = _value(name, value, spec, problems)
    for name in sorted(typed):
        if name in keys and keys[name].fixed:
            fix = f"Choose another option: {name.partition('.')[0]}=<option>"
            problems.append(Problem(name, given.get(name), "belongs to an option, and cannot be set by itself", fix))
    if problems:
        raise ConfigError(problems)
    return _build(values)


def _unknown(name: str, value: object, keys: Mapping[str, Key], tree: Mapping) -> Problem:
    """The problem of a key that does not exist, with the nearest one that does."""
    if inside := [known for known in keys if known.startswith(f"{name}.")]:
        return Problem(name, value, "a section, not a value", f"Set one of its keys, such as {inside[0]}")
    section = name.partition(".")[0]
    whose = f" of {section}={tree[section].get('name')}" if section in OPEN_GROUPS else ""
    settable = [*(known for known in keys if not keys[known].fixed), *GROUPS]
    return Problem(name, value, f"no such key{whose}", did_you_mean(name, settable, "See docs/configuration.md"))


def _build(values: Mapping[str, Any]) -> Config:
    sections: dict[str, Any] = {}
    for name, section in SECTIONS.items():
        own = {key.split(".", 1)[1]: value for key, value in values.items() if key.startswith(f"{name}.")}
        sections[name] = Choice(own.pop("name"), own) if section is Choice else section(**own)
    return Config(**sections, **{key: value for key, value in values.items() if "." not in key})


def _value(name: str, value: object, spec: Key, problems: list[Problem]) -> Any:
    """Convert ``value`` to the type of its key and check its bounds; appends to ``problems``."""
    kind, words, optional = spec.kinds()
    if (optional and value is None) or (isinstance(value, str) and value in words):
        return value
    converted = _convert(value, kind)
    if converted is MISSING or not spec.holds(converted):
        rule = f"must be {spec.takes()}" + (f" ({spec.doc})" if spec.doc else "")
        number_for_text = kind is str and isinstance(value, (int, float))
        fix = f"Quote it: \"{name}='...'\"" if number_for_text else did_you_mean(str(value), words)
        problems.append(Problem(name, value, rule, fix))
    return converted


def _convert(value: Any, kind: object) -> Any:
    """``value`` as a ``kind``, or MISSING if it is not one. Nothing is rounded, and true and false are not numbers.

    The text of a number is one: that is what a variable gives, as in ``train.lr=${oc.env:LR}``.
    """
    if kind in (int, float) and isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if kind is bool:
        return value if isinstance(value, bool) else MISSING
    if kind is int:
        return int(value) if number and value == int(value) else MISSING
    if kind == list[str]:
        items = [value] if isinstance(value, str) else value
        return items if isinstance(items, list) and all(isinstance(item, str) for item in items) else MISSING
    if kind is float:
        return float(value) if number else MISSING
    if kind is str:  # a number is refused: Hydra has turned 2026_11_22 into 20261122, and 1e3 into 1000.0
        return os.path.expanduser(value) if isinstance(value, str) and value.strip() else MISSING
    return MISSING if kind is None else value
