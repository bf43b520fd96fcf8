"""The grid of a fair comparison: every method at the same learning rates with the same seeds, as lines of a table.

A method is written ``backbone[+dlr][+option][:key=value...]``: ``cola``, ``cola+dlr``, ``lowrank+init_offset``,
``full+galore``, ``cola+dlr:dlr.alpha=0.5``; or as words alone, ``experiment=table1/cola_dlr``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlr_pretrain.analysis.tuning import Design
from dlr_pretrain.config import CONFIG_DIR, MISSING, Config, ConfigError, Problem, did_you_mean, flatten, to_dict
from dlr_pretrain.config.arguments import key_of, spread
from dlr_pretrain.launch.runs import Line, PlannedRun

LISTS = ("pair", "lr", "seeds", "confirm")
RESERVED = {"train.lr": "lr=", "scale.lr": "lr=", "lr": "lr=", "seed": "seeds=", "seeds": "seeds=",
            "run.dir": "run.root="}  # fmt: skip
# The keys that determine what a loss is measured on. Losses of methods that differ in one of them do not compare.
MEASURE = re.compile(
    r"eval\.(?!every).*|tokenizer\..*|train\.seq_len|scale\.vocab_size"
    r"|data\.(source|dataset|revision|root|validation_files|text_key|mask_documents)"
)


@dataclass(frozen=True)
class Grid:
    """A design with the words (overrides) of each method, and the words that all methods share."""

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
        """The words of one run. A word of the method replaces a shared word with the same key."""
        own = self.words[method]
        shared = (word for word in self.shared if key_of(word) not in _keys(own))
        return Line(f"{method} lr={lr:g} seed={seed}", (*shared, *own, f"train.lr={lr!r}", f"seed={seed}"))

    def cells(self) -> list[tuple[str, float, int]]:
        """(method, rate, seed) of the grid, method by method."""
        d = self.design
        return [(method, lr, seed) for method in d.methods for lr in d.rates for seed in d.seeds]


def read_grid(words: Sequence[str], config_dir: str | None = None) -> Grid:
    """The grid that a command line asks for. Raises one ConfigError with all problems of the grid."""
    lists: dict[str, str] = {}
    shared, problems = [], []
    for word in spread(words):
        key, _, value = word.lstrip("+").partition("=")
        if key not in LISTS:
            shared.append(word)
        elif key in lists:
            problems.append(Problem(key, value, f"{key}={lists[key]} is there already", "Write one list"))
        else:
            lists[key] = value
    problems += [_reserved(word) for word in shared if key_of(word) in RESERVED]
    for name, fix in (("pair", "cola,cola+dlr"), ("lr", "0.001,0.003,0.01"), ("seeds", "41,42,43")):
        if name not in lists:
            problems.append(Problem(name, MISSING, "is needed", f"Write for instance {name}={fix}"))
    problems += [Problem(name, "", "is an empty list", "Leave it out, or fill it") for name in lists if not lists[name]]
    methods: dict[str, tuple[str, ...]] = {}
    before = ""
    for written in _items(lists.get("pair", ""), "pair", problems):
        methods[written] = _method(written, before, config_dir, problems)
        before = written
    everyones = set.intersection(*map(_keys, methods.values())) if methods else set()
    problems += [_overridden(word) for word in shared if key_of(word) in everyones]
    rates = sorted(_numbers(lists.get("lr", ""), "lr", float, problems))
    seeds, fresh = (_numbers(lists.get(name, ""), name, int, problems) for name in ("seeds", "confirm"))
    if both := sorted(set(seeds) & set(fresh)):
        rule = f"the rates are chosen with seed {both[0]}"
        problems.append(Problem("confirm", lists["confirm"], rule, "Give seeds that are not among seeds="))
    if problems:
        raise ConfigError(problems)
    design = Design(tuple(methods), tuple(rates), tuple(seeds), tuple(fresh))
    flags = ("--config-dir", config_dir) if config_dir else ()
    return Grid(design, methods, (*flags, *shared))


def require_comparable(methods: dict[str, Config]) -> None:
    """Raises ConfigError if the methods' losses are not measured on the same text with the same tokenizer."""
    first, *others = methods
    measure = {name: value for name, value in flatten(to_dict(methods[first])).items() if MEASURE.fullmatch(name)}
    problems = []
    for other in others:
        values = flatten(to_dict(methods[other]))
        problems += [
            Problem(name, values.get(name), f"of {other} is not that of {first}, {value}: their losses do not compare",
                    "Give it for all methods")
            for name, value in measure.items()
            if values.get(name) != value
        ]  # fmt: skip
    if problems:
        raise ConfigError(problems)


