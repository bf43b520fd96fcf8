"""The grid of a fair comparison: every method at the same learning rates with the same seeds, as lines of a table.

A method is written ``backbone[+dlr][+option][:key=value...]``: ``cola``, ``cola+dlr``, ``lowrank+init_offset``,
``full+galore``, ``cola+dlr:dlr.alpha=0.5``; or as overrides alone, ``experiment=table1/galore``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from dlr_pretrain.analysis.tune import Design
from dlr_pretrain.config import MISSING, Config, ConfigError, Problem, flatten, to_dict
from dlr_pretrain.config.command_line import key_of, options, typed
from dlr_pretrain.launch.runs import Line

LISTS = {"pair": "cola,cola+dlr", "lr": "0.001,0.003,0.01", "seeds": "41,42,43", "confirm": "44,45,46"}
RESERVED = {"train.lr": "lr", "seed": "seeds", "run.dir": "run.root"}
# The keys that determine what a loss is measured on. Losses of methods that differ in one of them do not compare.
MEASURE = re.compile(
    r"eval\.(?!every).*|tokenizer\..*|train\.seq_len|scale\.vocab_size"
    r"|data\.(source|dataset|revision|root|train_files|validation_files|text_key|mask_documents)"
)


@dataclass(frozen=True)
class Grid:
    """A design with the overrides of each method, and those that all methods share."""

    design: Design
    words: dict[str, tuple[str, ...]]
    shared: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the results. It does not depend on rates and seeds, so that a grid can be widened."""
        text = "\n".join([*(f"{method}: {words}" for method, words in self.words.items()), *sorted(self.shared)])
        shown = re.sub(r"[^\w+-]+", "_", "-".join(self.design.methods))[:60]
        return f"{shown}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def line(self, method: str, lr: float, seed: int) -> Line:
        """The overrides of one run. One of the method replaces a shared one with the same key."""
        own = self.words[method]
        shared = (word for word in self.shared if key_of(word) not in map(key_of, own))
        return Line(f"{method} lr={lr:g} seed={seed}", (*shared, *own, f"train.lr={lr!r}", f"seed={seed}"))

    def cells(self) -> list[tuple[str, float, int]]:
        """(method, rate, seed) of the grid, method by method."""
        d = self.design
        return [(method, lr, seed) for method in d.methods for lr in d.rates for seed in d.seeds]


def read_grid(words: Sequence[str]) -> Grid:
    """The grid that a command line asks for; raises ConfigError."""
    given: dict[str, str] = {}
    shared = []
    for word in words:
        key, _, value = word.partition("=")
        if key in LISTS:
            given[key] = value
        else:
            shared.append(word)
    methods = {written: _method(written) for written in _items(given, "pair", str)}
    rates, seeds, fresh = sorted(_items(given, "lr", float)), _items(given, "seeds", int), _items(given, "confirm", int)
    if both := set(seeds) & set(fresh):
        rule = f"the rates are chosen with seed {min(both)}"
        _refuse("confirm", given["confirm"], rule, "Give seeds that are not among seeds=")
    for word in [*shared, *(word for own in methods.values() for word in own)]:
        for key in RESERVED.keys() & typed([word]).keys():
            rule = "is the grid's, and the same for all methods"
            _refuse(key, word.partition("=")[2], rule, f"Write {RESERVED[key]}=<value>,<value>")
    for word in shared:
        if all(key_of(word) in map(key_of, own) for own in methods.values()):
            rule = f"does nothing: every method of pair= has its own {key_of(word)}"
            _refuse(key_of(word), word.partition("=")[2], rule, "Leave it out")
    return Grid(Design(tuple(methods), tuple(rates), tuple(seeds), tuple(fresh)), methods, tuple(shared))


def require_comparable(methods: dict[str, Config]) -> None:
    """Raises ConfigError if the methods' losses are not measured on the same text with the same tokenizer."""
    first, *others = methods
    trees = {method: flatten(to_dict(cfg)) for method, cfg in methods.items()}
    for other in others:
        for name, value in trees[first].items():
            if MEASURE.fullmatch(name) and trees[other].get(name) != value:
                rule = f"of {other} is not that of {first}, {value}: their losses do not compare"
                _refuse(name, trees[other].get(name), rule, "Give it for all methods")


def _method(written: str) -> tuple[str, ...]:
    """The overrides of a method from its notation. Whether its options exist is checked with the runs."""
    name, *words = written.split(":")
    if "=" in name:
        return (name, *words)
    backbone, *added = name.split("+")
    optimizers = options("optimizer")
    chosen: dict[str, str] = {}
    for option in added:
        group = "optimizer" if option in optimizers else "dlr"
        if group in chosen:
            _refuse("pair", written, f"{chosen[group]} and {option} are both a choice of {group}", "Keep one")
        chosen[group] = "on" if option == "dlr" else option
    return (*(f"{group}={option}" for group, option in ({"backbone": backbone, "dlr": "off"} | chosen).items()), *words)


def _items(given: dict[str, str], name: str, kind: Callable) -> list:
    """The items of a list, each once: methods, rates above 0, or seeds from 0 on."""
    if not given.get(name) and (name != "confirm" or name in given):
        _refuse(name, given.get(name, MISSING), "needs a list", f"Write for instance {name}={LISTS[name]}")
    found: list = []
    for text in filter(None, (item.strip() for item in given.get(name, "").split(","))):
        try:
            item = kind(text)
        except ValueError:
            item = -1
        if kind is not str and not (0 < item < float("inf") or (kind is int and item == 0)):
            what = "a whole number from 0 on" if kind is int else "a learning rate above 0"
            _refuse(name, given[name], f"{text!r} is not {what}")
        if item in found:
            _refuse(name, given[name], f"{text} is given twice", "Leave one of them out")
        found.append(item)
    return found


def _refuse(key: str, value: object, rule: str, fix: str = "") -> NoReturn:
    raise ConfigError([Problem(key, value, rule, fix)])
