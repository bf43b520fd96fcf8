"""Turns words into a checked ``Config``. Hydra composes; problems that it reports one by one are reported together."""

from __future__ import annotations

import itertools
import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

from hydra import compose, version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from dlr_pretrain.config import resolvers
from dlr_pretrain.config.arguments import CommandLine, is_hydra, key_of, parse_word, value_of
from dlr_pretrain.config.identity import identity, run_name, to_dict
from dlr_pretrain.config.parse import flatten, parse
from dlr_pretrain.config.problems import MISSING, ConfigError, Problem, nearest
from dlr_pretrain.config.rules import unused, validate
from dlr_pretrain.config.tree import CONFIG_DIR, GROUPS, OPEN_GROUPS, Config
from dlr_pretrain.util.errors import first_line

VERSION_BASE = "1.3"
resolvers.register()
OmegaConf.register_new_resolver("overview", lambda: "", replace=True)  # used by configs/hydra/help: see answer_help


@contextmanager
def session(config_dir: str | None = None) -> Iterator[None]:
    """Make Hydra ready to compose from ``configs/`` and, as ``--config-dir`` does, from the user's ``config_dir``."""
    path = create_config_search_path(str(CONFIG_DIR))
    if config_dir is not None:
        if not os.path.isdir(config_dir):
            raise ConfigError([Problem("--config-dir", config_dir, "no such folder")])
        own = f"file://{os.path.abspath(config_dir)}"
        path.prepend(provider="command-line", path=own, anchor=SearchPathQuery(provider="schema"))
    version.setbase(VERSION_BASE)
    Hydra.create_main_hydra2(task_name="train", config_search_path=path)
    try:
        yield
    finally:
        GlobalHydra.instance().clear()


def check(line: CommandLine, world_size: int | None, machine: bool = True) -> list[Config]:
    """The configurations that a command line asks for (several with ``-m``); raises ConfigError with all its problems.

    ``machine`` says whether the rules about this machine are checked, see ``validate``.
    """
    with session(line.config_dir):
        problems, configs = list(line.problems), []
        for words in jobs(line.words):
            cfg, found = _check_job(words, line, world_size, machine)
            problems += found
            configs.append(cfg)
    if problems:
        raise ConfigError(problems)
    folders = [cfg.run.dir for cfg in configs]
    if len(set(folders)) < len(folders) and not line.shows:
        shared = next(folder for folder in folders if folders.count(folder) > 1)
        raise ConfigError([Problem("run.dir", shared, "several jobs of this sweep would share the run directory")])
    return configs


def configure(composed: DictConfig, hydra: DictConfig) -> tuple[Config | None, list[Problem]]:
    """Build the ``Config`` of one composed run, run directory included, and collect the problems of its single keys.

    ``hydra`` is Hydra's own node of the composition, which holds the chosen options. These options are composed again
    without the run's other overrides, to find the keys that they declare and the keys that the run changes.
    """
    choices = {group: option for group, option in hydra.runtime.choices.items() if group in GROUPS}
    chosen = [f"{group}={option}" for group, option in choices.items() if option and group != "experiment"]
    bare = _plain(_compose(hydra.job.config_name, [*chosen, *hydra.overrides.hydra]))
    problems: list[Problem] = []
    cfg, found = parse(_plain(composed, problems), {group: bare.get(group) or {} for group in OPEN_GROUPS})
    broken = {problem.key for problem in problems}
    problems += [problem for problem in found if problem.key not in broken]
    if problems:
        return None, problems
    if cfg.run.dir is None:
        plain = flatten(bare)
        plain["data.streams"] = cfg.usual_streams
        changed = {name: value for name, value in identity(cfg).items() if plain.get(name, MISSING) != value}
        cfg.run.dir = str(Path(cfg.run.root, run_name(choices, default_choices(), cfg.seed, changed)))
    return cfg, []


