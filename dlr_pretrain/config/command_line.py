"""The command line in one normal form, so that ``scale=1b``, ``+scale=1b`` and ``++scale=1b`` mean the same.

Hydra accepts either ``group=option`` or ``+group=option``, never both, and with a plus sign it accepts any misspelt
name. So a group loses its plus signs, and a key gets two, with which Hydra sets any key. Whether the key exists is
checked later, on the composed tree, where the nearest existing key is known.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from dlr_pretrain.config.parse import flatten
from dlr_pretrain.config.problems import MISSING, ConfigError, Problem, did_you_mean, nearest
from dlr_pretrain.config.tree import CONFIG_DIR, GROUPS, KEYS


@dataclass
class CommandLine:
    """A parsed command line: Hydra's own flags, the overrides in normal form, and the problems."""

    flags: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    config_name: str = "train"
    config_dir: str | None = None
    multirun: bool = False
    shows: bool = False  # prints the configuration instead of running it


def read(argv: list[str]) -> CommandLine:
    """Parse a command line and bring its words into normal form. A later word replaces an earlier one of its key.

    Raises ConfigError if there is no folder ``--config-dir``; all other problems are the line's.
    """
    given, rest = _flags().parse_known_args(argv)
    line = CommandLine(
        flags=[word for word in argv if word not in rest],
        config_name=given.config_name or "train",
        config_dir=given.config_dir,
        multirun=given.multirun or "hydra.mode=MULTIRUN" in rest,
        shows=bool(given.cfg or given.info),
    )
    if given.shell_completion:
        line.flags = argv
        return line
    if given.config_dir is not None and not Path(given.config_dir).is_dir():
        raise ConfigError([Problem("--config-dir", given.config_dir, "no such folder")])
    loose = []
    for word in rest:
        if word.startswith("-"):
            line.problems.append(_unknown_flag(word))
        elif word.startswith("~") or ("=" in word and key_of(word)):
            _add(word, line)
        else:
            loose.append(word)
    if loose:
        rule, fix = "not of the form key=value", "Write key=value, without blanks around ="
        line.problems.append(Problem(" ".join(loose), MISSING, rule, fix))
    return line


def _flags() -> argparse.ArgumentParser:
    """A parser that knows Hydra's flags, and none of its own."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in ("--help -h", "--hydra-help", "--version", "--shell-completion -sc", "--multirun -m", "--resolve"):
        parser.add_argument(*names.split(), action="store_true")
    for names in ("--config-name -cn", "--config-dir -cd", "--package -p", "--cfg -c"):
        parser.add_argument(*names.split())
    parser.add_argument("--info", "-i", nargs="?", const="all")
    return parser


def parse_word(word: str) -> Override:
    """Parse a word by Hydra's grammar; raises HydraException if it does not fit."""
    return OverridesParser.create().parse_override(word)


def key_of(word: str) -> str:
    """The key of a word."""
    return word.lstrip("+~").split("=", 1)[0].strip()


def typed(words: Sequence[str]) -> dict[str, Any]:
    """The values that well-formed words set, by dotted key: a mapping is split into its keys."""
    overrides = [override for override in map(parse_word, words) if not override.is_delete()]
    return flatten({override.key_or_group: override.value() for override in overrides})


def options(group: str, config_dir: str | None = None) -> list[str]:
    """The options of a group in ``configs/`` and in ``config_dir``; one in a subfolder is named by its path."""
    folders = [Path(folder, group) for folder in (CONFIG_DIR, config_dir) if folder is not None]
    files = [path.relative_to(folder) for folder in folders for path in sorted(folder.rglob("*.yaml"))]
    return [path.with_suffix("").as_posix() for path in dict.fromkeys(files)]


def _unknown_flag(flag: str) -> Problem:
    """The problem of a flag that is not Hydra's."""
    name, _, value = flag.lstrip("-").partition("=")
    meant = nearest(name, [*GROUPS, *KEYS])
    fix = f"Write {meant}={value or '<value>'}" if meant else did_you_mean(name, (), "See --help")
    return Problem(flag, MISSING, "not a flag of this command", fix)


def _add(word: str, line: CommandLine) -> None:
    """Add a well-formed word to the line in normal form; what is wrong with its value, to the problems."""
    key, value = key_of(word), word.partition("=")[2].strip()
    if not word.startswith("~") and not re.match(r"hydra[./]", key):
        is_option = key in GROUPS and not value.startswith("{")  # train={lr: 1} sets keys
        word = _option(key, value, line) if is_option else f"++{key}={os.path.expanduser(value)}"
        if not word:
            return
    try:
        swept = parse_word(word).is_sweep_override()
    except HydraException:
        text = value.replace("'", "\\'")
        line.problems.append(Problem(key, value, "not a plain value to Hydra", f"Quote it: \"{key}='{text}'\""))
        return
    if swept and not line.multirun:
        fix = f"train.py -m runs each. Or quote: \"{key}='{value}'\""
        line.problems.append(Problem(key, value, "several values for one run", fix))
        return
    line.words = [*(other for other in line.words if key_of(other) != key), word]


def _option(group: str, value: str, line: CommandLine) -> str:
    """The word that chooses an option; the nearest one stands for an option that does not exist, "" if none is near."""
    if re.search(r"[(\[]", value) or any(key_of(other) == "hydra.searchpath" for other in line.words):
        return f"{group}={value}"  # such as glob(*): Hydra finds the options
    known, chosen = options(group, line.config_dir), []
    for option in value.split(","):
        name = option.strip(" '\"")
        near = name if name in known else nearest(name, known)
        if near != name:
            fix = f"Did you mean {near}?" if near else ""
            fix = f"Write data=local data.root={name}" if group == "data" and "/" in name else fix
            line.problems.append(Problem(group, name, "must be one of " + ", ".join(known), fix))
        chosen.append(near or "")
    return f"{group}={','.join(chosen)}" if all(chosen) else ""
