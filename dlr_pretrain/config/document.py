"""Prints the page of all keys: ``python -m dlr_pretrain.config.document > docs/configuration.md``."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from dlr_pretrain.config.knobs import rules
from dlr_pretrain.config.problems import shown
from dlr_pretrain.config.tree import CONFIG_DIR, GROUPS, OPEN_GROUPS, SECTIONS, Config
from dlr_pretrain.util.text import table

HEAD = """# Configuration

Every key, from `dlr_pretrain/config/tree.py` and `configs/` (`python -m dlr_pretrain.config.document` writes this
page). A key is given as `section.key=value`, an option of a group as `group=option`. `${{a.b}}` is the value of another
key. Keys with a dot in the last column take part in the mathematics of a run: they name its directory, and cannot
change when it resumes (`run.start_from` starts another run from it). The others may; and so may those that say where
text and tokenizer lie, with `run.dir` given, as long as they are the same text and tokenizer.

Groups: {groups}. `experiment` holds recipes, which override any of them ([recipes](recipes.md))."""
KEYS = ("key", "meaning", "values", "default", "")
Row = list[str]


def page() -> str:
    """The page as Markdown."""
    groups = ", ".join(f"[`{group}`](#{group})" for group in GROUPS if group != "experiment")
    root = yaml.safe_load((CONFIG_DIR / "train.yaml").read_text())
    hints = typing.get_type_hints(Config)
    rows = [_row(f.name, f.metadata, hints[f.name], root[f.name]) for f in dataclasses.fields(Config) if f.metadata]
    parts = [HEAD.format(groups=groups), "## The root", table(KEYS, rows)]
    for name in SECTIONS:
        parts.append(f"## {name}")
        if name in OPEN_GROUPS:
            parts += _open_group(name)
        elif name in GROUPS:
            parts += _group(name)
        else:
            parts.append(table(KEYS, _rows(name, root[name])))
    return "\n\n".join(parts) + "\n"


def options(group: str) -> dict[str, Path]:
    """The files of a group by option, sorted by hidden size, then files without a base first, then by name."""

    def order(path: Path) -> tuple:
        return _values(path).get("hidden_size", 0), _base(path) is not None, path.stem

    return {path.stem: path for path in sorted((CONFIG_DIR / group).glob("*.yaml"), key=order)}


def _group(group: str) -> Iterator[str]:
    yield _options_table(group)
    files = {option: _values(path) for option, path in options(group).items()}
    shared = {key: _shared(option[key] for option in files.values()) for key in next(iter(files.values()))}
    rows = list(_rows(group, shared))
    if rows:
        yield table(KEYS, rows)
    varied = [key for key, value in shared.items() if value is _VARIES and not _fixed(group, key)]
    if varied:
        values = ([f"`{group}.{key}`", *(_value(of[key]) for of in files.values())] for key in varied)
        yield table(["", *(f"`{option}`" for option in files)], values)


def _open_group(group: str) -> Iterator[str]:
    yield _options_table(group)
    rows = []
    for option, path in options(group).items():
        comments = dict(re.findall(r"^(\w+):.*?\s#\s*(.*)$", path.read_text(), flags=re.M))
        for knob, value in _values(path).items():
            if knob not in ("name", "factorized"):
                declared = rules(group, _values(path)["name"], knob)
                values = (_bounds(declared) if declared else "") or ("true, false" if value in (True, False) else "")
                rows.append([f"`{option}`", f"`{group}.{knob}`", comments.get(knob, ""), values, _value(value)])
    yield table(["option", "key", "meaning", "values", "default"], rows)


def _options_table(group: str) -> str:
    rows = []
    for option, path in options(group).items():
        lines = [line[1:].strip() for line in path.read_text().split("\nname:")[0].splitlines() if line.startswith("#")]
        rows.append([f"`{group}={option}`", " ".join(lines)])
    return table(["option", ""], rows)


def _rows(section: str, defaults: Mapping[str, object]) -> Iterator[Row]:
    hints = typing.get_type_hints(SECTIONS[section])
    for f in dataclasses.fields(SECTIONS[section]):
        if not f.metadata["fixed"]:
            yield _row(f"{section}.{f.name}", f.metadata, hints[f.name], defaults[f.name])


def _row(name: str, metadata: Mapping, hint: type, default: object) -> Row:
    values = _bounds(metadata) or _kind(hint)
    shown = "by option" if default is _VARIES else _value(default)
    return [f"`{name}`", metadata["doc"], values, shown, "·" if metadata["identity"] else ""]


_VARIES = object()


def _shared(values: Iterator[object]) -> object:
    first, *others = values
    return first if all(other == first for other in others) else _VARIES


def _fixed(section: str, key: str) -> bool:
    return next(f.metadata["fixed"] for f in dataclasses.fields(SECTIONS[section]) if f.name == key)


def _base(path: Path) -> Path | None:
    """The file of the option, of the same group, on which a file is based; None if it has no base."""
    names = [name for name in yaml.safe_load(path.read_text()).get("defaults", []) if name != "_self_"]
    return path.with_name(f"{names[0]}.yaml") if names else None


def _values(path: Path) -> dict[str, object]:
    own = yaml.safe_load(path.read_text())
    base = _base(path)
    return (_values(base) if base else {}) | {key: value for key, value in own.items() if key != "defaults"}


def _bounds(metadata: Mapping) -> str:
    if metadata["choices"]:
        return ", ".join(f"`{choice}`" for choice in metadata["choices"])
    limits = [("above", ">"), ("at_least", "≥"), ("at_most", "≤"), ("below", "<")]
    return ", ".join(f"{sign} {metadata[name]}" for name, sign in limits if metadata[name] is not None)


def _kind(hint: type) -> str:
    kinds = [k for k in (typing.get_args(hint) if isinstance(hint, types.UnionType) else [hint]) if k is not type(None)]
    said = {bool: "true, false", str: "text", list[str]: "list", int: "integer", float: "number"}
    return " or ".join(said[kind] for kind in kinds)


def _value(value: object) -> str:
    return f"`{shown(value)}`"


if __name__ == "__main__":
    print(page(), end="")