def default_choices() -> dict[str, str]:
    """The default option of each group."""
    entries = [entry for entry in OmegaConf.load(CONFIG_DIR / "train.yaml").defaults if OmegaConf.is_dict(entry)]
    return {group: entry[group] for entry in entries for group in entry if group in GROUPS}


def _check_job(
    words: list[str], line: CommandLine, world_size: int | None, machine: bool
) -> tuple[Config | None, list[Problem]]:
    words, problems, certain = _checked_options(words, line.config_name)
    cfg, found = build(line.config_name, words)
    problems += found
    wrong = {problem.key for problem in found}
    if cfg is None:  # without the refused words, so that the rules below can check the rest
        words = [word for word in words if key_of(word) not in wrong]
        cfg, _ = build(line.config_name, words)
    if cfg is not None and certain and not line.shows:
        doubtful = set().union(*map(_keys_named, problems + line.problems))
        broken = validate(cfg, world_size, machine) + unused(cfg, {key_of(word) for word in words})
        problems += [problem for problem in broken if not doubtful & _keys_named(problem)]
    return cfg, problems


def _keys_named(problem: Problem) -> set[str]:
    return set(re.findall(r"[a-z_]+\.[a-z_]+", str(problem)))


def build(config_name: str, words: Sequence[str]) -> tuple[Config | None, list[Problem]]:
    """``configure`` for words in normal form, in an open session. The rules that span several keys are not checked."""
    try:
        composed = _compose(config_name, words)
        hydra = composed.pop("hydra")
        return configure(composed, hydra)
    except ConfigError as error:
        return None, error.problems


def recorded(tree: dict) -> Config:
    """The configuration that a run has written, in the form of today's code.

    A key that is newer than the run gets its option's default, because what it controls did not exist then. Raises
    ConfigError if today's code does not know one of the run's keys.
    """
    cfg, problems = parse(tree, {group: tree[group] for group in OPEN_GROUPS})
    if cfg is None:
        with session():
            plain, problems = build("train", [f"{group}={tree[group]['name']}" for group in ("scale", *OPEN_GROUPS)])
    if cfg is None and plain is not None:
        whole = to_dict(plain)
        for name, value in tree.items():
            whole[name] = whole.get(name, {}) | value if isinstance(value, dict) else value
        cfg, problems = parse(whole, {group: whole[group] for group in OPEN_GROUPS})
    if cfg is None:
        raise ConfigError(problems)
    return cfg


