"""The command line in one normal form, so that ``scale=1b``, ``+scale=1b`` and ``++scale=1b`` mean the same.

Hydra accepts either ``group=option`` or ``+group=option``, never both, and with a plus sign it accepts any misspelt
name. So a group loses its plus signs, and a key gets two, with which Hydra sets any key. Whether the key exists is
checked later, on the composed tree, where the nearest existing key is known.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, Sweep
from hydra.errors import HydraException

from dlr_pretrain.config.parse import KNOWN, is_fixed
from dlr_pretrain.config.problems import MISSING, Problem, nearest, no_home
from dlr_pretrain.config.secrets import HIDDEN, named_in, redact, variable
from dlr_pretrain.config.tree import GROUPS

WORD = re.compile(r"(?P<sign>\+\+|\+|~)?\s*(?P<key>[^=\s]+)\s*=\s*(?P<value>.*\S)\s*", re.DOTALL)
HYDRA_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir")
HYDRA_READ = ("hydra.mode", "hydra.searchpath", "hydra.sweeper", "hydra.launcher", "hydra.job.env_set")
SWITCHES = ("dlr", "probe", "profile")  # groups with the options on and off, which may be spelt as in SWITCH
SWITCH = dict.fromkeys(("on", "true", "yes", "1"), "on") | dict.fromkeys(("off", "false", "no", "0", "null"), "off")


@dataclass
class CommandLine:
    """A parsed command line: Hydra's own flags, the overrides in normal form, and the problems."""

    flags: list[str]
    words: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    config_name: str = "train"
    config_dir: str | None = None
    multirun: bool = False
    answers: bool = False  # help or completion: prints text and runs nothing
    shows: bool = False  # prints the configuration instead of running it

    @property
    def argv(self) -> list[str]:
        """The arguments for Hydra. Flags come first, because its parser refuses words on both sides of a flag."""
        return self.flags + self.words


def read(argv: list[str]) -> CommandLine:
    """Parse a command line and bring its words into normal form."""
    args, rest = get_args_parser().parse_known_args(argv)
    if args.shell_completion:
        return CommandLine(flags=argv, answers=True)
    strangers = [word for word in rest if word.startswith("-")]
    words = args.overrides + [word for word in rest if not word.startswith("-")]
    line = CommandLine(
        flags=[word for word in argv if word not in {*words, *strangers}],
        config_name=args.config_name or "train",
        config_dir=args.config_dir,
        multirun=args.multirun or "hydra.mode=MULTIRUN" in words,
        answers=args.help or args.hydra_help,
        shows=bool(args.cfg or args.info),
    )
    line.problems += [_secret(word) or _flag_problem(word) for word in strangers]
    line.problems += _conflicting_flags(args)
    line.problems += _malformed(words)
    for part in spread(words):
        if WORD.fullmatch(part) or part.startswith("~"):
            _admit(part, line)
    return line


def spread(words: Iterable[str]) -> list[str]:
    """Split mappings: ``train={lr: 1e-3, steps: 9}`` becomes ``train.lr=0.001`` and ``train.steps=9``.

    Words without a mapping, and mappings that hold a sweep, stay as they are.
    """
    return [part for word in words for part in _spread(word)]


def _spread(word: str) -> list[str]:
    found = WORD.fullmatch(word)
    if not found or found["sign"] == "~" or not found["value"].startswith("{"):
        return [word]
    try:
        value = parse_word(f"{found['key']}={found['value']}")._value  # Hydra's own value keeps the quotes
    except HydraException:
        return [word]
    return list(_leaves(found["key"], value)) if not _is_swept(value) else [word]


def _leaves(key: str, value: object) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield f"{key}={Override._get_value_element_as_str(value)}"


def _is_swept(value: object) -> bool:
    """Whether a parsed value is a sweep or contains one."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, Sweep) or any(map(_is_swept, inner))


def key_of(word: str) -> str:
    """The key of a word in normal form."""
    return word.lstrip("+~").split("=", 1)[0]


def value_of(word: str) -> str:
    """The value of a word in normal form, as it is written."""
    return word.partition("=")[2]


def parse_word(word: str) -> Override:
    """Parse a word by Hydra's grammar; raises HydraException if it does not fit."""
    return OverridesParser.create().parse_override(word)


def is_hydra(word: str) -> bool:
    """Whether a word concerns Hydra's own settings."""
    return re.match(r"[+~]*hydra[./]", word) is not None


def _conflicting_flags(args: Namespace) -> Iterator[Problem]:
    modes = {"--run": args.run, "--multirun": args.multirun, "--cfg": args.cfg, "--info": args.info}
    asked = [flag for flag, value in modes.items() if value]
    if len(asked) > 1:
        yield Problem(" ".join(asked), MISSING, "one command cannot do both", "Keep one")
    if args.resolve and not (args.cfg or args.help):
        yield Problem("--resolve", MISSING, "belongs to --cfg", "Add --cfg job")
    if args.config_path:
        fix = "Use --config-dir to add a folder of options and recipes"
        yield Problem("--config-path", MISSING, "the configuration tree cannot be replaced", fix)


