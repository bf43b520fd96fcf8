"""The arguments of the commands beside overrides: lists, numbers, and the nearest word for a flag that is unknown."""

import re
import sys
from argparse import Action, ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from dlr_pretrain.config.problems import MISSING, Problem, did_you_mean
from dlr_pretrain.config.tree import GROUPS, KEYS
from dlr_pretrain.util.secrets import redact

OVERRIDES = (*GROUPS, *KEYS)
PROMPT = "--prompt"  # may be empty: the model then begins a document


class Parser(ArgumentParser):
    """Parses a command's arguments. Its errors hide secrets and name the nearest flag, or override among ``keys``.

    An argument of type ``texts`` or ``integers`` takes several values: commas and spaces both separate them.
    """

    lists: tuple[str, ...] = ()  # flags of these arguments
    words: list[str]  # as typed

    def __init__(self, *about: Any, keys: Collection[str] = (), **settings: Any):
        super().__init__(*about, **settings | {"formatter_class": RawDescriptionHelpFormatter, "allow_abbrev": False})
        self.keys = keys

    @property
    def flags(self) -> list[str]:
        return re.findall(r"^ +(?:-\w, )?(--[\w-]+)", self.format_help(), re.MULTILINE)

    def add_argument(self, *names: str, **how: Any) -> Action:  # type: ignore[override]
        action = super().add_argument(*names, **how)
        self.lists += tuple(action.option_strings) if action.type in (texts, integers) else ()
        return action

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words: list[str] = []
        flag, self.words = "", [*(sys.argv[1:] if args is None else args)]
        for word in self.words:
            empty = word if re.fullmatch(r"--[\w-]+=", word) else "" if word.strip() else f"{flag} {word!r}".strip()
            if empty and not empty.startswith(PROMPT):  # an empty path would be the working directory
                self.error(f"{empty}: an empty value. Write one, or leave it out")
            if flag in self.lists and words[-1] != flag and not word.startswith("-") and "=" not in word:
                words[-1] += f",{word}"
                continue
            flag = word.partition("=")[0] if word.startswith("-") else "" if "=" in word else flag
            words.append(word)
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        stray = re.search(r"(?<=unrecognized arguments: )\S+", message)
        if stray and stray[0] in self.words:
            message = str(no_flag(self.words[self.words.index(stray[0]) :], self.flags, self.keys))
        super().error(redact(message))


def no_flag(words: Sequence[str], flags: Collection[str], keys: Collection[str]) -> Problem:
    """The problem of an unknown flag, the first of ``words``, with the nearest one of ``flags`` and ``keys``.

    The fix repeats the flag's value, and spells both as the command does: ``--gpus 8``, ``scale=tiny``.
    """
    name, equals, value = words[0].lstrip("-").partition("=")
    values = [value] if equals else [*takewhile(lambda word: not word.startswith("-") and "=" not in word, words[1:])]
    spelt = {flag.lstrip("-").replace("-", "_"): f"{flag} {''.join(values[:1])}".strip() for flag in flags}
    spelt |= {key: f"{key}={','.join(values)}" for key in keys if key not in spelt}
    fix = did_you_mean(name.replace("-", "_"), spelt, "See --help", spelt.get)
    return Problem(words[0], MISSING, "not a flag of this command", fix)


def texts(text: str) -> list[str]:
    """Converts a list such as ``cola,cola+dlr``."""
    return [word for word in map(str.strip, text.split(",")) if word]


def integers(text: str) -> list[int]:
    """Converts a list such as ``41,42``."""
    return [int(word) for word in texts(text)]


def at_least_1(text: str) -> int:
    """Converts an argument to a positive integer."""

    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return int(text)


def share(text: str) -> float:
    """Converts an argument to a number above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise ArgumentTypeError(f"{text!r}: must be a number above 0 and at most 1")
    return value
