"""From words to a checked ``Config``: Hydra composes, and every problem is reported at once."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dlr_pretrain.config.command_line import CommandLine, key_of, parse_word, typed
from dlr_pretrain.config.knobs import OPTIONS
from dlr_pretrain.config.parse import all_keys, flatten, parse
from dlr_pretrain.config.problems import MISSING, ConfigError, Problem
from dlr_pretrain.config.rules import unused, validate
from dlr_pretrain.config.tree import CONFIG_DIR, GROUPS, ROOT, SECTIONS, Choice, Config, Key, keys_of
from dlr_pretrain.config.written import run_name
from dlr_pretrain.util.errors import first_line

VERSION_BASE = "1.3"


def by_scale(values: Mapping, *, _root_: DictConfig) -> object:
    """The value for the chosen scale's name, else that of ``other``: ``"${by_scale:{1b: 200, other: 500}}"``, quoted.

    Raises ValueError if the scale is not listed and there is no ``other``.
    """
    name = _root_.scale.name
    if name not in values and "other" not in values:
        raise ValueError(f"no value for scale={name} (there are {', '.join(values)}): give one on the command line")
    return values[name] if name in values else values["other"]


def times(number: int, ratio: float) -> int:
    """A rounded share of a whole number: ``${times:${scale.rank},0.5}``."""
    return round(number * ratio)


def lost_rank(rank: int, hidden: int, intermediate: int, sparsity: float) -> int:
    """The largest rank at which LOST, sparse channels included, has no more parameters than plain layers of ``rank``.

    The rank is at least 1. A block's low-rank factors have 8 d + 3 (d + f) parameters per unit of rank; each of its
    seven projections adds k = max(1, int(sparsity * d_in)) dense columns.
    """
    d, f = hidden, intermediate
    columns = {width: max(1, int(sparsity * width)) for width in (d, f)}
    extra = 4 * columns[d] * d + 2 * columns[d] * f + columns[f] * d
    return max(1, rank - -(-extra // (8 * d + 3 * (d + f))))


def register() -> None:
    """Tell Hydra the defaults of all keys, as ``base_train`` and as ``base_<option>``, and the resolvers."""
    store = ConfigStore.instance()
    sections = {name: _defaults(section) for name, section in SECTIONS.items() if section is not Choice}
    store.store(name="base_train", node={name: found.default for name, found in ROOT.items()} | sections)
    for group, classes in OPTIONS.items():
        for option, section in classes.items():
            store.store(group=group, name=f"base_{option}", node={"name": option, **_defaults(section)})
    for resolver in (by_scale, times, lost_rank):
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)


def _defaults(section: type) -> dict[str, object]:
    return {name: found.default for name, found in keys_of(section)}


register()


def session() -> AbstractContextManager:
    """Hydra, ready to compose from ``configs/``."""
    return initialize_config_dir(str(CONFIG_DIR), version_base=VERSION_BASE)


def check(line: CommandLine, world_size: int | None, machine: bool = True) -> list[Config]:
    """The configurations that a command line asks for (several with ``-m``); raises ConfigError with all its problems.

    ``machine`` says whether the rules about this machine are checked, see ``validate``. What Hydra writes, logs and
    calls back plays no part here.
    """
    configs, problems = [], []
    search = [] if line.config_dir is None else [f"hydra.searchpath=[file://{os.path.abspath(line.config_dir)}]"]
    with session():
        for words in jobs(line.words):
            try:
                composed = compose(line.config_name, [*search, *words], return_hydra_config=True)
                configs.append(configure(composed, composed.hydra, line, world_size, machine))
            except ConfigError as error:
                problems += error.problems
            except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
                problems += [*line.problems, _composition_problem(error)]
    if problems:
        raise ConfigError(problems)
    folders = [cfg.run.dir for cfg in configs]
    if len(set(folders)) < len(folders) and not line.shows:
        shared = next(folder for folder in folders if folders.count(folder) > 1)
        raise ConfigError([Problem("run.dir", shared, "several jobs of this sweep would share the run directory")])
    return configs


def jobs(words: list[str]) -> Iterator[list[str]]:
    """The words of each job of a sweep, in the order in which Hydra runs the jobs; a single job if nothing is swept.

    Needs an open ``session``.
    """
    values = []
    for word in words:
        override = parse_word(word)
        override.config_loader = GlobalHydra.instance().config_loader()
        if override.is_sweep_override() and override.is_discrete_sweep():
            values.append([f"{word.split('=', 1)[0]}={value}" for value in override.sweep_string_iterator()])
        else:
            values.append([word])
    yield from map(list, itertools.product(*values))


def configure(
    composed: DictConfig, hydra: Any, line: CommandLine, world_size: int | None, machine: bool = True
) -> Config:
    """The checked ``Config`` of one composed run, with its directory.

    ``hydra`` is Hydra's own node of the composition: the chosen options, and the overrides of this run. Raises
    ConfigError with the problems of ``line`` and of all keys; if there are none, with those of the rules between keys.
    """
    words: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    given = set(typed(words))
    found: list[Problem] = []
    try:
        tree = _plain(composed)
        cfg = parse(tree, _declared(tree, hydra, words, line), given)
    except OmegaConfBaseException as error:
        found = [Problem(str(error.full_key), MISSING, first_line(error))]
    except ConfigError as error:
        found = error.problems
    if line.problems or found:
        raise ConfigError(line.problems + found)
    if cfg.run.dir is None:
        choices = {group: option for group, option in hydra.runtime.choices.items() if group in GROUPS}
        cfg.run.dir = str(Path(cfg.run.root, run_name(cfg, choices, default_choices(), given)))
    found = [] if line.shows else [*validate(cfg, world_size, machine), *unused(cfg, given)]
    if found:
        raise ConfigError(found)
    return cfg


@cache
def default_choices() -> dict[str, str]:
    """The default option of each group."""
    entries = [entry for entry in OmegaConf.load(CONFIG_DIR / "train.yaml").defaults if OmegaConf.is_dict(entry)]
    return {group: entry[group] for entry in entries for group in entry if group in GROUPS}


def _plain(composed: DictConfig) -> dict:
    """The composed tree as plain values, without Hydra's own."""
    own = OmegaConf.masked_copy(composed, [str(name) for name in composed if name != "hydra"])
    tree: Any = OmegaConf.to_container(own, resolve=True)
    return tree


def _declared(tree: dict, hydra: Any, words: list[str], line: CommandLine) -> dict[str, Key]:
    """The keys of a run. What a user's own option declares is what is there without the keys of the command line."""
    values = flatten(tree)
    if all(values.get(f"{group}.name") in known for group, known in OPTIONS.items()):
        return all_keys(tree)
    chosen = [word for word in words if key_of(word) in GROUPS]
    search = [word for word in hydra.overrides.hydra if key_of(word) == "hydra.searchpath"]
    base = compose(line.config_name, [*search, *chosen])
    return all_keys({group: OmegaConf.to_container(base[group], resolve=True) for group in OPTIONS})


def _composition_problem(error: Exception) -> Problem:
    text = " ".join(str(error if str(error) else error.__cause__).split()).partition(" Config search path:")[0]
    quoted = 'Quote "on" and "off" in defaults lists: YAML reads them as booleans'
    return Problem("configuration", MISSING, text.rstrip("."), quoted if "bool" in text else "")
