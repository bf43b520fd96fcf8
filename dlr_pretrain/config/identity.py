"""What makes two runs the same run: the keys that affect its mathematics, and the name that follows from them."""

import glob
import hashlib
import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path, PurePath

import yaml

from dlr_pretrain.config.key import Key, is_value, section
from dlr_pretrain.config.problems import as_typed
from dlr_pretrain.config.run_folder import MANIFEST, read_record
from dlr_pretrain.config.tree import CONFIG_DIR, KEYS, OPEN_GROUPS, SECTIONS, Config, entry_keys, keys_in
from dlr_pretrain.config.values import all_keys, flatten, to_dict
from dlr_pretrain.util.errors import UserError

TEXT = ("data.shards", "tokenizer.pieces", *(name for name, key in KEYS.items() if key.evaluates))
HASHED = {"data.shards": "another text", "tokenizer.pieces": "another tokenizer", "weights": "other weights",
          "run.start_from.weights": "other weights", "texts": "other rows"}  # fmt: skip


def identity(cfg: Config) -> dict[str, object]:
    """The dotted keys that affect the mathematics of a run, with their values as JSON returns them."""
    tree = to_dict(cfg)
    keys = all_keys(tree)
    tree["data"]["streams"] = cfg.num_streams
    return json.loads(json.dumps({name: v for name, v in flatten(tree).items() if not keys[name].changes}))


def facts(name: str, keys: Mapping[str, Key] = KEYS) -> Key:
    """What is true of an entry of an identity: of its key, or of the section under whose name a run records it."""
    group, *parts = name.split(".")
    shared: Key = getattr(SECTIONS.get(group), "shared", section())
    of_group = keys_in(group, SECTIONS[group]) if group in OPEN_GROUPS else {}
    if len(parts) == 3:  # of a named entry
        of_group = entry_keys({group: {parts[0]: {parts[1]: {}}}})
    return keys.get(name) or of_group.get(name, shared)


def differences(there: Mapping, here: Mapping) -> dict[str, tuple[object, object]]:
    """The keys in which the identities of two runs differ, with both values.

    Keys that say where text comes from do not count, nor keys that only one identity has. But a key that ``there``
    lacks, because it is newer than that run, has its default there, unless the default depends on other keys.
    """
    options = {}
    for group in OPEN_GROUPS:
        if (file := CONFIG_DIR / group / f"{here.get(f'{group}.name')}.yaml").is_file():
            options[group] = yaml.safe_load(file.read_text(encoding="utf-8"))
    keys = KEYS if len(options) < len(OPEN_GROUPS) else all_keys(options)
    defaults = {name: key.default for name, key in keys.items()} | flatten(options)
    defaults = {name: value for name, value in defaults.items() if is_value(value)}
    before = {**defaults, **there} if there else {}
    before = {name: facts(name, keys).normal_path(value) for name, value in before.items()}
    changed = {
        name: (before[name], value)
        for name, value in here.items()
        if name in before and not facts(name, keys).origin and before[name] != value
    }
    sources = sources_of(there), sources_of(here)
    return changed | ({"data.sources": sources} if all(sources) and sources[0] != sources[1] else {})


def sources_of(entries: Mapping[str, object]) -> list[str]:
    """The names of the sources of a mixture, in order, from an identity."""
    return [name.split(".")[2] for name in entries if re.fullmatch(r"data\.sources\.[^.]+\.weight", name)]


def describe_differences(changed: Mapping[str, tuple[object, object]], between: str = ", ") -> str:
    """The result of ``differences`` as text. Hashes stand for files, which the manifests of the runs name."""

    def described(name: str, there: object, here: object) -> str:
        if re.search(r"(^| )[0-9a-f]{16,64}$", str(there)):  # of a validation set, the number of tokens precedes it
            return f"{name}: {HASHED.get(name, 'other contents')} than there (see {MANIFEST})"
        return f"{name}: {as_typed(there)} there, {as_typed(here)} here"

    named = changed.keys() - ({"data.shards"} if "data.sources" in changed else set())  # the text differs with them
    return between.join(described(name, *values) for name, values in changed.items() if name in named)


def shorter_run(cfg: Config) -> str:
    """A note on a run beside a new one that differs from it only in ``train.steps``; "" if there is none."""
    here, folder = identity(cfg), Path(str(cfg.run.dir))
    family = re.sub(rf"(?<=-s{cfg.seed})-[\w.-]+$", "", folder.name)  # the name without its keys
    for path in [] if read_record(folder) else folder.parent.glob(f"{glob.escape(family)}*"):
        with suppress(UserError, OSError):  # the record of another run may be damaged or unreadable
            changed = differences(read_record(path).get("identity", {}), here)
            if changed.keys() == {"train.steps"}:
                note = f"this is a new run: {path} has train.steps={changed['train.steps'][0]}. Continue it with"
                return f"{note} that value, or start from it: run.start_from={path} run.start_optimizer=true"
    return ""


def run_folder(
    cfg: Config, choices: Mapping[str, str], defaults: Mapping[str, str], given: Collection[str],
    changed: Mapping[str, object], independent: Collection[str],
) -> Path:  # fmt: skip
    """The folder of a run, whose name has the chosen options, the seed, and a short hash of the ``changed`` settings.

    These are the fixed settings whose values differ from those of the options, so that a typed default changes no name.
    If one of them is ``independent`` of the others, it precedes the hash: ``-rank64-1f0c2a9e``. Options in ``defaults``
    are left out, except scale, backbone and dlr. A folder that was named by what was ``given``, as until version 0.1,
    remains the run's.
    """
    names = {group: PurePath(option).name for group, option in choices.items() if option}  # options may lie in folders
    parts = [names["scale"], names["backbone"], f"dlr_{names['dlr']}"]
    for group in ("optimizer", "data", "precision", "experiment"):
        if group in names and choices[group] != defaults.get(group):
            parts.append(names[group])
    name = "-".join([*parts, f"s{cfg.seed}"])
    typed = {key: value for key, value in identity(cfg).items() if key in given and key != "seed"}
    before = Path(cfg.run.root, name + _suffix(typed, typed))
    return before if before.is_dir() else Path(cfg.run.root, name + _suffix(changed, independent))


def _suffix(settings: Mapping[str, object], shown: Collection[str]) -> str:
    """The part of a name that follows from ``settings``, with the only one of ``shown`` in words if it is short."""
    if not settings:
        return ""
    word = "".join(f"-{key.split('.')[-1]}{as_typed(settings[key])}" for key in shown) if len(shown) == 1 else ""
    word = word if re.fullmatch(r"-[\w.]{1,32}", word) else ""
    return f"{word}-{hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]}"
