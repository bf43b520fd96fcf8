"""Converts a ``Config`` to and from a mapping, reports problems of keys, and reads what a run records about itself."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import pkgutil
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

import yaml

from dlr_pretrain.config.problems import MISSING, ConfigError, Problem, as_typed, did_you_mean
from dlr_pretrain.config.tree import CONFIG_DIR, GROUPS, KEYS, MANDATORY, OPEN_GROUPS, SECTIONS, Config, Key, keys_of
from dlr_pretrain.util.errors import UserError, file_error, first_line
from dlr_pretrain.util.files import NUMBER, Shape, fits, read_json, refuse_foreign

TARGET = "_target_"  # Hydra's name for the class that a mapping sets up
PATHS = ("data.root", "data.cache", "tokenizer.path", "run.root", "run.dir", "run.start_from")  # without globs
JOB = "job.json"  # in a run directory: the job that was queued last
JOB_SHAPE: Shape = {"time": NUMBER, "job": str, "log": str}
CHECKPOINT: Shape = {"format": int, "state": {"step": int}, "files": dict}  # of a checkpoint's JSON file
NULL_SPELLINGS = ("none", "null", "~", "")  # users type these for null; all but a bare null arrive as text
MANIFEST = "manifest.json"
RECORD: Shape = {
    "identity": dict, "saved?": int, "started_from?": {"step": int}, "micro_batch?": {"*": int},
    "starts": [{"time": str, "command": [str], "world_size": int, "device": str, "files?": {"*": str}}],
    "state?": {"name": str, "step": int, "reason": str, "time": NUMBER},
    "parameters?": NUMBER, "flops_per_token?": NUMBER,
}  # fmt: skip
# Sections and keys that do not affect the mathematics of a run, and may change on resume.
CHANGEABLE = (
    *("device", "compile", "cuda_graphs", "attention", "eval.every"),
    *("parallel.", "logger.", "checkpoint.", "log.", "profile."),
    *("run.root", "run.dir", "run.timeout_minutes", "scale.micro_batch", "data.revision", "data.cache"),
    *("backbone._target_", "optimizer._target_"),
    *("tokenizer.eos", "train.micro_batch", "train.activation_checkpointing", "train.stop_after"),
    *("train.on_nonfinite", "train.max_skipped"),
)
# The origin of text and tokenizer may change, even from shards of text to tokens made from them: fingerprints ensure
# that text and tokenizer stay the same.
ORIGIN = {
    *("data.source", "data.root", "data.train_files", "data.validation_files", "data.text_key"),
    *("data.held_out", "data.document", "data.bad_rows", "data.special_tokens"),
    *("tokenizer.path", "tokenizer.hub"),
}


def flatten(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested mapping by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        nested = isinstance(value, dict) and value
        flat |= flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def to_dict(cfg: Config) -> dict[str, Any]:
    """The configuration as nested mappings, as it is written to ``config.yaml``."""
    tree = dataclasses.asdict(cfg)
    for group in OPEN_GROUPS:
        options = getattr(cfg, group)
        target = {TARGET: f"{type(options).__module__}.{type(options).__qualname__}"}
        tree[group] = target | {name: getattr(options, name) for name, _ in keys_of(type(options))}
    return tree


def options_class(group: str, tree: Mapping) -> type:
    """The class of the chosen backbone or optimizer. This call may be the first to import torch.

    Raises ConfigError if the class is not named or cannot be imported.
    """
    chosen = tree.get(group)
    target = chosen.get(TARGET) if isinstance(chosen, Mapping) else None
    name = f"{group}.{TARGET}"
    if not isinstance(target, str):
        raise ConfigError([Problem(name, MISSING, "needs a value", f"Choose an option: {group}=<option>")])
    try:
        found = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        fix = "Install its package, or add the folder that holds it to PYTHONPATH"
        raise ConfigError([Problem(name, target, f"cannot be imported ({first_line(error)})", fix)]) from error
    if not (isinstance(found, type) and issubclass(found, SECTIONS[group])):
        rule = f"is not a subclass of {SECTIONS[group].__name__} of dlr_pretrain.config.tree"
        raise ConfigError([Problem(name, target, rule)])
    return found


def all_keys(tree: Mapping) -> dict[str, Key]:
    """Every key by dotted name, including those of the backbone and the optimizer of a tree."""
    keys = dict(KEYS)
    for group in OPEN_GROUPS:
        keys |= {f"{group}.{name}": found for name, found in keys_of(options_class(group, tree))}
        keys[f"{group}.{TARGET}"] = Key(str, MANDATORY, fixed=True)
    return keys


def parse(tree: Mapping, typed: Collection[str] | None = None) -> Config:
    """The ``Config`` of a composed or a written mapping. Raises ConfigError with the problems of all keys.

    ``typed`` are the keys of a command line, which cannot set fixed keys (None: a run wrote the mapping). A missing key
    gets its default if that is a plain value.
    """
    keys, given = all_keys(tree), flatten(tree)
    problems = [_unknown(name, given[name], keys, tree) for name in given if name not in keys]
    values: dict[str, Any] = {}
    for name, key in keys.items():
        value, section = given.get(name, key.default), name.partition(".")[0]
        if not _is_value(value):
            if section in given:  # the section itself has a value, which is reported already
                continue
            fix = f"Choose an option: {section}=<option>" if key.fixed else f"Set {name}=<value>"
            problems.append(Problem(name, MISSING, "needs a value", fix))
            continue
        try:
            if typed is not None and _meant_null(name, value, key):  # a recorded path may be ./None
                raise ValueError(name)
            values[name] = _normalised(name, key.read(value))
        except (ValueError, OverflowError):
            problems.append(_refused(name, value, key))
    for name in sorted(typed or ()):
        if name in keys and keys[name].fixed:
            fix = f"Choose another option: {name.partition('.')[0]}=<option>"
            problems.append(Problem(name, given.get(name), "can only be set by an option", fix))
    if problems:
        raise ConfigError(problems)
    return _build(values)


def _is_value(default: object) -> bool:
    """Whether a default is a value, so that no option, user or other key has to set it."""
    return default != MANDATORY and not (isinstance(default, str) and "${" in default)


def _meant_null(name: str, value: object, key: Key) -> bool:
    """Whether a value is text that a user may have typed for null, for a key that allows null or is a path."""
    takes_null = key.kinds()[2]
    return isinstance(value, str) and value.strip().lower() in NULL_SPELLINGS and (takes_null or name in PATHS)


def _normalised(name: str, value: Any) -> Any:
    """A path x for x/, x// and ./x; any other value as it is. The target of .. depends on links, so .. stays."""
    if name not in PATHS or not isinstance(value, str):
        return value
    if "://" in value:  # in an address, a second slash is part of a name
        return value if value.endswith("//") else value.removesuffix("/")
    return str(Path(value))