def _compose(config_name: str, words: Sequence[str]) -> DictConfig:
    try:
        composed = compose(config_name, list(words), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        text = " ".join(str(error if str(error) else error.__cause__).split()).partition(" Config search path:")[0]
        quoted = 'Quote "on" and "off" in defaults lists: YAML reads them as booleans'
        fix = quoted if "bool" in text else ""
        raise ConfigError([Problem("configuration", MISSING, text.rstrip("."), fix)]) from error
    OmegaConf.set_struct(composed, False)
    return composed


def _plain(node: DictConfig, problems: list[Problem] | None = None, prefix: str = "") -> dict:
    """The composed tree as plain values. A value that cannot be resolved becomes None.

    ``problems``, if given, gets a problem for each such value.
    """
    tree = {}
    for name in node:
        if not prefix and name == "hydra":
            continue
        problem, value = None, None
        try:
            value = node[name]
        except MissingMandatoryValue:
            problem = Problem(f"{prefix}{name}", MISSING, "needs a value", f"Set {prefix}{name}=<value>")
        except OmegaConfBaseException as error:
            written = OmegaConf.to_container(node, resolve=False)[name]
            problem = Problem(f"{prefix}{name}", written, first_line(error))
        if problem and problems is not None:
            problems.append(problem)
        if OmegaConf.is_dict(value):
            value = _plain(value, problems, f"{prefix}{name}.")
        tree[str(name)] = OmegaConf.to_container(value) if OmegaConf.is_list(value) else value
    return tree


def jobs(words: list[str]) -> Iterator[list[str]]:
    """The words of each job of a sweep, in the order in which Hydra runs the jobs; a single job if nothing is swept."""
    values = []
    for word in words:
        override = parse_word(word)
        override.config_loader = GlobalHydra.instance().config_loader()
        if override.is_sweep_override():
            values.append([f"{word.split('=', 1)[0]}={value}" for value in override.sweep_string_iterator()])
        else:
            values.append([word])
    yield from map(list, itertools.product(*values))


def _checked_options(words: list[str], config_name: str) -> tuple[list[str], list[Problem], bool]:
    """Replace each option that does not exist by the nearest one, or drop its word if none is near.

    Returns the words, a problem for each such option, and whether no word was dropped. If one was dropped, the rules
    that span keys cannot be checked.
    """
    kept, problems, certain = [], [], True
    search = [word for word in words if is_hydra(word)]
    for word in words:
        group = key_of(word)
        if group not in GROUPS or word.startswith("~"):
            kept.append(word)
            continue
        value = parse_word(word).value()
        if not search and _exists(group, value):
            kept.append(word)
            continue
        options = _options(group, config_name, search)
        if not isinstance(value, bool) and str(value) in options:
            kept.append(word)
            continue
        near = nearest(str(value), options)
        rule = "must be one of " + ", ".join(_near_folder(str(value), options))
        problems.append(Problem(group, value_of(word), rule, f"Did you mean {near}?" if near else ""))
        certain = certain and near is not None
        if near:
            kept.append(f"{group}={near}")
    return kept, problems, certain


def _exists(group: str, option: object) -> bool:
    """Whether an option certainly exists; False if that is not sure. Many times faster than listing all options."""
    plain = isinstance(option, str) and re.fullmatch(r"[\w-]+(/[\w-]+)*", option)  # excludes .. and .yaml
    return bool(plain) and GlobalHydra.instance().config_loader().repository.config_exists(f"{group}/{option}")


def _near_folder(value: str, options: list[str]) -> list[str]:
    """The options in the folder that ``value`` names or lies in; if there are none, all others, each folder once."""
    folder = value.rpartition("/")[0] or value
    inside = [option for option in options if option.startswith(f"{folder}/")]
    return inside or list(dict.fromkeys(re.sub("/.*", "/...", option) for option in options))


def answer_help() -> None:
    """Make ``${overview:}`` return the overview. Only help does so, because Hydra evaluates it in every composition."""
    OmegaConf.register_new_resolver("overview", cache(overview), replace=True)


def overview(width: int = 80) -> str:
    """The groups with their options; a folder of options is shown with their number. Needs an open session of Hydra."""
    lines = []
    usual = default_choices()
    for group in sorted(GROUPS):
        options = [f"{o}*" if o == usual.get(group) else o for o in _options(group, "train", [])]
        options.sort(key=_size)
        folders = Counter(option.partition("/")[0] for option in options if "/" in option)
        shown = [option for option in options if "/" not in option] + [f"{f}/ ({n})" for f, n in folders.items()]
        entries = (entry.replace(" ", "\0") for entry in shown)  # keep a folder and its number on one line
        line = textwrap.fill(f"{group}: " + ", ".join(entries), width, subsequent_indent="  ")
        lines.append(line.replace("\0", " "))
    return "\n".join(lines)


def _size(option: str) -> float:
    """A sort key: the millions of parameters of a scale such as 60m or 1b. Other options get 0 and keep their order."""
    found = re.fullmatch(r"(\d+)([mb])\*?", option)
    return float(found[1]) * {"m": 1, "b": 1000}[found[2]] if found else 0.0


def _options(group: str, config_name: str, search: list[str]) -> list[str]:
    """The options of a group on Hydra's whole search path; an option in a subfolder is named by its path."""
    list_of = partial(GlobalHydra.instance().config_loader().get_group_options, group)
    folders = list_of(ObjectType.GROUP, config_name, search)
    inside = [
        f"{folder}/{option}" for folder in folders for option in _options(f"{group}/{folder}", config_name, search)
    ]
    return list_of(ObjectType.CONFIG, config_name, search) + inside
