"""The command line in one normal form, so that ``scale=1b``, ``+scale=1b`` and ``++scale=1b`` mean the same.

Hydra accepts either ``group=option`` or ``+group=option``, never both, and with a plus sign it accepts any misspelt
name. So a group loses its plus signs, and a key gets two, with which Hydra sets any key. Whether the key exists is
checked later, on the composed tree, where the nearest existing key is known.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException

from dlr_pretrain.config.parse import flatten
from dlr_pretrain.config.problems import MISSING, Problem, nearest, no_home
from dlr_pretrain.config.secrets import HIDDEN, named_in, redact, variable
from dlr_pretrain.config.tree import CONFIG_DIR, GROUPS, KEYS

WORD = re.compile(r"(?P<sign>\+\+|\+|~)?\s*(?P<key>[^=\s]+)\s*=\s*(?P<value>.*\S)\s*", re.DOTALL)
SWITCHES = ("dlr", "probe", "profile")  # groups with the options on and off, which may be spelt as in SWITCH
SWITCH = dict.fromkeys(("on", "true", "yes", "1"), "on") | dict.fromkeys(("off", "false", "no", "0", "null"), "off")
# Hydra's flags
ALONE = ("--help -h", "--hydra-help", "--version", "--shell-completion -sc", "--multirun -m", "--run -r", "--resolve")
VALUED = ("--config-name -cn", "--config-dir -cd", "--config-path -cp", "--package -p", "--experimental-rerun",
          "--cfg -c")  # fmt: skip


@dataclass
class CommandLine:
    """A parsed command line: Hydra's own flags, the overrides in normal form, and the problems."""

    flags: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    config_name: str = "train"
    config_dir: str | None = None
    multirun: bool = False
    answers: bool = False  # prints the help and runs nothing
    shows: bool = False  # prints the configuration instead of running it
    certain: bool = True  # false: a word was left out whose meaning nobody can guess

    @property
    def argv(self) -> list[str]:
        """The arguments for Hydra. Flags come first, because its parser refuses words on both sides of a flag."""
        return self.flags + self.words


def read(argv: list[str]) -> CommandLine:
    """Parse a command line and bring its words into normal form. A later word replaces an earlier one of its key."""
    given, rest = _flags().parse_known_args(argv)
    strangers = [word for word in rest if word.startswith("-")]
    words = [word for word in rest if not word.startswith("-")]
    line = CommandLine(
        flags=[word for word in argv if word not in rest],
        config_name=given.config_name or "train",
        config_dir=given.config_dir,
        multirun=given.multirun or "hydra.mode=MULTIRUN" in words,
        answers=given.help,
        shows=bool(given.cfg or given.info),
    )
    if given.shell_completion:
        line.flags = argv
        return line
    if given.config_dir is not None and not Path(given.config_dir).is_dir():
        line.problems.append(Problem("--config-dir", given.config_dir, "no such folder"))
    line.problems += [_secret(word) or _flag_problem(word) for word in strangers]
    line.problems += _malformed(words)
    for word in words:
        if WORD.fullmatch(word) or word.startswith("~"):
            _admit(word, line)
    return line


def _flags() -> argparse.ArgumentParser:
    """A parser that knows Hydra's flags, and none of its own."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in ALONE:
        parser.add_argument(*names.split(), action="store_true")
    for names in VALUED:
        parser.add_argument(*names.split())
    parser.add_argument("--info", "-i", nargs="?", const="all")
    return parser


def parse_word(word: str) -> Override:
    """Parse a word by Hydra's grammar; raises HydraException if it does not fit."""
    return OverridesParser.create().parse_override(word)


def key_of(word: str) -> str:
    """The key of a word in normal form."""
    return word.lstrip("+~").split("=", 1)[0]


def typed(words: Sequence[str]) -> dict[str, Any]:
    """The values that well-formed words set, by dotted key: a mapping is split into its keys."""
    overrides = [override for override in map(parse_word, words) if not override.is_delete()]
    return flatten({override.key_or_group: override.value() for override in overrides})


def options(group: str, config_dir: str | None = None) -> list[str]:
    """The options of a group in ``configs/`` and in ``config_dir``; one in a subfolder is named by its path."""
    folders = [Path(folder, group) for folder in (CONFIG_DIR, config_dir) if folder is not None]
    files = [path.relative_to(folder) for folder in folders for path in sorted(folder.rglob("*.yaml"))]
    return [path.with_suffix("").as_posix() for path in dict.fromkeys(files)]


def _admit(word: str, line: CommandLine) -> None:
    """Append ``word`` to the line's words in normal form, or append the problem that keeps it out."""
    if problem := _secret(word):
        line.problems.append(problem)
        return
    found = WORD.fullmatch(word)
    if found and found["sign"] != "~" and not re.match(r"hydra[./]", found["key"]):
        word = _normal(found["key"], found["value"], line)
    if problem := _grammar_problem(word, line.multirun):
        line.problems.append(problem)
        return
    key = key_of(word)
    if key in GROUPS and word.startswith(key) and not (word := _with_options(word, line)):
        line.certain = False
        return
    line.words = [*(other for other in line.words if key_of(other) != key), word]


