"""Turns a command line into checked configurations: Hydra composes, and all problems are reported at once.

``scale=1b``, ``+scale=1b`` and ``++scale=1b`` mean the same. Hydra accepts either ``group=option`` or
``+group=option``, but not both, and accepts any misspelt name after a plus sign. So a group loses its plus signs, and a
key gets two, which let Hydra set any key. The composed tree then shows whether the key exists, or which key is nearest.
"""

import argparse
import copy
import glob
import itertools
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dlr_pretrain.config.arguments import OVERRIDES, no_flag
from dlr_pretrain.config.identity import identity, run_folder
from dlr_pretrain.config.key import is_value, keys_of
from dlr_pretrain.config.problems import MISSING, ConfigError, Problem, did_you_mean, nearest
from dlr_pretrain.config.rules import unused, validate
from dlr_pretrain.config.run_folder import read_config
from dlr_pretrain.config.shape import FROM, OURS, name_of, read_shape
from dlr_pretrain.config.tree import CONFIG_DIR, GROUPS, OPEN_GROUPS, ROOT, SECTIONS, Config, entry_keys
from dlr_pretrain.config.values import flatten, merged, parse, to_dict
from dlr_pretrain.util.errors import first_line

VERSION_BASE = "1.3"


@dataclass
class CommandLine:
    """A parsed command line: Hydra's own flags, the overrides in normal form, and the problems."""

    flags: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    config_name: str = "train"
    config_dir: str | None = None
    multirun: bool = False
    shows: bool = False  # print the configuration instead of running it
    helps: bool = False  # print help, or the version

    @property
    def is_plain(self) -> bool:
        """Whether this is one run that asks nothing of Hydra but the configuration."""
        return not (self.flags or self.multirun or any(_is_hydras(key_of(word)) for word in self.words))


def read(argv: list[str], flags: Collection[str] = ()) -> CommandLine:
    """Parse a command line and normalise its words. A later word replaces an earlier word for the same key.

    ``flags`` are those that a command has beside Hydra's, for the fix of an unknown one. Raises ConfigError if the
    folder given by ``--config-dir`` does not exist. All other problems are in the result.
    """
    given, rest = _flags().parse_known_args(argv)
    line = CommandLine(
        flags=[word for word in argv if word not in rest],
        config_name=given.config_name or "train",
        config_dir=given.config_dir,
        multirun=given.multirun or "hydra.mode=MULTIRUN" in rest,
        shows=bool(given.cfg or given.info),
        helps=given.help or given.hydra_help or given.version or given.shell_completion,
    )
    if given.shell_completion:
        line.flags = argv
        return line
    if given.config_dir is not None and not Path(given.config_dir).is_dir():
        raise ConfigError([Problem("--config-dir", given.config_dir, "no such folder")])
    loose = []
    for i, word in enumerate(rest):
        if word.startswith("-"):
            line.problems.append(no_flag(rest[i:], flags, OVERRIDES))
        elif len(word.splitlines()) > 1:
            line.problems.append(Problem(key_of(word), repr(word.partition("=")[2]), "contains a line break"))
        elif word.startswith("~") or ("=" in word and key_of(word)):
            _add(word, line)
        elif i == 0 or not rest[i - 1].startswith("-"):  # else it is the flag's value
            loose.append(word)
    if loose:
        rule, fix = "not of the form key=value", "Write key=value, without spaces around ="
        line.problems.append(Problem(" ".join(loose), MISSING, rule, fix))
    return line


def _flags() -> argparse.ArgumentParser:
    """Hydra's flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in ("--help -h", "--hydra-help", "--version", "--shell-completion -sc", "--multirun -m", "--resolve"):
        parser.add_argument(*names.split(), action="store_true")
    for names in ("--config-name -cn", "--config-dir -cd", "--package -p", "--cfg -c"):
        parser.add_argument(*names.split())
    parser.add_argument("--info", "-i", nargs="?", const="all")
    return parser


@cache
def parse_word(word: str) -> Override:
    """Parse a word by Hydra's grammar. Raises HydraException if this fails."""
    return OverridesParser.create().parse_override(word)


def key_of(word: str) -> str:
    return word.lstrip("+~").split("=", 1)[0].strip()


def _is_hydras(key: str) -> bool:
    return re.match(r"hydra[./]", key) is not None


def typed(words: Sequence[str]) -> dict[str, Any]:
    """The values that well-formed words set, by dotted key; a mapping sets several keys."""
    values: dict[str, Any] = {}
    for override in map(parse_word, words):
        values |= {} if override.is_delete() else flatten({override.key_or_group: override.value()})
    return values


