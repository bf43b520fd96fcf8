"""A ``Config`` from a composed mapping and back, with every problem of a key instead of only the first."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from dlr_pretrain.config.knobs import OPTIONS
from dlr_pretrain.config.problems import MISSING, ConfigError, Problem, did_you_mean
from dlr_pretrain.config.tree import GROUPS, KEYS, KINDS, MANDATORY, OPEN_GROUPS, SECTIONS, Choice, Config, Key, keys_of

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
    typed = type(default) in KINDS and "${" not in str(default)
    return Key(type(default) if typed else object, default, fixed=knob == "factorized")


def parse(tree: Mapping, keys: Mapping[str, Key] | None = None, typed: Collection[str] = ()) -> Config:
    """The ``Config`` of a composed or a written mapping; raises ConfigError with the problems of all its keys.

    ``keys`` are those that the mapping may have (None: ``all_keys``); ``typed`` are the keys of a command line, which
    cannot set all. A key that the mapping lacks gets its default, if that is a plain value.
    """
    keys, given = all_keys(tree) if keys is None else keys, flatten(tree)
    problems = [_unknown(name, given[name], keys, tree) for name in given if name not in keys]
    values: dict[str, Any] = {}
    for name, key in keys.items():
        value, section = given.get(name, key.default), name.partition(".")[0]
        if value == MANDATORY or (isinstance(value, str) and "${" in value):
            if section in given:  # as a value, which is a problem already
                continue
            fix = f"Choose an option: {section}=<option>" if key.fixed else f"Set {name}=<value>"
            problems.append(Problem(name, MISSING, "needs a value", fix))
            continue
        try:
            values[name] = key.read(value)
        except (ValueError, OverflowError):
            problems.append(_refused(name, value, key))
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


def _refused(name: str, value: object, key: Key) -> Problem:
    """The problem of a value that the key does not take."""
    kind, words, _ = key.kinds()
    rule = f"must be {key.takes()}" + (f" ({key.doc})" if key.doc else "")
    if kind is str and isinstance(value, (int, float)):
        return Problem(name, value, rule, f"Quote it: \"{name}='...'\"")
    return Problem(name, value, rule, did_you_mean(str(value), words))