def _normal(key: str, value: str, line: CommandLine) -> str:
    """A word without or with its plus signs. A name that no group has is taken for the group that was meant."""
    if key not in GROUPS and "." not in key:
        meant = nearest(key, [*GROUPS, *KEYS])
        if meant in GROUPS:
            written, value = value, "jsonl" if meant == "logger" and SWITCH.get(value.lower()) == "off" else value
            line.problems.append(Problem(key, written, "no such key", f"Did you mean {meant}={value}?"))
            key = meant
    if key in SWITCHES:
        value = ",".join(SWITCH.get(option.strip().strip("'\"").lower(), option) for option in value.split(","))
    if key == "experiment" and value == "null":
        return "~experiment"
    option = key in GROUPS and not value.startswith("{")  # train={lr: 1} sets keys
    return f"{key}={value}" if option else f"++{key}={value}"


def _with_options(word: str, line: CommandLine) -> str:
    """``word`` with an option that does not exist replaced by the nearest one; empty if none is near."""
    override, group = parse_word(word), key_of(word)
    if any(key_of(other) == "hydra.searchpath" for other in line.words) or not _is_plain(override):
        return word  # Hydra finds the options
    known, chosen = options(group, line.config_dir), []
    for option in override.sweep_string_iterator() if override.is_sweep_override() else [override.value()]:
        name = str(option).strip("'\"")
        inside = [option for option in known if option.startswith(f"{name}/")]
        near = name if name in known else None if inside else nearest(name, known)
        if near != name:
            rule = "must be one of " + ", ".join(inside or _near_folder(name, known))
            line.problems.append(Problem(group, name, rule, f"Did you mean {near}?" if near else ""))
        if near is None:
            return ""
        chosen.append(near)
    return f"{group}={','.join(chosen)}"


def _is_plain(override: Override) -> bool:
    """Whether the options are given by name: neither a list nor a glob."""
    if override.is_sweep_override():
        return override.is_choice_sweep() and override.value_type != ValueType.GLOB_CHOICE_SWEEP
    return isinstance(override.value(), (str, int, float, bool))


def _near_folder(value: str, known: list[str]) -> list[str]:
    """The options in the folder that ``value`` lies in; if there are none, all others, each folder once."""
    folder = value.rpartition("/")[0]
    inside = [option for option in known if folder and option.startswith(f"{folder}/")]
    return inside or list(dict.fromkeys(re.sub("/.*", "/...", option) for option in known))


def _grammar_problem(word: str, multirun: bool) -> Problem | None:
    key, value = key_of(word), word.partition("=")[2]
    try:
        override = parse_word(word)
    except HydraException:
        text = value.replace("'", "\\'")
        return no_home(key, value) or Problem(key, value, "not a plain value to Hydra", f"Quote it: \"{key}='{text}'\"")
    if override.is_sweep_override() and not multirun:
        fix = f"train.py -m runs each. Or quote: \"{key}='{value}'\""
        return Problem(key, value, "several values for one run", fix)
    return None


def _flag_problem(word: str) -> Problem:
    name, _, value = word.lstrip("-").partition("=")
    meant = nearest(name, [*GROUPS, *KEYS])
    fix = f"Write {meant}={value or '<value>'}" if meant else "See --help"
    return Problem(word, MISSING, "not a flag of this command", fix)


def _secret(word: str) -> Problem | None:
    """The problem of a password or a token in a word: Hydra, the run's record and the console would show it."""
    key, _, value = word.partition("=")
    if name := named_in(word):
        rule = f"{name.rpartition('.')[2]} is a password or a token, and a command line is recorded and shown"
        return Problem(key, HIDDEN, rule, f"Set the environment variable {variable(name)} instead")
    if redact(word) != word:
        rule = "holds a password or a token, and a command line is recorded and shown"
        return Problem(key.lstrip("+"), redact(value), rule, "Use HF_TOKEN, WANDB_API_KEY or ~/.netrc")
    return None


def _malformed(words: list[str]) -> Iterator[Problem]:
    """The problems of words that are not key=value. Adjacent words share one: blanks around = are the usual cause."""
    runs: list[list[str]] = [[]]
    for word in words:
        if WORD.fullmatch(word) or word.startswith("~"):
            runs.append([])
        else:
            runs[-1].append(word)
    for run in filter(None, runs):
        joined = "".join(run)
        empty = re.fullmatch(r"[+]*(\S+?)\s*=\s*", joined)
        fix = f"Write {joined}" if len(run) > 1 and WORD.fullmatch(joined) else "Write key=value"
        fix = f"Write {empty[1]}=<value>" if empty else fix
        yield _secret(joined) or Problem(" ".join(run), MISSING, "not of the form key=value", fix)