def _unknown(name: str, value: object, keys: Mapping[str, Key], tree: Mapping) -> Problem:
    """The problem of a key that does not exist, with the nearest existing key."""
    if inside := [known for known in keys if known.startswith(f"{name}.")]:
        return Problem(name, value, "a section, not a value", f"Set one of its keys, such as {inside[0]}")
    section = name.partition(".")[0]
    whose = f" of {section}={tree[section].get('name')}" if section in OPEN_GROUPS else ""
    settable = [*(known for known in keys if not keys[known].fixed), *GROUPS]
    return Problem(name, value, f"no such key{whose}", did_you_mean(name, settable, "See docs/configuration.md"))


def _build(values: Mapping[str, Any]) -> Config:
    sections: dict[str, Any] = {}
    for name, section in SECTIONS.items():
        own = {key.split(".", 1)[1]: value for key, value in values.items() if key.startswith(f"{name}.")}
        kind = options_class(name, {name: {TARGET: own.pop(TARGET)}}) if name in OPEN_GROUPS else section
        sections[name] = kind(**own)
    return Config(**sections, **{key: value for key, value in values.items() if "." not in key})


def _refused(name: str, value: object, key: Key) -> Problem:
    """The problem of a value that the key does not allow."""
    kind, words, optional = key.kinds()
    rule = f"must be {key.takes()}" + (f" ({key.doc})" if key.doc else "")
    if _meant_null(name, value, key):
        place = "~/" if value == "~" else f"./{str(value).strip()}"
        fixes = ["null"] * optional + [f"{place} for the path"] * (name in PATHS)
        return Problem(name, value, rule, f"Write {', or '.join(fixes)}")
    if kind is str and isinstance(value, (int, float)):
        return Problem(name, value, rule, f"Quote it: \"{name}='...'\"")
    return Problem(name, value, rule, did_you_mean(str(value), words))


def identity(cfg: Config) -> dict[str, object]:
    """The dotted keys that affect the mathematics of a run, with their values as JSON returns them."""
    tree = to_dict(cfg)
    tree["data"]["streams"] = cfg.num_streams
    found = {name: value for name, value in flatten(tree).items() if not name.startswith(CHANGEABLE)}
    return json.loads(json.dumps(found))


