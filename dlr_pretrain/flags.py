"""Checks of command-line flags that several scripts share and argparse lacks."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace


def at_least_1(text: str) -> int:
    """A whole number above 0, as the type of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return int(text)


def refuse(parser: ArgumentParser, given: Namespace, flags: tuple[str, ...], why: str) -> None:
    """End with the parser's error if one of ``flags`` was given, because it would be ignored silently."""
    for flag in flags:
        name = flag.removeprefix("--").replace("-", "_")
        if getattr(given, name) != parser.get_default(name):
            parser.error(f"{flag} {why}")
