"""Writes the page of all keys: ``python docs/configuration.py > docs/configuration.md``."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from dlr_pretrain.config.key import MANDATORY, Key
from dlr_pretrain.config.problems import as_typed
from dlr_pretrain.config.tree import CONFIG_DIR, ENTRIES, GROUPS, OPEN_GROUPS, ROOT, SECTIONS, keys_in
from dlr_pretrain.config.values import flatten, options_class
from dlr_pretrain.util.text import markdown_table

HEAD = """# Configuration

This page lists every key and every option (`docs/configuration.py` generates it from the code). A key is given as
`section.key=value`, an option of a group as `group=option`; later arguments override earlier ones. `${{a.b}}` is the
value of another key. The last column says whether a key may change when a run resumes. A key that may not affects the
mathematics of the run: `run.start_from` starts another run from it. The keys of text and tokenizer may change if these
stay the same text and tokenizer.

`scale.from=<config.json, its folder, or owner/name on the hub>` sets keys of `scale` from a published LLaMA
([recipe](recipes.md#the-shape-of-a-published-llama)).

Groups: {groups}. `experiment` holds recipes, which override any of them ([recipes](recipes.md))."""
COLUMNS = ("key", "meaning", "values", "default", "may change on resume")


def page() -> str:
    """The page as Markdown."""
    groups = ", ".join(f"[`{group}`](#{group})" for group in GROUPS if group != "experiment")
    parts = [HEAD.format(groups=groups), "## Keys without a section", _keys(ROOT)]
    for name, section in SECTIONS.items():
        parts.append(f"## {name}")
        if name in GROUPS:
            columns = ["option", "what it is", "what it sets"][: 2 if name in OPEN_GROUPS else 3]
            parts.append(markdown_table(columns, [row[: len(columns)] for row in _options(name)]))
        tables: dict[str, type | Path] = {name: section}
        if name in OPEN_GROUPS:
            tables = {f"{name}={path.stem}": path for path in sorted((CONFIG_DIR / name).glob("*.yaml"))}
        for title, declared in tables.items():
            keys = {dotted: key for dotted, key in _declared(name, declared) if not key.fixed}
            if keys:
                parts += ([f"`{title}`:"] if title != name else []) + [_keys(keys)]
        for entries, declared in ENTRIES.items():
            if entries.startswith(f"{name}."):
                parts += [f"`{entries}`, for each name:", _keys(keys_in(f"{entries}.<name>", declared))]
    return "\n\n".join(parts) + "\n"


def _declared(group: str, section: type | Path) -> Iterator[tuple[str, Key]]:
    """The keys of a section. Those of a backbone or an optimizer have their defaults in its YAML file."""
    if isinstance(section, type):
        yield from keys_in(group, section).items()
    else:
        values = yaml.safe_load(section.read_text(encoding="utf-8"))
        for name, key in keys_in(group, options_class(group, {group: values})).items():
            yield name, replace(key, default=values.get(name.partition(".")[2], key.default))


def _keys(keys: Mapping[str, Key]) -> str:
    rows = []
    for name, key in keys.items():
        default = "by option" if key.default == MANDATORY else f"`{as_typed(key.default)}`"
        changes = "yes" if key.changes else "with the same text" if key.origin else ""
        rows.append([f"`{name}`", key.doc, key.takes(), default, changes])
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
