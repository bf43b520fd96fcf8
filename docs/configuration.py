"""Writes the page of all keys: ``python docs/configuration.py > docs/configuration.md``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from dlr_pretrain.config.problems import as_typed
from dlr_pretrain.config.tree import CONFIG_DIR, GROUPS, MANDATORY, OPEN_GROUPS, ROOT, SECTIONS, Key, keys_of
from dlr_pretrain.config.written import CHANGEABLE, flatten, options_class
from dlr_pretrain.util.text import markdown_table

HEAD = """# Configuration

This page lists every key and every option (`docs/configuration.py` generates it from the code). A key is given as
`section.key=value`, an option of a group as `group=option`; later arguments override earlier ones. `${{a.b}}` is the
value of another key. Keys with a dot in the last column affect the mathematics of a run and cannot change when it
resumes (`run.start_from` starts another run from it). The others may change, and so may the locations of text and
tokenizer, as long as these stay the same text and tokenizer.

Groups: {groups}. `experiment` holds recipes, which override any of them ([recipes](recipes.md))."""
COLUMNS = ("key", "meaning", "values", "default", "")


def page() -> str:
    """The page as Markdown."""
    groups = ", ".join(f"[`{group}`](#{group})" for group in GROUPS if group != "experiment")
    parts = [HEAD.format(groups=groups), "## Keys without a section", _keys("", ROOT)]
    for name, section in SECTIONS.items():
        parts.append(f"## {name}")
        if name in GROUPS:
            columns = ["option", "what it is", "what it sets"][: 2 if name in OPEN_GROUPS else 3]
            parts.append(markdown_table(columns, [row[: len(columns)] for row in _options(name)]))
        tables: dict[str, type | Path] = {name: section}
        if name in OPEN_GROUPS:
            tables = {f"{name}={path.stem}": path for path in sorted((CONFIG_DIR / name).glob("*.yaml"))}
        for title, declared in tables.items():
            keys = {key: found for key, found in _declared(name, declared) if not found.fixed}
            if keys:
                parts += ([f"`{title}`:"] if title != name else []) + [_keys(f"{name}.", keys)]
    return "\n\n".join(parts) + "\n"


def _declared(group: str, section: type | Path) -> Iterator[tuple[str, Key]]:
    """The keys of a section. Those of a backbone or an optimizer have their defaults in its YAML file."""
    if isinstance(section, type):
        yield from keys_of(section)
    else:
        values = yaml.safe_load(section.read_text(encoding="utf-8"))
        for name, found in keys_of(options_class(group, {group: values})):
            yield name, replace(found, default=values[name])


def _keys(prefix: str, keys: Mapping[str, Key]) -> str:
    rows = []
    for name, found in keys.items():
        default = "by option" if found.default == MANDATORY else f"`{as_typed(found.default)}`"
        kept = "" if f"{prefix}{name}".startswith(CHANGEABLE) else "·"
        rows.append([f"`{prefix}{name}`", found.doc, found.takes(), default, kept])
    return markdown_table(COLUMNS, rows)


def _options(group: str) -> Iterator[list[str]]:
    """The options of a group with the comment at the head of their files, and the values that these set."""
    for path in sorted((CONFIG_DIR / group).glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        comment = " ".join(line[1:].strip() for line in text.splitlines() if line.startswith("#") and "@" not in line)
        sets = {key: value for key, value in flatten(yaml.safe_load(text)).items() if key != "defaults"}
        values = ", ".join(f"`{key}={as_typed(value)}`" for key, value in sets.items() if not key.endswith("name"))
        yield [f"`{group}={path.stem}`", comment, values]


if __name__ == "__main__":
    print(page(), end="")
