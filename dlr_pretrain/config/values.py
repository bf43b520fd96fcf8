"""Reads a composed or a written mapping into a checked ``Config``, and writes a ``Config`` as a mapping."""

import dataclasses
import pkgutil
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dlr_pretrain.config.key import Key, is_value, keys_of
from dlr_pretrain.config.problems import MISSING, ConfigError, Problem, did_you_mean
from dlr_pretrain.config.tree import ENTRIES, GROUPS, KEYS, OPEN_GROUPS, SECTIONS, Config, Options, entry_keys, keys_in
from dlr_pretrain.util.errors import first_line

TARGET = "_target_"  # Hydra's name for the class that a mapping sets up


def flatten(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested mapping by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        nested = isinstance(value, dict) and value
        flat |= flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def merged(tree: Mapping, values: Mapping) -> dict[str, Any]:
    """``tree`` with the values of another tree, where that has one, in place of its own."""
    given = {name: value for name, value in values.items() if is_value(value)}
    both = [name for name in given if isinstance(tree.get(name), dict) and isinstance(given[name], dict)]
    return {**tree, **given, **{name: merged(tree[name], given[name]) for name in both}}


def to_dict(cfg: Config) -> dict[str, Any]:
    """The configuration as nested mappings, as it is written to ``config.yaml``."""
    tree = dataclasses.asdict(cfg)
    for group in OPEN_GROUPS:
        options = getattr(cfg, group)
        values = {name: getattr(options, name) for name, _ in keys_of(type(options))}
        tree[group] = {TARGET: target_of(options)} | values
    return tree


def target_of(options: Options) -> str:
    """The name of the class of chosen options, by which Hydra and Python find it."""
    return f"{type(options).__module__}.{type(options).__qualname__}"


def options_class(group: str, tree: Mapping) -> type:
    """The class of the chosen backbone or optimizer. This call may be the first to import torch.

    Raises ConfigError if the class is not named or cannot be imported.
    """
    chosen = tree.get(group)
    target = chosen.get(TARGET) if isinstance(chosen, Mapping) else None
    name = f"{group}.{TARGET}"
    if not isinstance(target, str):
        raise ConfigError([Problem(name, MISSING, "needs a value", f"Choose an option: {group}=<option>")])
    try:
        options = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        fix = "Install its package, or add the folder that holds it to PYTHONPATH"
        raise ConfigError([Problem(name, target, f"cannot be imported ({first_line(error)})", fix)]) from error
    if not (isinstance(options, type) and issubclass(options, SECTIONS[group])):
        base = SECTIONS[group].__name__
        raise ConfigError([Problem(name, target, f"is not a subclass of {base} of dlr_pretrain.config.tree")])
    return options


def all_keys(tree: Mapping) -> dict[str, Key]:
    """Every key by dotted name, including those of the backbone, the optimizer and the named entries of a tree."""
    keys = KEYS | entry_keys(tree)
    for group in OPEN_GROUPS:
        keys |= keys_in(group, options_class(group, tree))
        keys[f"{group}.{TARGET}"] = Key(str, fixed=True, changes=True)
    return keys


def parse(tree: Mapping, typed: Collection[str] | None = None, problems: Sequence[Problem] = ()) -> Config:
    """The ``Config`` of a composed or a written mapping. Raises ConfigError with the problems of all keys.

    ``typed`` are the keys of a command line, which cannot set fixed keys (None: a run wrote the mapping), and
    ``problems`` are those of its words. A missing key gets its default if that is a plain value. The classes of
    backbone and optimizer, which import torch, are not imported for words that are wrong without them.
    """
    given, words = flatten(tree), set(typed or ())
    of_options = {name for name in given if name.partition(".")[0] in OPEN_GROUPS}
    if not of_options & words:
        _, wrong = _read(KEYS | entry_keys(tree) | dict.fromkeys(of_options, Key(object)), given, tree, typed)
        if (problems or wrong) and words.issuperset(problem.key for problem in wrong):  # none is a recipe's
            raise ConfigError([*problems, *wrong])
    values, wrong = _read(all_keys(tree), given, tree, typed)
    if problems or wrong:
        raise ConfigError([*problems, *wrong])
    return _build(values)


def _read(
    keys: Mapping[str, Key], given: Mapping[str, Any], tree: Mapping, typed: Collection[str] | None
) -> tuple[dict[str, Any], list[Problem]]:
    """The values of all ``keys``, from those ``given`` or the defaults, and the problems."""
    problems = [_unknown(name, given[name], keys, tree) for name in given if name not in keys]
    values: dict[str, Any] = {}
    for name, key in keys.items():
        value, section = given.get(name, key.default), name.partition(".")[0]
        if not is_value(value):
            if section in given:  # the section itself has a value, which is reported already
                continue
            fix = f"Choose an option: {section}=<option>" if key.fixed else f"Set {name}=<value>"
            problems.append(Problem(name, MISSING, "needs a value", fix))
            continue
        try:
            if typed is not None and key.means_null(value):  # a recorded path may be ./None
                raise ValueError(name)
            values[name] = key.read(value)
        except (ValueError, OverflowError):
            problems.append(_refused(name, value, key))
    for name in sorted(typed or ()):
        if name in keys and keys[name].fixed:
            fix = f"Choose another option: {name.partition('.')[0]}=<option>"
            problems.append(Problem(name, given.get(name), "can only be set by an option", fix))
    return values, problems


def _unknown(name: str, value: object, keys: Mapping[str, Key], tree: Mapping) -> Problem:
    """The problem of a key that does not exist, with the nearest existing key."""
    if inside := [known for known in keys if known.startswith(f"{name}.")]:
        return Problem(name, value, "a section, not a value", f"Set one of its keys, such as {inside[0]}")
    section = name.partition(".")[0]
    whose = f" of {section}={tree[section].get('name')}" if section in OPEN_GROUPS else ""
    settable = [*(known for known in keys if not keys[known].fixed), *GROUPS]
    return Problem(name, value, f"no such key{whose}", did_you_mean(name, settable, "See docs/configuration.md"))


def _build(values: Mapping[str, Any]) -> Config:
    sections: dict[str, Any] = {}
    for name, section in SECTIONS.items():
        options = {key.split(".", 1)[1]: value for key, value in values.items() if key.startswith(f"{name}.")}
        for leaf in [key.split(".")[1] for key in ENTRIES if key.startswith(f"{name}.")]:
            entries: dict[str, dict[str, Any]] = {}
            for key in [key for key in options if key.startswith(f"{leaf}.")]:
                entry, _, field = key.partition(".")[2].rpartition(".")  # a dot in a name is refused later
                entries.setdefault(entry, {})[field] = options.pop(key)
            options[leaf] = {entry: ENTRIES[f"{name}.{leaf}"](**given) for entry, given in entries.items()}
        kind = options_class(name, {name: {TARGET: options.pop(TARGET)}}) if name in OPEN_GROUPS else section
        sections[name] = kind(**options)
    return Config(**sections, **{key: value for key, value in values.items() if "." not in key})


def _refused(name: str, value: object, key: Key) -> Problem:
    """The problem of a value that the key does not allow."""
    kind, words, optional = key.kinds()
    rule = f"must be {key.takes()}" + (f" ({key.doc})" if key.doc else "")
    if key.means_null(value):
        place = "~/" if value == "~" else f"./{str(value).strip()}"
        fixes = ["null"] * optional + [f"{place} for the path"] * key.path
        return Problem(name, value, rule, f"Write {', or '.join(fixes)}")
    if kind is str and isinstance(value, (int, float)):
        return Problem(name, value, rule, f"Quote it: \"{name}='...'\"")
    return Problem(name, value, rule, did_you_mean(str(value), words, written=f"{name}={{}}".format))