def budgets(runs: dict[str, PlannedRun]) -> dict[str, dict[str, int]]:
    """Steps and tokens (positions) of each method's run."""
    return {
        method: {"steps": run.cfg.train.steps, "tokens": run.cfg.train.steps * run.positions}
        for method, run in runs.items()
    }


def _method(written: str, before: str, config_dir: str | None, problems: list[Problem]) -> tuple[str, ...]:
    """The words of a method from its notation; ``before`` is the method written before it. Adds to ``problems``."""
    name, *words = written.split(":")
    if "=" in name:
        words = [name, *words]
    else:
        backbone, *options = name.split("+")
        known = {group: _options(group, config_dir) for group in ("backbone", "dlr", "optimizer")}
        if backbone not in known["backbone"]:
            problems.append(_unknown(written, backbone, "backbone", known["backbone"]))
            if "=" in before:
                rule = "a comma ends a method, and a value with one is not possible here"
                fix = "If it is one, give its key to all methods, beside pair="
                problems.append(Problem("pair", f"{before},{written}", rule, fix))
        chosen: dict[str, str] = {}
        for option in options:
            group = "optimizer" if option in known["optimizer"] else "dlr"
            if option not in known[group] and option != "dlr":
                either = known["dlr"] | known["optimizer"]
                problems.append(_unknown(written, option, "choice of dlr or optimizer", either))
            elif group in chosen:
                rule = f"{chosen[group]} and {option} are both a choice of {group}"
                problems.append(Problem("pair", written, rule, "Keep one"))
            chosen[group] = option
        chosen = {"backbone": backbone, "dlr": "off"} | chosen
        words = [*(f"{group}={'on' if option == 'dlr' else option}" for group, option in chosen.items()), *words]
    problems += [_reserved(word) for word in words if key_of(word) in RESERVED]
    return tuple(words)


def _options(group: str, config_dir: str | None) -> set[str]:
    roots = [CONFIG_DIR, *([Path(config_dir)] if config_dir else [])]
    return {path.stem for root in roots for path in (root / group).glob("*.yaml")}


def _unknown(written: str, name: str, what: str, known: set[str]) -> Problem:
    return Problem("pair", written, f"{name} is no {what}", did_you_mean(name, known, f"Choose {', '.join(known)}"))


def _reserved(word: str) -> Problem:
    key, _, value = word.lstrip("+~").partition("=")
    return Problem(key, value, "is the grid's, and the same for all methods", f"Write {RESERVED[key]}<value>,<value>")


def _overridden(word: str) -> Problem:
    key, _, value = word.lstrip("+~").partition("=")
    return Problem(key, value, f"does nothing: every method of pair= has its own {key}", "Leave it out")


def _items(text: str, name: str, problems: list[Problem]) -> list[str]:
    items = [item.strip() for item in text.split(",")] if text else []
    if twice := {item for item in items if items.count(item) > 1}:
        problems.append(Problem(name, text, f"{twice.pop()} is given twice", "Leave one of them out"))
    return items


def _numbers(text: str, name: str, kind: type, problems: list[Problem]) -> list:
    """The numbers of a list, each once: rates above 0, or whole seeds from 0 on. Adds to ``problems``."""
    found = []
    for item in _items(text, name, problems):
        try:
            number = kind(item)
        except ValueError:
            number = -1
        if not (0 < number < float("inf") or (kind is int and number == 0)):
            rule = f"{item!r} is not a {'whole number from 0 on' if kind is int else 'learning rate above 0'}"
            problems.append(Problem(name, text, rule))
        elif number in found:
            problems.append(Problem(name, text, f"{item} is there already", "Leave one of them out"))
        else:
            found.append(number)
    return found


def _keys(words: Sequence[str]) -> set[str]:
    return set(map(key_of, words))