def _flag_problem(word: str) -> Problem:
    name, _, value = word.lstrip("-").partition("=")
    meant = nearest(name, [*GROUPS, *KNOWN])
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


def _malformed(words: list[str]) -> list[Problem]:
    """The problems of words that are not key=value. Adjacent words share one: blanks around = are the usual cause."""
    runs: list[list[str]] = [[]]
    for word in words:
        if WORD.fullmatch(word) or word.startswith("~"):
            runs.append([])
        else:
            runs[-1].append(word)
    problems = []
    for run in filter(None, runs):
        joined = "".join(run)
        empty = re.fullmatch(r"[+]*(\S+?)\s*=\s*", joined)
        fix = f"Write {joined}" if len(run) > 1 and WORD.fullmatch(joined) else "Write key=value"
        fix = f"Write {empty[1]}=<value>" if empty else fix
        problems.append(_secret(joined) or Problem(" ".join(run), MISSING, "not of the form key=value", fix))
    return problems


def _admit(word: str, line: CommandLine) -> None:
    """Append ``word`` to the line's words in normal form, or append the problem that keeps it out."""
    if problem := _secret(word):
        line.problems.append(problem)
        return
    if is_hydra(word):
        if problem := _hydra_problem(word) or _grammar_problem(word, line.multirun):
            line.problems.append(problem)
        else:
            line.words.append(word)
        return
    if word.startswith("~"):
        _admit_deletion(word, line)
        return
    key, value = WORD.fullmatch(word).group("key", "value")
    if key not in GROUPS and "." not in key:
        meant = nearest(key, [*GROUPS, *KNOWN])
        if meant in GROUPS:
            line.problems.append(Problem(key, value, "no such key", f"Did you mean {meant}={value}?"))
            key = meant  # the rest of the command line is checked as if the group had been spelt so
    if key in SWITCHES:
        value = ",".join(SWITCH.get(option.strip().lower(), option) for option in value.split(","))
    word = f"{key}={value}" if key in GROUPS else f"++{key}={value}"
    if word == "experiment=null":
        word = "~experiment"
    if is_fixed(key):
        group = key.split(".", 1)[0]
        rule = "says what the option is, and its file sets it"
        line.problems.append(Problem(key, value, rule, f"Choose another option: {group}=<option>"))
    elif key in map(key_of, line.words):
        first = next(w for w in line.words if key_of(w) == key)
        line.problems.append(Problem(key, value, f"given twice, first as {first.lstrip('+')}", "Keep one"))
    elif problem := _grammar_problem(word, line.multirun):
        line.problems.append(problem)
    else:
        line.words.append(word)


def _hydra_problem(word: str) -> Problem | None:
    """The problem of a setting of Hydra's that a run ignores, such as its folders, logs, names and callbacks."""
    key, value = key_of(word), value_of(word)
    if key in HYDRA_FOLDERS:
        rule = "would be ignored: Hydra writes nothing, and a run makes its own directory"
        return Problem(key, value, rule, "Use run.dir=<folder>, or run.root=<folder of the runs>")
    if f"{key}.".replace("/", ".").startswith(tuple(f"{name}." for name in HYDRA_READ)):
        return None
    return Problem(key, value, "would be ignored", f"Of Hydra's own settings a run has {', '.join(HYDRA_READ)}")


def _admit_deletion(word: str, line: CommandLine) -> None:
    key = key_of(word)
    if key == "experiment":
        line.words.append("~experiment")
        return
    fix = f"Choose another option: {key}=<option>" if key in GROUPS else f"Set it instead: {key}=<value>"
    line.problems.append(Problem(word, MISSING, "a run needs every group and key", fix))


def _grammar_problem(word: str, multirun: bool) -> Problem | None:
    key, value = key_of(word), value_of(word)
    try:
        override = parse_word(word)
    except HydraException:
        text = value.replace("'", "\\'")
        return no_home(key, value) or Problem(key, value, "not a plain value to Hydra", f"Quote it: \"{key}='{text}'\"")
    several = override._value.list if isinstance(override._value, ChoiceSweep) else [override._value]
    if any(isinstance(each, dict) and (_is_swept(each) or len(several) > 1) for each in several):
        return Problem(key, value, "a sweep has plain values", f"Sweep over a key of it: {key}.<key>=<value>,<value>")
    if override.is_sweep_override() and not multirun:
        fix = f"train.py -m runs each. Or quote: \"{key}='{value}'\""
        return Problem(key, value, "several values for one run", fix)
    if override.is_sweep_override() and not override.is_discrete_sweep():
        return Problem(key, value, "an interval has no list of values", f"Write {key}=<value>,<value>")
    return None