def differences(there: Mapping, here: Mapping) -> dict[str, tuple[object, object]]:
    """The keys in which the identities of two runs differ, with both values.

    Keys of ORIGIN do not count, nor keys that only one identity has. But a key that ``there`` lacks, because it is
    newer than that run, has its default there, unless the default depends on other keys.
    """
    defaults = {name: key.default for name, key in KEYS.items()}
    for group in OPEN_GROUPS:
        if (file := CONFIG_DIR / group / f"{here.get(f'{group}.name')}.yaml").is_file():
            defaults |= flatten({group: yaml.safe_load(file.read_text(encoding="utf-8"))})
    defaults = {name: default for name, default in defaults.items() if _is_value(default)}
    before = {name: _normalised(name, value) for name, value in {**defaults, **there}.items()} if there else {}
    return {k: (before[k], here[k]) for k in here if k in before and k not in ORIGIN and before[k] != here[k]}


def describe_differences(changed: Mapping[str, tuple[object, object]], between: str = ", ") -> str:
    """The result of ``differences`` as text."""
    return between.join(
        f"{name}: {as_typed(there)} there, {as_typed(here)} here" for name, (there, here) in changed.items()
    )


def shorter_run(cfg: Config) -> str:
    """A note on a run beside a new one that differs from it only in ``train.steps``; "" if there is none."""
    own, folder = identity(cfg), Path(str(cfg.run.dir))
    family = re.sub(rf"(?<=-s{cfg.seed})-[\w.-]+$", "", folder.name)  # the name without its keys
    for path in [] if read_record(folder) else folder.parent.glob(f"{glob.escape(family)}*"):
        with suppress(UserError, OSError):  # the record of another run may be damaged or unreadable
            changed = differences(read_record(path).get("identity", {}), own)
            if changed.keys() == {"train.steps"}:
                note = f"this is a new run: {path} has train.steps={changed['train.steps'][0]}. Continue it with"
                return f"{note} that value, or start from it: run.start_from={path} run.start_optimizer=true"
    return ""


def run_name(cfg: Config, choices: Mapping[str, str], defaults: Mapping[str, str], given: Collection[str]) -> str:
    """A stable name from the chosen options, the seed, and a short hash of the other keys that were ``given``.

    A single key precedes its hash: ``-rank64-1f0c2a9e``. Options in ``defaults`` are left out, except scale, backbone
    and dlr. Only the values of keys that affect the mathematics count, not their spelling or order.
    """
    own = {group: PurePath(option).name for group, option in choices.items() if option}  # options may lie in folders
    parts = [own["scale"], own["backbone"], f"dlr_{own['dlr']}"]
    for group in ("optimizer", "data", "precision", "experiment"):
        if group in own and choices[group] != defaults.get(group):
            parts.append(own[group])
    parts.append(f"s{cfg.seed}")
    matter = {name: value for name, value in identity(cfg).items() if name in given and name != "seed"}
    if len(matter) == 1:
        ((name, value),) = matter.items()
        parts += [word] if re.fullmatch(r"[\w.]{1,32}", word := f"{name.split('.')[-1]}{as_typed(value)}") else []
    if matter:
        parts.append(hashlib.sha256(json.dumps(matter, sort_keys=True).encode()).hexdigest()[:8])
    return "-".join(parts)


def require_run_folder(run_dir: Path, cache: str | None = None) -> None:
    """Before anything is written into ``run_dir``: raise UserError if it holds files but no run.

    A run without its manifest is known by its checkpoints. Logs, the job's file and the cache may precede the run.
    """
    expected = {"profile"} | ({Path(cache).name} if cache and Path(cache).parent == run_dir else set())
    if not (job := run_dir / JOB).exists() or not job.stat().st_size or fits(job, JOB_SHAPE):
        expected.add(JOB)
    checkpoints = run_dir.glob("checkpoints/step_*/checkpoint.json")  # other trainers name their folders so, too
    ours = bool(read_record(run_dir)) or any(fits(path, CHECKPOINT) for path in checkpoints)
    refuse_foreign(run_dir, "run.dir", "run", ours, expected)


def read_config(run_dir: Path) -> dict:
    """The mapping in ``run_dir/config.yaml``. Raises UserError if the file is missing or damaged."""
    path = run_dir / "config.yaml"
    if not path.exists():
        raise UserError(f"{path} is missing: {run_dir} is not a run directory")
    try:
        return dict(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} is damaged ({first_line(error)}). Restore it from a backup") from error


def read_record(run_dir: Path) -> dict:
    """The content of ``run_dir/manifest.json``, see RECORD; empty if the file is missing.

    Raises UserError if the file is damaged.
    """
    path = run_dir / MANIFEST
    try:
        return read_json(path, RECORD)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        rule = "Move it away to resume; settings are then not checked against those of the run"
        raise UserError(f"{path} is damaged ({first_line(error)}). {rule}") from error
    except OSError as error:
        raise file_error(error) from error