def options(group: str, config_dir: str | None = None) -> list[str]:
    """The options of a group in ``configs/`` and in ``config_dir``, named by their paths."""
    folders = [Path(folder, group) for folder in (CONFIG_DIR, config_dir) if folder is not None]
    files = [path.relative_to(folder) for folder in folders for path in sorted(folder.rglob("*.yaml"))]
    return [path.with_suffix("").as_posix() for path in dict.fromkeys(files)]


def _add(word: str, line: CommandLine) -> None:
    """Normalise a well-formed word and add it to the line, or add the problem of its value."""
    key, value = key_of(word), word.partition("=")[2].strip()
    if not word.startswith("~") and not _is_hydras(key):
        is_option = key in GROUPS and not value.startswith("{")  # train={lr: 1} sets keys
        text = "'~'" if value == "~" else os.path.expanduser(value)  # Hydra's grammar does not allow a bare ~
        word = _option(key, value, line) if is_option else f"++{key}={text}"
        if not word:
            return
    try:
        override = parse_word(word)
    except HydraException:
        line.problems.append(_unreadable(key, value))
        return
    if override.package:
        fix = f"Write {override.key_or_group}={value}"
        line.problems.append(Problem(key, value, "an option cannot stand elsewhere in the configuration", fix))
        return
    if override.is_sweep_override() and not line.multirun:
        fix = f"Run each value with train.py -m. Or quote: \"{key}='{value}'\""
        line.problems.append(Problem(key, value, "several values for one run", fix))
        return
    merges = "={" in word  # a mapping such as train={lr: 1} adds to earlier words
    line.words = [*(other for other in line.words if merges or "={" in other or key_of(other) != key), word]


def _unreadable(key: str, value: str) -> Problem:
    """What Hydra cannot parse in ``key=value``: the key, or else the value."""
    try:
        parse_word(f"{key}=1")
    except HydraException:
        fix = "A key is words joined by dots, such as train.lr; each begins with a letter"
        return Problem(key, value, "not a key to Hydra", fix)
    text = value.replace("'", "\\'")
    fix = f"Quote it: \"{key}='{text}'\""
    if value[:1] in ("{", "["):
        fix = "Quote the text inside it, as in {root: '~/text'}"
    return Problem(key, value, "not a plain value to Hydra", fix)


def _option(group: str, value: str, line: CommandLine) -> str:
    """The word that chooses an option. The nearest option replaces one that does not exist; "" if none is near."""
    if "(" in value or any(key_of(other) == "hydra.searchpath" for other in line.words):
        return f"{group}={value}"  # Hydra finds the options, such as for glob(*)
    known, chosen = options(group, line.config_dir), []
    for option in value.split(","):
        name = option.strip(" '\"")
        if name not in known:
            fix = did_you_mean(name, known, written=f"{group}={{}}".format)
            fix = f"Write data=local data.root={name}" if group == "data" and "/" in name else fix
            line.problems.append(Problem(group, name, "must be one of " + ", ".join(known), fix))
        chosen.append(name if name in known else nearest(name, known))
    return f"{group}={','.join(chosen)}" if set(chosen) <= {*known} else ""


def by_scale(values: Mapping, *, _root_: DictConfig) -> object:
    """The value for the chosen scale, or else for ``other``: ``"${by_scale:{1b: 200, other: 500}}"``, quotes included.

    Raises ValueError if neither is listed.
    """
    name = _root_.scale.name
    if name not in values and "other" not in values:
        raise ValueError(f"no value for scale={name}, only for {', '.join(values)}: give one on the command line")
    return values[name] if name in values else values["other"]


def times(number: int, ratio: float) -> int:
    """A whole number times a ratio, rounded: ``${times:${scale.rank},0.5}``."""
    return round(number * ratio)


def lost_rank(rank: int, hidden: int, intermediate: int, sparsity: float, *, _root_: DictConfig) -> int:
    """The largest rank, at least 1, at which LOST with its sparse channels has no more parameters than plain ``rank``.

    A projection has d_in + d_out parameters per unit of rank, and max(1, int(sparsity * d_in)) dense columns.
    """
    d, f, s = hidden, intermediate, _root_.scale
    q, kv = ((heads or s.num_heads) * (s.head_dim or d // s.num_heads) for heads in (s.num_heads, s.num_kv_heads))
    shapes = ((d, q), (d, kv), (d, kv), (q, d), (d, f), (d, f), (f, d))
    extra = sum(max(1, int(sparsity * d_in)) * d_out for d_in, d_out in shapes)
    return max(1, rank - -(-extra // sum(map(sum, shapes))))


for resolver in (by_scale, times, lost_rank):
    OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
defaults = {name: key.default for name, key in ROOT.items()} | {
    name: {leaf: key.default for leaf, key in keys_of(declared)}
    for name, declared in SECTIONS.items() if name not in OPEN_GROUPS
}  # fmt: skip
ConfigStore.instance().store(name="base_train", node=defaults)


def session() -> AbstractContextManager:
    """A context in which Hydra composes from ``configs/``."""
    return initialize_config_dir(str(CONFIG_DIR), version_base=VERSION_BASE)


def check(line: CommandLine, world_size: int | None, machine: bool = True) -> list[Config]:
    """The configurations of a command line, several with ``-m``. Raises ConfigError with all problems.

    ``machine`` says whether rules about this machine are checked (see ``validate``). Hydra writes and logs nothing
    here, and calls no callbacks.
    """
    configs, problems = [], []
    with session():
        for words in jobs(line.words):
            try:
                configs.append(configure(*_compose(words, line), words, line, world_size, machine))
            except ConfigError as error:
                problems += error.problems
            except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
                problems += [*line.problems, _composition_problem(error)]
    if not configs and not problems:
        problems.append(Problem("-m", MISSING, "no job: a value is a glob that matches no option"))
    if problems:
        raise ConfigError(problems)
    folders = [cfg.run.dir for cfg in configs]
    if len(set(folders)) < len(folders) and not line.shows:
        shared = next(folder for folder in folders if folders.count(folder) > 1)
        raise ConfigError([Problem("run.dir", shared, "several jobs of this sweep would share the run directory")])
    return configs


def _compose(words: Sequence[str], line: CommandLine) -> tuple[DictConfig, DictConfig]:
    """The configuration of one job, and Hydra's own node. Hydra composes each choice of options only once.

    The keys are then set as Hydra would set them. It does so itself where a word deletes, or names a package. If a file
    of options may have changed since, as in a notebook, Hydra composes anew.
    """
    plain = not any(word.startswith("~") or "@" in key_of(word) for word in words)
    keys = [word for word in words if plain and word.startswith("++") and not _is_hydras(key_of(word))]
    search = [] if line.config_dir is None else [f"hydra.searchpath=[file://{os.path.abspath(line.config_dir)}]"]
    patterns = [os.path.join(folder, "**/*.yaml") for folder in (CONFIG_DIR, line.config_dir) if folder]
    files = [path for pattern in patterns for path in sorted(glob.glob(pattern, recursive=True))]  # also behind links
    written = tuple((path, os.stat(path).st_mtime_ns) for path in files if os.path.isfile(path))
    if any(key_of(word) == "hydra.searchpath" for word in words):  # its files are not among these
        _of_options.cache_clear()
    options, hydra = _of_options(line.config_name, (*search, *(word for word in words if word not in keys)), written)
    composed = copy.deepcopy(options)
    for override in map(parse_word, keys):
        value = override.value()
        OmegaConf.update(composed, override.key_or_group, value, merge=isinstance(value, dict))
    return composed, hydra


@cache
def _of_options(name: str, words: tuple[str, ...], _: tuple[tuple[str, int], ...]) -> tuple[DictConfig, DictConfig]:
    composed = compose(name, [*words], return_hydra_config=True)
    OmegaConf.set_struct(composed, False)  # so that a key can be added or taken out
    return composed, composed.pop("hydra")


def jobs(words: list[str]) -> Iterator[list[str]]:
    """Yields the words of each job of a sweep, in Hydra's order; a single job if nothing is swept.

    An interval, from which a sweeper draws, yields its two ends. Needs an open ``session``.
    """
    values = []
    for word in words:
        override = parse_word(word)
        override.config_loader = GlobalHydra.instance().config_loader()
        if not override.is_sweep_override():
            values.append([word])
            continue
        swept: Any = override.value()
        choices = override.sweep_string_iterator() if override.is_discrete_sweep() else (swept.start, swept.end)
        values.append([f"{word.split('=', 1)[0]}={value}" for value in choices])
    yield from map(list, itertools.product(*values))


def configure(
    composed: DictConfig, hydra: Any, words: Sequence[str], line: CommandLine, ranks: int | None, machine: bool = True
) -> Config:
    """The checked ``Config`` of one run on ``ranks`` ranks, composed from ``words``, with its directory.

    ``hydra`` is Hydra's own node, with the chosen options. Raises ConfigError with the problems of ``line`` and of all
    keys, or else with those of the rules between keys.
    """
    given = set(typed([word for word in words if not _is_hydras(key_of(word))]))
    source = OmegaConf.select(composed, FROM)
    source = source if source is None else str(source).strip()
    problems = [*line.problems]
    if source == "":
        problems.append(Problem(FROM, source, "an empty name", "Name a file, its folder, or owner/name on the hub"))
    try:
        cfg = parse(_resolved(composed), given, problems)
        if cfg.run.dir is None:
            choices = {group: option for group, option in hydra.runtime.choices.items() if group in GROUPS}
            named = choices | ({"scale": name_of(source)} if source else {})
            cfg.run.dir = str(run_folder(cfg, named, default_choices(), given, *_changed(cfg, words, given, line)))
        if source:
            for leaf, value in _shape(source, given, Path(cfg.run.dir)).items():
                OmegaConf.update(composed, f"scale.{leaf}", value)
            cfg = replace(parse(_resolved(composed)), run=cfg.run)
    except OmegaConfBaseException as error:
        raise ConfigError([*line.problems, Problem(str(error.full_key), MISSING, first_line(error))]) from None
    problems = [] if line.shows else [*validate(cfg, ranks, machine), *unused(cfg, given)]
    if hydra.job.chdir:
        problems.append(Problem("hydra.job.chdir", True, "would move relative paths, such as run.dir", "Leave it out"))
    if problems:
        raise ConfigError(problems)
    return cfg


def _resolved(composed: DictConfig) -> dict[str, Any]:
    tree: Any = OmegaConf.to_container(composed, resolve=True)
    with suppress(KeyError, TypeError):  # parse refuses a scale that is not a section
        del tree["scale"]["from"]
    return tree


def _shape(source: str, given: set[str], run_dir: Path) -> dict[str, Any]:
    """The keys of ``scale`` that ``source`` decides, as the run has recorded them, or else as they are read."""
    scale = read_config(run_dir).get("scale") if (run_dir / "config.yaml").exists() else None
    if not isinstance(scale, dict) or scale.get("source") != source:
        scale = read_shape(source, given)
    shape = {name: scale[name] for name in OURS.values() if f"scale.{name}" not in given}
    return {**shape, "name": name_of(source), "source": source}


def _changed(cfg: Config, words: Sequence[str], given: set[str], line: CommandLine) -> tuple[dict[str, Any], list[str]]:
    """The fixed settings to which the chosen options give other values, and those that do not follow from others."""
    settings = identity(cfg)
    if not given - {"seed"} & settings.keys():
        return {}, []
    words = [word for word in words if key_of(word) in GROUPS and not word.startswith("++")] + [f"++seed={cfg.seed}"]
    words += [word for word in line.words if _is_hydras(key_of(word))]
    composed, tree = OmegaConf.create(), {}
    with suppress(HydraException, OmegaConfBaseException, ValueError):  # options may need the value of a key
        composed, _ = _compose(words, line)
        tree = _resolved(composed)
    standard = identity(parse(merged(to_dict(cfg), tree)))
    valued = {name for name, value in flatten(tree).items() if is_value(value)} | {"seed", "data.streams"}
    valued |= {name for name, key in entry_keys(tree).items() if is_value(key.default)}
    valued -= {name for name in given if FROM in given and name.startswith("scale.")}  # the file has other values
    changed = {name: value for name, value in settings.items() if name not in valued or standard[name] != value}
    nodes = {name: OmegaConf.select(composed, name.rpartition(".")[0]) if "." in name else composed for name in changed}
    set_freely = [
        name for name, node in nodes.items()
        if not node or (leaf := name.rpartition(".")[2]) not in node or not OmegaConf.is_interpolation(node, leaf)
    ]  # fmt: skip
    return changed, set_freely


@cache
def default_choices() -> dict[str, str]:
    """The default option of each group."""
    entries = [entry for entry in OmegaConf.load(CONFIG_DIR / "train.yaml").defaults if OmegaConf.is_dict(entry)]
    return {group: entry[group] for entry in entries for group in entry if group in GROUPS}


def _composition_problem(error: Exception) -> Problem:
    text = " ".join(str(error if str(error) else error.__cause__).split()).partition(" Config search path:")[0]
    quoted = 'Quote "on" and "off" in defaults lists: YAML reads them as booleans'
    return Problem("configuration", MISSING, text.rstrip("."), quoted if "bool" in text else "")
